"""Versions reserved ahead: who publishes one small tensor again and again asks the registry once for each, not twice.

The commit of a publish reserves the next version of the same name and size. It is a pending version of this process as
any other: the registry undoes it when the process dies, and forgets it when it is rebuilt, which changes the epoch.
What is written into its block, the header too, is written when it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rota.runtime.random import RandomSource
from rota.spec.errors import RegistryUnavailable
from rota.tensors.errors import TensorError
from rota.tensors.registry import CommitResult, Reserved, ScriptRefused, VersionRequest
from rota.tensors.space import Space

_IN_A_ROW: Final = 3
_IN_A_ROW_S: Final = 0.1
_IDLE_S: Final = 0.1
_SPARES_MAX: Final = 16
"""Each look for a request id passes all pending versions of a process."""
_ROWS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Spare:
    """A reserved version, like ``ask`` but for the step: the one behind version ``after``, which has ``step``."""

    ask: VersionRequest
    reserved: Reserved
    epoch: int
    after: int
    step: int
    at_s: float


class Ahead:
    """The versions that one process has reserved ahead in one namespace, at most one a name. Thread-safe."""

    def __init__(self, space: Space, random_source: RandomSource) -> None:
        self._space, self._random = space, random_source
        self._spares: dict[str, Spare] = {}
        self._rows: dict[str, tuple[VersionRequest, int, float]] = {}

    def request(self, ask: VersionRequest) -> str:
        """The request id with which the commit shall reserve the next version; ``""``: it shall not."""
        single = ask.kind == "t" and ask.direct and ask.count > 1
        if not single or ask.retain > 1 or ask.orphan != "keep" or ask.mutable or ask.copied:
            return ""
        now_s, (before, count, at_s) = self._space.clock.monotonic_s(), self._rows.get(ask.name, (None, 0, 0.0))
        count = count + 1 if ask == before and now_s <= at_s + _IN_A_ROW_S else 1
        if len(self._rows) >= _ROWS_MAX:
            self._rows.clear()
        self._rows[ask.name] = (ask, count, now_s)
        wanted = count >= _IN_A_ROW and len(self._spares) < _SPARES_MAX
        return self._random.new_id(48) if wanted else ""

    def keep(self, ask: VersionRequest, done: CommitResult, step: int, epoch: int) -> None:
        """Keep what a commit, of that step and in that epoch of the registry, reserved."""
        if done.ahead is not None:
            spare = Spare(ask, done.ahead, epoch, done.version, step, self._space.clock.monotonic_s())
            self._end([other] if (other := self._spares.get(ask.name)) is not None else [])  # that of another thread
            self._spares[ask.name] = spare

    def take(self, ask: VersionRequest) -> tuple[Reserved, int] | None:
        """The version that was reserved for this publish, with its step, and the epoch of the registry then. None when
        there is none, or another process changed the name since."""
        spare = self._spares.get(ask.name)
        if spare is None:
            return None
        step = self._step(spare)
        if spare.ask != ask or step is None or spare.epoch != self._space.table.epoch:
            self._end([spare])
            return None
        found = replace(spare.reserved, step=step if ask.step is None else ask.step)
        return (found, spare.epoch) if self._spares.pop(ask.name, None) is spare else None

    def _step(self, spare: Spare) -> int | None:
        """The step of a publish that leaves it open, as the registry would say it now; None: it must be asked."""
        table, slot = self._space.table, spare.reserved.slot
        if table.is_newest(slot, spare.after):
            return spare.step + 1
        return 0 if table.deleted(slot) and table.last(slot) == spare.after else None

    def undo(self, request: str, ask: VersionRequest) -> None:
        """Undo what a commit reserved whose reply was not read to its end. The same request has the same answer."""
        space = self._space
        with contextlib.suppress(TensorError, ScriptRefused, RegistryUnavailable):
            reserved = space.retry(lambda: space.registry.reserve(space.client, request, ask))
            self._spares.pop(ask.name, None)
            self._abort([reserved.version])

    def end_idle(self, idle_s: float = _IDLE_S) -> int:
        """Give back what was not used for that long; how many. Raises RegistryUnavailable."""
        before_s = self._space.clock.monotonic_s() - idle_s
        return self._end([spare for spare in list(self._spares.values()) if spare.at_s <= before_s])

    def _end(self, spares: Sequence[Spare]) -> int:
        """Give these back but those that another thread took meanwhile."""
        mine = [spare for spare in spares if self._spares.pop(spare.ask.name, None) is spare]
        try:
            with contextlib.suppress(TensorError, ScriptRefused):
                self._abort([spare.reserved.version for spare in mine if spare.epoch == self._space.table.epoch])
        except RegistryUnavailable:
            for spare in mine:
                self._spares.setdefault(spare.ask.name, spare)
            raise
        return len(mine)

    def _abort(self, versions: Sequence[int]) -> None:
        space = self._space
        if versions and space.retry(lambda: space.registry.abort(space.client, *versions)) == len(versions):
            space.retry(lambda: space.registry.reap(versions))  # no slot ever showed them
