"""The space of plans that the search looks at: settings, their cuts into stages, and what each costs and needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from rota.train.plan.cost import LayerTime, StatePlacement, head_s, layer_time, state_time, transfers_s
from rota.train.plan.hardware import Hardware
from rota.train.plan.memory import (
    activation_bytes_per_layer,
    ends_bytes,
    layer_bytes,
    layers_in_flight,
)
from rota.train.plan.model import (
    Dtype,
    Layer,
    Mesh,
    ModelShape,
    Offload,
    ParallelPlan,
    Recompute,
    Schedule,
    Stage,
    head_params,
    layer_params,
)

INTERLEAVE_MAX = 8
SEQ_WHOLE_MAX = 8192
"""Longer sequences may be split over context ranks without being asked to."""
MIXED = Dtype(param="bf16", reduce="fp32", master="fp32")
"""Mixed precision with fp32 main gradients."""


def formats_of(model: ModelShape) -> Dtype:
    """Number formats of training a model whose parameters are in its ``dtype``; gradients and master copy in fp32."""
    return replace(MIXED, param=model.dtype)


RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What is asked: the best plan for ``batch`` sequences on ``gpus`` devices of ``memory_gib`` each.

    ``pins`` fixes degrees by name (``tp``, ``pp``, ``dp``, ``cp``, ``zero``, ``micro_batch``, ``interleave``, ``sp``).
    ``allow`` widens the space: ``cp`` for short sequences, too, ``offload`` also when something fits without.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int
    memory_gib: float
    batch: int
    dtype: Dtype = MIXED
    pins: dict[str, int] = field(default_factory=dict[str, int])
    allow: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> float:
        """Memory a rank may use: the limit less the reserve of the hardware."""
        return (self.memory_gib - self.hardware.device.reserve_gib) * 2**30

    def allows(self, name: str, value: int) -> bool:
        """True unless the degree is pinned to another value."""
        return self.pins.get(name, value) == value


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything of a plan but its cut into stages and its recompute."""

    pp: int
    tp: int
    dp: int
    cp: int = 1
    micro_batch: int
    micro_batches: int
    interleave: int
    zero: int
    sp: bool
    offloads: bool = False

    @property
    def offload(self) -> Offload:
        """Shards go to the host whole, of replicas only the optimizer."""
        return "none" if not self.offloads else "all_cpu" if self.zero >= 2 else "optimizer_cpu"

    @property
    def schedule(self) -> Schedule:
        """None without a pipeline; interleaved with several chunks a rank; else 1F1B, GPipe with too few batches."""
        if self.pp == 1:
            return "none"
        return "interleaved" if self.interleave > 1 else "1f1b" if self.micro_batches >= self.pp else "gpipe"

    @property
    def mesh(self) -> Mesh:
        """The degrees as axes: ZeRO 2 and 3 shard, 0 and 1 replicate."""
        if self.zero >= 2:
            return Mesh(pp=self.pp, dp_shard=self.dp, cp=self.cp, tp=self.tp)
        return Mesh(pp=self.pp, dp_replicate=self.dp, cp=self.cp, tp=self.tp)


