"""Versions from other machines: one elected process of a machine fetches, all of its processes read what it published.

``pull`` answers from the store of this machine if that has what is wanted. If not, the process that gets a lock asks
the tensor server of another machine (``server.py``), receives straight into the block that readers will map, and
publishes it under the same name, step and epoch. Whoever dies while fetching leaves nothing: the next one does it.

How another part keeps or finds a group on a second machine: ``replicate(plane, group, host, step=n)`` makes ``host``
fetch step ``n`` from here and returns when it has it whole; later any process of any machine of the installation reads
it by ``pull(plane, group, step=n)``, which asks every tensor server that the directory knows, ``near`` first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import mmap
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rota.runtime import directory, environ, file_locks, process
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.directory import Directory
from rota.runtime.handshake import client_handshake_blocking
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import NotReachable
from rota.tensors import errors, messages
from rota.tensors.api.store import DEFAULT_NAMESPACE, Plane
from rota.tensors.core import Fields
from rota.tensors.errors import failpoint
from rota.tensors.reader import Snapshot, selector_of
from rota.tensors.writer import Life, Pending, PublishOrder, lay_out

WAIT_S: Final = 20.0
"""Longest time without a byte of what is wanted, by default."""
_TURN_S: Final = 0.05
_NO_WAIT_S: Final = 1e-9
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = (0.02, 0.5)
_START_S: Final = 30.0
_SILENT_S: Final = 30.0
_LOOK_S: Final = 1.0
"""Between two looks at whether the tensor server of this machine lives."""
_POLL_S: Final = 0.01
_LOCKS: Final = 256
_IDLE_MAX: Final = 4
_IDLE_S: Final = 20.0
_BRING_MAX_S: Final = 7200.0
"""Longest time in which a tensor server brings one version: 700 GB at 100 MB/s."""
_REMOTE_WAIT_S: Final = 1.0
_NOT_THERE: Final = ("TENSOR_NOT_FOUND", "TENSOR_VERSION_GONE", "TENSOR_WAIT_TIMEOUT")
_REMOTE: Final = {
    one.code: one
    for one in (
        errors.NotFound, errors.VersionGone, errors.WaitTimeout, errors.OutOfMemory, errors.QuotaExceeded,
        errors.UnsupportedTensor, errors.Corrupt, errors.TornRead, errors.ProtocolBreach, errors.StaleEpoch,
    )
}  # fmt: skip


def record_of(plane: Plane) -> Path:
    """The file in which the tensor server of a registry on this machine writes who and where it is."""
    return plane.folder.parent / "store.json"


def mark_of(key: bytes) -> str:
    """A digest by which two keys of tensor servers differ; it does not give the key away."""
    return hmac.digest(key, b"tensor server", "sha256").hex()[:16]


def own_store(plane: Plane) -> str:
    """``address:port`` of the tensor server of this machine, started if need be; empty where no engine has others.

    Raises NotReachable when it does not start.
    """
    known = directory.current()
    if known is None or not known.host:  # a master has no versions of its own
        return ""
    now_s = SystemClock().monotonic_s()
    if _own.pid == os.getpid() and _own.folder == plane.folder and now_s < _own.until_s:
        return _own.store
    store = _running(plane, known)
    if not store:
        with file_locks.locked(plane.folder.parent / "store.lock"):
            store = _running(plane, known) or _start(plane, known)
    if known.stores().get(known.host) != store:
        known.register(store)
    _own.pid, _own.folder, _own.store, _own.until_s = os.getpid(), plane.folder, store, now_s + _LOOK_S
    return store


@dataclass(slots=True)
class _Own:
    """The tensor server of this machine as last looked at by this process."""

    pid: int = 0
    folder: Path | None = None
    store: str = ""
    until_s: float = 0.0


_own: Final = _Own()


def _running(plane: Plane, known: Directory) -> str:
    """Where the tensor server of this machine listens; empty when none runs that has the key of the installation."""
    found = _recorded(plane)
    ours = bool(found) and found.get("key") == mark_of(known.key())
    return str(found["address"]) if ours and process.is_alive(_id(found)) else ""


def _recorded(plane: Plane) -> Fields:
    try:
        found: Fields = json.loads(record_of(plane).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def _id(found: Fields) -> process.ProcessId:
    return process.ProcessId(pid=found["pid"], start_time=found["start_time"])


def _start(plane: Plane, known: Directory) -> str:
    if found := _recorded(plane):  # with the key of an engine before this one: no other machine can talk to it
        process.stop(_id(found), grace_s=_START_S)
    record_of(plane).unlink(missing_ok=True)
    home = environ.Home.of(plane.home)
    log = home.run / f"tensors-{process.machine_id()}.log"
    url = plane.address.url if environ.get(environ.REDIS_URL) else None
    # It belongs to no instance, and outlives the process that needed it first.
    unset = dict.fromkeys(("ROTA_TENSORS_DIE_AT", "ROTA_ENGINE", environ.JOB, environ.INSTANCE, environ.EPOCH))
    command = (sys.executable, "-m", "rota.tensors.server", str(home.root), known.host, known.address)
    what = process.Spawn(command=command, env={**unset, environ.REDIS_URL: url}, log=log, input=True)
    child = process.spawn(what, name="tensors")
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as sink:
        sink.write(f"{known.key().hex()}\n".encode())
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + _START_S
    while not (store := _running(plane, known)):
        if child.poll() or clock.monotonic_s() > deadline_s:
            hint = f"its log is {log}"
            raise NotReachable(f"the tensor server of {known.host} does not start at {known.address}", hint=hint)
        blocking_sleep(_POLL_S)
    child.wait()  # it is a grandchild
    return store


@dataclass(slots=True)
class _Links:
    """Idle connections of this process to tensor servers, by address, with the time since when each is idle.

    A thread closes what was idle for ``_IDLE_S``, before the other side does: who is done with a machine keeps nothing.
    """

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: dict[str, list[tuple[float, socket.socket]]] = field(
        default_factory=dict[str, list[tuple[float, socket.socket]]]
    )
    closes: bool = False

    def take(self, store: str) -> socket.socket | None:
        """An idle connection; None when a new one must be made."""
        self._check_process()
        with self.lock:
            found = self.idle.get(store, [])
            while found:
                _, link = found.pop()
                if not _has_ended(link):
                    return link
                link.close()
            self.idle.pop(store, None)
        return None

    def give(self, store: str, link: socket.socket) -> None:
        """Keep a connection on which nothing is under way."""
        self._check_process()
        with self.lock:
            found = self.idle.setdefault(store, [])
            if len(found) >= _IDLE_MAX:
                link.close()
                return
            found.append((SystemClock().monotonic_s(), link))
            if not self.closes:
                self.closes = True
                threading.Thread(target=self._close_idle, name="tensor-links", daemon=True).start()

    def _check_process(self) -> None:
        if self.pid != os.getpid():  # a forked child: the connections are its parent's, which has the thread too
            self.pid, self.lock, self.idle, self.closes = os.getpid(), threading.Lock(), {}, False

    def _close_idle(self) -> None:
        """Until none is idle any more."""
        while True:
            blocking_sleep(_IDLE_S / 4)
            until_s = SystemClock().monotonic_s() - _IDLE_S
            with self.lock:
                for store, found in tuple(self.idle.items()):
                    for _, link in [one for one in found if one[0] <= until_s or _has_ended(one[1])]:
                        link.close()
                    self.idle[store] = [one for one in found if one[1].fileno() >= 0]
                    if not self.idle[store]:
                        del self.idle[store]
                if not self.idle:
                    self.closes = False
                    return


def _has_ended(link: socket.socket) -> bool:
    """Whether the other side closed an idle connection, or sent what was not asked for."""
    try:
        link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


_links: Final = _Links()


def _connect(store: str) -> socket.socket:
    """A new connection after the handshake. Raises OSError, NotReachable."""
    known = directory.current()
    if known is None:
        raise NotReachable("this process was started by no engine, and knows no key of other machines")
    host, _, port = store.rpartition(":")
    link = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    with undone_if_raised(link.close):
        link.settimeout(None)
        client_handshake_blocking(link, known.key(), messages.PURPOSE)
        messages.limit_silence(link)
    return link


def _exchange(store: str, request: Fields) -> tuple[socket.socket, Fields]:
    """Send a request; the connection, and the first message of the answer. Raises OSError, NotReachable.

    A connection that was idle may have ended meanwhile: then once more over a new one.
    """
    message = messages.pack(request)
    link = _links.take(store)
    if link is not None:
        try:
            link.sendall(message)
            return link, messages.receive(link)
        except OSError:
            link.close()
    link = _connect(store)
    with undone_if_raised(link.close):
        link.sendall(message)
        return link, messages.receive(link)


def ask(store: str, request: Fields) -> Fields:
    """One request that is answered by a message alone. Raises OSError, NotReachable, and what the other side raised."""
    link, reply = _exchange(store, request)
    _links.give(store, link)
    return _accepted(store, reply)


def _accepted(store: str, reply: Fields) -> Fields:
    if reply.get("ok"):
        return reply
    kind = _REMOTE.get(str(reply.get("error")), errors.TensorError)
    raise kind(f"{reply.get('text')} (at the tensor server {store})")


def pull(
    plane: Plane,
    name: str,
    *,
    step: int | None = None,
    min_step: int | None = None,
    epoch_min: int = 0,
    near: str = "",
    wait_s: float = WAIT_S,
    as_: str = "torch",
) -> Snapshot:
    """A version of a name or group from here or, if it is not here, from another machine; then it is here too.

    It is the one of exactly ``step``, one of at least ``min_step``, or the current one, of ``epoch_min`` or later.
    ``near`` is the host, or the ``address:port`` of a tensor server, to ask first; ``wait_s`` the longest time in which
    no byte of it comes. Raises WaitTimeout when no machine has it, TransferFailed when the one that has it does not
    answer (the message says what each said), else what reading and publishing raise.
    """
    known = directory.current()
    if known is None:
        found = plane.get_group(name, step=step, min_step=min_step, wait_s=wait_s, as_=as_)
        if found.epoch < epoch_min:
            raise errors.VersionGone(f"{name}: step {found.step} is of epoch {found.epoch}, not {epoch_min}", name=name)
        return found
    fetch = _Fetch(plane, name, step=step, min_step=min_step, epoch_min=epoch_min, near=near, wait_s=wait_s)

    least = step if min_step is None else min_step

    def look(limit_s: float) -> Snapshot | None:
        cached = plane._reader.find_cached((name, as_, plane._reader.sealed, "group"))
        if not limit_s and cached is not None and least is not None and cached.step < least:
            return None  # what this process read last is still the newest here
        found = None
        # With no wait at all a get would look for similar names, for its error: too long for a question.
        with contextlib.suppress(errors.WaitTimeout):
            try:
                found = plane.get_group(name, step=step, min_step=min_step, wait_s=limit_s or _NO_WAIT_S, as_=as_)
            except errors.VersionGone:
                fetch.aside = True
                found = plane.get_group(_aside(name, step), step=step, wait_s=_NO_WAIT_S, as_=as_)
        return found if found is not None and found.epoch >= epoch_min else None

    return elected(plane, name, look, lambda left_s: fetch.run(known, left_s), wait_s)


def elected(
    plane: Plane,
    name: str,
    look: Callable[[float], Snapshot | None],
    bring: Callable[[float], None],
    wait_s: float,
) -> Snapshot:
    """What ``look(wait_s)`` finds here, after one process of this machine has called ``bring(wait_s)`` for all.

    When that one dies, the next calls it, for the kernel frees its lock. Raises WaitTimeout, and what ``bring`` raises.
    """
    path = _lock_of(plane, name)
    seen = _last_brought(path)
    if (found := look(0.0)) is not None:
        return found
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, environ.PRIVATE_FILE)
    clock = SystemClock()
    until_s = clock.monotonic_s() + wait_s
    try:
        while True:
            if file_locks.try_lock(fd):
                try:
                    before, seen = seen, _last_brought(path)
                    if seen == before or (found := look(0.0)) is None:
                        bring(max(0.0, until_s - clock.monotonic_s()))
                        now_ns = int(clock.wall_s() * 1e9)
                        os.utime(fd, ns=(now_ns, max(now_ns, seen + 1)))
                finally:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                found = found or look(0.0)
            else:
                found = look(_TURN_S)
            if found is not None:
                return found
            if clock.monotonic_s() > until_s and file_locks.try_lock(fd):
                raise errors.WaitTimeout(f"{name}: not here after {wait_s:g} s", name=name)
    finally:
        os.close(fd)


def is_coming(plane: Plane, name: str) -> bool:
    """Whether a process of this machine fetches a version of the name now (or of one that shares its lock)."""
    try:
        fd = os.open(_lock_of(plane, name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not file_locks.try_lock(fd)
    finally:
        os.close(fd)


def _lock_of(plane: Plane, name: str) -> Path:
    return plane.folder / f"pull-{zlib.crc32(name.encode()) % _LOCKS}.lock"


def _last_brought(lock: Path) -> int:
    """Another number than before when a process has brought something under this lock meanwhile."""
    try:
        return lock.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def replicate(plane: Plane, group: str, host: str, *, step: int, epoch: int = 0, wait_s: float = WAIT_S) -> None:
    """Let machine ``host`` have step ``step`` of a group, which this machine has; returns when it is whole there.

    Raises NotFound when the directory knows no tensor server of that host, OSError and TensorError when it fails.
    """
    own = own_store(plane)
    _bring(plane, _store_of(host), group, step, epoch, own, wait_s)


def bring(plane: Plane, group: str, *, step: int, epoch: int = 0, near: str = "", wait_s: float = WAIT_S) -> None:
    """Let the tensor server of this machine fetch step ``step`` of a group from machine ``near``, or find it here.

    Unlike with ``pull``, the version may be of an epoch that is over for this process. Raises as ``replicate`` does.
    """
    if (own := own_store(plane)) == "":
        raise errors.NotFound("this machine has no tensor server", hint="it has one in a job of an engine")
    # The server knows no directory: an address, or nothing if only this machine can have it.
    _bring(plane, own, group, step, epoch, _store_of(near) if near else "", wait_s)


def _store_of(host: str) -> str:
    """``address:port`` of the tensor server of a machine. Raises NotFound when the directory knows none."""
    known = directory.current()
    store = (known.stores().get(host) or known.stores(fresh=True).get(host)) if known is not None else None
    if store is None:
        raise errors.NotFound(f"host {host} has no tensor server", hint="it starts with the first instance there")
    return store


def _bring(plane: Plane, store: str, group: str, step: int, epoch: int, near: str, wait_s: float) -> None:
    request = {"op": "bring", "name": group, "step": step, "epoch_min": epoch, "near": near, "wait_s": wait_s}
    clock = SystemClock()
    until_s = clock.monotonic_s() + _BRING_MAX_S
    while ask(store, {**request, "namespace": plane.namespace}).get("coming"):
        # the other side answers every second, and fails when no byte comes for wait_s
        if clock.monotonic_s() > until_s:
            text = f"{group}: step {step} is still on its way to the tensor server {store} after {_BRING_MAX_S:g} s"
            raise errors.TransferFailed(text, name=group)


def delete(plane: Plane, names: Sequence[tuple[str, str]]) -> None:
    """Delete names, each given with the tensor server of the machine that made it (empty: this one), wherever they
    were sent to. What cannot be reached goes when its label is dropped.
    """
    by_store: dict[str, list[str]] = {}
    for name, store in names:
        by_store.setdefault(store, []).append(name)
    for store, found in by_store.items():
        if store:  # it knows where they were sent to as long as it has them
            notify(store, {"op": "delete", "namespace": plane.namespace, "names": found})
        for name in found:
            plane.delete(name, missing_ok=True)


def everywhere(request: Fields, namespace: str = DEFAULT_NAMESPACE) -> tuple[str, ...]:
    """Send a request to the tensor server of every other machine; the hosts of those that did not do it."""
    known = directory.current()
    if known is None:
        return ()
    stores = known.stores(fresh=True).items()
    asked = {**request, "namespace": namespace}
    return tuple(host for host, store in stores if host != known.host and not notify(store, asked))


_silent: Final = dict[str, float]()
"""Tensor servers that did not answer, and until when they are not asked to delete anything."""


def notify(store: str, request: Fields) -> bool:
    """Ask for something whose loss does no harm, True if it is done; one that is silent is left alone for a while."""
    now_s = SystemClock().monotonic_s()
    if _silent.get(store, 0.0) > now_s:
        return False
    _silent.pop(store, None)
    try:
        ask(store, request)
    except errors.TensorError:
        return False
    except (OSError, NotReachable):
        _silent[store] = now_s + _SILENT_S
        return False
    return True


def _aside(name: str, step: int | None) -> str:
    """Where a step is kept that came after a newer one, which the name itself cannot take any more."""
    return f"{name}/@{step}"


class _Fetch:
    """One version that is wanted from another machine."""

    def __init__(
        self, plane: Plane, name: str, *, step: int | None, min_step: int | None, epoch_min: int, near: str,
        wait_s: float,
    ) -> None:  # fmt: skip
        self._plane, self._name, self._step = plane, name, step
        self._select = selector_of(step=step, min_step=min_step)
        self._epoch_min, self._near, self._wait_s = epoch_min, near, wait_s
        self._clock = SystemClock()
        self._failed: list[str] = []
        self._said: dict[str, str] = {}
        self._moved_s = 0.0
        self._transfer: _Transfer | None = None
        self.aside = False
        """The name itself has something newer here already."""

    def run(self, known: Directory, left_s: float) -> None:
        """Ask until the version is here. Raises WaitTimeout, TransferFailed; then nothing of it is left here."""
        own = own_store(self._plane)
        self._moved_s, pause_s = self._clock.monotonic_s() - (self._wait_s - left_s), _PAUSE_S[0]
        try:
            while True:
                for index, store in enumerate(self._stores(known, own)):
                    if self._try(store, own, 0.0 if index else _REMOTE_WAIT_S):
                        return
                if self._clock.monotonic_s() - self._moved_s > self._wait_s:
                    raise self._error()
                blocking_sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])
        finally:
            if self._transfer is not None:
                self._transfer.abort()
                self._transfer = None

    def _stores(self, known: Directory, own: str) -> list[str]:
        """Whom to ask, in order: the one said to have it, then all others."""
        stores = known.stores(fresh=bool(self._said))
        first = stores.get(self._near, self._near if ":" in self._near else "")
        found = dict.fromkeys([first, *stores.values()])
        return [store for store in found if store not in ("", own)]

    def _try(self, store: str, own: str, wait_s: float) -> bool:
        """Ask one tensor server, and those to which it sends; True when the version is here. Notes what went wrong."""
        where = store
        while True:
            request = {
                "op": "get", "namespace": self._plane.namespace, "name": self._name, "select": self._select,
                "epoch_min": self._epoch_min, "to": own, "failed": self._failed,
                "wait_s": wait_s if where == store else _REMOTE_WAIT_S,
                "resume": self._transfer.mark if self._transfer is not None else None, "sent_here": where != store,
            }  # fmt: skip
            try:
                link, reply = _exchange(where, request)
                try:
                    onward = where if _accepted(where, reply).get("coming") else str(reply.get("redirect", ""))
                    if not onward:
                        self._receive(link, reply)
                        _say_done(link)
                except BaseException as error:
                    _end(where, link, whole=isinstance(error, errors.TensorError) and not reply.get("ok"))
                    raise
                _links.give(where, link)
                if not onward:
                    return True
                if onward == where:  # it is on its way there, and whoever fetches it there is alive
                    self._progressed()
                where = onward
                continue
            except errors.PublishRefused:
                # A process of this machine published something newer while it came: it is what is wanted, or beside it.
                if self.aside or self._transfer is None:
                    raise
                self._transfer.abort()
                self._transfer, self.aside = None, self._step is not None
                return not self.aside
            except errors.TensorError as error:
                if error.code not in _NOT_THERE:
                    raise
                self._said[where] = str(error)
            except (OSError, NotReachable) as error:
                self._said[where] = f"{where}: {error or type(error).__name__}"
            if where == store:
                return False
            self._failed.append(where)  # and back to the one that sent us there
            where = store

    def _receive(self, link: socket.socket, reply: Fields) -> None:
        """Take in what is announced and publish it. Raises OSError, after which the rest may follow."""
        if self._transfer is not None and not reply["resumed"]:
            self._transfer.abort()
            self._transfer = None
        if self._transfer is None:
            name = _aside(self._name, self._step) if self.aside else self._name
            self._transfer = _Transfer(self._plane, name, reply, self._progressed)
        self._transfer.receive(link)
        self._transfer.publish()
        self._transfer = None

    def _progressed(self) -> None:
        self._moved_s = self._clock.monotonic_s()

    def _error(self) -> errors.TensorError:
        said = "; ".join(self._said.values()) or "no other machine has a tensor server"
        text = f"{self._name}: not here, and no byte of it came for {self._wait_s:g} s: {said}"
        if self._transfer is not None:
            return errors.TransferFailed(text, name=self._name)
        return errors.WaitTimeout(text, name=self._name)


def _say_done(link: socket.socket) -> None:
    """Say that all of a version is here: the other side ends its lease. A loss of this has no consequence here."""
    with contextlib.suppress(OSError):
        link.sendall(messages.pack({"done": True}))


def _end(store: str, link: socket.socket, *, whole: bool) -> None:
    """Keep a connection whose answer was read whole, close any other."""
    if whole:
        _links.give(store, link)
    else:
        link.close()


class _Transfer:
    """One version on its way here: reserved blocks, and how far they are filled."""

    def __init__(self, plane: Plane, name: str, reply: Fields, progressed: Callable[[], None]) -> None:
        self._writer, self._segments = plane._session.writer, plane._session.space.segments
        self._progressed = progressed
        self.mark = {"serial": str(reply["serial"]), "version": int(reply["version"]), "part": 0, "at": 0}
        self._pending: list[Pending] = []
        self._fresh: list[bool] = []
        order_of = [int(reply["epoch"]), int(reply["step"])]
        with undone_if_raised(self.abort):
            for manifest, _, rank, world in reply["parts"]:
                self._reserve(name, json.loads(manifest), (int(rank), int(world)), order_of, bool(reply["group"]))

    def _reserve(self, name: str, facts: Fields, part: tuple[int, int], order_of: list[int], group: bool) -> None:
        """A block that is laid out as the one that is sent: the same tensors at the same places of the payload."""
        order = PublishOrder(label=facts["label"], epoch=order_of[0], step=order_of[1], copied=True)
        life = Life(orphan="keep", retain=facts["retain"], evictable=facts["evictable"], part=part)
        rows = [(key if group else name, dtype, tuple(shape)) for key, dtype, shape, *_ in facts["tensors"]]
        draft = lay_out(rows, order, life, facts["meta"])
        pending = self._writer.reserve(name, "g" if group else "t", draft, order, life)
        self._pending.append(pending)
        self._fresh.append(not self._segments.is_open(pending.reserved.seg))

    def receive(self, link: socket.socket) -> None:
        """Fill the blocks from where the last connection broke. Raises OSError."""
        for index in range(self.mark["part"], len(self._pending)):
            pending = self._pending[index]
            segment = self._segments.open(pending.reserved.seg)
            start = pending.reserved.offset + pending.draft.start
            fresh = segment.map if self._fresh[index] else None
            target = memoryview(segment.map)[start : start + pending.draft.payload]

            def ready(at: int, size: int, memory: mmap.mmap | None = fresh, start: int = start) -> None:
                failpoint("receiving")
                if memory is not None:
                    messages.populate(memory, start + at, size)

            def done(at: int) -> None:
                self.mark["at"] = at
                self._progressed()

            messages.receive_payload(link, target, int(self.mark["at"]), ready, done)
            self.mark["part"], self.mark["at"] = index + 1, 0
        self._progressed()

    def publish(self) -> None:
        """Make it visible here."""
        failpoint("received")
        while self._pending:
            self._writer.commit(self._pending[0])
            self._pending.pop(0)

    def abort(self) -> None:
        """Free the blocks."""
        while self._pending:
            self._writer.abort(self._pending.pop())
