"""Writer of tensors: reserve a block, copy, commit; nothing is visible before, nothing remains on failure."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from rota.runtime import environ
from rota.runtime.clock import blocking_sleep
from rota.runtime.node import cores_allowed
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, RotaError
from rota.tensors import core, errors
from rota.tensors.arrays import Bytes, Layout, TensorSource
from rota.tensors.core import (
    WORLD_MAX,
    Json,
    Tensor,
    check_count,
    describe,
    payload_bytes,
)
from rota.tensors.devices.client import PLACE_BYTES, DevicePlace
from rota.tensors.errors import failpoint
from rota.tensors.locks import clients_in, read_file
from rota.tensors.namespace import Namespace, Published
from rota.tensors.ownership import Put
from rota.tensors.registry import CommitResult, Reserved, ScriptRefused, VersionRequest, refusal
from rota.tensors.segments import KEPT_MAX, PENDING, PREPARED, READY, STATE_AT, BlockHeader, pack_state

_PWRITE_BYTES_MAX: Final = 1 << 30
MANIFEST_BYTES_MAX: Final = 32 << 20
_ROOM_TRIES_MAX: Final = 4
_POLL_S: Final = 0.005
_STEPS_MAX: Final = 256
_BATCH_MAX: Final = 64
"""Names in one round trip: for each the registry looks through the pending ones of this client."""
_KEPT_TENSORS_MAX: Final = 8
_json: Final = json.JSONEncoder(separators=(",", ":")).encode  # made once: dumps() would make one a call


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOrder:
    """Who publishes, and where in the order of publishes: ``label``, ``epoch``, ``step`` (None: one after the last).

    ``copied``: another machine published it, and it is of the past: it passes a fence of its label, as an instance that
    is restored reads what the one before it published.
    """

    label: str
    epoch: int
    step: int | None
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How long a version lives, and which part of a step it is."""

    orphan: str = "keep"
    retain: int = 1
    mutable: bool = False
    evictable: bool = False
    part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.orphan not in ("keep", "drop"):
            raise BadInput(f"orphan={self.orphan!r}: keep or drop")
        check_count("retain", self.retain, 1, KEPT_MAX)
        if self.mutable not in (False, True) or self.evictable not in (False, True):
            raise BadInput(f"mutable={self.mutable!r}, evictable={self.evictable!r}: True or False")
        if len(self.part) != 2 or check_count("rank", self.part[0], 0) >= check_count(
            "world", self.part[1], 1, WORLD_MAX
        ):
            raise BadInput(f"part={self.part}: (rank, world) with 0 <= rank < world")


PLAIN: Final = Life()


@dataclass(frozen=True, slots=True)
class Draft:
    """The shape of a payload before any memory is taken.

    On a ``device`` (its UUID) the block holds the place alone, and ``total`` bytes of tensors lie there.
    """

    tensors: tuple[Layout, ...]
    manifest: bytes
    front: int
    payload: int
    total: int
    desc: str
    device: str = ""

    @property
    def start(self) -> int:
        """Where the payload begins in its block."""
        return core.payload_offset(self.front, self.payload)


