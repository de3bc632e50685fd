"""Inspection and repair of a namespace: stats, fsck, gc, recover, and the rows of ``rota tensors ls``."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypedDict

from rota.runtime.clock import blocking_sleep
from rota.tensors import errors
from rota.tensors.core import HEADER_BYTES
from rota.tensors.devices.client import PLACE_BYTES, DevicePlace
from rota.tensors.locks import clients_in, is_alive, noted_in, read_file
from rota.tensors.namespace import Namespace, remove_unknown
from rota.tensors.ownership import in_stock
from rota.tensors.recovery import blocks_of
from rota.tensors.registry import STATES, Dump, Row
from rota.tensors.segments import BlockHeader
from rota.tensors.session import Session, remove_vanished, shm_base


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken invariant: its rule (I1 to I7), the object, what is wrong, whether it was repaired."""

    rule: str
    object: str
    detail: str
    repaired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the bytes of one part of a version lie: ``tier`` is ``memory``, ``file`` (spilled) or ``device``.

    ``bytes`` bytes from ``offset`` of the file ``path``, or on ``device`` (its UUID), whose ``path`` holds their place
    there. ``mapped``: this process has them mapped already.
    """

    version: int
    part: int
    tier: str
    path: Path
    offset: int
    bytes: int
    mapped: bool
    device: str = ""


class TensorRow(TypedDict):
    """One item of ``TensorList``; ``dtype`` and ``shape`` of a single tensor, ``age_s`` since its last publish."""

    name: str
    version: int
    step: int
    epoch: int
    kind: Literal["group", "tensor"]
    dtype: str | None
    shape: list[int] | None
    tensors: int
    device: str
    bytes: int
    leases: int
    owner: str
    label: str
    state: str
    age_s: float


class HolderRow(TypedDict):
    """A client that leases a version, and for how long it has been a client."""

    client: str
    pid: int | None
    label: str
    age_s: float | None


class VersionRow(TypedDict):
    """One version of a name: where its bytes are, and its holders."""

    version: int
    step: int
    epoch: int
    leases: int
    state: str
    bytes: int
    segment: str
    offset: int
    part: int
    world: int
    tier: str
    holders: list[HolderRow]


class TensorDocument(TensorRow):
    """The document of ``rota tensors stat``."""

    versions: list[VersionRow]


class TensorList(TypedDict):
    """The document of ``rota tensors ls``."""

    items: list[TensorRow]


class TopRow(TypedDict):
    """Bytes of all versions of a name; ``doomed_bytes`` are kept by old leases alone."""

    name: str
    bytes: int
    doomed_bytes: int
    leases: int
    versions: int


class TopDocument(TypedDict):
    """The document of ``rota tensors top``."""

    items: list[TopRow]


class Stats(TypedDict):
    """``bytes`` of versions, ``free_bytes`` warm, ``file_bytes`` on the file system, and counts."""

    namespace: str
    names: int
    versions: dict[str, int]
    leases: int
    clients: int
    bytes: int
    free_bytes: int
    file_bytes: int
    spilled_bytes: int
    segments: int
    registry_epoch: int
    process: dict[str, int]


class FsckDocument(TypedDict):
    """The document of ``rota tensors fsck``; each violation as a ``Violation``."""

    checked: int
    violations: list[dict[str, object]]
    registry_bytes: int
    disk_bytes: int


class Dropped(TypedDict):
    """What a collection removed, and why."""

    what: str
    why: str
    bytes: int


class GcDocument(TypedDict):
    """The document of ``rota tensors gc``."""

    swept: int
    trimmed_bytes: int
    dropped: list[Dropped]
    dry_run: bool


class DoctorDocument(TypedDict):
    """The document of ``rota tensors doctor``; each check as a ``StoreCheck``."""

    checks: list[dict[str, object]]


def row_document(row: Row, now_s: float) -> TensorRow:
    """One item of ``TensorList``."""
    shape = json.loads(row.desc) if row.desc else {}
    return {
        "name": row.name, "version": row.version, "step": row.step, "epoch": row.epoch,
        "kind": "group" if row.kind == "g" else "tensor", "dtype": shape.get("dtype"), "shape": shape.get("shape"),
        "tensors": shape.get("tensors", 1), "device": shape.get("device", "cpu"), "bytes": row.payload,
        "leases": row.refs, "owner": row.owner, "label": row.label, "state": row.state,
        "age_s": round(max(now_s - row.at_ms / 1000, 0), 3),
    }  # fmt: skip


def tensor_list(space: Namespace, prefix: str = "") -> TensorList:
    """The document of ``rota tensors ls``."""
    now_s = space.clock.wall_s()
    return {"items": [row_document(row, now_s) for row in space.rows(prefix) if row.version]}


def tensor(space: Namespace, row: Row) -> TensorDocument:
    """The document of ``rota tensors stat``: the row, its versions, their holders, its latest events."""
    now_s, direct = space.clock.wall_s(), noted_in(space.clients)
    versions: list[VersionRow] = [
        {
            "version": version, "step": int(v["s"]), "epoch": int(v["e"]),
            "leases": int(v["refs"]) + direct[version], "state": STATES[v["st"]], "bytes": int(v["len"]),
            "segment": v["seg"], "offset": int(v["off"]), "part": int(v["part"]), "world": int(v["world"]),
            "tier": _tier(space.segments.path(v["seg"]), json.loads(v["desc"] or "{}").get("device", "")),
            "holders": holders(space, who, version, now_s),
        }
        for version, v, who in space.registry.versions(row.name)
    ]  # fmt: skip
    return {**row_document(row, now_s), "versions": sorted(versions, key=lambda each: each["version"])}


def locate(space: Namespace, name: str) -> list[Location]:
    """Where the parts of a name's current version lie, in order of the parts. Raises NotFound, VersionGone."""
    row = space.find_row(name)
    versions = {version: fields for version, fields, _ in space.registry.versions(name)}
    if row is None or not row.version:
        raise space.not_found(name)
    if row.version not in versions:
        text = f"{name}: version {row.version} was replaced meanwhile"
        raise errors.VersionGone(text, name=name, wanted=row.version, newest=None)
    found: list[Location] = []
    for v in [row.version, *map(int, versions[row.version].get("parts", "").split())]:
        fields = versions[v]
        header = _header(space, v, fields)
        if header is None:
            raise errors.VersionGone(f"{name}: version {v} was replaced meanwhile", name=name, wanted=v, newest=None)
        path, device = space.segments.path(fields["seg"]), json.loads(fields["desc"] or "{}").get("device", "")
        found.append(
            Location(
                version=v, part=header.part, tier=_tier(path, device), path=path.resolve(), device=device,
                offset=int(fields["off"]) + header.offset, bytes=header.bytes,
                mapped=space.segments.is_open(fields["seg"]),
            )
        )  # fmt: skip
    return sorted(found, key=lambda each: each.part)


