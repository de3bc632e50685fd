"""The machines of an engine that somebody else runs: which live, which can be used, and what each says it has."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from rota.runtime.ray.engine import HOST_LABEL

LOOK_S = 2.0
"""How long one look waits for machines that were not heard yet; the next look hears them."""


class Machines:
    """What is known of them, kept from look to look.

    ``ask`` gives what a machine has, of its row in Ray's table, or nothing when it does not say; it ends in bounded
    time. A machine is asked by one task at a time, and no more once it has answered.
    """

    def __init__(self, ask: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        self._ask = ask
        self._names = dict[str, str]()
        self._asking = dict[str, asyncio.Future[dict[str, Any]]]()
        self._known = dict[str, dict[str, Any]]()
        self._silent = set[str]()
        self._doubled = set[str]()
        self._held = dict[str, tuple[str, str]]()
        """Of those that another installation holds: name, and which installation."""

    async def look(self, rows: Iterable[Mapping[str, Any]], held: Mapping[str, str]) -> dict[str, Any]:
        """``nodes``: what is known by now; ``alive``: the names of all that live, heard or not.

        ``held`` has the machines of other installations, by Ray's ids: to this one they are as if they were not there.
        """
        there = {row["NodeID"]: row for row in rows if row["Alive"]}
        self._held = {one: (there[one]["Labels"].get(HOST_LABEL, ""), held[one]) for one in held if one in there}
        living = {identity: row for identity, row in there.items() if identity not in held}
        self._names = {identity: row["Labels"].get(HOST_LABEL, "") for identity, row in living.items()}
        counts = Counter(name for name in self._names.values() if name)
        self._doubled = {name for name, count in counts.items() if count > 1}
        self._forget(living.keys())
        for identity, row in living.items():
            if counts[self._names[identity]] == 1 and identity not in self._known.keys() | self._asking.keys():
                self._asking[identity] = asyncio.ensure_future(self._ask(row))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=LOOK_S)
        for identity in [one for one, task in self._asking.items() if task.done()]:
            self._hear(identity, self._asking.pop(identity).result())
        return {"nodes": list(self._known.values()), "alive": sorted(counts)}

    def _hear(self, identity: str, said: dict[str, Any]) -> None:
        if said:
            self._known[identity] = said
            self._silent.discard(identity)
        else:
            self._silent.add(identity)

    def _forget(self, living: Iterable[str]) -> None:
        for identity in (self._known.keys() | self._asking.keys() | self._silent).difference(living):
            self._known.pop(identity, None)
            self._silent.discard(identity)
            if task := self._asking.pop(identity, None):
                task.cancel()

    @property
    def hosts(self) -> list[str]:
        """Names of those that said what they have."""
        return sorted(node["host"] for node in self._known.values())

    @property
    def unusable(self) -> list[str]:
        """Ray's ids of those without a name, with one that was taken, or that did not say what they have."""
        bad = {"", *self._doubled}
        found = {identity for identity, name in self._names.items() if name in bad and identity not in self._known}
        return sorted(found | self._silent | self._held.keys())

    @property
    def text(self) -> str:
        """What to do about machines that cannot be used; empty when there are none."""
        unnamed = sum(not name for name in self._names.values())
        silent = sorted(self._names[identity] for identity in self._silent)
        how = f"start each with: ray start --address=HOST:PORT --labels={HOST_LABEL}=NAME"
        said = [f"{unnamed} machines have no name to place jobs by; {how}"] if unnamed else []
        if self._doubled:
            said.append(f"several machines have the name {', '.join(sorted(self._doubled))}: give each another; {how}")
        for who in sorted({who for _, who in self._held.values()}):
            names = ", ".join(sorted(name for name, other in self._held.values() if other == who))
            said.append(f"{names}: used by the installation {who}; end that one with 'rota down' to use them here")
        if silent:
            said.append(f"{', '.join(silent)} did not say what they have: is Rota installed there? see gateway.log")
        return "; ".join(said)