@dataclass(slots=True)
class Pending:
    """A reserved version whose bytes are being written."""

    name: str
    ask: VersionRequest
    draft: Draft
    reserved: Reserved
    header: BlockHeader
    place: DevicePlace | None = None
    prepared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One published value of a name. ``ready`` is False for a part of a group step that is not complete yet."""

    name: str
    id: int
    epoch: int
    step: int
    bytes: int
    ready: bool = True
    received: int = 1


class TensorWriter:
    """The write path of one namespace."""

    def __init__(self, space: Namespace, copier: Copier, *, check: bool) -> None:
        self._space = space
        self._check = check
        self._requests = itertools.count(1)
        self.copier = copier
        self._groups: dict[str, deque[int]] = {}
        self.in_flight: set[int] = set()
        """Versions that are being written; a rebuilt registry may take others for it, which were given up."""

    def publish(
        self,
        name: str,
        kind: str,
        sources: dict[str, TensorSource],
        order: PublishOrder,
        life: Life,
        meta: Json,
        device: str = "",
    ) -> Version:
        """Publish tensors as one version of ``name``: (1) lay out, (2) reserve, (3) copy, (4) commit.

        Raises StaleEpoch, StaleStep, LostRace, Aborted, PublishBlocked, OutOfMemory, QuotaExceeded; then nothing of it
        is kept.
        """
        draft = lay_out([(key, each.dtype, each.shape) for key, each in sources.items()], order, life, meta, device)
        plain = kind == "t" and life is PLAIN and not device and not order.copied and not self._check
        if plain and (done := self._put_claimed(name, draft, sources[name], order)) is not None:
            return done
        pending = self.reserve(name, kind, draft, order, life)
        with undone_if_raised(self.abort, pending):
            self.copy(pending, [each.data for each in sources.values()])
            return self.commit(pending, claim=plain and pending.ask.count > 1 and self._space.claims.wants(name))

    def _put_claimed(self, name: str, draft: Draft, source: TensorSource, order: PublishOrder) -> Version | None:
        """``publish`` without a call, of a name that this client claims."""
        space = self._space
        if not space.claims.has(name):
            return None
        space.check()
        size = core.size_class(draft.front, draft.payload)
        done = space.claims.put(
            Put(name=name, label=order.label, epoch=order.epoch, step=order.step, size=size, manifest=draft.manifest,
                start=draft.start, data=source.data)
        )  # fmt: skip
        if done is None:
            return None
        space.counters["puts"] += 1
        return Version(name=name, id=done[0], epoch=order.epoch, step=done[1], bytes=draft.payload)

    def publish_many(
        self, sources: Mapping[str, TensorSource], order: PublishOrder, life: Life, device: str = ""
    ) -> dict[str, Version]:
        """``publish`` of a single tensor a name: (2) and (4) are one round trip each for all names of a batch.

        Each name is published by itself. Raises as ``publish``: nothing of a batch is published when a name could not
        be reserved, else all names but those refused; batches before it stay.
        """
        done: dict[str, Version] = {}
        names = list(sources)
        for at in range(0, len(names), _BATCH_MAX):
            batch = {name: sources[name] for name in names[at : at + _BATCH_MAX]}
            done |= self._publish_batch(batch, order, life, device)
        return done

    def _publish_batch(
        self, sources: Mapping[str, TensorSource], order: PublishOrder, life: Life, device: str
    ) -> dict[str, Version]:
        drafts = {
            name: lay_out([(name, each.dtype, each.shape)], order, life, None, device) for name, each in sources.items()
        }
        pendings = self._reserve_batch(drafts, order, life)
        with undone_if_raised(self._abort_batch, pendings):
            for pending in pendings:
                self.copy(pending, [sources[pending.name].data])
            replies = self.commit_many(pendings)
        versions: dict[str, Version] = {}
        for pending, reply in zip(pendings, replies, strict=True):
            if isinstance(reply, ScriptRefused):
                refusal(reply, pending.name, epoch=order.epoch, step=order.step)
            versions[pending.name] = reply
        return versions

    def _reserve_batch(self, drafts: Mapping[str, Draft], order: PublishOrder, life: Life) -> list[Pending]:
        """``reserve`` of each name in one round trip; what then has no memory, or was forgotten by a rebuilt registry,
        is reserved by itself. When one cannot be reserved none stays."""
        space, table = self._space, self._space.table
        asks = [(str(next(self._requests)), _ask(name, "t", draft, order, life)) for name, draft in drafts.items()]
        space.reap_some(sum(ask.block for _, ask in asks))
        epoch = table.epoch
        replies = space.retry(lambda: space.registry.reserve_many(space.client, asks))
        pendings: list[Pending] = []
        with undone_if_raised(self._abort_batch, pendings, replies):
            for (_, ask), reserved in zip(asks, replies, strict=True):
                draft, pending = drafts[ask.name], None
                if isinstance(reserved, Reserved):
                    with contextlib.suppress(errors.OutOfMemory):
                        pending = self._allocate(ask, draft, reserved, spill=False)
                if pending is not None and self._begin(pending, epoch):
                    pendings.append(pending)
                else:
                    if pending is not None:
                        self._forget(pending)
                    pendings.append(self.reserve(ask.name, "t", draft, order, life))
        return pendings

    def _abort_batch(self, pendings: Sequence[Pending], replies: Sequence[Reserved | ScriptRefused] = ()) -> None:
        """Give up what was written, and of ``replies`` those that came after it."""
        space = self._space
        for pending in pendings:
            self.abort(pending)
        for reserved in (each for each in replies[len(pendings) :] if isinstance(each, Reserved)):
            with contextlib.suppress(errors.TensorError, ScriptRefused):
                space.retry(lambda version=reserved.version: space.registry.abort(space.client, version))

    def reserve(self, name: str, kind: str, draft: Draft, order: PublishOrder, life: Life) -> Pending:
        """A pending version with its block, header written. Memory is recorded before it is taken.

        When the file system is full, free files and then evictable names make room; then the disk, if one is named.
        """
        ask = _ask(name, kind, draft, order, life)
        self._space.reap_some(ask.block)
        for _ in range(_ROOM_TRIES_MAX):
            try:
                return self._occupy(ask, draft)
            except errors.OutOfMemory as full:
                self._space.claims.shed()
                if self._space.reap():
                    continue
                on_device = draft.device and not isinstance(full, errors.QuotaExceeded)
                if not (self.evict(draft.total) if on_device else self._make_room(ask.file)):
                    break
        try:
            return self._occupy(ask, draft, spill=True)
        except errors.OutOfMemory:
            self.free_room()  # the file that could not be made
            raise

    def _occupy(self, ask: VersionRequest, draft: Draft, *, spill: bool = False) -> Pending:
        """Reserve a block, make its memory exist and write the header; undone when that fails.

        Once more when the registry was rebuilt meanwhile: it knows nothing of a block without a header, and may have
        given it to another.
        """
        for _ in range(_ROOM_TRIES_MAX):
            epoch = self._space.table.epoch
            pending = self._prepare(ask, draft, spill)
            if self._begin(pending, epoch):
                return pending
            self._forget(pending)
        raise errors.Aborted(f"{ask.name}: the registry was rebuilt repeatedly", name=ask.name)

    def _forget(self, pending: Pending) -> None:
        """Undo what was reserved in a registry that was lost since, its file too if the new one does not know it."""
        self.abort(pending)
        if pending.reserved.seg not in self._space.retry(lambda: self._space.registry.members("segs")):
            self._space.segments.unlink(pending.reserved.seg)

    def _prepare(self, ask: VersionRequest, draft: Draft, spill: bool) -> Pending:
        """A reserved block whose memory exists, not yet touched."""
        return self._allocate(ask, draft, self._reserve(ask), spill)

    def _reserve(self, ask: VersionRequest) -> Reserved:
        space, request = self._space, str(next(self._requests))
        try:
            return space.retry(lambda: space.registry.reserve(space.client, request, ask))
        except ScriptRefused as refused:
            refusal(refused, ask.name, epoch=ask.epoch, step=ask.step)
        except RotaError:
            raise
        except BaseException:  # Ctrl-C: it may have been done, and the same request has the same answer
            with contextlib.suppress(ScriptRefused):  # then it was not
                space.registry.abort(space.client, space.registry.reserve(space.client, request, ask).version)
            raise

    def _allocate(self, ask: VersionRequest, draft: Draft, reserved: Reserved, spill: bool) -> Pending:
        self.in_flight.add(reserved.version)
        failpoint("reserved")
        header = BlockHeader(
            state=PENDING, version=reserved.version, slot=reserved.slot, epoch=ask.epoch, step=reserved.step,
            name=ask.name, owner=self._space.client, offset=draft.start, bytes=draft.payload, group=ask.kind == "g",
            manifest_bytes=len(draft.manifest), block=ask.block, part=ask.part, world=ask.world,
            ctime_ns=int(self._space.clock.wall_s() * 1e9),
        )  # fmt: skip
        pending = Pending(ask.name, ask, draft, reserved, header)
        with undone_if_raised(self.abort, pending):
            self._space.segments.ensure(reserved.seg, ask.file, spill=spill)
        failpoint("allocated")
        return pending

    def _begin(self, pending: Pending, epoch: int) -> bool:
        """Write the header, after which a rebuilt registry knows of the version, and take its memory on a device.
        False if the registry was rebuilt since ``epoch``: the block may be another's."""
        draft, reserved, space = pending.draft, pending.reserved, self._space
        with undone_if_raised(self.abort, pending):
            with space.file.beginning():
                if space.table.epoch != epoch:
                    return False
                failpoint("beginning")
                self._write(pending, 0, pending.header.pack() + draft.manifest)
            if draft.device and space.devices is not None:
                pending.place = space.devices.take(reserved.version, draft.total)
                self._write(pending, draft.start, pending.place.pack())
        return True

    def copy(self, pending: Pending, data: Sequence[Tensor]) -> None:
        """Copy the tensors' bytes to their places."""
        failpoint("copying")
        if pending.place is not None and self._space.devices is not None and self._space.devices.driver.host:
            self.copier.copy(list(zip(self.view_on_device(pending, None, "bytes").values(), data, strict=True)))
        elif pending.place is not None:
            for target, source in zip(self.view_on_device(pending, None, "bytes").values(), data, strict=True):
                target.copy_(source)
        elif self._is_mapped(pending):
            memory = self._space.segments.open(pending.reserved.seg).array[pending.reserved.offset :]
            places = [memory[each.offset : each.offset + each.bytes] for each in pending.draft.tensors]
            self.copier.copy(list(zip(places, data, strict=True)))
        else:
            for layout, array in zip(pending.draft.tensors, data, strict=True):
                if array.nbytes:
                    self._write(pending, layout.offset, array)
        failpoint("copied")

    def commit(self, pending: Pending, *, claim: bool = False) -> Version:
        """Make it visible, under the lock of its slot; the header says so after the registry does. ``claim`` its
        name."""
        done = self.commit_many([pending], [claim])[0]
        if isinstance(done, ScriptRefused):
            refusal(done, pending.name, epoch=pending.ask.epoch, step=pending.ask.step)
        return done

    def commit_many(self, pendings: Sequence[Pending], claims: Sequence[bool] = ()) -> list[Version | ScriptRefused]:
        """``commit`` of each, in one round trip; those that are refused are undone."""
        space = self._space
        versions = [pending.reserved.version for pending in pendings]
        for pending in pendings:
            self._seal(pending)
        with space.table.slot_locks((each.reserved.slot, each.name) for each in pendings):
            for pending in pendings:  # from here on a rebuild commits it: the lost registry may have done so
                pending.prepared = True
                self._write(pending, STATE_AT, pack_state(PREPARED))
            failpoint("prepared")
            for _ in range(_ROOM_TRIES_MAX):
                epoch = space.table.epoch
                replies = space.retry(lambda: space.registry.commit_many(space.client, versions, claims))
                failpoint("committed")
                for pending, done in zip(pendings, replies, strict=True):
                    self._show(pending, done)
                failpoint("slot-stored")
                if space.table.epoch == epoch:
                    break  # else the registry was rebuilt, maybe from a header that did not say ready yet: commit again
            else:
                raise errors.Aborted(f"{pendings[0].name}: the registry was rebuilt repeatedly", name=pendings[0].name)
        self.in_flight.difference_update(versions)
        return [
            done if isinstance(done, ScriptRefused) else self._published(pending, done)
            for pending, done in zip(pendings, replies, strict=True)
        ]

    def _seal(self, pending: Pending) -> None:
        """Complete the bytes, and the header but for its state."""
        space, reserved = self._space, pending.reserved
        if pending.place is not None and space.devices is not None:
            space.devices.finish()
        elif self._check and not pending.ask.mutable:
            block = space.segments.open(reserved.seg).array[reserved.offset : reserved.offset + pending.ask.block]
            payload = block[pending.draft.start : pending.draft.start + pending.draft.payload]
            pending.header = replace(pending.header, payload_crc=zlib.crc32(payload.data) or 1)
            self._write(pending, 0, pending.header.pack())

    def _show(self, pending: Pending, done: CommitResult | ScriptRefused) -> None:
        """Say in header and table what the registry did; the slot's lock is held."""
        table, reserved = self._space.table, pending.reserved
        if isinstance(done, ScriptRefused):
            self._space.segments.take_back(reserved.seg, reserved.offset, reserved.version)
            with contextlib.suppress(ScriptRefused):  # claimed by now: who asks settles it
                row = self._space.retry(lambda: self._space.find_row(pending.name), settles=False)
                if row is not None and row.version and row.slot == reserved.slot:
                    table.store(row.slot, row.version)
            return
        if done.ready:
            self._write(pending, STATE_AT, pack_state(READY, done.version, done.kept[:KEPT_MAX]))
        if done.current == reserved.version and pending.ask.direct:
            table.store_place(reserved.slot, done.current, reserved.seg, reserved.offset, pending.ask.block)
        if done.own:
            table.store_claimed(reserved.slot, done.current)
            self._space.claims.begin(pending.name, (pending.ask.label, pending.ask.epoch), done, reserved)
        elif done.current:
            table.store(reserved.slot, done.current)

    def _published(self, pending: Pending, done: CommitResult) -> Version:
        space, reserved = self._space, pending.reserved
        if done.first:
            space.table.created(done.version)
        else:
            space.doomed(pending.ask.block)
        if pending.ask.kind == "g":
            self._groups.setdefault(pending.name, deque(maxlen=_STEPS_MAX)).append(reserved.version)
        elif done.ready:
            space.note_published(Published(pending.name, reserved.slot, reserved.version, pending.ask.block))
        space.counters["puts"] += 1
        return Version(
            name=pending.name, id=reserved.version, epoch=pending.ask.epoch, step=reserved.step,
            bytes=pending.draft.payload, ready=done.ready, received=done.received or pending.ask.world,
        )  # fmt: skip

    def await_readers(self, group: str, alive_max: int, wait_s: float) -> None:
        """Wait until at most ``alive_max`` steps that this process published are still in memory.

        Raises BackPressure, with the holders of the oldest.
        """
        space, delay_s = self._space, _POLL_S
        deadline_s = space.deadline_s(wait_s)
        while len(alive := self._groups.get(group, ())) > alive_max:
            space.reap()
            gone = set(space.retry(lambda alive=alive: space.registry.gone(alive)))
            alive = self._groups[group] = deque((v for v in alive if v not in gone), _STEPS_MAX)
            if len(alive) > alive_max and space.clock.monotonic_s() >= deadline_s:
                files = [read_file(space.clients, client) for client in clients_in(space.clients)]
                pids = [facts.get("pid") for facts, held in files if alive[0] in held]
                text = f"{group}: {len(alive)} steps are in use, the oldest by process {', '.join(map(str, pids))}"
                raise errors.BackPressure(text, hint="readers must let go of old steps", name=group, depth=len(alive))
            blocking_sleep(delay_s if len(alive) > alive_max else 0)

    def abort(self, pending: Pending) -> None:
        """Undo a pending version; what cannot be undone now, the sweep undoes."""
        space, version = self._space, pending.reserved.version
        self.in_flight.discard(version)
        with contextlib.suppress(errors.TensorError, ScriptRefused):
            if pending.prepared:  # still this client's alone
                space.retry(lambda: space.take_back_own(space.client, (version,)))
            undone = space.retry(lambda: space.registry.abort(space.client, version))
            if undone and pending.ask.direct and not space.leases.has(version):  # no slot ever showed it to others
                space.retry(lambda: space.registry.reap([version]))

    def view_on_device(self, pending: Pending, lease: object, as_: str = "torch") -> dict[str, Tensor]:
        """The tensors of a version on a device, as its writer sees them; ``bytes``: as plain bytes."""
        devices, place, layouts = self._space.devices, pending.place, pending.draft.tensors
        assert devices is not None
        assert place is not None
        if as_ == "bytes":
            layouts = [replace(each, dtype="uint8", shape=(each.bytes,)) for each in layouts]
            as_ = "numpy" if devices.driver.host else "torch"
        version = pending.reserved.version
        return devices.view(pending.name, version, pending.draft.device, place, layouts, lease, as_=as_)

    def free_room(self, *, idle_ms: int = 0) -> int:
        """Unlink files that have been wholly free for that long; bytes given back."""
        space, freed = self._space, 0
        before_ms = int(space.clock.wall_s() * 1000) - idle_ms
        while segs := space.retry(lambda: space.registry.trim(before_ms)):
            for seg in segs:
                path = space.segments.path(seg)
                freed += path.stat().st_size if path.exists() else 0
                space.segments.unlink(seg)
            space.retry(lambda segs=segs: space.registry.strike(segs))
        return freed

    def evict(self, bytes_wanted: int) -> int:
        """Delete the least recently used evictable names that are not leased; bytes that were freed."""
        freed = 0
        for name in self._space.retry(self._space.registry.evictable):
            if freed >= bytes_wanted:
                break
            row = self._space.retry(lambda name=name: self._space.find_row(name))
            if row is not None and self._space.delete(name, expected=row.version, idle=True):
                freed += max(row.block, row.payload)
        return freed

    def _make_room(self, bytes_wanted: int) -> int:
        """Unlink free files, or evict names and unlink theirs; bytes given back. In vain nothing is evicted."""
        freed, facts = self.free_room(), os.statvfs(self._space.folder)
        if not freed and bytes_wanted <= facts.f_blocks * facts.f_frsize and self.evict(bytes_wanted):
            freed = self.free_room()
        return freed

    def _is_mapped(self, pending: Pending) -> bool:
        return pending.ask.count > 1 or self._space.segments.is_open(pending.reserved.seg)

    def _write(self, pending: Pending, at: int, data: bytes | Bytes) -> None:
        """Copy into the block: through the mapping when there is one, else by pwrite, which is faster on new pages."""
        segments, offset = self._space.segments, pending.reserved.offset + at
        size = len(data)
        if self._is_mapped(pending):
            mapping = segments.open(pending.reserved.seg)
            if isinstance(data, bytes):
                mapping.map[offset : offset + size] = data
            else:
                mapping.array[offset : offset + size] = data
            return
        fd = os.open(segments.path(pending.reserved.seg), os.O_RDWR | os.O_CLOEXEC)
        try:
            view = memoryview(data)  # pyright: ignore[reportArgumentType]  # numpy arrays are buffers, the stub forgets
            done = 0
            while done < size:
                done += os.pwrite(fd, view[done : done + _PWRITE_BYTES_MAX], offset + done)
        finally:
            os.close(fd)