def _tier(path: Path, device: str) -> str:
    return "device" if device else "file" if path.is_symlink() else "memory"


def _header(space: Namespace, version: int, fields: Mapping[str, str]) -> BlockHeader | None:
    """The header of a version's block; None when it was freed since the registry was asked, or never written."""
    try:
        raw = space.segments.read(fields["seg"], int(fields["off"]), HEADER_BYTES)
        header = BlockHeader.unpack(raw, fields["seg"], settled=False)
    except FileNotFoundError:
        return None
    except errors.Corrupt:
        if fields["st"] == "d" or space.registry.gone([version]):
            return None
        raise
    return header if header.version == version else None


def top(space: Namespace, n_max: int = 20) -> TopDocument:
    """Names by bytes, with those that only old leases keep."""
    space.settle_all()
    space.reap()
    dump, direct = space.registry.dump(), noted_in(space.clients)
    names: dict[str, TopRow] = {}
    for key, fields in dump.items():
        if key.startswith("v:") and fields["st"] != "s":
            none = TopRow(name=fields["name"], bytes=0, doomed_bytes=0, leases=0, versions=0)
            item = names.setdefault(fields["name"], none)
            item["bytes"] += int(fields["blk"])
            item["doomed_bytes"] += int(fields["blk"]) if fields["st"] == "d" else 0
            item["leases"] += int(fields["refs"]) + direct[int(key[2:])]
            item["versions"] += 1
    items = sorted(names.values(), key=lambda item: (-item["bytes"], item["name"]))
    return {"items": items[:n_max]}


