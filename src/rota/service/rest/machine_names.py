"""Names of the machines that joined, each bound to the token that took it: bounded, and kept in a file of the home."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from rota.runtime.clock import Clock
from rota.runtime.process import write_private
from rota.service.accounts import Caller, UserRole
from rota.spec.errors import Conflict, LimitExceeded, NotAllowed, UnknownName

SEEN_S: Final = 15.0
"""A machine that did not ask for this long is silent: another one with its token may take the name."""
MACHINES_MAX: Final = 4096
"""Names that are kept; the one that is silent for longest is forgotten for a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMachine:
    """What the agent of a machine said when it joined, the id of its token, and when it asked last (monotonic s)."""

    host: str
    identity: str
    address: str
    versions: Mapping[str, str]
    token: str
    seen_s: float = field(default=0.0, compare=False)


class MachineNames:
    """Who has which name. A name belongs to the token that took it until that token, or an admin, gives it back.

    The same machine (``identity``) may join again with another token, as when the first one expired.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._names = dict[str, JoinedMachine]()
        for one in _read(path):
            self._names[one.host] = replace(one, seen_s=clock.monotonic_s())  # what joined before has time to ask again

    def check(self, host: str, identity: str, caller: Caller) -> None:
        """Raises Conflict when a machine of this identity cannot have the name."""
        known = self._names.get(host)
        if known is None or known.identity == identity:
            return
        if not self._is_silent(known):
            hint = "give this one another: rota join --name NAME"
            raise Conflict(f"the name {host} is taken by one at {known.address}", hint=hint)
        if known.token != caller.token and not caller.has(UserRole.ADMIN):
            hint = "join with that token or with one of an admin, or under another name: rota join --name NAME"
            raise Conflict(f"the name {host} belongs to the token with which {known.address} joined", hint=hint)

    def take(self, wanted: JoinedMachine) -> None:
        """Bind a name, after ``check``. Raises LimitExceeded when all other names are in use."""
        before = self._names.get(wanted.host)
        if before is None and len(self._names) >= MACHINES_MAX:
            oldest = min(self._names.values(), key=lambda one: one.seen_s)
            if not self._is_silent(oldest):
                raise LimitExceeded(f"{MACHINES_MAX} machines have joined", hint="let some leave: rota leave, there")
            del self._names[oldest.host]
        self._names[wanted.host] = replace(wanted, seen_s=self._clock.monotonic_s())
        if before != wanted:
            self._write()

    def get(self, host: str) -> JoinedMachine:
        """A machine that joined. Raises UnknownName."""
        if (known := self._names.get(host)) is None:
            raise UnknownName(f"no machine {host!r} has joined", hint="there: rota join ADDRESS --token TOKEN")
        return known

    def seen(self, host: str, caller: Caller) -> None:
        """Note that the agent of a machine asked. Raises UnknownName; from another token nothing is noted."""
        known = self.get(host)
        if known.token == caller.token:
            self._names[host] = replace(known, seen_s=self._clock.monotonic_s())

    def give_back(self, host: str, caller: Caller) -> None:
        """Free a name; harmless when it has none. Raises NotAllowed for a token that did not take it."""
        if (known := self._names.get(host)) is None:
            return
        if known.token != caller.token and not caller.has(UserRole.ADMIN):
            hint = "leave with the token with which it joined, or with one of an admin"
            raise NotAllowed(f"the name {host} belongs to another token", hint=hint)
        del self._names[host]
        self._write()

    def _is_silent(self, known: JoinedMachine) -> bool:
        return self._clock.monotonic_s() - known.seen_s >= SEEN_S

    def _write(self) -> None:
        write_private(self._path, json.dumps([asdict(one) for one in self._names.values()]))


def _read(path: Path) -> list[JoinedMachine]:
    """What was written last; nothing of a file that is missing or broken: the machines join again by themselves."""
    try:
        return [JoinedMachine(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
