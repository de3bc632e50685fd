"""Costs of one setting of the search: times and bytes by degree, lower bounds, and what fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

from rota.train.plan.cost import LayerTime, StatePlacement, head_s, layer_time, state_time, transfers_s
from rota.train.plan.layers import head_params
from rota.train.plan.memory import (
    activation_bytes_per_layer,
    ends_bytes,
    layer_bytes,
    layer_params_per_rank,
    layers_in_flight,
)
from rota.train.plan.model import Layer
from rota.train.plan.space import RECOMPUTES, SearchRequest, Setting, layer_of, plan_of

T = TypeVar("T")


class CostTable:
    """Costs by the degrees that they depend on. Questions that differ in devices and batch may share one."""

    def __init__(self, question: SearchRequest) -> None:
        self._model, self._hardware, self._dtype = question.model, question.hardware, question.dtype
        self._known: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found

    def layer(self, setting: Setting) -> LayerTime:
        """Times of a layer; they are those of every kind of recompute."""
        tp, sp, micro, cp = setting.tp, setting.sp, setting.micro_batch, setting.cp
        kind, dtype = Layer(tp=tp, sp=sp), self._dtype.param
        return self._once(
            ("layer", tp, sp, micro, cp),
            lambda: layer_time(self._model, kind, micro, self._hardware, dtype, cp=cp),
        )

    def head_s(self, setting: Setting) -> float:
        """Forward pass of the head for one micro-batch."""
        tp, micro, cp = setting.tp, setting.micro_batch, setting.cp
        return self._once(
            ("head", tp, micro, cp),
            lambda: head_s(self._model, tp, micro, self._hardware, self._dtype.param, cp=cp),
        )

    def state_s(self, setting: Setting, held: float, layers: int) -> float:
        """Exchange, optimizer and offload of a rank that holds ``held`` parameters, all hidden that may be."""
        kind = StatePlacement(
            ranks=setting.dp * setting.cp,
            tp=setting.tp,
            zero=setting.zero,
            offload=setting.offload,
            micro_batches=setting.micro_batches if setting.zero >= 2 else 1,  # the others exchange once
            dtype=self._dtype,
        )
        return self._once(
            (kind, held, layers),
            lambda: state_time(kind, self._hardware, held, layers).total_s(self._hardware, float("inf")),
        )

    def held(self, setting: Setting, counts: list[int]) -> float:
        """Parameters of the fullest pipeline rank by the layers of each; the first and the last have an embedding."""
        each = layer_params_per_rank(self._model, setting.tp)
        ends = head_params(self._model, setting.tp)
        return float(max(max(counts) * each, counts[0] * each + ends, counts[-1] * each + ends))

    def least_s(self, setting: Setting) -> float:
        """As ``state_s`` of a rank that holds no more than an even share of layers and ends."""
        layers, pp = self._model.layers, setting.pp
        each, most = layer_params_per_rank(self._model, setting.tp), -(-layers // pp)
        ends = head_params(self._model, setting.tp) * min(pp, 2)
        return self.state_s(setting, max(most * each, (layers * each + ends) / pp), most)

    def hops_s(self, setting: Setting) -> list[float]:
        """Activations from each pipeline rank to the next, the last to the first."""
        key = ("hops", setting.pp, setting.tp, setting.dp, setting.cp, setting.micro_batch)
        micro, dtype = setting.micro_batch, self._dtype.param
        return self._once(key, lambda: transfers_s(self._model, setting.mesh, micro, self._hardware, dtype))

    def layer_bytes(self, setting: Setting) -> float:
        """State that a layer adds to a rank."""
        key = ("bytes", setting.tp, setting.zero, setting.offloads, setting.dp, setting.cp, setting.pp > 1)
        return self._once(key, lambda: layer_bytes(self._model, layer_of(setting), setting.mesh, self._dtype))

    def ends_bytes(self, setting: Setting) -> tuple[float, float, float]:
        """What the first pipeline rank holds without its layers, one between, and the last."""
        degrees = (setting.tp, setting.dp, setting.cp, setting.zero, setting.offloads)
        return self._once(
            ("ends", *degrees, setting.micro_batch, min(setting.pp, 3)), lambda: self._ends_bytes(setting)
        )

    def _ends_bytes(self, setting: Setting) -> tuple[float, float, float]:
        few = min(setting.pp, 3)  # all between the first and the last are alike
        short = replace(setting, pp=few, interleave=1)
        bare = plan_of(self._dtype, short, (1,) * few, [(("none", 1),)] * few)
        made = [ends_bytes(bare, self._model, rank) for rank in range(few)]
        return made[0], made[few // 2], made[-1]

    def least_bytes(self, setting: Setting) -> float:
        """Bytes of the most layers that some rank holds whatever the cut, all repeated, one micro-batch alive."""
        kind = layer_of(setting, recompute="full")
        kept = activation_bytes_per_layer(self._model, kind, setting.micro_batch) / setting.cp
        return -(-self._model.layers // setting.pp) * (self.layer_bytes(setting) + kept)


class MemoryBudget:
    """What fits on the ranks of one setting: memory is linear in the layers, and each rank has its own.

    A pipeline is never slower when one of its stages is faster, and stages share no memory; so each rank may take the
    cheapest recompute that fits it, alone.
    """

    def __init__(self, question: SearchRequest, setting: Setting, table: CostTable) -> None:
        model, pp, time = question.model, setting.pp, table.layer(setting)
        kinds = [layer_of(setting, recompute=kind) for kind in RECOMPUTES]
        self._again_s = [time.again_s(kind) for kind in kinds[1:]]
        first, middle, last = (question.budget_bytes - size for size in table.ends_bytes(setting))
        self._left = [first, *[middle] * (pp - 2), last][:pp]
        state = table.layer_bytes(setting)
        kept = [activation_bytes_per_layer(model, kind, setting.micro_batch) / setting.cp for kind in kinds]
        micro = setting.micro_batches if pp > 1 else 1
        flying = [
            layers_in_flight(setting.schedule, stage=rank, p=pp, m=micro, v=setting.interleave) for rank in range(pp)
        ]
        self._each = [tuple(state + one * many for one in kept) for many in flying]
        self._known: dict[tuple[int, int], tuple[int, int] | None] = {}

    def recompute(self, rank: int, layers: int) -> tuple[int, int] | None:
        """(selective, full) layers among ``layers`` of a rank with the least repeated time; None: nothing fits."""
        key = (rank, layers)
        if key not in self._known:
            self._known[key] = self._cheapest(rank, layers)
        return self._known[key]

    def _cheapest(self, rank: int, layers: int) -> tuple[int, int] | None:
        none, selective, full = self._each[rank]
        best: tuple[float, int, int] | None = None
        for whole in range(layers + 1):
            left = self._left[rank] - whole * full - (layers - whole) * none
            saved = none - selective
            partly = 0 if left >= 0 else layers + 1 if saved <= 0 else int(-(left // saved))
            if partly <= layers - whole:
                found = (partly * self._again_s[0] + whole * self._again_s[1], partly, whole)
                best = min(best, found) if best else found
            if partly == 0:
                break  # more would only be repeated for nothing
        return (best[1], best[2]) if best else None