def stats(space: Namespace) -> Stats:
    """Bytes, leases and counts of a namespace and of this process."""
    space.settle_all()
    space.reap()
    dump = space.registry.dump()
    sizes = dump.get("bytes", {})
    files, used = int(sizes.get("files", 0)), int(sizes.get("used", 0))
    leases = {key[2:-2]: len(value) for key, value in dump.items() if key.startswith("c:") and key.endswith(":l")}
    states: dict[str, int] = defaultdict(int)
    for key, value in dump.items():
        if key.startswith("v:") and value["st"] == "s":  # in the stock of a client
            used -= int(value["blk"])
        elif key.startswith("v:"):
            states[STATES[value["st"]]] += 1
    return {
        "namespace": space.namespace, "names": sum(key.startswith("n:") for key in dump), "versions": dict(states),
        "leases": sum(leases.values()) + noted_in(space.clients).total(),
        "clients": len(dump.get("clients", ())), "bytes": used, "free_bytes": files - used, "file_bytes": files,
        "spilled_bytes": space.segments.spilled_bytes(), "segments": len(dump.get("segs", ())),
        "registry_epoch": space.table.epoch, "process": dict(space.counters) | {"leases": len(space.leases)},
    }  # fmt: skip


_LOOKS: Final = 3
_LOOK_S: Final = 0.02


def fsck(session: Session, *, repair: bool = False) -> FsckDocument:
    """Check I1 to I7 as of one moment."""
    space = session.space
    space.retry(space.settle_all)
    dump = space.retry(space.registry.dump)
    found = [*check(dump), *_check_files(space, dump), *_check_table(space, dump), *_check_devices(space, dump)]
    found += _check_notes(space)
    if repair and found:
        session.recover()
        found = [Violation(**{**asdict(each), "repaired": True}) for each in found]
    files = dict(space.segments.files())
    return {
        "checked": sum(key.startswith(("v:", "n:", "s:")) for key in dump),
        "violations": [asdict(each) for each in found],
        "registry_bytes": int(dump.get("bytes", {}).get("files", 0)),
        "disk_bytes": sum(size for seg, size in files.items() if seg in dump.get("segs", ())),
    }


def check(dump: dict[str, Dump]) -> list[Violation]:
    """The invariants that the registry's content alone shows (I1, I2, I4, I6 and the counters)."""
    versions = {key[2:]: value for key, value in dump.items() if key.startswith("v:")}
    found: list[Violation] = []
    refs: dict[str, int] = defaultdict(int)
    for key, value in dump.items():
        if key.startswith("c:") and key.endswith(":l"):
            for v in value:
                refs[v] += 1
                if v not in versions:
                    found.append(Violation(rule="I1", object=key, detail=f"leases version {v}, which is gone"))
    gone = dump.get("limbo", set()) - versions.keys()
    found += [Violation(rule="I1", object="limbo", detail=f"holds version {v}, which is gone") for v in gone]
    for v, fields in versions.items():
        if int(fields["refs"]) != refs[v]:
            text = f"refs {fields['refs']}, leases {refs[v]}"
            found.append(Violation(rule="I1", object=f"{fields['name']} v{v}", detail=text))
        if fields["st"] == "d" and refs[v] == 0 and v not in dump.get("limbo", ()):
            text = "doomed, unleased, not reclaimed"
            found.append(Violation(rule="I1", object=f"{fields['name']} v{v}", detail=text))
    found += _check_blocks(dump, versions) + _check_names(dump, versions)
    used = sum(int(fields["blk"]) for fields in versions.values())
    if used != int(dump.get("bytes", {}).get("used", 0)):
        text = f"{dump.get('bytes', {}).get('used', 0)} counted, {used} in versions"
        found.append(Violation(rule="I7", object="used bytes", detail=text))
    return found


def _check_blocks(dump: dict[str, Dump], versions: dict[str, dict[str, str]]) -> list[Violation]:
    found: list[Violation] = []
    holders: dict[tuple[str, int], list[str]] = defaultdict(list)
    for v, fields in versions.items():
        holders[fields["seg"], int(fields["off"])].append(f"version {v}")
    for key, value in dump.items():
        if key.startswith("free:"):
            for item in value:
                seg, off = item.split(" ")
                holders[seg, int(off)].append(key)
    for seg in dump.get("segs", ()):
        facts = dump.get(f"s:{seg}", {})
        block, count = int(facts.get("blk", 0)), int(facts.get("next", 0))
        in_use = 0
        for index in range(count):
            who = holders.pop((seg, index * block), [])
            in_use += any(each.startswith("version") for each in who)
            if len(who) != 1:
                text = f"is in {', '.join(who) or 'nothing'}"
                found.append(Violation(rule="I2", object=f"{seg}+{index * block}", detail=text))
        if in_use != int(facts.get("used", 0)):
            found.append(Violation(rule="I2", object=seg, detail=f"used {facts.get('used')}, versions {in_use}"))
    for (seg, off), who in holders.items():
        found.append(Violation(rule="I2", object=f"{seg}+{off}", detail=f"unknown block in {', '.join(who)}"))
    return found


