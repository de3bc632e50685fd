"""connect() and Plane: the public calls of the tensor store."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from rota.runtime import environ
from rota.runtime.clock import Clock, SystemClock
from rota.runtime.random import RandomSource, SystemRandom
from rota.runtime.redis import server as redis_server
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput
from rota.tensors import core, errors, inspect
from rota.tensors.api.channels import Channel, TensorEvent, Watch
from rota.tensors.arrays import TensorSource, address_of, dtype_name, source_of, view_of
from rota.tensors.core import Json, Tensor, check_count, check_only
from rota.tensors.inspect import Location
from rota.tensors.locks import PIN_MARK
from rota.tensors.reader import Snapshot, chosen, selector_of
from rota.tensors.registry import PartBlock, Row, ScriptRefused
from rota.tensors.session import Session, end_keepers, remove_root, shm_root
from rota.tensors.writer import PLAIN, Life, Pending, PublishOrder, Version, lay_out

if TYPE_CHECKING:
    import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
DEFAULT_NAMESPACE: Final = "default"
NAMESPACE: Final = "ROTA_TENSORS_NAMESPACE"
SEALED: Final = "ROTA_TENSORS_SEALED"
_FETCH: Final = "rota.tensors.transport.pull() fetches from another node"

_planes: dict[tuple[int, str, str], Plane] = {}
_planes_lock = threading.RLock()


def connect(
    url: str | None = None,
    *,
    namespace: str | None = None,
    backend: str = "auto",
    bytes_max: int | None = None,
    label: str | None = None,
    epoch: int | None = None,
    sealed: bool | None = None,
    device: str | None = None,
    keeper: str = "auto",
    home: str | Path | None = None,
    keep: bool = False,
) -> Plane:
    """The tensor store of this process in a namespace; started or joined at the first call, the same one afterwards.

    ``url`` (or ``ROTA_REDIS_URL``) names a registry server; without one the server of ``home`` (``ROTA_HOME``) is
    joined or started, and ends with its last client unless ``keep``. ``label`` says who publishes (default: the job
    and instance of the environment) and ``epoch`` its epoch; both may be set on the result later. ``sealed`` maps every
    read read-only. ``bytes_max`` limits the bytes of the namespace. ``device`` is where puts go, and lets
    tensors on devices be read: ``cuda:0``; ``memfd``, memory of the host that has a name in no file system;
    ``fakecuda:0``, the rules of CUDA on CPU; ``backend`` follows, and a ``keeper`` starts there.
    Raises RegistryUnavailable, BadInput, WrongDevice, IpcUnavailable.
    """
    check_only("backend", backend, "auto", "device= chooses: none for shared memory, memfd, cuda:0, fakecuda:0")
    check_only("keeper", keeper, "auto", "a keeper starts with the first put on a device, and without a device never")
    space = core.check_namespace(namespace or environ.get(NAMESPACE) or DEFAULT_NAMESPACE)
    where = environ.Home.of(home) if home is not None else environ.Home.find()
    given = url or environ.get(environ.REDIS_URL)
    key = (os.getpid(), given or str(where.root), space)
    with _planes_lock:
        plane = _planes.get(key)
        if plane is None or plane.closed:
            plane = _planes[key] = Plane.join(where, given, space, sealed=sealed, keep=keep)
        elif keep:
            plane._session.keep_server()
    if device is not None:
        plane._session.use_device(device)
    if bytes_max is not None:
        plane.limit(bytes_max)
    if label is not None:
        plane.label = core.check_label(label)
    if epoch is not None:
        plane.epoch = core.check_count("epoch", epoch, 0, core.EPOCH_MAX)
    return plane


def down(home: str | Path | None = None) -> bool:
    """End the registry server of a home and give all its shared memory back; True when there was one."""
    where = environ.Home.of(home) if home is not None else environ.Home.find()
    with redis_server.registry_lock(where):
        roots = {shm_root(redis_server.RegistryAddress(path=str(redis_server.socket_path(where))).url)}
        running = redis_server.find_running(where)
        if running is not None:
            roots.add(shm_root(running.address.url))
        ended = redis_server.end_running(where)
        for root in roots:
            end_keepers(root)
            remove_root(root)
    return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One version of a name, by value: picklable, small, valid while it is leased: by the sender, or by ``holder``,
    a pin made with it."""

    namespace: str
    name: str
    version: int
    holder: str = ""

    def get(self) -> Tensor:
        """The tensor of exactly this version. Raises VersionGone when it is gone."""
        return connect(namespace=self.namespace).get(self.name, version=self.version)

    def close(self) -> None:
        """End the pin, if there is one; harmless when it ended before. Views that live keep the bytes."""
        if self.holder:
            connect(namespace=self.namespace).unpin(self.holder)