SPACE = (
    "pp: divisors of the devices; tp: powers of two inside the innermost level that divide heads, kv_heads and "
    "ffn; cp: powers of two of which twice divides the sequence, when it is longer than 8192 or cp is pinned; "
    "dp: the rest; micro_batch: divisors of the batch of a replica; schedule: none, 1f1b (gpipe below pp "
    "micro-batches), interleaved 2..8; zero "
    "0..3 and sp for the whole model; offload for the whole model when it is allowed or nothing else fits; "
    "recompute none, selective or full layer by layer; cuts: the last chunk holds as many layers as the fullest "
    "of an even cut or fewer, the others share the rest evenly, the larger ones last"
)


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return [*small, *(number // size for size in reversed(small) if size * size != number)]


def settings(question: SearchRequest) -> Iterator[Setting]:
    """Every setting of the space that keeps the rules of a plan, in a fixed order."""
    model, innermost = question.model, question.hardware.levels[0].size or question.gpus
    for tp in (1 << power for power in range(innermost.bit_length())):
        if question.gpus % tp or model.heads % tp or model.key_heads % tp or model.inner % tp:
            continue
        for cp in _context_degrees(question, question.gpus // tp):
            for pp in divisors(question.gpus // tp // cp):
                dp = question.gpus // tp // cp // pp
                if pp > model.layers or question.batch % dp or not _allowed(question, tp=tp, pp=pp, dp=dp, cp=cp):
                    continue
                yield from _inner_settings(question, tp, pp, dp, cp)


def _context_degrees(question: SearchRequest, ranks: int) -> list[int]:
    """Sizes of rings; each rank holds two chunks of the sequence, so that causal work is even."""
    if question.model.seq <= SEQ_WHOLE_MAX and "cp" not in question.pins and "cp" not in question.allow:
        return [1]
    sizes = [1 << power for power in range(ranks.bit_length())]
    return [cp for cp in sizes if cp == 1 or (ranks % cp == 0 and question.model.seq % (2 * cp) == 0)]


def _inner_settings(question: SearchRequest, tp: int, pp: int, dp: int, cp: int) -> Iterator[Setting]:
    for micro_batch in divisors(question.batch // dp):
        micro_batches = question.batch // dp // micro_batch
        for interleave in _interleaves(question.model, pp, micro_batches):
            for zero in range(4 if dp * cp > 1 else 1):
                for sp, offloads in itertools.product(
                    (False, True) if tp > 1 and question.model.seq % tp == 0 else (False,),
                    _offloads(question, zero, tp),
                ):
                    if _allowed(question, micro_batch=micro_batch, interleave=interleave, zero=zero, sp=int(sp)):
                        yield Setting(
                            pp=pp,
                            tp=tp,
                            dp=dp,
                            cp=cp,
                            micro_batch=micro_batch,
                            micro_batches=micro_batches,
                            interleave=interleave,
                            zero=zero,
                            sp=sp,
                            offloads=offloads,
                        )


def _offloads(question: SearchRequest, zero: int, tp: int) -> tuple[bool, ...]:
    """Whether state may go to the host; the optimizer alone may where weights are whole."""
    possible = "offload" in question.allow and question.hardware.host.gb_s > 0 and (zero >= 2 or tp == 1)
    return (False, True) if possible else (False,)


def _allowed(question: SearchRequest, **degrees: int) -> bool:
    return all(question.allows(name, value) for name, value in degrees.items())


def _interleaves(model: ModelShape, pp: int, micro_batches: int) -> list[int]:
    if pp == 1:
        return [1]
    legal = [v for v in range(2, INTERLEAVE_MAX + 1) if pp * v <= model.layers and micro_batches % pp == 0]
    return [1, *legal]


def cuts(layers: int, pieces: int) -> Iterator[tuple[int, ...]]:
    """Layer counts of the chunks; the last one, which also has the head, from the even share (rounded up) down."""
    if pieces == 1:
        yield (layers,)
        return
    for last in range(-(-layers // pieces), 0, -1):
        base, extra = divmod(layers - last, pieces - 1)
        if base < 1:
            continue
        yield (*([base] * (pieces - 1 - extra)), *([base + 1] * extra), last)


def spread(chosen: Sequence[tuple[int, int]], cut: tuple[int, ...], pp: int) -> list[tuple[tuple[Recompute, int], ...]]:
    """Each chunk's layers as (recompute, count): of each rank full ones first, then selective, then none."""
    left = list(chosen)
    runs: list[tuple[tuple[Recompute, int], ...]] = []
    for index, size in enumerate(cut):
        selective, full = left[index % pp]
        here_full = min(full, size)
        here_selective = min(selective, size - here_full)
        left[index % pp] = (selective - here_selective, full - here_full)
        rest = size - here_full - here_selective
        kinds: tuple[tuple[Recompute, int], ...] = (("full", here_full), ("selective", here_selective), ("none", rest))
        runs.append(tuple((kind, count) for kind, count in kinds if count))
    return runs


def layer_of(setting: Setting, *, count: int = 1, recompute: Recompute = "none") -> Layer:
    """``count`` layers as the setting wants them."""
    return Layer(
        count=count,
        tp=setting.tp,
        sp=setting.sp,
        zero=setting.zero,
        offload=setting.offload,
        recompute=recompute,
    )


def plan_of(
    dtype: Dtype,
    setting: Setting,
    cut: tuple[int, ...],
    runs: list[tuple[tuple[Recompute, int], ...]],
) -> ParallelPlan:
    """The plan as a value; ``runs`` gives each chunk its layers as (recompute, count)."""
    bounds = [0, *itertools.accumulate(cut)]
    counts: list[tuple[Recompute, int]] = []
    for kind, count in (run for chunk in runs for run in chunk):
        if counts and counts[-1][0] == kind:
            counts[-1] = (kind, counts[-1][1] + count)
        else:
            counts.append((kind, count))
    ends = Layer(tp=setting.tp, zero=setting.zero, offload=setting.offload)
    return ParallelPlan(
        mesh=setting.mesh,
        stages=tuple(
            Stage(layers=span, chunk=i // setting.pp, embed=i == 0, head=i == len(cut) - 1)
            for i, span in enumerate(itertools.pairwise(bounds))
        ),
        layers=tuple(layer_of(setting, count=count, recompute=kind) for kind, count in counts),
        embed=ends,
        head=ends,
        schedule=setting.schedule,
        micro_batch=setting.micro_batch,
        micro_batches=setting.micro_batches,
        dtype=dtype,
    )


T = TypeVar("T")


class CostTable:
    """Costs by the degrees that they depend on. Questions that differ in devices and batch may share one."""

    def __init__(self, question: SearchRequest) -> None:
        self._model, self._hardware, self._dtype = question.model, question.hardware, question.dtype
        self._known: dict[Hashable, object] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        return cast("T", self._known[key])

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
        """Exchange, optimizer and offload of a rank that holds ``held`` parameters, overlapped where possible."""
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
        each = layer_params(self._model, setting.tp)
        ends = head_params(self._model, setting.tp)
        return float(max(max(counts) * each, counts[0] * each + ends, counts[-1] * each + ends))

    def least_s(self, setting: Setting) -> float:
        """As ``state_s`` of a rank that holds no more than an even share of layers and ends."""
        layers, pp = self._model.layers, setting.pp
        each, most = layer_params(self._model, setting.tp), -(-layers // pp)
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
        """Least bytes of the fullest rank under any cut: full recompute, one micro-batch in flight."""
        kind = layer_of(setting, recompute="full")
        kept = activation_bytes_per_layer(self._model, kind, setting.micro_batch, self._dtype.param) / setting.cp
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
        kept = [
            activation_bytes_per_layer(model, kind, setting.micro_batch, question.dtype.param) / setting.cp
            for kind in kinds
        ]
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