def _check_names(dump: dict[str, Dump], versions: dict[str, dict[str, str]]) -> list[Violation]:
    found: list[Violation] = []
    reachable: set[str] = set()
    pending: dict[str, int] = defaultdict(int)
    for v, fields in versions.items():
        pending[fields["name"]] += fields["st"] in "pq"
        if fields["st"] == "r" and "head" in fields and fields["head"] not in versions:
            found.append(Violation(rule="I6", object=f"{fields['name']} v{v}", detail="a part without its step"))
    slots: dict[str, str] = {}
    for key, fields in dump.items():
        if not key.startswith("n:"):
            continue
        name = key[2:]
        for v in [fields["v"], *fields.get("hist", "").split()]:
            if v != "0":
                reachable.add(v)
                if v not in versions or versions[v]["st"] != "r":
                    found.append(Violation(rule="I3", object=name, detail=f"version {v} is not ready"))
        if int(fields["pend"]) != pending[name]:
            text = f"pend {fields['pend']}, pending versions {pending[name]}"
            found.append(Violation(rule="I2", object=name, detail=text))
        other = slots.setdefault(fields["slot"], name)
        if other != name:
            found.append(Violation(rule="I3", object=name, detail=f"shares slot {fields['slot']} with {other}"))
    for v, fields in versions.items():
        if fields["st"] == "r" and v not in reachable and fields.get("head", v) == v:
            found.append(Violation(rule="I2", object=f"{fields['name']} v{v}", detail="ready, but under no name"))
    return found


def _check_files(space: Namespace, dump: dict[str, Dump]) -> list[Violation]:
    found: list[Violation] = []
    files = dict(space.segments.files())
    known: set[str] = dump.get("segs", set())
    for seg, size in files.items():
        if seg not in known and seg not in dump.get("trash", ()):
            found.append(Violation(rule="I5", object=seg, detail=f"{size} bytes the registry does not know"))
    for seg in known:
        want = int(dump.get(f"s:{seg}", {}).get("file", 0))
        if not files.get(seg):  # its first user was killed before the memory was there: the next one makes it
            if int(dump[f"s:{seg}"]["used"]) > 0:
                found.append(Violation(rule="I7", object=seg, detail="the file is missing"))
        elif files[seg] != want:
            found.append(Violation(rule="I7", object=seg, detail=f"{files[seg]} bytes on disk, {want} registered"))
        elif blocks_of(seg, files[seg])[1] != int(dump[f"s:{seg}"]["count"]):
            found.append(Violation(rule="I7", object=seg, detail="another number of blocks than its size says"))
    strays = space.segments.spill.strays() if space.segments.spill is not None else ()
    return found + [
        Violation(rule="I5", object=path.name, detail="spilled, and nothing leads to it") for path in strays
    ]


def _check_table(space: Namespace, dump: dict[str, Dump]) -> list[Violation]:
    found: list[Violation] = []
    for key, fields in dump.items():
        if key.startswith("n:") and fields["v"] != "0":
            shown = space.table.current(int(fields["slot"]))
            now = next(iter(space.registry.ls(key[2:], n_max=1)), None)
            if "by" in fields or now is None or now.name != key[2:] or space.table.is_claimed(now.slot, shown):
                continue
            if shown not in (0, int(fields["v"])) and now.version != shown:
                text = f"the table says {shown}, the registry {fields['v']}"
                found.append(Violation(rule="I3", object=key[2:], detail=text))
    return found


def _check_notes(space: Namespace) -> list[Violation]:
    """No client notes a version that is gone, for longer than it takes to look at the slot again."""
    lost = set(noted_in(space.clients))
    for _ in range(_LOOKS):
        lost -= in_stock(space)
        if not lost:
            return []
        lost &= set(space.registry.gone(lost)) & set(noted_in(space.clients))
        blocking_sleep(_LOOK_S if lost else 0)
    return [Violation(rule="I1", object="leases", detail=f"a client notes version {v}, which is gone") for v in lost]


