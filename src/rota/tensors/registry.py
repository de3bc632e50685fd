"""Client of the registry: a method for each script; every call may be repeated after a lost reply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from rota.runtime.clock import Clock
from rota.runtime.redis.client import Argument, Exchange, RedisClient, RegistryAddress, ReplyError, Script
from rota.spec.errors import RegistryUnavailable
from rota.tensors import errors
from rota.tensors.core import SLOTS_MAX, Json

_FOLDER = Path(__file__).parent / "scripts"
REJOIN: Final = ("EPOCH", "UNJOINED")
"""Refusals after which a client joins again and repeats."""
STATES = {"s": "spare", "p": "pending", "q": "prepared", "r": "ready", "d": "doomed"}
_DISTRUST = """
local run = redis.call('HGET', KEYS[1], 'run')
if run and run ~= '' and run ~= ARGV[1] then redis.call('HDEL', KEYS[1], 'epoch') end
"""
SCRIPTS = {path.stem: Script.load(_FOLDER, path.stem) for path in _FOLDER.glob("*.lua") if path.stem != "prelude"}


Reply: TypeAlias = Any
"""Reply of a script: bytes, integers, None, and lists of these."""
Dump: TypeAlias = Any
"""Everything a namespace holds, by key: hashes and sorted sets as dicts, lists, sets, strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRequest:
    """What a publisher asks for: who it is, the name, its order, its size and how long it shall live.

    ``direct``: readers may lease it without the registry, so its block is freed by ``reap`` alone. ``copied``: another
    machine published it, so a fence of its label does not stop it.
    """

    name: str
    kind: str
    epoch: int
    step: int | None
    label: str
    block: int
    count: int
    file: int
    payload: int
    desc: str
    orphan: str = "keep"
    retain: int = 1
    mutable: bool = False
    evictable: bool = False
    part: int = 0
    world: int = 1
    direct: bool = False
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A pending version and the block it may be written to."""

    version: int
    slot: int
    seg: str
    offset: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """Result of a commit: the version that became current, or how many parts of the step have come. ``own``: the first
    of the ids that the client may give to versions of this name by itself, 0 when it may not.

    ``current`` is the current version of the name afterwards: what the generation table must say.
    """

    ready: bool
    version: int
    slot: int
    first: bool
    kept: tuple[int, ...]
    current: int
    received: int = 0
    own: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBlock:
    """Where one part of a version lies."""

    version: int
    seg: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """One leased version: its slot and order, the name's current version then, its blocks (one a part)."""

    version: int
    slot: int
    epoch: int
    step: int
    current: int
    blocks: tuple[PartBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Result of a slice of a sweep: how many resources are left, and names to delete because their owner is gone."""

    left: int
    drops: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One name as ``ls`` shows it; version 0 means that nothing of it is published yet."""

    name: str
    version: int
    slot: int
    kind: str
    kept: tuple[int, ...]
    pending: int
    label: str
    epoch: int
    step: int
    state: str
    refs: int
    owner: str
    block: int
    payload: int
    desc: str
    at_ms: int
    parts: int
    mutable: bool
    evictable: bool


class ScriptRefused(Exception):
    """The error reply of a script: its ``code`` and ``words``."""

    def __init__(self, code: str, words: Iterable[object] = ()) -> None:
        self.code, self.words = code, [str(word) for word in words]
        super().__init__(" ".join([code, *self.words]))


class Machine(Protocol):
    """One namespace of a registry: the Redis scripts, or the model of them (tests/proof) in memory."""

    def run(self, name: str, *args: Argument) -> Reply:
        """Run one script with (epoch, wall clock in ms, *args). Raises ScriptRefused."""
        ...

    def run_many(self, name: str, calls: Sequence[tuple[Argument, ...]]) -> list[Reply]:
        """``run`` for each tuple of arguments; refusals but those of ``REJOIN`` come back as values."""
        ...


class RedisMachine:
    """The scripts on a Redis server."""

    def __init__(
        self, address: RegistryAddress, namespace: str, clock: Clock, *, silent: Callable[[], None] | None = None
    ) -> None:
        self.client = RedisClient(address, on_connect=self._on_connect, silent=silent)
        self.prefix = f"{{{namespace}}}:"
        self.epoch = 0
        self.run_id = ""
        self._clock = clock

    def _on_connect(self, exchange: Exchange) -> None:
        """A server that was started anew may have come back with the content of an hour ago (its AOF or dump): a
        namespace it did not begin itself is taken as lost, whatever it holds. Headers are the truth. It takes a user
        who may say INFO and EVAL; for any other old content cannot be recognised."""
        try:
            self._distrust(exchange)
        except ReplyError as error:
            if error.code != "NOPERM":
                raise

    def _distrust(self, exchange: Exchange) -> None:
        lines = exchange([("INFO", "server")])[0].decode().splitlines()
        run_id = next(line.partition(":")[2] for line in lines if line.startswith("run_id:"))
        exchange([("EVAL", _DISTRUST, 1, self.prefix + "cfg", run_id)])
        self.run_id = run_id

    def run(self, name: str, *args: Argument) -> Reply:
        """Run one script. Raises ScriptRefused, or RegistryUnavailable when the server cannot be reached."""
        now_ms = int(self._clock.wall_s() * 1000)
        try:
            return self.client.run(SCRIPTS[name], self.prefix, self.epoch, now_ms, *args)
        except ReplyError as error:
            raise ScriptRefused(error.code, error.words[:-1]) from None  # the last word is the dot of every refusal

    def run_many(self, name: str, calls: Sequence[tuple[Argument, ...]]) -> list[Reply]:
        """Run one script once for each tuple of arguments, in one round trip; what is refused comes back as a value.
        Raises ScriptRefused when the registry was lost or does not know the client: then all is to be repeated."""
        now_ms = int(self._clock.wall_s() * 1000)
        replies = self.client.run_many(SCRIPTS[name], self.prefix, [(self.epoch, now_ms, *args) for args in calls])
        out = [ScriptRefused(r.code, r.words[:-1]) if isinstance(r, ReplyError) else r for r in replies]
        for reply in out:
            if isinstance(reply, ScriptRefused) and reply.code in REJOIN:
                raise reply
        return out

    def find_epoch(self) -> tuple[int, str]:
        """The epoch of the registry, 0 when it does not know the namespace, and the folder of the memory."""
        epoch, folder = self.client.call("HMGET", self.prefix + "cfg", "epoch", "folder")
        return int(epoch or 0), _text(folder or "")

    def settle(self) -> None:
        """Wait until all that had arrived is done: the server answers no one before. One that is lost does no more."""
        with contextlib.suppress(RegistryUnavailable):
            self.find_epoch()

    def info(self, section: str) -> dict[str, str]:
        """A section of the ``INFO`` of the server."""
        lines = self.client.call("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def events(self, after: str, limit_ms: int, n_max: int) -> list[tuple[str, dict[str, str]]]:
        """Entries of the event stream behind an id; waits up to ``limit_ms`` for the first."""
        key = self.prefix + "ev"
        found = self.client.call("XREAD", "COUNT", n_max, "BLOCK", limit_ms, "STREAMS", key, after)
        return [] if not found else [(_text(at), _shaped("hash", fields)) for at, fields in found[0][1]]

    def last_event(self, *, first: bool = False) -> str:
        """Id of the newest event, or of the ``first`` that is still kept; ``0`` when there is none."""
        how = ("XRANGE", "-", "+") if first else ("XREVRANGE", "+", "-")
        found = self.client.call(how[0], self.prefix + "ev", *how[1:], "COUNT", 1)
        return _text(found[0][0]) if found else "0"

    def knows(self, client: str) -> bool:
        """True when the client has joined."""
        return bool(self.client.call("EXISTS", f"{self.prefix}c:{client}"))

    def wipe(self) -> None:
        """Forget everything of this namespace; its epoch first, so that no script adds a key meanwhile."""
        self.client.call("UNLINK", self.prefix + "cfg")
        cursor = b"0"
        while True:
            cursor, keys = self.client.call("SCAN", cursor, "MATCH", self.prefix + "*", "COUNT", 1000)
            if keys:
                self.client.call("UNLINK", *keys)
            if cursor == b"0":
                return


class Registry:
    """The scripts as typed methods. A refusal is raised as ``ScriptRefused``; ``refusal`` gives the public error."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def join(self, client: str, identity: str, leases: Iterable[tuple[int, int]] = ()) -> list[int]:
        """Register a client (its file is locked by now); its leases become exactly these. Returns the lost ones."""
        words = [word for lease in leases for word in lease]
        return [int(v) for v in self.machine.run("join", client, identity, *words)]

    def reserve(self, client: str, request: str, ask: VersionRequest) -> Reserved:
        """A pending version with a block."""
        return _reserved(self.machine.run("reserve", client, request, *_asked(ask)))

    def reserve_many(self, client: str, asks: Sequence[tuple[str, VersionRequest]]) -> list[Reserved | ScriptRefused]:
        """``reserve`` of each (request id, ask), in one round trip."""
        replies = self.machine.run_many("reserve", [(client, request, *_asked(ask)) for request, ask in asks])
        return [reply if isinstance(reply, ScriptRefused) else _reserved(reply) for reply in replies]

    def commit(self, client: str, version: int, *, claim: bool = False) -> CommitResult:
        """Make a pending version current, or hand in a part; ``claim`` its name, if nothing else has to do with it."""
        return _committed(version, self.machine.run("commit", client, version, int(claim)))

    def commit_many(
        self, client: str, versions: Sequence[int], claims: Sequence[bool] = ()
    ) -> list[CommitResult | ScriptRefused]:
        """``commit`` of each, in one round trip."""
        asked = claims or [False] * len(versions)
        replies = self.machine.run_many("commit", [(client, v, int(c)) for v, c in zip(versions, asked, strict=True)])
        return [
            reply if isinstance(reply, ScriptRefused) else _committed(version, reply)
            for version, reply in zip(versions, replies, strict=True)
        ]

    def stock(
        self, client: str, block: tuple[int, int, int], n: int, used: Iterable[tuple[int, int, int, int, str]] = ()
    ) -> list[tuple[int, str, int]]:
        """Hand in blocks that are used (id, version, step, length, name), and take ``n`` of a size (block, count, bytes
        of a file): id, segment, offset of each."""
        words = [word for each in used for word in each]
        return [(int(v), _text(seg), int(at)) for v, seg, at in self.machine.run("stock", client, *block, n, *words)]

    def claims(self, client: str) -> tuple[list[tuple[str, int, int]], list[tuple[int, str, int, int]]]:
        """The names that a client puts by itself (name, slot, first id), its blocks (id, segment, offset, block)."""
        names, blocks = self.machine.run("claims", client)
        return [(_text(name), int(slot), int(base)) for name, slot, base in names], [
            (int(v), _text(seg), int(at), int(block)) for v, seg, at, block in blocks
        ]

    def settle(self, name: str, base: int, spare: int, version: int | str, step: int, length: int, desc: str) -> int:
        """End a claim with what its client published (0: nothing that the registry does not know; '': it deleted the
        name)."""
        return int(self.machine.run("settle", name, base, spare, version, step, length, desc))

    def abort(self, client: str, version: int) -> bool:
        """Undo a pending version; False when it is gone or was committed."""
        return self.machine.run("abort", client, version) == 1

    def get(self, client: str, seq: int, wanted: Sequence[tuple[str, str]]) -> list[Leased]:
        """Lease one version of each name as of one moment; see get.lua for the selectors."""
        reply = self.machine.run("get", client, seq, *[word for pair in wanted for word in pair])
        return [_leased(row) for row in reply]

    def check(self, label: str, epoch: int) -> None:
        """Nothing, unless the label is fenced above that epoch."""
        self.machine.run("check", label, epoch)

    def touch(self, name: str) -> int:
        """Note that a tensor was written in place; its version."""
        return int(self.machine.run("touch", name))

    def release(self, client: str, leases: Iterable[tuple[int, int]]) -> int:
        """End leases whose sequence number is still the stored one; how many did end."""
        return self.machine.run("release", client, *[word for lease in leases for word in lease])

    def reap(self, versions: Iterable[int]) -> int:
        """Free doomed versions in limbo that no client's file notes; how many were."""
        return int(self.machine.run("reap", *versions))

    def delete(
        self, name: str, slot: int, *, expected: int | None = None, idle: bool = False, label: str = "", epoch: int = 0
    ) -> tuple[int, int]:
        """Take a name away from its slot, unless ``label`` is fenced above ``epoch``; its last version, and how many
        publishes of it are on their way."""
        version = "" if expected is None else expected
        return _two(self.machine.run("delete", name, slot, version, int(idle), label, epoch))

    def delete_many(self, names: Sequence[tuple[str, int]]) -> list[tuple[int, int] | ScriptRefused]:
        """``delete`` of each (name, slot), in one round trip."""
        replies = self.machine.run_many("delete", [(name, slot, "", 0, "", 0) for name, slot in names])
        return [reply if isinstance(reply, ScriptRefused) else _two(reply) for reply in replies]

    def own(self, client: str) -> list[tuple[int, str, int]]:
        """The publishes of a client on their way: version, segment, offset."""
        return [(int(v), _text(seg), int(offset)) for v, seg, offset in self.machine.run("own", client)]

    def sweep(self, client: str, n_max: int = 1000) -> Swept:
        """End up to ``n_max`` leases and ``n_max`` open publishes of a client; ``left``: how many remain."""
        left, _leases, _aborted, *drops = self.machine.run("sweep", client, n_max)
        pairs = tuple((int(drops[i]), _text(drops[i + 1])) for i in range(0, len(drops), 2))
        return Swept(left=left, drops=pairs)

    def hold(self, client: str, holder: str) -> int:
        """Let ``holder`` lease all that ``client`` leases; how many."""
        return self.machine.run("hold", client, holder)

    def fence(self, label: str, epoch: int) -> int:
        """Refuse older writers of a label from now on; the fence now in force."""
        return self.machine.run("fence", label, epoch)

    def trim(self, before_ms: int, n_max: int = 256) -> list[str]:
        """Files taken out of the registry, to be unlinked by the caller."""
        return [_text(seg) for seg in self.machine.run("trim", before_ms, n_max)]

    def ls(self, prefix: str = "", after: str = "", n_max: int = 500, *, exact: bool = False) -> list[Row]:
        """A page of names; ``exact``: refused when one of them is claimed, of which the newest is not known here."""
        return [_row(row) for row in self.machine.run("ls", prefix, after, n_max, int(exact))]

    def find_many(self, names: Sequence[str]) -> list[Row | None]:
        """The row of exactly each name, in one round trip; none of a claimed one."""
        pages = self.machine.run_many("ls", [(name, "", 1, 1) for name in names])
        rows = [_row(page[0]) if page and not isinstance(page, ScriptRefused) else None for page in pages]
        return [row if row and row.name == name else None for name, row in zip(names, rows, strict=True)]

    def ls_all(self, prefix: str = "") -> list[Row]:
        """Every name with that prefix, page by page."""
        rows: list[Row] = []
        while page := self.ls(prefix, rows[-1].name if rows else ""):
            rows += [row for row in page if row.name.startswith(prefix)]
            if not page[-1].name.startswith(prefix):
                break
        return rows

    def dump(self) -> dict[str, Dump]:
        """Everything the namespace holds, by key."""
        return {_text(key): _shaped(_text(kind), row) for key, kind, row in self.machine.run("dump")}

    def versions(self, name: str) -> list[tuple[int, dict[str, str], set[str]]]:
        """Every version of a name: id, fields, clients that lease it here."""
        rows = self.machine.run("versions", name)
        return [(int(v), _shaped("hash", fields), _shaped("set", who)) for v, fields, who in rows]

    def members(self, key: str) -> set[str]:
        """The members of a set: ``clients``, ``segs``, ``trash``, ``limbo``."""
        return {_text(member) for member in self.machine.run("members", key)}

    def strike(self, segs: Iterable[str]) -> None:
        """Take unlinked files from the trash."""
        self.machine.run("strike", *segs)

    def gone(self, versions: Iterable[int]) -> list[int]:
        """Which of these versions have been freed."""
        return [int(version) for version in self.machine.run("gone", *versions)]

    def evictable(self) -> list[str]:
        """Names that may be dropped for room, the least recently used first."""
        return [_text(name) for name in self.machine.run("lru")]

    def configure(self, **settings: int) -> dict[str, str]:
        """Set the settings given; returns all settings."""
        words = self.machine.run("config", *[word for item in settings.items() for word in item])
        return _shaped("hash", words)


def refusal(refused: ScriptRefused, name: str, *, epoch: int = 0, step: int | None = None) -> NoReturn:
    """Raise the public error for a refusal of an operation on ``name``."""
    code, words = refused.code, refused.words
    first = words[0] if words else ""
    match code:
        case "FENCED":
            text = f"{name}: epoch {epoch} is older than {first}"
            raise errors.StaleEpoch(text, hint="a newer writer took over; stop", name=name, epoch=epoch, current=first)
        case "STALE":
            text = f"{name}: step {step} is lower than the current step {first} of this epoch"
            raise errors.StaleStep(text, name=name, step=step, current=int(first))
        case "LOST":
            raise errors.LostRace(f"{name}: a newer version became current first (step {first})", name=name)
        case "ABORTED":
            raise errors.Aborted(f"{name}: the pending version was swept or given up", name=name)
        case "KIND":
            kinds = {"t": "a single tensor", "g": "a group"}
            raise errors.ProtocolBreach(f"{name} already is {kinds.get(first, first)}", rule="kind", name=name)
        case "QUOTA":
            text = f"{name}: the namespace holds {first} of at most {words[1]} bytes"
            raise errors.QuotaExceeded(text, name=name, used=int(first), bytes_max=int(words[1]))
        case "SLOTS":
            raise errors.OutOfMemory(f"{name}: the namespace holds {SLOTS_MAX} names already", name=name)
        case _:
            raise errors.TensorError(f"{name}: the registry refused: {refused}", name=name) from refused


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _two(reply: Sequence[Reply]) -> tuple[int, int]:
    first, second = reply
    return int(first), int(second)


def _asked(ask: VersionRequest) -> tuple[Argument, ...]:
    """A request as ``reserve.lua`` reads it, behind the client and the request id."""
    return (
        ask.name, ask.kind, ask.epoch, "" if ask.step is None else ask.step, ask.label, ask.block, ask.count, ask.file,
        ask.payload, ask.desc, ask.orphan, ask.retain, int(ask.mutable), int(ask.evictable), ask.part, ask.world,
        int(ask.direct), int(ask.copied),
    )  # fmt: skip


def _reserved(reply: Sequence[Reply]) -> Reserved:
    version, slot, seg, offset, step = reply
    return Reserved(version=int(version), slot=int(slot), seg=_text(seg), offset=int(offset), step=int(step))


def _committed(version: int, reply: Sequence[Reply]) -> CommitResult:
    kind, value, slot, first, kept, current, own = reply
    ready = _text(kind) == "ready"
    return CommitResult(
        ready=ready, version=int(value) if ready else version, slot=int(slot), first=int(first) == 1,
        kept=tuple(map(int, _text(kept).split())), current=int(current), received=0 if ready else int(value),
        own=int(own),
    )  # fmt: skip


def _leased(row: Sequence[Reply]) -> Leased:
    blocks = tuple(
        PartBlock(version=int(row[i]), seg=_text(row[i + 1]), offset=int(row[i + 2]), bytes=int(row[i + 3]))
        for i in range(5, len(row), 4)
    )
    version, slot, epoch, step, current = (int(word) for word in row[:5])
    return Leased(version=version, slot=slot, epoch=epoch, step=step, current=current, blocks=blocks)


def _row(row: Sequence[Reply]) -> Row:
    words = ["" if word is None else _text(word) for word in row]
    return Row(**{name: read(word) for (name, read), word in zip(_COLUMNS.items(), words, strict=True)})


def _whole(word: str) -> int:
    return int(word) if word.lstrip("-").isdigit() else 0


def _is_one(word: str) -> bool:
    return word == "1"


_COLUMNS: Final[dict[str, Callable[[str], Json]]] = {
    "name": str, "version": _whole, "slot": _whole, "kind": str, "kept": lambda word: tuple(map(int, word.split())),
    "pending": _whole, "label": str, "epoch": _whole, "step": _whole, "state": lambda word: STATES[word or "p"],
    "refs": _whole, "owner": str, "block": _whole, "payload": _whole, "desc": str, "at_ms": _whole,
    "parts": lambda word: len(word.split()) + 1, "mutable": _is_one, "evictable": _is_one,
}  # fmt: skip


def _shaped(kind: str, row: Sequence[Reply]) -> Dump:
    words = [_text(word) for word in row]
    match kind:
        case "hash" | "zset":
            return dict(zip(words[::2], words[1::2], strict=True))
        case "set":
            return set(words)
        case "string":
            return words[0]
        case _:
            return words
