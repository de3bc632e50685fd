"""The protocol of the tensor registry as a pure machine; the Lua scripts must equal it.

A version goes ``p`` (pending) -> ``r`` (ready) -> ``d`` (doomed) -> gone, a part of a group step by way of ``q``
(prepared). ``refs`` of a version is always the number of holders whose lease hash names it; a doomed version without
refs is gone at once and its block is free. Three users: tests compare it with the scripts call by call, explore it
exhaustively, and unit tests take it as an in-memory registry. ``run`` takes and returns what the scripts do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rota.tensors.core import SLOTS_MAX
from rota.tensors.registry import ScriptRefused


@dataclass(slots=True)
class Version:
    """One version: where it lies, who made it, its place in the order, who must still end before it may go."""

    name: str
    owner: str
    label: str
    e: int
    s: int
    seg: str
    off: int
    blk: int
    length: int
    orphan: str
    retain: int
    part: int
    world: int
    auto: bool
    direct: bool = False
    copied: bool = False
    st: str = "p"
    refs: int = 0
    parts: list[int] = field(default_factory=list[int])
    head: int = 0


@dataclass(slots=True)
class Name:
    """One name: its slot, its current version (0: none), what it still keeps, how much is on the way."""

    slot: int
    kind: str
    label: str
    v: int = 0
    e: int = 0
    s: int = 0
    hist: list[int] = field(default_factory=list[int])
    pend: int = 0
    part_epoch: int = -1
    claim: int = 0
    by: str = ""


@dataclass(slots=True)
class Segment:
    """One file: its blocks below ``next`` are in versions or free, ``used`` of them in versions."""

    blk: int
    count: int
    file: int
    next: int = 0
    used: int = 0


@dataclass(slots=True)
class Client:
    """What one holder has: leases (version -> seq), pending versions (-> request), names that go with it."""

    leases: dict[int, int] = field(default_factory=dict[int, int])
    own: dict[int, str] = field(default_factory=dict[int, str])
    drops: dict[int, str] = field(default_factory=dict[int, str])
    stock: list[int] = field(default_factory=list[int])
    claims: dict[str, int] = field(default_factory=dict[str, int])


class ProtocolMachine:
    """The registry of one namespace in memory. Deterministic: the same calls give the same replies and content."""

    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}
        self.names: dict[str, Name] = {}
        self.parts: dict[str, dict[tuple[int, int, int], int]] = {}
        self.segments: dict[str, Segment] = {}
        self.free: dict[int, list[tuple[str, int]]] = {}
        self.current: dict[int, str] = {}
        self.clients: dict[str, Client] = {}
        self.fences: dict[str, int] = {}
        self.limbo: set[int] = set()
        self.slots, self.slots_free = 0, list[int]()
        self.ids, self.quota = 0, 0

    def run(self, name: str, *args: object) -> Any:
        """Run one script by its name. Raises Refused."""
        handler: Callable[..., Any] = getattr(self, f"_{name}")
        return handler(*args)

    def _reclaim(self, v: int) -> None:
        """No holder is known here any more: a version that may be noted in the file of a client waits for ``reap``."""
        if self.versions[v].direct:
            self.limbo.add(v)
        else:
            self._free(v)

    def _reap(self, *versions: int) -> int:
        ended = [v for v in versions if v in self.limbo and self.versions[v].refs == 0]
        for v in ended:
            self.limbo.remove(v)
            self._free(v)
        return len(ended)

    def _free(self, v: int) -> None:
        version = self.versions.pop(v)
        if version.orphan == "drop" and version.owner in self.clients:
            self.clients[version.owner].drops.pop(v, None)
        self.free.setdefault(version.blk, []).append((version.seg, version.off))
        self.segments[version.seg].used -= 1
        for part in version.parts:
            self._free(part)

    def _doom(self, v: int) -> None:
        version = self.versions.get(v)
        if version is not None:
            version.st = "d"
            if version.refs == 0:
                self._reclaim(v)

    def _lease(self, client: Client, v: int, seq: int) -> None:
        if v not in client.leases:
            self.versions[v].refs += 1
        client.leases[v] = max(client.leases.get(v, seq), seq)

    def _unlease(self, client: Client, v: int) -> None:
        del client.leases[v]
        version = self.versions[v]
        version.refs -= 1
        if version.refs == 0 and version.st == "d":
            self._reclaim(v)

    def _forget_if_empty(self, name: str) -> None:
        entry = self.names[name]
        if entry.v == 0 and entry.pend == 0:
            del self.names[name]
            self.slots_free.append(entry.slot)

    def _undo(self, v: int) -> None:
        version = self.versions[v]
        if version.owner in self.clients:
            self.clients[version.owner].own.pop(v, None)
        if version.st == "q":
            parts, key = self.parts.get(version.name, {}), (version.e, version.s, version.part)
            if parts.get(key) == v:
                del parts[key]
        self.names[version.name].pend -= 1
        self._doom(v)
        self._forget_if_empty(version.name)

    def _fence_of(self, label: str) -> int:
        levels = label.split("/")
        above = ["/".join(levels[:n]) for n in range(1, len(levels) + 1)]
        return max((self.fences[each] for each in above if each in self.fences), default=-1)

    def _gone(self, *versions: int) -> list[int]:
        return [v for v in versions if v not in self.versions]

    def _join(self, client: str, identity: str, *leases: int) -> list[int]:
        del identity
        entry = self.clients.setdefault(client, Client())
        given = dict(zip(leases[::2], leases[1::2], strict=True))
        for v, seq in given.items():
            if v in self.versions:
                self._lease(entry, v, seq)
        for v in [v for v in entry.leases if v not in given]:
            self._unlease(entry, v)
        return [v for v in given if v not in self.versions]

    def _reserve(
        self, client: str, request: str, name: str, kind: str, epoch: int, step: int | str, label: str, block: int,
        count: int, file: int, length: int, desc: str, orphan: str, retain: int, mutable: int, evictable: int,
        part: int, world: int, direct: int = 0, copied: int = 0,
    ) -> list[Any]:  # fmt: skip
        del desc, mutable, evictable
        if client not in self.clients:
            raise ScriptRefused("UNJOINED")
        own = self.clients[client].own
        for v, before in own.items():
            if before == request:
                version = self.versions[v]
                return [v, self.names[name].slot, version.seg, version.off, version.s]
        entry = self.names.get(name)
        self._check_claim(entry)
        step, auto = self._check_order(entry, kind, epoch, step, -1 if copied else self._fence_of(label))
        if entry is None and not self.slots_free and self.slots >= SLOTS_MAX:
            raise ScriptRefused("SLOTS")
        seg, off = self._take_block(block, count, file)
        self.ids += 1
        self.versions[self.ids] = Version(
            name, client, label, epoch, step, seg, off, block, length, orphan, retain, part, world, auto, bool(direct),
            bool(copied),
        )  # fmt: skip
        own[self.ids] = request
        if entry is None:
            if self.slots_free:
                slot = self.slots_free.pop()
            else:
                self.slots += 1
                slot = self.slots
            entry = self.names[name] = Name(slot, kind, label)
        entry.pend += 1
        return [self.ids, entry.slot, seg, off, step]

    def _check_claim(self, entry: Name | None, *at: int) -> None:
        if entry is not None and entry.claim:
            raise ScriptRefused("CLAIMED", [entry.slot, entry.by, *at])

    def _stock(self, client: str, block: int, count: int, file: int, n: int, *used: Any) -> list[list[Any]]:
        if client not in self.clients:
            raise ScriptRefused("UNJOINED")
        for at in range(0, len(used), 5):
            spare, v, step, length, name = used[at : at + 5]
            if self._adopt(client, spare, v):
                version = self.versions[v]
                version.st, version.s, version.length, version.name = "d", step, length, name
                self._reclaim(v)
        out: list[list[Any]] = []
        for _ in range(n):
            try:
                seg, off = self._take_block(block, count, file)
            except ScriptRefused:
                break
            self.ids += 1
            self.versions[self.ids] = Version(
                "", client, "", 0, 0, seg, off, block, 0, "keep", 1, 0, 1, auto=False, direct=True, st="s"
            )
            self.clients[client].stock.append(self.ids)
            out.append([self.ids, seg, off])
        return out

    def _claims(self, client: str) -> list[list[list[Any]]]:
        entry = self.clients.get(client, Client())
        blocks = [(v, self.versions[v]) for v in entry.stock]
        names = [[name, self.names[name].slot, base] for name, base in entry.claims.items()]
        return [names, [[v, each.seg, each.off, each.blk] for v, each in blocks]]

    def _adopt(self, client: str, spare: int, v: int) -> bool:
        if spare not in self.clients[client].stock:
            return False
        self.clients[client].stock.remove(spare)
        self.versions[v] = self.versions.pop(spare)
        return True

    def _settle(self, name: str, base: int, spare: int, version: int | str, step: int, length: int, desc: str) -> int:
        del desc
        entry = self.names.get(name)
        if entry is None or not base or entry.claim != base:
            return 0
        old = entry.v
        if version and spare not in self.clients[entry.by].stock:
            raise ScriptRefused("ABORTED")
        del self.clients[entry.by].claims[name]
        by, entry.claim, entry.by = entry.by, 0, ""
        if version == "":
            entry.v, entry.e, entry.s = 0, 0, 0
            self._doom(old)
            self._forget_if_empty(name)
        elif isinstance(version, int) and version:
            self._adopt(by, spare, version)
            made = self.versions[version]
            made.st, made.name, made.label, made.e, made.s, made.length = "r", name, entry.label, entry.e, step, length
            entry.v, entry.s = version, step
            self._doom(old)
        return 1

    def _check_order(self, entry: Name | None, kind: str, epoch: int, step: int | str, fence: int) -> tuple[int, bool]:
        if epoch < fence:
            raise ScriptRefused("FENCED", [fence])
        if entry is not None and entry.kind != kind:
            raise ScriptRefused("KIND", [entry.kind])
        published = entry is not None and entry.v != 0
        auto = isinstance(step, str)
        chosen = (entry.s + 1 if entry is not None and published else 0) if isinstance(step, str) else step
        if entry is not None and published:
            if epoch < entry.e:
                raise ScriptRefused("FENCED", [entry.e])
            if epoch == entry.e and chosen < entry.s:
                raise ScriptRefused("STALE", [entry.s])
        return chosen, auto

    def _take_block(self, block: int, count: int, file: int) -> tuple[str, int]:
        if self.free.get(block):
            seg, off = self.free[block].pop()
            self.segments[seg].used += 1
            return seg, off
        seg = self.current.get(block, "")
        if not seg or self.segments[seg].next >= count:
            files = sum(each.file for each in self.segments.values())
            if self.quota and files + file > self.quota:
                raise ScriptRefused("QUOTA", [files, self.quota])
            self.ids += 1
            seg = self.current[block] = f"seg-{block}-{self.ids}"
            self.segments[seg] = Segment(block, count, file)
        segment = self.segments[seg]
        off = segment.next * block
        segment.next += 1
        segment.used += 1
        return seg, off

    def _commit(self, client: str, v: int, claim: int = 0) -> list[Any]:
        version = self.versions.get(v)
        if client not in self.clients:
            raise ScriptRefused("UNJOINED")
        if version is None or version.st == "d":
            raise ScriptRefused("ABORTED")
        entry = self.names[version.name]
        if version.st == "r":
            return ["ready", version.head or v, entry.slot, 0, _joined(entry.hist), entry.v, 0]
        why = self._refusal(version, v, entry)
        if why is not None:
            self._undo(v)
            raise why
        if version.world > 1 and not self._complete(client, version, v, entry):
            return ["part", self._received(version), entry.slot, 0, "", entry.v, 0]
        keep: list[int] = []
        for old in ([entry.v] if entry.v else []) + entry.hist:
            if old in self.versions and self.versions[old].s < version.s and len(keep) < version.retain - 1:
                keep.append(old)
            else:
                self._doom(old)
        first = int(entry.v == 0)
        version.st = "r"
        self.clients[client].own.pop(v, None)
        entry.v, entry.e, entry.s, entry.hist, entry.label = v, version.e, version.s, keep, version.label
        entry.pend -= 1
        if version.orphan == "drop":
            self.clients[client].drops[v] = version.name
        plain = version.world == 1 and version.retain == 1 and version.orphan == "keep" and not (entry.pend or keep)
        if claim and plain:
            entry.claim, entry.by = self.ids + 1, client
            self.clients[client].claims[version.name] = entry.claim
            self.ids += 4096
        return ["ready", v, entry.slot, first, _joined(keep), v, entry.claim]

    def _refusal(self, version: Version, v: int, entry: Name) -> ScriptRefused | None:
        fence = -1 if version.copied else self._fence_of(version.label)
        if version.e < fence:
            return ScriptRefused("FENCED", [fence])
        if version.e < entry.part_epoch:
            return ScriptRefused("FENCED", [entry.part_epoch])
        if entry.v == 0 or version.e > entry.e:
            return None
        if version.e < entry.e:
            return ScriptRefused("FENCED", [entry.e])
        if version.s < entry.s:
            return ScriptRefused("LOST" if version.auto else "STALE", [entry.s])
        return ScriptRefused("LOST", [entry.s]) if version.s == entry.s and v < entry.v else None

    def _received(self, version: Version) -> int:
        return sum(key[:2] == (version.e, version.s) for key in self.parts[version.name])

    def _complete(self, client: str, version: Version, v: int, entry: Name) -> bool:
        """Take a part in; True when its step is whole, and then the parts belong to ``v``."""
        parts, key = self.parts.setdefault(version.name, {}), (version.e, version.s, version.part)
        if key in parts and parts[key] != v:
            self._undo(parts[key])
        version.st = "q"
        parts[key] = v
        entry.part_epoch = version.e
        self.clients[client].own.pop(v, None)
        same = [parts.get((version.e, version.s, part)) for part in range(version.world)]
        if None in same:
            return False
        for part in range(version.world):
            del parts[version.e, version.s, part]
        version.parts = [each for each in same if each is not None and each != v]
        for each in version.parts:
            self.versions[each].st, self.versions[each].head = "r", v
        entry.pend -= version.world - 1
        for (e, s, _), other in list(parts.items()):
            if e < version.e or s <= version.s:
                self._undo(other)
        return True

    def _abort(self, client: str, v: int) -> int:
        if client not in self.clients or v not in self.clients[client].own:
            return 0
        self._undo(v)
        return 1

    def _get(self, client: str, seq: int, *wanted: str) -> list[list[Any]]:
        if client not in self.clients:
            raise ScriptRefused("UNJOINED")
        picks = [
            (wanted[i], self._pick(client, 5 + i, wanted[i], wanted[i + 1]))  # counted as ARGV of the script
            for i in range(0, len(wanted), 2)
        ]
        rows: list[list[Any]] = []
        for name, v in picks:
            self._lease(self.clients[client], v, seq)
            rows.append(self._row(name, v))
        return rows

    def _row(self, name: str, v: int) -> list[Any]:
        version, entry = self.versions[v], self.names.get(name)
        row: list[Any] = [v, entry.slot if entry else 0, version.e, version.s, entry.v if entry else 0]
        for each in [v, *version.parts]:
            block = self.versions[each]
            row += [each, block.seg, block.off, block.blk]
        return row

    def _check(self, label: str, epoch: int) -> int:
        if epoch < self._fence_of(label):
            raise ScriptRefused("FENCED", [self._fence_of(label)])
        return 1

    def _touch(self, name: str) -> int:
        self._check_claim(self.names.get(name))
        if name not in self.names or not self.names[name].v:
            raise ScriptRefused("NOTFOUND")
        return self.names[name].v

    def _pick(self, client: str, at: int, name: str, selector: str) -> int:
        mode, arg, entry = selector[:1], int(selector[1:] or 0), self.names.get(name)
        self._check_claim(entry, at)
        if mode in ("v", "h"):
            version = self.versions.get(arg)
            alive = version is not None and (
                version.st == "r"
                or (version.st == "d" and (version.refs > 0 or mode == "h"))
                or (version.st == "p" and version.owner == client)
            )
            if version is None or not alive or version.name != name:
                raise ScriptRefused("GONE", [at, entry.v if entry else 0, entry.s if entry else 0])
            return arg
        if entry is None or entry.v == 0:
            raise ScriptRefused("NOTFOUND", [at])
        if mode == "s":
            for v in [entry.v, *entry.hist]:
                if self.versions[v].s == arg:
                    return v
            raise ScriptRefused("BEHIND" if entry.s < arg else "GONE", [at, entry.v, entry.s, entry.slot])
        if (mode == "m" and entry.s < arg) or (mode == "w" and entry.v < arg):
            raise ScriptRefused("BEHIND", [at, entry.v, entry.s, entry.slot])
        return entry.v

    def _release(self, client: str, *leases: int) -> int:
        entry, ended = self.clients.get(client, Client()), 0
        for v, seq in zip(leases[::2], leases[1::2], strict=True):
            if entry.leases.get(v) == seq:
                self._unlease(entry, v)
                ended += 1
        return ended

    def _delete(self, name: str, slot: int, expected: int | str, idle: int, label: str, epoch: int) -> int:
        if epoch < self._fence_of(label):
            raise ScriptRefused("FENCED", [self._fence_of(label)])
        entry, parts = self.names.get(name), list(self.parts.get(name, {}).values())
        self._check_claim(entry)
        if entry is None or (entry.v == 0 and not parts):
            raise ScriptRefused("NOTFOUND")
        if slot != entry.slot or expected not in ("", entry.v):
            raise ScriptRefused("CHANGED", [entry.v, entry.slot])
        every = ([entry.v] if entry.v else []) + entry.hist
        if idle and any(self.versions[v].refs for v in every):
            raise ScriptRefused("LEASED")
        was = entry.v
        entry.v, entry.e, entry.s, entry.hist, entry.part_epoch = 0, 0, 0, [], -1
        for v in every:
            self._doom(v)
        for v in parts:
            self._undo(v)
        pend = entry.pend
        if name in self.names:
            self._forget_if_empty(name)
        return [was, pend]

    def _sweep(self, client: str, n_max: int) -> list[Any]:
        entry = self.clients.get(client, Client())
        leases = list(entry.leases)
        for v in leases[:n_max]:
            self._unlease(entry, v)
        left, pending = max(len(leases) - n_max, 0) + len(entry.stock) + len(entry.claims), list(entry.own)
        for v in pending[:n_max]:
            self._undo(v)
        left += max(len(pending) - n_max, 0)
        out: list[Any] = []
        for v, name in list(entry.drops.items()):
            if name in self.names and self.names[name].v == v:
                out += [v, name] if len(out) < 2 * n_max else []
                left += 1
            else:
                del entry.drops[v]
        if left == 0:
            self.clients.pop(client, None)
        return [left, min(len(leases), n_max), min(len(pending), n_max), *out]

    def _hold(self, client: str, holder: str) -> int:
        entry, leases = self.clients.setdefault(holder, Client()), list(self.clients[client].leases)
        for v in leases:
            self._lease(entry, v, 0)
        return len(leases)

    def _fence(self, label: str, epoch: int) -> int:
        self.fences[label] = max(self.fences.get(label, -1), epoch)
        return self.fences[label]


def _joined(ids: list[int]) -> str:
    return " ".join(str(v) for v in ids)