def _on_devices(space: Namespace, dump: dict[str, Dump]) -> Iterator[tuple[str, dict[str, str], str, str]]:
    """Complete versions on devices: (id, fields, UUID of the device, keeper)."""
    for key, fields in dump.items():
        device = json.loads(fields["desc"] or "{}").get("device") if key.startswith("v:") else None
        if device and fields["st"] in "qrd":
            header = _header(space, int(key[2:]), fields)
            if header is not None:
                raw = space.segments.read(fields["seg"], int(fields["off"]) + header.offset, PLACE_BYTES)
                yield key[2:], fields, device, DevicePlace.unpack(raw).keeper


def _check_devices(space: Namespace, dump: dict[str, Dump]) -> list[Violation]:
    """Every range that a keeper gave belongs to a version, every version of a living keeper has its range.

    Others release versions between one answer and the next; what is gone by then is asked for again.
    """
    found: list[Violation] = []
    blocks: dict[str, set[int]] = {}
    for uuid in [path.stem for path in space.folder.glob("k/*.sock")] if space.devices else []:
        blocks[uuid] = _given(space, uuid)
        gone = set(space.registry.gone(blocks[uuid]))
        gone = gone and gone & _given(space, uuid)
        where = f"device {uuid}"
        found += [Violation(rule="I2", object=where, detail=f"a range of version {v}, which is gone") for v in gone]
    for v, fields, uuid, keeper in _on_devices(space, dump):
        missing = is_alive(space.clients, keeper) and uuid in blocks and int(v) not in blocks[uuid]
        if missing and not space.registry.gone([int(v)]):
            found.append(Violation(rule="I7", object=f"{fields['name']} v{v}", detail=f"no memory on device {uuid}"))
    return found


def _given(space: Namespace, uuid: str) -> set[int]:
    """The versions to which a keeper gave ranges, without those that are gone as it looks."""
    assert space.devices is not None
    reply = space.devices.ask(uuid, {"op": "blocks"}, start=False)
    return {int(version) for version, *_ in reply.get("blocks", ())}


def gc(session: Session, *, dry_run: bool = False) -> GcDocument:
    """Sweep, then give free files back; ``dropped`` lists what went and why."""
    space = session.space
    before = space.retry(lambda: stats(space))
    if dry_run:
        dead = sum(not is_alive(space.clients, client) for client in clients_in(space.clients))
        return {"swept": dead, "trimmed_bytes": before["free_bytes"], "dropped": [], "dry_run": True}
    space.claims.shed()
    session.release_ended()
    session.rings.end_all()
    session.release_ended()
    swept = session.sweep()
    trimmed = session.writer.free_room()
    dropped: list[Dropped] = [{"what": client, "why": "its process is dead", "bytes": 0} for client in swept]
    for v, fields, uuid, keeper in _on_devices(space, space.registry.dump()):
        if not is_alive(space.clients, keeper) and space.delete(fields["name"], expected=int(v)):
            dropped.append({"what": fields["name"], "why": f"the keeper of device {uuid} died", "bytes": 0})
    why = "its home was removed"
    dropped += [Dropped(what=str(other), why=why, bytes=0) for other in remove_vanished(session.root)]
    strays = space.segments.spill.sweep() if space.segments.spill is not None else ()
    dropped += [Dropped(what=stray, why="spilled by a process that died", bytes=size) for stray, size in strays]
    why = "left by a process that died"
    dropped += [Dropped(what=seg, why=why, bytes=size) for seg, size in remove_unknown(space)]
    return {"swept": len(swept), "trimmed_bytes": trimmed, "dropped": dropped, "dry_run": False}


def holders(space: Namespace, leasing: Set[str], version: int, now_s: float) -> list[HolderRow]:
    """Who leases a version: those that the registry knows, and those whose file notes it, in order of the clients."""
    out: list[HolderRow] = []
    for client in sorted(leasing | set(clients_in(space.clients))):
        facts, noted = read_file(space.clients, client)
        if client in leasing or version in noted:
            age_s = round(now_s - facts["joined_s"], 3) if facts.get("joined_s") else None
            out.append({"client": client, "pid": facts.get("pid"), "label": facts.get("label", ""), "age_s": age_s})
    return out


_SHM_BYTES_MIN: Final = 1 << 30
_SHM_FREE_SHARE_MIN: Final = 0.1
_OPEN_FILES_MIN: Final = 1024
_LEASE_OLD_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """One check: ``ok``, ``warn`` or ``fail``, what was found, what to do."""

    name: str
    level: Literal["ok", "warn", "fail"]
    value: str
    remedy: str = ""


