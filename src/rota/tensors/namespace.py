"""One namespace as this process has it open: registry, generation table, segments, leases, and its own client file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from rota.runtime.clock import Clock, blocking_sleep
from rota.spec.errors import RegistryUnavailable, nearest
from rota.tensors import errors
from rota.tensors.core import Fields, check_seconds
from rota.tensors.devices.client import Devices
from rota.tensors.errors import failpoint
from rota.tensors.generation import GenerationTable
from rota.tensors.leases import Leases
from rota.tensors.locks import PIN_MARK, ClientFile, clients_in, dead_in, noted_in
from rota.tensors.ownership import Claims, adopt, settle, settle_client
from rota.tensors.registry import REJOIN, Registry, Row, ScriptRefused
from rota.tensors.segments import Segments

_T = TypeVar("_T")
_RETRIES_MAX: Final = 5
_RETRY_S: Final = 0.02
_NEAREST_OF_MAX: Final = 32
_LIMBO_COUNT_MAX: Final = 32
_LIMBO_BYTES_MAX: Final = 4 << 20
_REAP_MAX: Final = 1000
_PUBLISHED_MAX: Final = 4096
_DELETE_MAX: Final = 256
_SETTLES_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Published:
    """What this process published last under a name; while the table says that it still is the newest, the registry
    need not be asked where the name is."""

    name: str
    slot: int
    version: int
    block: int


@dataclass(slots=True, kw_only=True)
class Namespace:
    """What every operation needs. ``rejoin`` is called when the registry is lost or was rebuilt."""

    namespace: str
    folder: Path
    client: str
    clock: Clock
    registry: Registry
    table: GenerationTable
    segments: Segments
    leases: Leases
    file: ClientFile
    rejoin: Callable[[], None]
    identity: Fields = field(default_factory=dict)
    forked: bool = False
    closed: bool = False
    devices: Devices | None = None
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("gets", "puts", "swept", "recovered"), 0))
    lock: threading.RLock = field(default_factory=threading.RLock)
    limbo_count: int = 0
    limbo_bytes: int = 0
    published: dict[str, Published] = field(default_factory=dict[str, Published])
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.claims = Claims(self)

    @property
    def clients(self) -> Path:
        """Where the client files lie."""
        return self.folder / "c"

    def deadline_s(self, wait_s: float) -> float:
        """When a wait of ``wait_s`` seconds ends, in seconds of the clock. Raises BadInput unless it is a number."""
        return self.clock.monotonic_s() + check_seconds("wait_s", wait_s)

    def settle_all(self) -> None:
        """Let the registry know of what clients have put and deleted by themselves. Raises PublishBlocked."""
        for client in self.registry.members("claimants"):
            settle(self, client)

    def make_known(self, name: str, version: int) -> None:
        """Let the registry know of a version that this process leases, and that was put without it."""
        self.find_row(name)
        if self.registry.gone([version]):
            for block in self.leases.blocks_of(version):
                adopt(self, version, block.seg, block.offset)

    def retry(self, action: Callable[[], _T], *, settles: bool = True) -> _T:
        """Do a repeatable action; when the registry was lost, rebuild or join it again and repeat, and when it refuses
        because of a claim, settle that (unless not ``settles``).

        Raises ForkedClient in a forked child, ClosedPlane after close, RegistryUnavailable when it stays away.
        """
        for attempt in range(_RETRIES_MAX):
            self.check()
            try:
                return self._settled(action) if settles else action()
            except ScriptRefused as refused:
                if refused.code not in REJOIN:
                    raise
            except errors.EpochChanged:
                pass
            except RegistryUnavailable:
                if attempt == _RETRIES_MAX - 1:
                    raise
            try:
                self.rejoin()
            except RegistryUnavailable:  # killed again while it was joined, unless it was ended on purpose
                if attempt == _RETRIES_MAX - 1 or not self.folder.exists():
                    raise
            except ScriptRefused as refused:  # rebuilt once more while it was joined
                if refused.code not in REJOIN:
                    raise
            if attempt:
                blocking_sleep(_RETRY_S * attempt)
        raise RegistryUnavailable(f"namespace {self.namespace}: the registry was rebuilt repeatedly")

    def _settled(self, action: Callable[[], _T]) -> _T:
        for _ in range(_SETTLES_MAX):
            try:
                return action()
            except ScriptRefused as refused:
                if refused.code != "CLAIMED":
                    raise
                settle(self, refused.words[1], int(refused.words[0]))
        return action()

    def check(self) -> None:
        """Raise ForkedClient or ClosedPlane when this process must not use the store."""
        if self.forked:
            raise errors.ForkedClient(
                "a forked child cannot use its parent's connection", hint="call rota.tensors.connect()"
            )
        if self.closed:
            raise errors.ClosedPlane("this connection was closed", hint="call rota.tensors.connect()")

    def rows(self, prefix: str = "") -> list[Row]:
        """Every name with that prefix, with all its leases."""
        self.settle_all()
        return self.with_leases(self.registry.ls_all(prefix))

    def with_leases(self, rows: list[Row]) -> list[Row]:
        """The rows with all leases: beside those in the registry also those that files alone note."""
        direct = noted_in(self.clients)
        return [replace(row, refs=row.refs + direct[row.version]) if row.version in direct else row for row in rows]

    def doomed(self, block_bytes: int) -> None:
        """Note that a version of that size may wait in limbo for a look at the files of the clients."""
        self.limbo_count, self.limbo_bytes = self.limbo_count + 1, self.limbo_bytes + block_bytes

    def reap_some(self, block_bytes: int) -> None:
        """``reap`` before a block of that size is taken, when it is large or this process doomed much since the last
        time: blocks that are used again cost no new pages."""
        if self.limbo_count >= _LIMBO_COUNT_MAX or max(self.limbo_bytes, block_bytes) >= _LIMBO_BYTES_MAX:
            self.reap()

    def reap(self) -> int:
        """Free the doomed versions that no client notes any more; how many were. Harmless beside others who do so.

        They are asked for before the files are read: none of them is shown by a slot any more, so whoever notes one
        later finds that it is gone when it looks at the slot again.
        """
        self.limbo_count = self.limbo_bytes = 0
        limbo = sorted(map(int, self.retry(lambda: self.registry.members("limbo"))))
        noted = noted_in(self.clients) if limbo else {}
        ended = [version for version in limbo if version not in noted]
        failpoint("reaping")
        slices = [ended[at : at + _REAP_MAX] for at in range(0, len(ended), _REAP_MAX)]
        return sum(self.retry(lambda part=part: self.registry.reap(part)) for part in slices)

    def find_row(self, name: str) -> Row | None:
        """The registry's row of exactly this name."""
        rows = self.registry.ls(name, n_max=1, exact=True)
        return rows[0] if rows and rows[0].name == name else None

    def not_found(self, name: str) -> errors.NotFound:
        """The error for a name that is not there; its hint has the nearest one."""
        alike = str(name)[: max(len(str(name)) // 2, 1)]  # a page of those that begin alike, else of the first
        page = partial(self.registry.ls, n_max=_NEAREST_OF_MAX)
        rows = [row for row in self.retry(lambda: page(alike)) if row.name.startswith(alike)] or self.retry(page)
        hint = nearest(str(name), [row.name for row in rows if row.version], "tensors")
        return errors.NotFound(f"no tensor is named {name!r}", hint=hint, name=name)

    def note_published(self, what: Published) -> None:
        """Remember what this process published."""
        if len(self.published) >= _PUBLISHED_MAX:
            self.published.clear()
        self.published[what.name] = what

    def delete_many(self, names: Sequence[str]) -> list[str]:
        """``delete`` of each name, those of a batch in one round trip, or two where this process did not publish them;
        the names that were there."""
        gone: list[str] = []
        for at in range(0, len(names), _DELETE_MAX):
            gone += self._delete_batch(names[at : at + _DELETE_MAX])
        return gone

    def _delete_batch(self, names: Sequence[str]) -> list[str]:
        self.check()
        own = {name for name in names if self.claims.delete(name)}
        rest = [name for name in names if name not in own]
        table, known = self.table, {name: self.published.get(name) for name in rest}
        if strange := [name for name, what in known.items() if what is None]:
            rows = self.retry(lambda: self.registry.find_many(strange))
            found = [Published(row.name, row.slot, row.version, row.block) for row in rows if row is not None]
            known = {name: what for name, what in known.items() if what} | {what.name: what for what in found}
        done = set[str]()
        befores: dict[str, int] = {}
        with table.slot_locks((what.slot, name) for name, what in known.items() if what):
            sure = [what for what in known.values() if what and table.is_newest(what.slot, what.version)]
            for what in sure:
                befores[what.name] = table.store_deleted(what.slot, what.version)
                self.doomed(what.block)
            failpoint("deleting")
            epoch = table.epoch
            asked = [(what.name, what.slot) for what in sure]
            replies = self.retry(lambda: self.registry.delete_many(asked)) if asked else []
            failpoint("deleted")
            for what, reply in zip(sure, replies, strict=True):
                if isinstance(reply, tuple):
                    table.store_deleted(what.slot, reply[0])
                    done.add(what.name)
                elif reply.code == "NOTFOUND":  # it was there: the reply was lost, this answers the second try
                    done.add(what.name)
                else:
                    table.store_last(what.slot, befores[what.name])
                if reply[1] if isinstance(reply, tuple) else reply.code == "NOTFOUND":
                    self._take_back(what.name)
            rebuilt = table.epoch != epoch
        for name in rest:  # one by one what another process changed, and all if a rebuild may have brought them back
            self.published.pop(name, None)
            if (name not in done or rebuilt) and self.delete(name):
                done.add(name)
        return [name for name in names if name in done or name in own]

    def delete(
        self, name: str, *, expected: int | None = None, idle: bool = False, label: str = "", epoch: int = 0
    ) -> bool:
        """Delete a name under its slot's lock; False when it is not there, is another version, or (idle) leased.

        Of several who delete one version, one gets True: also when the registry did it and its reply was lost. Raises
        ScriptRefused when ``label`` is fenced above ``epoch``.
        """
        self.check()
        if expected is None and not idle and not label and self.claims.delete(name):
            return True
        for _ in range(_SETTLES_MAX):
            row = self._find_published(name) or self.retry(lambda: self.find_row(name))
            if row is None:
                return False
            with self.table.slot_lock(row.slot, name):
                if isinstance(row, Published) and not self.table.is_newest(row.slot, row.version):
                    continue  # another process changed it
                if row.version and self.table.deleted(row.slot) and self.table.last(row.slot) >= row.version:
                    now = self.retry(lambda: self.registry.ls(name, n_max=1))
                    if not now or (now[0].name, now[0].version) != (name, row.version):
                        continue  # by another since we looked; from here on no other can delete it
                delete = partial(
                    self.registry.delete, name, row.slot, expected=expected, idle=idle, label=label, epoch=epoch
                )
                # before the registry does it: a rebuild after a death in between must not bring it back
                before = self.table.store_deleted(row.slot, row.version)
                failpoint("deleting")
                self.doomed(row.block)
                try:
                    return self._delete_in(name, row.slot, delete)
                except ScriptRefused as refused:
                    self.table.store_last(row.slot, before)
                    if refused.code == "CLAIMED":
                        continue  # since we looked
                    if refused.code == "CHANGED" and int(refused.words[1]) != row.slot:
                        continue  # deleted and made anew since we looked: its slot has another lock
                    return self._not_deleted(row, refused)
        return False

    def _delete_in(self, name: str, slot: int, delete: Callable[[], tuple[int, int]]) -> bool:
        """Run ``delete`` for a slot whose lock is held, again if the registry was rebuilt meanwhile: maybe from a
        header that was not yet known to be a deleted version's, and then the name is there again."""
        for _ in range(_RETRIES_MAX):
            before = self.table.epoch
            version, pending = self.retry(delete, settles=False)  # which takes the lock that is held here
            failpoint("deleted")
            self.table.store_deleted(slot, version)
            if pending:
                self._take_back(name)
            if self.table.epoch == before:
                return True
        raise RegistryUnavailable(f"namespace {self.namespace}: the registry was rebuilt repeatedly")

    def take_back_own(self, client: str, only: Container[int] | None = None) -> None:
        """Take back what a client had prepared and did not commit; ``only`` these versions, if given."""
        for version, seg, offset in self.registry.own(client):
            if only is None or version in only:
                self.segments.take_back(seg, offset, version)

    def _take_back(self, name: str) -> None:
        """Take back what was prepared of a name that was just deleted; its slot's lock is held. Who publishes it is not
        at its commit now, or dead: a rebuild must not take that for newer than the delete."""
        for version, fields, _ in self.retry(lambda: self.registry.versions(name)):
            if fields["st"] == "p":
                self.segments.take_back(fields["seg"], int(fields["off"]), version)

    def _find_published(self, name: str) -> Published | None:
        """What this process knows of a name that it published last, forgotten with the look."""
        what = self.published.pop(name, None)
        return what if what is not None and self.table.is_newest(what.slot, what.version) else None

    def _not_deleted(self, row: Row | Published, refused: ScriptRefused) -> bool:
        """Restore the slot whose lock is held. Whether the name is gone by us; raises what does not answer that."""
        match refused.code:
            case "NOTFOUND" if row.version:  # it was there when the lock was taken: only the reply was lost
                self.table.store_deleted(row.slot, row.version)
                self._take_back(row.name)
                return True
            case "NOTFOUND":
                self._take_back(row.name)
                return False
            case "CHANGED":
                self.table.store(row.slot, int(refused.words[0]))
                return False
            case "LEASED" | "FENCED":
                self.table.store(row.slot, row.version)
        if refused.code != "LEASED":
            raise refused
        return False


_SLICE: Final = 1000
_UNBORN_S: Final = 60.0
_SLICES_MAX: Final = 10_000


def sweep_dead(space: Namespace) -> list[str]:
    """Undo what every dead client had; the clients swept. The caller is the one sweeper."""
    swept: list[str] = []
    for client, fd in dead_in(space.clients):
        try:
            sweep_client(space, client)
            for slab in space.folder.glob(f"k/{client}.*"):  # what a keeper had: its memory died with it
                slab.unlink(missing_ok=True)
            (space.clients / client).unlink(missing_ok=True)
            swept.append(client)
        finally:
            os.close(fd)
    _remove_unborn(space)
    if swept:
        restore_slots(space)
        remove_unknown(space)
        space.counters["swept"] += len(swept)
    return swept


def remove_unknown(space: Namespace) -> list[tuple[str, int]]:
    """Remove the files that the registry does not know, with their sizes: their makers died after it was lost."""
    files = list(space.segments.files())  # before the question: a file is recorded before it is made
    known = space.retry(lambda: space.registry.members("segs"))
    gone = [(seg, size) for seg, size in files if seg not in known]
    for seg, _ in gone:
        space.segments.unlink(seg)
        space.retry(lambda seg=seg: space.registry.strike([seg]))
    return gone


def _remove_unborn(space: Namespace) -> None:
    """Files of clients that died before they had locked and shown them."""
    for path in space.clients.glob(".*"):
        with contextlib.suppress(FileNotFoundError):
            if space.clock.wall_s() - path.stat().st_mtime > _UNBORN_S:
                path.unlink()


def sweep_unfiled(space: Namespace) -> list[str]:
    """Undo registry clients that have no file: they died between two steps of their own sweep."""
    known = space.registry.members("clients")
    lost = [c for c in known - set(clients_in(space.clients)) if not c.startswith(PIN_MARK) and c != space.client]
    for client in lost:
        sweep_client(space, client)
    return lost


def sweep_client(space: Namespace, client: str) -> None:
    """Undo one client slice by slice; each slice may be repeated. What it prepared and did not commit is taken back
    first: a rebuild would commit it. Before that, what the client had sent is done: its commit may be on its way."""
    space.table.settle()
    space.take_back_own(client)
    for _ in range(_SLICES_MAX):
        settle_client(space, client)
        swept = space.registry.sweep(client, _SLICE)
        failpoint("mid-sweep")
        for version, name in swept.drops:
            space.delete(name, expected=version)
        if not swept.left:
            return


def restore_slots(space: Namespace) -> int:
    """Fill slots that a dead publisher left at 0; readers were right meanwhile, only slower. How many were filled."""
    filled = 0
    for row in space.registry.ls_all():
        if row.version and space.table.current(row.slot) == 0 and not space.table.blocker(row.slot):
            with space.table.slot_lock(row.slot, row.name):
                try:
                    now = space.find_row(row.name)
                except ScriptRefused as refused:
                    if refused.code != "CLAIMED":  # and deleted, maybe
                        raise
                    continue
                if now is not None and now.version and now.slot == row.slot:
                    space.table.store(row.slot, now.version)
                    filled += 1
    return filled
