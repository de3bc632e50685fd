"""Recovery of a lost registry from segment headers and client files."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypedDict

from rota.runtime.clock import blocking_sleep
from rota.runtime.process import write_private
from rota.runtime.redis.client import Argument
from rota.spec.errors import RegistryUnavailable
from rota.tensors import errors
from rota.tensors.core import HEADER_BYTES, Fields, blocks_in_slab, describe, label_covers
from rota.tensors.errors import file_errors
from rota.tensors.locks import FORK_MARK, PIN_MARK, clients_in, is_alive, is_beginning, read_file
from rota.tensors.namespace import Namespace
from rota.tensors.registry import RedisMachine, ScriptRefused
from rota.tensors.segments import PREPARED, READY, BlockHeader, Segments

_SETTLE_S: Final = 0.01
_BEGIN_MAX_S: Final = 1.0
_VERSION_GAP: Final = 1 << 20
_COMMANDS_MAX: Final = 500
_TRIES_MAX: Final = 5
_NOTES: Final = "notes.json"


Words: TypeAlias = "list[tuple[Argument, ...]]"
"""Commands of Redis, one a tuple."""


class Notes(TypedDict):
    """What no header says: epoch by fenced label, version by holder of a pin."""

    fences: dict[str, int]
    pins: dict[str, int]


@dataclass(frozen=True, slots=True)
class ScannedBlock:
    """One block on disk and what its header says (None: never written, or its checksum is wrong)."""

    seg: str
    offset: int
    block: int
    header: BlockHeader | None
    corrupt: bool = False


@dataclass(slots=True)
class Recovered:
    """Result of a recovery."""

    epoch: int = 0
    names: int = 0
    leases: int = 0
    promoted: int = 0
    quarantined: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    seconds: float = 0.0


def blocks_of(seg: str, file_bytes: int) -> tuple[int, int]:
    """Block size and number of blocks of a segment file, from its name and size."""
    block = int(seg.split("-")[1])
    return block, 1 if file_bytes < 2 * block else blocks_in_slab(block)


def scan(segments: Segments, *, dry_run: bool) -> Iterator[ScannedBlock]:
    """Every block of every segment file; a header with a bad checksum differs from one never written."""
    for seg, size in segments.files():
        block, count = blocks_of(seg, size)
        if size < block:  # whoever made the file died before its memory was there
            if not dry_run:
                segments.unlink(seg)
            continue
        with segments.path(seg).open("rb") as file:
            for index in range(count):
                raw = os.pread(file.fileno(), HEADER_BYTES, index * block)
                if not raw.strip(b"\0"):
                    yield ScannedBlock(seg, index * block, block, None)
                    continue
                try:
                    yield ScannedBlock(seg, index * block, block, BlockHeader.unpack(raw, seg, settled=True))
                except errors.Corrupt:
                    yield ScannedBlock(seg, index * block, block, None, corrupt=True)


def read_notes(folder: Path) -> Notes:
    """What was noted in the folder of a namespace; nothing without a file that can be read."""
    try:
        return json.loads((folder / _NOTES).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {"fences": {}, "pins": {}}


def write_note(space: Namespace, kind: Literal["fences", "pins"], key: str, value: int | None) -> None:
    """Change one note (None: strike it); the caller holds the recovery lock."""
    notes = read_notes(space.folder)
    if value is None:
        notes[kind].pop(key, None)
    else:
        notes[kind][key] = value
    with file_errors():
        write_private(space.folder / _NOTES, json.dumps(notes))


def live_clients(space: Namespace) -> dict[str, list[int]]:
    """Client files whose lock is held, with the versions they lease."""
    living = [client for client in clients_in(space.clients) if is_alive(space.clients, client)]
    return {client: read_file(space.clients, client)[1] for client in living}


def rebuild(space: Namespace, machine: RedisMachine, *, dry_run: bool = False) -> Recovered:
    """Fill an empty registry from what lies on disk, or say what would come; the caller holds the recovery lock.

    (1) a new epoch, every slot makes readers ask the registry; (2) headers: the newest ready version of each slot wins;
    (3) leases from the files of the living; (4) all other blocks are free; (5) open the namespace. Begun anew when the
    registry is lost once more. Raises RegistryUnavailable.
    """
    for _ in range(_TRIES_MAX):
        with contextlib.suppress(ScriptRefused):
            return _rebuild(space, machine, dry_run)
    raise RegistryUnavailable(f"namespace {space.namespace}: the registry was lost repeatedly while it was rebuilt")


def _rebuild(space: Namespace, machine: RedisMachine, dry_run: bool) -> Recovered:
    began_s = space.clock.monotonic_s()
    epoch = max(space.table.epoch, machine.epoch) + 1
    if not dry_run:
        space.table.lose_all(epoch)
        blocking_sleep(_SETTLE_S)  # a get that read the old epoch has noted its lease by now, or sees the new one
        _wait_for_headers(space)
    notes = read_notes(space.folder)
    plan = _Plan(space, notes["fences"])
    plan.take_headers(list(scan(space.segments, dry_run=dry_run)))
    plan.take_leases(live_clients(space) | {holder: [version] for holder, version in notes["pins"].items()})
    if not dry_run:
        _fill(space, machine, plan, notes["fences"], epoch)
    plan.report.epoch, plan.report.seconds = epoch, space.clock.monotonic_s() - began_s
    return plan.report


def _wait_for_headers(space: Namespace) -> None:
    """Wait until no living client is about to write a header in the epoch before: its block would be free in the next.
    Raises PublishBlocked when one is stopped there."""
    until_s = space.clock.monotonic_s() + _BEGIN_MAX_S
    for client in clients_in(space.clients):
        while is_beginning(space.clients, client):
            if space.clock.monotonic_s() > until_s:
                pid = read_file(space.clients, client)[0].get("pid", 0)
                text = f"namespace {space.namespace}: process {pid} is beginning to publish, the registry is lost"
                raise errors.PublishBlocked(
                    text, hint=f"try again; if process {pid} is stopped, continue or end it", name="", pid=pid
                )
            blocking_sleep(_SETTLE_S)


def _fill(space: Namespace, machine: RedisMachine, plan: _Plan, fences: dict[str, int], epoch: int) -> None:
    machine.wipe()
    run_id, filling = machine.run_id, f"{epoch} {machine.run_id}"
    commands: Words = [("HSET", f"{machine.prefix}cfg", "folder", str(space.folder), "filling", filling)]
    commands += plan.commands(machine.prefix)
    if fences:
        commands.append(("HSET", f"{machine.prefix}fence", *_flat(fences)))
    for at in range(0, len(commands), _COMMANDS_MAX):
        machine.client.pipeline(commands[at : at + _COMMANDS_MAX])
    for slot, version in plan.currents():  # before the namespace opens: nothing newer can be overwritten
        space.table.try_store(slot, version)
    machine.epoch = epoch
    machine.run("begin", epoch, plan.slots_max, plan.newest + _VERSION_GAP, plan.top_slot, run_id, filling)
    space.counters["recovered"] += 1


class _Plan:
    """The registry content that follows from headers and files."""

    def __init__(self, space: Namespace, fences: Mapping[str, int]) -> None:
        self._space, self._fences = space, fences
        self.report = Recovered()
        self.newest = space.table.newest()  # no header has an id whose block was given back
        self.top_slot = 0
        self.slots_max = len(space.table.words) // 2 - 1
        self._found: dict[int, ScannedBlock] = {}
        self._blocks: list[ScannedBlock] = []
        self._versions: dict[int, Fields] = {}
        self._names: dict[str, Fields] = {}
        self._parts: dict[str, dict[str, int]] = defaultdict(dict)
        self._leases: dict[str, list[int]] = {}

    def take_headers(self, found: list[ScannedBlock]) -> None:
        """Decide which headers stand for versions."""
        self._blocks = found
        slots: dict[int, list[BlockHeader]] = defaultdict(list)
        under_way: list[BlockHeader] = []
        for each in found:
            if each.header is None:
                if each.corrupt:
                    self.report.quarantined.append(f"{each.seg}+{each.offset}")
                continue
            self._found[each.header.version] = each
            self.newest = max(self.newest, each.header.version)
            slots[each.header.slot].append(each.header)
        for slot, headers in slots.items():
            self.top_slot = max(self.top_slot, slot)
            under_way += self._take_slot(slot, sorted(headers, key=lambda header: -header.version))
        for header in under_way:  # when all names that have a version have their slots
            if self._names.get(header.name, {"slot": header.slot})["slot"] == header.slot:
                self._take_pending(header)

    def _take_slot(self, slot: int, headers: list[BlockHeader]) -> list[BlockHeader]:
        """Take the current version of a slot and those it keeps; headers that may be of publishes on their way."""
        table = self._space.table
        floor = table.last(slot) + (1 if table.deleted(slot) else 0)
        fresh = [header for header in headers if header.version >= floor]
        ready = next((header for header in fresh if header.state == READY), None)
        head = next((h for h in fresh if h is ready or self._may_be_current(h, ready)), None)
        if head is not None and self._take_step(head, headers):
            ids = head.kept
            if head is not ready:
                self.report.promoted += 1
                older = (ready.version, *ready.kept) if ready is not None and ready.step < head.step else ()
                ids = older[: int(self._versions[head.version]["retain"]) - 1]
            kept = [h for v in ids for h in headers if h.version == v and self._take_step(h, headers)]
            self._name(head, current=head.version, kept=[h.version for h in kept])
            self.report.names += 1
        # older ones too: their writers may still be copying, whoever was faster; a name under way keeps its slot
        return [h for h in headers if h in fresh or (h.world == 1 and h.name == headers[0].name)]

    def _may_be_current(self, header: BlockHeader, ready: BlockHeader | None) -> bool:
        """True for a tensor whose commit was under way: the lost registry may have done it, and readers seen it. Its
        writer, if it lives, holds the slot's lock, and commits it again. Refused is what the registry would refuse."""
        if header.state != PREPARED or header.world > 1:
            return False
        if ready is not None and (header.epoch, header.step) < (ready.epoch, ready.step):
            return False
        label = self._manifest(header)["label"] if self._fences else ""
        return not any(label_covers(above, label) and header.epoch < fence for above, fence in self._fences.items())

    def _take_step(self, head: BlockHeader, headers: list[BlockHeader]) -> bool:
        """Take a version, or a group step if all its parts are there."""
        same = [h for h in headers if (h.epoch, h.step, h.world) == (head.epoch, head.step, head.world)]
        newest = {h.part: h for h in reversed(same) if h.state >= PREPARED and h.version <= head.version}
        newest[head.part] = head
        if len(newest) < head.world:
            return False
        parts = [h.version for h in newest.values() if h.version != head.version]
        self._version(head, "r", parts=" ".join(map(str, parts)))
        for header in newest.values():
            if header.version != head.version:
                self._version(header, "r", head=str(head.version))
        return True

    def _take_pending(self, header: BlockHeader) -> None:
        """A publish on its way: that of a living writer, or a complete part of an incomplete step."""
        if header.version in self._versions or header.state == READY:
            return
        is_part = header.state == PREPARED and header.world > 1
        if not is_part and not is_alive(self._space.clients, header.owner):
            return
        self._version(header, "q" if is_part else "p")
        name = self._name(header)
        name["pend"] += 1
        if is_part:
            field_name = f"{header.epoch}:{header.step}:{header.part}"
            self._parts[header.name][field_name] = header.version
            name["pe"] = max(name.get("pe", 0), header.epoch)

    def take_leases(self, live: dict[str, list[int]]) -> None:
        """Leases of living clients; a version that was replaced is kept for them until they end."""
        for client, versions in live.items():
            kept = self._leases.setdefault(client, [])
            for version in dict.fromkeys(versions):  # noted twice: ended, not reported yet, and leased again meanwhile
                if version not in self._versions:
                    found = self._found.get(version)
                    if found is None or found.header is None:
                        self.report.lost.append(version)
                        continue
                    self._version(found.header, "d")
                self._versions[version]["refs"] += 1
                kept.append(version)
                self.report.leases += 1

    def currents(self) -> Iterator[tuple[int, int]]:
        """Slot and version for the generation table."""
        for fields in self._names.values():
            if fields["v"]:
                yield fields["slot"], fields["v"]

    def commands(self, prefix: str) -> Words:
        """The commands that write all of it."""
        out: Words = []
        for version, fields in self._versions.items():
            out.append(("HSET", f"{prefix}v:{version}", *_flat(fields)))
            if fields["st"] == "p":
                out.append(("HSET", f"{prefix}c:{fields['owner']}:o", version, "recovered"))
        for name, fields in self._names.items():
            if fields.pop("evict", 0):
                out.append(("ZADD", f"{prefix}evict", 0, name))
            out.append(("HSET", f"{prefix}n:{name}", *_flat(fields)))
            head = self._versions.get(fields["v"])
            if head is not None and head["orphan"] == "drop":  # an owner without a file is swept, and this goes then
                out.append(("SADD", f"{prefix}clients", head["owner"]))
                out.append(("HSET", f"{prefix}c:{head['owner']}:d", fields["v"], name))
            out.append(("ZADD", f"{prefix}names", 0, name))
        for name, parts in self._parts.items():
            out.append(("HSET", f"{prefix}p:{name}", *_flat(parts)))
        for client, versions in self._leases.items():
            out.append(("SADD", f"{prefix}clients", client))
            # all others join again themselves, and may do nothing before they did
            if FORK_MARK in client or client.startswith(PIN_MARK):
                out.append(("HSET", f"{prefix}c:{client}", "id", "{}"))
            if versions:
                out.append(("HSET", f"{prefix}c:{client}:l", *[word for v in versions for word in (v, 0)]))
        taken = {fields["slot"] for fields in self._names.values()}
        free = [slot for slot in range(1, self.top_slot + 1) if slot not in taken]
        if free:
            out.append(("RPUSH", f"{prefix}slotfree", *free))
        return out + self._memory(prefix)

    def _memory(self, prefix: str) -> Words:
        taken = {(fields["seg"], fields["off"]): int(fields["blk"]) for fields in self._versions.values()}
        segs: dict[str, int] = defaultdict(int)
        out: Words = []
        for each in self._blocks:
            if (each.seg, each.offset) in taken:
                segs[each.seg] += 1
            else:
                segs[each.seg] += 0
                out.append(("RPUSH", f"{prefix}free:{each.block}", f"{each.seg} {each.offset}"))
        files = dict(self._space.segments.files())
        now_ms = int(self._space.clock.wall_s() * 1000)
        for seg, used in segs.items():
            size = files.get(seg, 0)
            block, count = blocks_of(seg, size)
            facts = {"blk": block, "count": count, "file": size, "next": count, "used": used}
            out.append(("HSET", f"{prefix}s:{seg}", *_flat(facts)))
            out.append(("SADD", f"{prefix}segs", seg))
            if not used:
                out.append(("ZADD", f"{prefix}idle", now_ms, seg))
        total = sum(files.get(seg, 0) for seg in segs)
        out.append(("HSET", f"{prefix}bytes", "files", total, "used", sum(taken.values())))
        return out

    def _name(self, header: BlockHeader, *, current: int = 0, kept: list[int] | None = None) -> Fields:
        kind = "g" if header.group else "t"
        fresh = {"v": 0, "e": 0, "s": 0, "slot": header.slot, "kind": kind, "hist": "", "pend": 0, "label": ""}
        fields = self._names.setdefault(header.name, fresh)
        if current:
            hist = " ".join(map(str, kept or []))
            label = self._versions[current]["label"]
            fields |= {"v": current, "e": header.epoch, "s": header.step, "hist": hist, "label": label}
            if self._versions[current]["evict"]:
                fields["evict"] = 1
        return fields

    def _manifest(self, header: BlockHeader) -> Fields:
        found = self._found[header.version]
        raw = self._space.segments.read(found.seg, found.offset + HEADER_BYTES, header.manifest_bytes)
        try:
            return json.loads(raw)
        except ValueError:
            self.report.quarantined.append(f"{found.seg}+{found.offset}: manifest")
            return {"tensors": [], "label": "", "retain": 1, "orphan": "keep"}

    def _version(self, header: BlockHeader, state: str, **more: str) -> None:
        found, manifest = self._found[header.version], self._manifest(header)
        rows, device = manifest["tensors"], manifest.get("device", "")
        size = max((offset + size for *_, offset, size in rows), default=0) if device else header.bytes
        self._versions[header.version] = {
            "st": state, "name": header.name, "refs": 0, "owner": header.owner, "label": manifest["label"],
            "e": header.epoch, "s": header.step, "seg": found.seg, "off": found.offset, "blk": header.block,
            "len": size, "desc": json.dumps(describe(rows, device)), "orphan": manifest["orphan"],
            "retain": manifest["retain"], "mut": int(manifest.get("mutable", False)),
            "evict": int(manifest.get("evictable", False)),
            "part": header.part, "world": header.world, "dir": int(header.world == 1), "auto": 0,
            "at": header.ctime_ns // 1_000_000, **more,
        }  # fmt: skip


def _flat(fields: Mapping[str, Argument]) -> list[Argument]:
    return [word for item in fields.items() for word in item]
