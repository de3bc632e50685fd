"""What fits on the ranks of one setting, and the cheapest recompute that makes it fit."""

from __future__ import annotations

from rota.train.plan.memory import activation_bytes_per_layer, layers_in_flight
from rota.train.plan.space import RECOMPUTES, Question, Setting, layer_of
from rota.train.plan.table import Table


class Room:
    """What fits on the ranks of one setting: memory is linear in the layers, and each rank has its own.

    A pipeline is never slower when one of its stages is faster, and stages share no memory; so each rank may take the
    cheapest recompute that fits it, alone.
    """

    def __init__(self, question: Question, setting: Setting, table: Table) -> None:
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
        """(selective, full) layers of so many on a rank, with the least repeated time that fits; None: nothing fits."""
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