def _ask(name: str, kind: str, draft: Draft, order: PublishOrder, life: Life) -> VersionRequest:
    cls = core.size_class(draft.front, draft.payload)
    return VersionRequest(
        name=name, kind=kind, epoch=order.epoch, step=order.step, label=order.label, block=cls.block, count=cls.count,
        file=cls.file, payload=draft.total, desc=draft.desc, orphan=life.orphan, retain=life.retain,
        mutable=life.mutable, evictable=life.evictable, part=life.part[0], world=life.part[1],
        direct=life.part[1] == 1 and not life.evictable, copied=order.copied,
    )  # fmt: skip


def lay_out(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], order: PublishOrder, life: Life, meta: Json, device: str = ""
) -> Draft:
    """Places of tensors (name, dtype, shape) in one block, and the manifest that describes them.

    Raises BadInput unless ``meta`` is a JSON value.
    """
    make = _lay_out if meta is not None or len(tensors) > _KEPT_TENSORS_MAX else _lay_out_again
    return make(tuple(tensors), order.label, life, meta, device)


def _lay_out(
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...], label: str, life: Life, meta: Json, device: str
) -> Draft:
    sizes = [payload_bytes(dtype, shape) for _, dtype, shape in tensors]
    offsets, total = core.pack(sizes)
    payload = PLACE_BYTES if device else total
    rows = [[*each, offset, size] for each, offset, size in zip(tensors, offsets, sizes, strict=True)]
    facts = {"tensors": rows, "label": label, "retain": life.retain, "orphan": life.orphan}
    flags = {"mutable": life.mutable, "evictable": life.evictable} | ({"device": device} if device else {})
    try:
        manifest = _json({**facts, **flags, "meta": meta}).encode()
    except (TypeError, ValueError) as error:
        raise BadInput(f"meta is not a JSON value: {error}") from None
    if len(manifest) > MANIFEST_BYTES_MAX:
        raise BadInput(f"names and meta take {len(manifest)} bytes, the limit is {MANIFEST_BYTES_MAX}")
    front = core.HEADER_BYTES + len(manifest)
    start = 0 if device else core.payload_offset(front, payload)
    layouts = tuple(
        Layout(name, dtype, shape, start + offset, size)
        for (name, dtype, shape), offset, size in zip(tensors, offsets, sizes, strict=True)
    )
    return Draft(layouts, manifest, front, payload, total, _json(describe(rows, device)), device)


