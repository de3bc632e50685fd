"""Follow what happens to names: events in order, on one thread or by iterating."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from rota.spec.errors import BadInput, RegistryUnavailable
from rota.tensors import errors
from rota.tensors.registry import RedisMachine
from rota.tensors.space import Space

_POLL_MS: Final = 200
_BATCH_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEvent:
    """One fact: ``published deleted reclaimed left``. ``id`` orders events; ``at_s`` is the wall clock of its cause."""

    id: str
    kind: str
    name: str
    version: int
    step: int
    at_s: float


class WatchGap(errors.TensorError):
    """Events were dropped before they were read (about 10,000 are kept), or the registry was rebuilt: list again."""

    code = "TENSOR_WATCH_GAP"


class Watch:
    """Events of names with a prefix, from now on or from behind ``after``, until ``close()``.

    Iterate it, or give a callback, which is called on one thread of its own. Raises WatchGap from the iteration.
    """

    def __init__(
        self,
        space: Space,
        machine: RedisMachine,
        prefix: str,
        after: str | None,
        callback: Callable[[TensorEvent], object] | None,
    ) -> None:
        self._space, self._machine, self._prefix = space, machine, prefix
        self._epoch = space.table.epoch
        self._at = machine.last_event() if after is None else "-".join(map(str, _order(after)))
        self._resumed = after is not None
        self._closed = threading.Event()
        self.failure: WatchGap | None = None
        if callback is not None:
            self._thread = threading.Thread(target=self._call, args=(callback,), name="rota-tensors-watch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[TensorEvent]:
        while not self._closed.is_set() and not self._space.closed:
            self._check_gap()
            try:
                found = self._machine.events(self._at, _POLL_MS, _BATCH_MAX)
            except RegistryUnavailable as error:
                raise WatchGap("the registry went away during a watch", hint="list the names again") from error
            self._resumed = len(found) == _BATCH_MAX  # so far behind that events may be dropped before they are read
            for at, fields in found:
                self._at = at
                if fields["name"].startswith(self._prefix):
                    yield TensorEvent(
                        id=at, kind=fields["kind"], name=fields["name"], version=int(fields["version"]),
                        step=int(fields["step"]), at_s=int(fields["at"]) / 1000,
                    )  # fmt: skip

    def close(self) -> None:
        """End the watch; an iteration ends within a fraction of a second."""
        self._closed.set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_gap(self) -> None:
        if self._space.table.epoch != self._epoch:
            raise WatchGap("the registry was rebuilt during a watch", hint="list the names again")
        if self._resumed:
            first = self._machine.last_event(first=True)
            if self._at != "0" and _order(first) > _order(self._at) and self._machine.last_event() != self._at:
                raise WatchGap(f"events behind {self._at} were dropped", hint="list the names again")
            self._resumed = False

    def _call(self, callback: Callable[[TensorEvent], object]) -> None:
        try:
            for event in self:
                callback(event)
        except WatchGap as gap:
            self.failure = gap


def _order(event_id: str) -> tuple[int, int]:
    first, _, second = event_id.partition("-")
    try:
        return int(first), int(second or 0)
    except ValueError:
        raise BadInput(f"after={event_id!r}: the id of an event") from None