def _server(session: Session) -> StoreCheck:
    facts = session.machine.info("server") | session.machine.info("memory")
    name = "valkey" if "valkey_version" in facts else "redis"
    version = facts.get("valkey_version") or facts.get("redis_version", "?")
    ours = "started here" if session.server.ours else "given by URL"
    text = f"{name} {version}, {ours}, {facts.get('used_memory_human', '?')}, at {session.server.address.url}"
    return StoreCheck(name="registry server", level="ok", value=text)


def _socket(session: Session) -> StoreCheck:
    path = session.server.address.path
    if not path:
        remedy = "a handle of memory carries no permission check: use an ACL user, or a unix socket"
        return StoreCheck(name="registry access", level="warn", value=session.server.address.url, remedy=remedy)
    mode = stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)  # noqa: PTH116, PTH120  # a socket's folder, by its text
    if mode & 0o077:
        return StoreCheck(name="registry access", level="fail", value=f"folder mode {mode:04o}", remedy="chmod 700")
    return StoreCheck(name="registry access", level="ok", value=f"unix socket, folder mode {mode:04o}")


def _memory(folder: Path) -> list[StoreCheck]:
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    kind = _file_system(str(folder))
    found = [
        StoreCheck(name="shared memory", level="ok", value=f"{kind} at {folder}, {size >> 20} MiB, {free >> 20} free")
    ]
    if kind != "tmpfs":
        remedy = "set ROTA_SHM_DIR to a tmpfs: on a disk every publish is ten times slower"
        found.append(StoreCheck(name="shared memory kind", level="fail", value=kind, remedy=remedy))
    if size < _SHM_BYTES_MIN:
        remedy = "start the container with a larger shm size (docker run --shm-size)"
        found.append(StoreCheck(name="shared memory size", level="fail", value=f"{size >> 20} MiB", remedy=remedy))
    if free < size * _SHM_FREE_SHARE_MIN:
        remedy = "rota tensors top shows who holds it; rota tensors gc gives free blocks back"
        found.append(StoreCheck(name="shared memory free", level="warn", value=f"{free >> 20} MiB", remedy=remedy))
    return found


def _file_system(path: str) -> str:
    best, kind = "", "?"
    with open("/proc/self/mounts") as mounts:  # noqa: PTH123  # a kernel file, read as it is
        for line in mounts:
            _, point, name, *_ = line.split(" ")
            if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best, kind = point, name
    return kind


def _open_files() -> StoreCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES_MIN:
        remedy = f"ulimit -n {min(hard, 65536)}: each large tensor in use keeps a file open"
        return StoreCheck(name="open files", level="warn", value=str(soft), remedy=remedy)
    return StoreCheck(name="open files", level="ok", value=str(soft))


def _housekeeping(session: Session) -> StoreCheck:
    if (error := session.failure) is None:
        return StoreCheck(name="housekeeping", level="ok", value="no unexpected failure in this process")
    return StoreCheck(name="housekeeping", level="warn", value=repr(error), remedy="report it; it is tried again")


def _old_leases(session: Session) -> StoreCheck:
    now_ms, oldest = session.clock.wall_s() * 1000, 0.0
    what = ""
    for key, fields in session.space.registry.dump().items():
        age_ms = now_ms - int(fields["at"]) if key.startswith("v:") and fields["st"] == "d" else 0
        if age_ms > max(oldest, _LEASE_OLD_S * 1000):
            oldest, what = age_ms, f"{fields['name']} v{key[2:]}, {fields['len']} bytes"
    if what:
        remedy = "rota tensors stat NAME shows the holders; their views keep the memory"
        return StoreCheck(name="old leases", level="warn", value=f"{what}, for {oldest / 1000:.0f} s", remedy=remedy)
    return StoreCheck(name="old leases", level="ok", value=f"none over {_LEASE_OLD_S:.0f} s")


def doctor(session: Session | None) -> DoctorDocument:
    """The document of ``rota tensors doctor``, of the machine alone where no registry runs.

    None of the remedies is needed to work at all.
    """
    if session is None:
        base = shm_base()
        there = next(folder for folder in (base, *base.parents) if folder.exists())
        none = StoreCheck(name="registry server", level="ok", value="none runs here: nothing is shared")
        found = [none, *_memory(there), _open_files()]
    else:
        folder = session.space.folder
        found = [_server(session), _socket(session), *_memory(folder), _open_files()]
        found += [_old_leases(session), _housekeeping(session)]
    return {"checks": [asdict(each) for each in found]}