_lay_out_again = lru_cache(256)(_lay_out)  # of what is published again and again: a fifth of what Python does for a put


THREADS: Final = "ROTA_TENSORS_COPY_THREADS"
_THREADS_DEFAULT_MAX: Final = 4
_THREADS_MAX: Final = 64
_SHARED_BYTES_MIN: Final = 8 << 20
_PIECE_BYTES: Final = 2 << 20
_SMALL_BYTES: Final = 256 << 10


def threads_wanted() -> int:
    """``ROTA_TENSORS_COPY_THREADS``, else one a core that this process may use, at most four. Raises BadInput."""
    given = environ.get(THREADS)
    if not given:
        return min(_THREADS_DEFAULT_MAX, cores_allowed())
    if not given.isdecimal() or not 1 <= int(given) <= _THREADS_MAX:
        raise BadInput(f"{THREADS}={given!r}: a number of threads, 1 to {_THREADS_MAX}")
    return int(given)


class Copier:
    """The copies of one tensor store. At most ``threads``, with the caller's own, share the pieces of one."""

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(self._helpers, 1), "rota-tensors-copy")  # a thread starts at its first use

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy each source into its target, of the same length. Once it returns or raises, no thread writes there.

        Threads take pieces as they come, so one that gets no core costs nothing but the piece that it has begun.
        """
        shared = self._helpers and sum(source.nbytes for _, source in pairs) >= _SHARED_BYTES_MIN
        pieces = deque[tuple[Bytes, Bytes]]()
        for target, source in pairs:
            if shared and source.nbytes >= _SMALL_BYTES:  # below, a turn of the interpreter costs more than the copy
                for at in range(0, source.nbytes, _PIECE_BYTES):
                    pieces.append((target[at : at + _PIECE_BYTES], source[at : at + _PIECE_BYTES]))
            else:
                target[:] = source
        if not pieces:
            return
        helpers = [Future[None]() for _ in range(min(self._helpers, len(pieces) - 1))]
        try:
            with contextlib.suppress(RuntimeError):  # no thread to be had, or the process ends: it goes without
                for helper in helpers:
                    self._pool.submit(_help, helper, pieces)
            _drain(pieces)
        finally:
            pieces.clear()
            _settle(helpers)
        for helper in helpers:
            if not helper.cancelled():
                helper.result()

    def close(self) -> None:
        """End the threads; a copy still works afterwards, alone."""
        self._pool.shutdown(wait=False)


def _drain(pieces: deque[tuple[Bytes, Bytes]]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        failpoint("piece")
        target[:] = source


def _help(helper: Future[None], pieces: deque[tuple[Bytes, Bytes]]) -> None:
    if helper.set_running_or_notify_cancel():
        try:
            _drain(pieces)
        except BaseException as error:  # noqa: BLE001  # raised where the copy was asked for
            helper.set_exception(error)
        else:
            helper.set_result(None)


def _settle(helpers: Sequence[Future[None]]) -> None:
    """Wait for the pieces that others have begun; an interrupt waits too, since the block is given up after it."""
    try:
        wait([helper for helper in helpers if not helper.cancel()])
    except BaseException:
        _settle(helpers)
        raise