class Pin:
    """A lease that no process holds: the version stays until ``close()`` or until its label's job ends.

    Not to be mixed up with pinned (page-locked) host memory.
    """

    def __init__(self, holder: str, name: str, version: int, close: Callable[[str], None]) -> None:
        self.holder, self.name, self.version = holder, name, version
        self._close = close

    def close(self) -> None:
        """End the pin; harmless when it ended before."""
        self._close(self.holder)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _in_thread(method: Callable[_P, _R]) -> Callable[_P, Coroutine[object, object, _R]]:
    """The method without blocking the event loop."""

    @functools.wraps(method)
    async def call(*args: _P.args, **named: _P.kwargs) -> _R:
        return await asyncio.to_thread(method, *args, **named)

    call.__doc__ = f"``{method.__name__}`` without blocking the event loop."
    return call


class Plane:
    """Named tensors of one namespace. Thread-safe; a forked child must call ``connect()`` itself."""

    def __init__(self, session: Session) -> None:
        self._session, self._space = session, session.space
        self._reader, self._writer = session.reader, session.writer
        self._cache, self._words = session.reader.cache, session.reader.words
        self.label, self.epoch = session.label, session.epoch

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<tensors of namespace {self._space.namespace!r} in {self.home}{state}>"

    @classmethod
    def join(
        cls, home: environ.Home, url: str, namespace: str, *, sealed: bool | None, keep: bool, keeper: bool = False
    ) -> Plane:
        """Join (or start) the registry and become one of its clients."""
        clock: Clock = SystemClock()
        random_source: RandomSource = SystemRandom()
        always = environ.get(SEALED) == "1" if sealed is None else sealed
        with errors.file_errors(), redis_server.registry_lock(home):
            was_ended = redis_server.was_ended(home)
            server = redis_server.find_or_start(home, url=url, keep=keep)
            for_this_client = server.ours and was_ended
            with undone_if_raised(redis_server.end_running, home) if for_this_client else contextlib.nullcontext():
                session = Session(
                    home,
                    server,
                    namespace,
                    clock=clock,
                    random_source=random_source,
                    sealed=always,
                    url=url,
                    keeper=keeper,
                )
        session.start()
        return cls(session)

    def put(
        self,
        name: str,
        tensor: Tensor,
        *,
        step: int | None = None,
        orphan: str = "keep",
        retain: int = 1,
        mutable: bool = False,
        evictable: bool = False,
        device: str | None = None,
        scope: str = "node",
        ready: str = "sync",
        label: str | None = None,
        epoch: int | None = None,
    ) -> Version:
        """Publish a tensor or array under a name; readers see it whole from then on. One copy, into shared memory.

        ``step`` orders publishes of one epoch (default: one after the last). ``retain`` newest versions stay readable
        by ``get(version=)``. ``orphan="drop"``: the name goes when this process dies. ``mutable``: one memory, written
        in place. ``evictable``: may be dropped when memory is short. ``device="cpu"`` keeps it off the device.
        The bytes are there when the name is. Raises UnsupportedTensor, StaleEpoch, StaleStep, LostRace, OutOfMemory,
        QuotaExceeded.
        """
        core.check_name(name)
        check_only("scope", scope, "node", _FETCH)
        check_only("ready", ready, "sync", "the writer's stream is waited for before the name is seen")
        order = self._order(step, label, epoch)
        is_plain = (orphan, retain, mutable, evictable) == ("keep", 1, False, False)
        life = PLAIN if is_plain else Life(orphan=orphan, retain=retain, mutable=mutable, evictable=evictable)
        uuid = self._device(device)
        return self._writer.publish(name, "t", {name: self._source(tensor, uuid)}, order, life, None, uuid)

    def put_many(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int | None = None,
        orphan: str = "keep",
        retain: int = 1,
        evictable: bool = False,
        device: str | None = None,
        label: str | None = None,
        epoch: int | None = None,
    ) -> dict[str, Version]:
        """``put`` of a tensor under each of many names, with two round trips to the registry for each 64 of them.

        Each name is published by itself: readers may see some before the others (``publish_group`` shows all at once).
        Raises as ``put``, for the first name that is refused. When no block could be had for a name, nothing of its 64
        is published; when another writer was faster, all but that name are.
        """
        if not isinstance(tensors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise BadInput(f"put_many({type(tensors).__name__}): a mapping of names to tensors")
        uuid = self._device(device)
        sources = {core.check_name(name): self._source(tensor, uuid) for name, tensor in tensors.items()}
        life = Life(orphan=orphan, retain=retain, evictable=evictable)
        return self._writer.publish_many(sources, self._order(step, label, epoch), life, uuid)

    @contextlib.contextmanager
    def create(
        self,
        name: str,
        shape: Sequence[int],
        dtype: object,
        *,
        step: int | None = None,
        orphan: str = "keep",
        retain: int = 1,
        mutable: bool = False,
        evictable: bool = False,
        device: str | None = None,
        as_: str = "torch",
    ) -> Iterator[Tensor]:
        """Write a tensor in place: yields uninitialised shared memory, published at the end, given up on an exception.

        Afterwards the tensor is a leased view like any reader's. Costs the same for any size when memory is warm.
        """
        core.check_name(name)
        order = self._order(step, None, None)
        life = Life(orphan=orphan, retain=retain, mutable=mutable, evictable=evictable)
        tensor = (name, dtype_name(dtype), core.check_shape(shape))
        draft = lay_out([tensor], order, life, None, self._device(device))
        pending = self._writer.reserve(name, "t", draft, order, life)
        with undone_if_raised(self._writer.abort, pending):
            yield self._view_pending(pending, as_)
            self._writer.commit(pending)

    def publish_group(
        self,
        group: str,
        tensors: Mapping[str, Tensor],
        *,
        step: int | None = None,
        part: tuple[int, int] = (0, 1),
        retain: int = 1,
        meta: Json = None,
        orphan: str = "keep",
        device: str | None = None,
        lag_max: int | None = None,
        wait_s: float = 0.0,
        label: str | None = None,
        epoch: int | None = None,
    ) -> Version:
        """Publish many tensors as one step of a group: readers see all of them or none.

        With ``part=(rank, world)`` each of ``world`` writers brings its own, and the step is visible with the last
        (``ready`` of the result). ``meta`` is a JSON value. A higher epoch may publish a lower step: steps that it
        takes back are dropped, those below it stay among the ``retain`` kept. Blocks for the copy alone; with
        ``lag_max`` also up to ``wait_s`` while readers hold more old steps of this writer than that. Raises
        BackPressure, and as ``put``.
        """
        core.check_name(group)
        if not isinstance(tensors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise BadInput(f"tensors of {group}: a mapping of names to tensors, not {type(tensors).__name__}")
        uuid = self._device(device)
        if lag_max is not None:
            self._writer.await_readers(group, core.check_count("lag_max", lag_max, 0) + retain, wait_s)
        sources = {str(key): self._source(value, uuid) for key, value in tensors.items()}
        life = Life(orphan=orphan, retain=retain, part=part)
        return self._writer.publish(group, "g", sources, self._order(step, label, epoch), life, meta, uuid)

    def get(
        self,
        name: str,
        *,
        wait_s: float = 0.0,
        min_version: int | None = None,
        min_step: int | None = None,
        version: int | None = None,
        device: str | None = None,
        sealed: bool | None = None,
        as_: str | None = None,
        source: str = "node",
    ) -> Tensor:
        """The current tensor of a name (or an exact ``version``), the same bytes without a copy.

        The bytes stay valid as long as any view of them lives. Waits up to ``wait_s`` for the name, or for a version or
        step at least the given one. ``device="cpu"`` copies from a device. Raises NotFound, VersionGone, WaitTimeout.
        """
        if device is not None or source != "node":
            check_only("source", source, "node", _FETCH)
            check_only("device", device or "cpu", "cpu", "without it the tensor is read where it lies; .to() copies it")
            found = self.get(
                name, wait_s=wait_s, min_version=min_version, min_step=min_step, version=version, sealed=sealed, as_=as_
            )
            return found.cpu() if device and as_ in (None, "torch") else found
        entry = self._cache.get(name)
        if (
            entry is not None
            and self._words[entry.word] == entry.version
            and (as_ is None and sealed is None and version is None and min_version is None)
            and (min_step is None or entry.step >= min_step)
        ):
            entry.used = True
            return entry.value
        shut = self._reader.sealed if sealed is None else sealed
        selector = selector_of(version=version, min_step=min_step, min_version=min_version)
        if not selector and (cached := self._reader.find_cached((name, as_ or "torch", shut))) is not None:
            return cached.value
        return self._reader.get(name, selector, wait_s=wait_s, sealed=shut, as_=as_ or "torch")

    def get_many(
        self,
        names: Iterable[str] | None = None,
        *,
        prefix: str | None = None,
        wait_s: float = 0.0,
        sealed: bool | None = None,
        as_: str = "torch",
    ) -> Snapshot:
        """Many names as of one moment: those given, or all single names that begin with ``prefix``."""
        if (names is None) == (prefix is None):
            raise BadInput("get_many: give the names, or prefix=")
        if isinstance(names, str) or not isinstance(names, Iterable | None):
            raise BadInput(f"get_many({names!r}): an iterable of names")
        chosen = list(names) if names is not None else self._singles(prefix or "")
        shut = self._reader.sealed if sealed is None else sealed
        found = {name: entry for name in chosen if (entry := self._reader.find_cached((name, as_, shut))) is not None}
        if all(name in found and self._words[found[name].word] == found[name].version for name in chosen):
            versions = {name: entry.version for name, entry in found.items()}  # one moment for all
            step = max((entry.step for entry in found.values()), default=0)
            tensors = {name: entry.value for name, entry in found.items()}
            newest = max(versions.values(), default=0)
            return Snapshot(tensors, id=newest, step=step, epoch=0, meta=None, versions=versions)
        return self._reader.get_many(chosen, wait_s=wait_s, sealed=shut, as_=as_)

    def get_group(
        self,
        group: str,
        *,
        step: int | None = None,
        min_step: int | None = None,
        part: int | tuple[int, int] | None = None,
        names: Iterable[str] | None = None,
        wait_s: float = 0.0,
        source: str = "node",
        sealed: bool | None = None,
        as_: str = "torch",
    ) -> Snapshot:
        """All tensors of a group's current step, of exactly ``step``, or of the current one if at least ``min_step``.

        ``part``, a rank or ``(rank, world)``: only what that writer brought; ``names``: only these. Waits up to
        ``wait_s``. Raises BadInput, NotFound, VersionGone, WaitTimeout.
        """
        check_only("source", source, "node", _FETCH)
        shut = self._reader.sealed if sealed is None else sealed
        entry = self._reader.find_cached((group, as_, shut, "group"))
        if entry is not None and (step is None or step == entry.step) and (min_step is None or min_step <= entry.step):
            found: Snapshot = entry.value
        else:
            selector = selector_of(step=step, min_step=min_step)
            found = self._reader.get_group(group, selector, wait_s=wait_s, sealed=shut, as_=as_)
        return found if part is None and names is None else chosen(group, found, part, names)

    def channel(self, name: str, *, items_max: int = 64, full: str = "block", epoch: int | None = None) -> Channel:
        """A bounded stream of records with tensors, by name: see ``Channel``. Raises BadInput."""
        order = self._order(None, None, epoch)
        return Channel(self._session, name, order, items_max=items_max, full=full)

    def touch(self, name: str) -> None:
        """Notify watchers that a mutable tensor was written in place. Raises NotFound."""
        try:
            self._space.retry(lambda: self._space.registry.touch(name))
        except ScriptRefused as refused:
            raise self._space.not_found(name) from refused

    def delete(self, name: str, *, missing_ok: bool = False) -> None:
        """Take a name or group away at once; readers keep their bytes. Raises NotFound unless ``missing_ok``."""
        deleted = self._space.delete(name)
        self._reader.forget(name)
        if not deleted and not missing_ok:
            raise self._space.not_found(name)

    def delete_many(self, names: Iterable[str], *, missing_ok: bool = False) -> int:
        """Take many names away, with one round trip to the registry for each 256 of them, two for those that another
        process published; how many were there. Raises NotFound unless ``missing_ok``, when the others are gone."""
        if isinstance(names, str) or not isinstance(names, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  # as above
            raise BadInput(f"delete_many({names!r}): an iterable of names")
        wanted = list(dict.fromkeys(names))
        gone = self._space.delete_many(wanted)
        for name in wanted:
            self._reader.forget(name)
        if not missing_ok and len(gone) < len(wanted):
            raise self._space.not_found(next(name for name in wanted if name not in gone))
        return len(gone)

    def drop_label(self, label: str) -> int:
        """Delete every name that ``label``, or a label below it, published last, end its pins, and give free memory
        back: what ends a job. Returns how many names went. Leases that living processes still hold end with them.
        """
        rows = [row for row in self._rows() if core.label_covers(label, row.label)]
        for row in rows:  # and no version that another published meanwhile
            self._space.delete(row.name, expected=row.version)
            self._reader.forget(row.name)
        for holder in self._space.retry(lambda: self._space.registry.members("clients")):
            if holder.startswith(PIN_MARK) and core.label_covers(label, holder.split(":")[1]):
                self._session.unpin(holder)
        self._session.sweep()
        self._writer.free_room()
        return len(rows)

    def release(self, name: str) -> None:
        """Drop the cache's view of a name; the caller's own views keep their lease."""
        self._reader.forget(name)

    def pin(self, name: str, *, label: str | None = None) -> Pin:
        """Keep the current version of a name or group whatever happens to processes, until closed or its label ends."""
        return self._pin(name, label)

    def _pin(self, name: str, label: str | None, selector: str = "") -> Pin:
        holder = f"{PIN_MARK}{core.check_label(self.label if label is None else label)}:{SystemRandom().new_id(48)}"
        try:
            version = self._session.pin(holder, name, selector)
        except ScriptRefused as refused:
            raise self._space.not_found(name) from refused
        return Pin(holder, name, version, self._session.unpin)

    def unpin(self, holder: str) -> None:
        """End the pin of a ``Pin.holder`` or ``TensorRef.holder``, from any process; harmless when it ended before."""
        self._session.unpin(holder)

    def fence(self, label: str, epoch: int) -> int:
        """Refuse publishers of ``label`` (and of labels below it) whose epoch is lower; the fence now in force."""
        return self._session.fence(core.check_label(label), core.check_count("epoch", epoch, 0, core.EPOCH_MAX))

    def ref(self, tensor: Tensor, *, holder: str | None = None) -> TensorRef:
        """A small, picklable reference to the version a view belongs to; valid while a process leases it.

        With ``holder``, a label, a pin of it does, whatever happens to processes: until ``TensorRef.close()`` or the
        label ends. Raises NotFound for other memory, BadInput.
        """
        if (found := self.version_of(tensor)) is None:
            raise errors.NotFound("this tensor is not a view of a shared tensor")
        name, version = found
        self._space.retry(lambda: self._space.make_known(name, version))
        pinned = "" if holder is None else self._pin(name, holder, f"h{version}").holder
        return TensorRef(namespace=self._space.namespace, name=name, version=version, holder=pinned)

    def version_of(self, tensor: Tensor) -> tuple[str, int] | None:
        """Name and version whose bytes a view shows, or None for a tensor of other memory."""
        address, devices = address_of(tensor), self._space.devices
        return self._space.leases.find(address) or (devices.find(address) if devices else None)

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Note that another stream works on a view of a device: its memory is not used again before that is done."""
        if (found := self.version_of(tensor)) is not None and self._space.devices is not None:
            self._space.devices.record_stream(found[1], stream)

    def find_place(self, tensor: Tensor) -> tuple[Path, int] | None:
        """File and offset of a view's first byte, for who maps it without this library; None for other memory, empty
        tensors and sealed views (they have a mapping of their own)."""
        return self._space.segments.find(address_of(tensor))

    def ls(self, prefix: str = "") -> list[Row]:
        """Every published name with that prefix, in order."""
        return [row for row in self._rows(prefix) if row.version]

    def watch(
        self, prefix: str = "", callback: Callable[[TensorEvent], object] | None = None, *, after: str | None = None
    ) -> Watch:
        """Events of names with a prefix, in order: iterate it, or give a callback; ``after`` resumes behind an id."""
        return self._space.retry(lambda: Watch(self._space, self._session.machine, prefix, after, callback))

    aput = _in_thread(put)
    aget = _in_thread(get)
    apublish_group = _in_thread(publish_group)
    aget_group = _in_thread(get_group)

    def locate(self, name: str) -> list[Location]:
        """Where the bytes of a name's current version lie, part by part: memory, file or device. It leases nothing: the
        bytes may be another's a moment later. Raises NotFound, VersionGone."""
        return self._space.retry(lambda: inspect.locate(self._space, name))

    def info(self, name: str) -> Row:
        """What the registry knows of a name. Raises NotFound."""
        row = self._space.retry(lambda: self._space.find_row(name))
        if row is None:
            raise self._space.not_found(name)
        return self._space.with_leases([row])[0]

    def stats(self) -> inspect.Stats:
        """Bytes, leases and counts of the namespace and of this process."""
        return self._space.retry(lambda: inspect.stats(self._space))

    def fsck(self, *, repair: bool = False) -> inspect.FsckDocument:
        """Check invariants I1 to I7: the document of ``rota tensors fsck``."""
        return self._space.retry(lambda: inspect.fsck(self._session, repair=repair))

    def gc(self, *, dry_run: bool = False) -> inspect.GcDocument:
        """Sweep the dead and give all free memory back: the document of ``rota tensors gc``."""
        return self._space.retry(lambda: inspect.gc(self._session, dry_run=dry_run))

    def recover(self, *, dry_run: bool = False) -> dict[str, object]:
        """Rebuild the registry from headers and client files: the document of ``rota tensors recover``."""
        done = asdict(self._session.recover(dry_run=dry_run))
        return done | {"seconds": round(done["seconds"], 4)}

    def list_document(self, prefix: str = "") -> inspect.TensorList:
        """The document of ``rota tensors ls``."""
        return self._space.retry(lambda: inspect.tensor_list(self._space, prefix))

    def stat_document(self, name: str) -> inspect.TensorDocument:
        """The document of ``rota tensors stat``: a name, its versions, their holders. Raises NotFound."""
        row = self.info(name)
        return self._space.retry(lambda: inspect.tensor(self._space, row))

    def top(self, n_max: int = 20) -> inspect.TopDocument:
        """The document of ``rota tensors top``: names by the bytes that all their versions take."""
        return self._space.retry(lambda: inspect.top(self._space, n_max))

    def doctor(self) -> inspect.DoctorDocument:
        """The document of ``rota tensors doctor``: findings with level and remedy."""
        return self._space.retry(lambda: inspect.doctor(self._session))

    def limit(self, bytes_max: int) -> None:
        """Set how many bytes the files of the namespace may take; 0 lifts the limit. Raises BadInput."""
        check_count("bytes_max", bytes_max, 0)
        self._space.retry(lambda: self._space.registry.configure(quota=bytes_max or 1 << 62))

    @property
    def namespace(self) -> str:
        """The namespace of this store."""
        return self._space.namespace

    @property
    def address(self) -> redis_server.RegistryAddress:
        """Where the registry listens."""
        return self._session.server.address

    @property
    def folder(self) -> Path:
        """Where the shared memory of the namespace lies on this node."""
        return self._space.folder

    @property
    def home(self) -> Path:
        """The home whose registry is used."""
        return self._session.home.root

    @property
    def closed(self) -> bool:
        """True after ``close()``."""
        return self._space.closed or self._space.forked

    def close(self) -> None:
        """Leave the namespace; views that still live keep their bytes. The last client ends a server not kept."""
        self._session.close(at_exit=False)
        with _planes_lock:  # else its memory and its files stay open as long as the process lives
            for key in [key for key, plane in _planes.items() if plane is self]:
                del _planes[key]

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _order(self, step: int | None, label: str | None, epoch: int | None) -> PublishOrder:
        chosen = self.label if label is None else core.check_label(label)
        number = core.check_count("epoch", self.epoch if epoch is None else epoch, 0, core.EPOCH_MAX)
        wanted = None if step is None else core.check_count("step", step, -core.STEP_MAX)
        return PublishOrder(label=chosen, epoch=number, step=wanted)

    def _device(self, device: str | None) -> str:
        """UUID of the device a put goes to; nothing for the CPU."""
        devices = self._space.devices
        if device is None:
            return devices.uuid if devices else ""
        if device == "cpu":
            return ""
        raise BadInput(f"device={device!r}: cpu, or nothing for the device of connect(device=...)")

    def _source(self, value: Tensor, uuid: str) -> TensorSource:
        devices = self._space.devices
        return source_of(value, device=bool(uuid) and devices is not None and not devices.driver.host)

    def _view_pending(self, pending: Pending, as_: str) -> Tensor:
        """A leased view of a version that only its writer may see."""
        space, reserved = self._space, pending.reserved
        if pending.ask.direct:
            block = PartBlock(
                version=reserved.version, seg=reserved.seg, offset=reserved.offset, bytes=pending.ask.block
            )
            held = space.leases.hold_own(block)[0]
        else:
            wanted = [(pending.name, f"v{reserved.version}")]
            held = space.retry(lambda: self._reader.lease(wanted, sealed=False))[1][0][0]
        if pending.place is not None:
            return self._writer.view_on_device(pending, held.holder, as_)[pending.name]
        return view_of(pending.draft.tensors[0], held.holder, held.base, as_)

    def _rows(self, prefix: str = "") -> list[Row]:
        return self._space.retry(lambda: self._space.rows(prefix))

    def _singles(self, prefix: str) -> list[str]:
        return [row.name for row in self._rows(prefix) if row.version and row.kind == "t"]


def _after_fork_in_child() -> None:
    global _planes_lock  # another thread of the parent may have held it, and there is none here to let it go
    _planes_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _close_all() -> None:
    for (pid, _, _), plane in list(_planes.items()):
        if pid == os.getpid():
            plane._session.close(at_exit=True)
