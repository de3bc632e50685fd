"""Session of a process in a namespace, from joining to leaving: client file, the end of leases, housekeeping, forks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rota.runtime import environ, process
from rota.runtime.clock import Clock
from rota.runtime.random import RandomSource
from rota.runtime.redis import server as redis_server
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, RegistryUnavailable, TensorError
from rota.tensors.core import EPOCH_MAX, Fields, check_label, count_of
from rota.tensors.devices.client import Devices
from rota.tensors.errors import failpoint
from rota.tensors.generation import GenerationTable
from rota.tensors.leases import Leases
from rota.tensors.locks import (
    KEEPER_MARK,
    ClientFile,
    LockFile,
    clients_in,
    is_alive,
    make_fork_hold,
    read_file,
    shared,
)
from rota.tensors.namespace import Namespace, sweep_client, sweep_dead, sweep_unfiled
from rota.tensors.reader import TensorReader
from rota.tensors.records import Rings
from rota.tensors.recovery import Recovered, read_notes, rebuild, write_note
from rota.tensors.registry import RedisMachine, Registry, ScriptRefused
from rota.tensors.segments import Segments, Spill, remove_file
from rota.tensors.writer import Copier, TensorWriter, threads_wanted

SHM_DIR: Final = "ROTA_SHM_DIR"
CHECK: Final = "ROTA_TENSORS_CHECK"
_TICK_BUSY_S: Final = 0.005
_TICK_IDLE_S: Final = 0.02
_AGE_S: Final = 0.04
_LINGER_S: Final = 1.0
_SWEEP_S: Final = 0.25
_TRIM_S: Final = 5.0
_TRIM_IDLE_MS: Final = 30_000
_JITTER: Final = 0.2
_LEAVE_S: Final = 10.0
_HOME_MARK: Final = "home"


def shm_root(address_url: str) -> Path:
    """Where the segments of one registry's namespaces lie: ``ROTA_SHM_DIR``, else a private folder of ``/dev/shm``."""
    return shm_base() / hashlib.sha256(address_url.encode()).hexdigest()[:12]


def shm_base() -> Path:
    """The folder of all registries' segments; it is made with the first one. Raises BadInput for a relative one."""
    base = Path(environ.get(SHM_DIR, f"/dev/shm/rota-{os.getuid()}"))
    if not base.is_absolute():
        raise BadInput(f"{SHM_DIR}={str(base)!r}: an absolute folder, the same for all who share")
    return base


def own_label() -> str:
    """Who this process publishes as: ``job/role/rank`` inside an instance, else nothing. Raises BadInput."""
    return check_label("/".join(word for word in (environ.get(environ.JOB), environ.get(environ.INSTANCE)) if word))


def own_epoch() -> int:
    """The epoch this process publishes at: its instance's, else 0. Raises BadInput."""
    return count_of(environ.EPOCH, environ.get(environ.EPOCH, "0"), 0, EPOCH_MAX)


def remove_root(root: Path) -> None:
    """Free all shared memory of a registry's namespaces, and what spilled from it to disk."""
    for segment in root.glob("*/seg-*"):
        remove_file(segment)
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):  # other registries of this user still have theirs beside it
        root.parent.rmdir()


def _make_private(root: Path, *below: Path) -> None:
    """Make a registry's folder and those below it. Raises BadInput when they belong to another user."""
    for path in (root.parent, root, *below):
        path.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
    if root.parent.stat().st_uid not in (0, os.getuid()) or root.stat().st_uid != os.getuid():
        raise BadInput(f"{root} belongs to another user", hint=f"{SHM_DIR} names another folder")
    root.chmod(environ.PRIVATE_DIR)  # not the folder it lies in: that may be /dev/shm itself


def is_last(home: environ.Home, server: redis_server.Server, own: str) -> bool:
    """True when a server goes with the client ``own``: ours, not kept, no other living client, no pin anywhere."""
    running = redis_server.find_running(home) if server.ours else None
    if running is None or running.kept or running.address != server.address:
        return False
    for clients in shm_root(server.address.url).glob("*/c"):
        others = [client for client in clients_in(clients) if client != own and not client.startswith(KEEPER_MARK)]
        if read_notes(clients.parent)["pins"] or any(is_alive(clients, client) for client in others):
            return False
    return True


def end_keepers(root: Path) -> None:
    """End the keepers of a registry's devices; their memory goes with them."""
    for folder in root.glob("*/c"):
        for client in [each for each in clients_in(folder) if each.startswith(KEEPER_MARK)]:
            facts = read_file(folder, client)[0]
            if facts and is_alive(folder, client):
                process.stop(process.ProcessId(pid=facts["pid"], start_time=facts["start_time"]), grace_s=_LEAVE_S)


def remove_vanished(root: Path) -> list[Path]:
    """Remove what registries of vanished homes left beside ``root``: the home is gone, and no client lives there."""
    gone: list[Path] = []
    for other in [path for path in root.parent.iterdir() if path != root and (path / _HOME_MARK).is_file()]:
        clients = [(folder, client) for folder in other.glob("*/c") for client in clients_in(folder)]
        if not Path((other / _HOME_MARK).read_text()).exists() and not any(is_alive(*each) for each in clients):
            remove_root(other)
            gone.append(other)
    return gone


class Session:
    """One process in one namespace, from join to leave."""

    def __init__(
        self,
        home: environ.Home,
        server: redis_server.Server,
        namespace: str,
        *,
        clock: Clock,
        random_source: RandomSource,
        sealed: bool,
        url: str = "",
        keeper: bool = False,
    ) -> None:
        self.home, self.server, self.clock, self._random, self._url = home, server, clock, random_source, url
        self.pid, self.label, self.epoch = os.getpid(), own_label(), own_epoch()
        self._copier = Copier(threads_wanted())
        self.root = shm_root(server.address.url)
        folder = self.root / namespace
        _make_private(self.root, folder, folder / "c")
        if server.ours and _text_of(self.root / _HOME_MARK) != str(home.root):
            process.write_private(self.root / _HOME_MARK, str(home.root))
        _wipe_after_reboot(folder)
        silent = redis_server.StoppedServer(home) if server.ours else None
        self.machine = RedisMachine(server.address, namespace, clock, silent=silent)
        segments = Segments(folder, Spill.of(folder))
        if segments.spill is not None:
            segments.spill.sweep()
        table = shared(folder / "gen", GenerationTable, lambda path: GenerationTable(path, clock))
        self._sweeper = shared(folder / "sweeper.lock", LockFile, LockFile)
        self._recover = shared(folder / "recover.lock", LockFile, LockFile)
        table.settle = self.machine.settle
        client = KEEPER_MARK * keeper + random_source.new_id(96)
        identity = self._identity(client)
        mirror = ClientFile(folder / "c", client, identity)  # last of what a full file system refuses
        failpoint("joining")
        leases = Leases(segments, mirror)
        self.space = Namespace(
            namespace=namespace, folder=folder, client=client, clock=clock, registry=Registry(self.machine),
            table=table, segments=segments, leases=leases, file=mirror, rejoin=self.rejoin,
            identity=identity,
        )  # fmt: skip
        check = environ.get(CHECK) == "1"
        self.reader = TensorReader(self.space, sealed=sealed, check=check)
        self.writer = TensorWriter(self.space, self._copier, check=check)
        self.rings = Rings(self.space, self.reader, self.writer, check=check)
        self._recover_gate = threading.RLock()  # taken before the registry's lock, by all threads alike
        self._release_gate = threading.Lock()
        self._unsent: list[tuple[int, int, int]] = []
        self._gone = threading.Event()
        self.failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._forks = 0
        self._fork_fds: list[int] = []
        with undone_if_raised(mirror.close):
            self.space.retry(self.rejoin)

    def start(self) -> None:
        """Start the housekeeping thread."""
        name = f"rota-tensors-{self.space.namespace}"
        self._thread = threading.Thread(target=self._keep_house, name=name, daemon=True)
        self._thread.start()
        _sessions.add(self)

    def rejoin(self) -> None:
        """Reach the registry, rebuild it if it is lost, and say which leases this process has. One at a time."""
        with self._recover_gate:
            try:
                epoch, folder = self.machine.find_epoch()
            except RegistryUnavailable:
                self._restart_server()
                epoch, folder = 0, ""
            self._check_folder(folder)
            if epoch == 0 or epoch != self.space.table.epoch:
                with self._recover.locked():
                    epoch, folder = self.machine.find_epoch()
                    if epoch == 0 or epoch != self.space.table.epoch:
                        self._check_folder(folder)
                        rebuild(self.space, self.machine)
            self.machine.epoch = self.space.table.epoch
            if not self.machine.knows(self.space.client):
                self._join()

    def _check_folder(self, known: str) -> None:
        """Raise RegistryUnavailable when the namespace has its memory elsewhere: a rebuild from the files that this
        process sees would make the registry forget every name."""
        folder, url = self.space.folder, self.machine.client.address.url
        if known and known != str(folder) and Path(known).exists():
            text = (
                f"tensor registry at {url}: namespace {self.space.namespace} has its memory in {known}, not in {folder}"
            )
            hint = f"set {SHM_DIR}={Path(known).parent.parent}, the same for all who share, or call rota.tensors.down()"
            raise RegistryUnavailable(text, hint=hint)
        if not self.space.table.is_current():
            text = f"tensor registry at {url}: the memory of namespace {self.space.namespace} was removed meanwhile"
            raise RegistryUnavailable(text, hint="close this client, then call connect() again")

    def keep_server(self) -> None:
        """Let a server of the home outlive its last client from now on."""
        if self.server.ours and not self.server.kept:
            with redis_server.registry_lock(self.home):
                if redis_server.find_running(self.home) is not None:
                    self.server = redis_server.find_or_start(self.home, keep=True)

    def use_device(self, device: str) -> None:
        """Let tensors go to and come from devices; ``device`` is where puts go from now on."""
        if self.space.devices is None:
            self.space.devices = Devices(self.space.folder, self.home, self._url, device, self.clock)
        self.space.devices.use(device)

    def recover(self, *, dry_run: bool = False) -> Recovered:
        """Rebuild the registry now, lost or not; with ``dry_run`` only say what would come back."""
        self.space.check()
        with self._recover_gate, self._recover.locked():
            done = rebuild(self.space, self.machine, dry_run=dry_run)
            if not dry_run:
                self._join()
            return done

    def fence(self, label: str, epoch: int) -> int:
        """Fence a label, and note it for a loss of the registry; the fence now in force."""
        with self._recover_gate, self._recover.locked():
            write_note(self.space, "fences", label, max(epoch, read_notes(self.space.folder)["fences"].get(label, -1)))
        fence = self.space.retry(lambda: self.space.registry.fence(label, epoch))
        with self._recover_gate, self._recover.locked():
            self.space.table.fenced()
        return fence

    def pin(self, holder: str, name: str, selector: str = "") -> int:
        """Lease a version of a name (the current one) for a holder without a process, and note it.

        Raises ScriptRefused.
        """
        space = self.space
        while True:
            space.retry(lambda: space.registry.join(holder, ""))
            epoch = space.table.epoch
            try:
                version = space.retry(lambda: space.registry.get(holder, 1, [(name, selector)]))[0].version
            except ScriptRefused:
                self.unpin(holder)
                raise
            failpoint("pinned")
            with self._recover_gate, self._recover.locked():
                if space.table.epoch == epoch:  # else the registry was rebuilt, and knew nothing of this lease
                    write_note(space, "pins", holder, version)
                    return version

    def unpin(self, holder: str) -> None:
        """End a pin; harmless when it ended before."""
        with self._recover_gate, self._recover.locked():
            write_note(self.space, "pins", holder, None)
        self.space.retry(lambda: sweep_client(self.space, holder))

    def release_ended(self) -> int:
        """Report leases whose views died to the registry; how many. What fails now is reported next time: a lease that
        stays noted in the client's file comes back with a rebuilt registry, and would never end.
        """
        self.rings.settle()
        with self._release_gate:
            ended, devices = self.space.leases.take_ended(), self.space.devices
            self._unsent += devices.settle(ended) if devices is not None else ended
            sent = self._unsent
            if sent:
                failpoint("releasing")
                for _, _, place in (each for each in sent if not each[1]):
                    self.space.file.clear(place)
                sent = self._unsent = [each for each in sent if each[1]]
                try:
                    if sent:
                        self.space.registry.release(self.space.client, [(version, seq) for version, seq, _ in sent])
                except ScriptRefused:  # a new epoch: joining again states the leases that are left
                    self.rejoin()
                failpoint("released")
                self._unsent = []
                for *_, place in sent:
                    self.space.file.clear(place)
            return len(ended)

    def sweep(self) -> list[str]:
        """Undo what dead clients had, unless another process is doing so; the clients swept."""
        with self._sweeper.tried() as mine:
            if not mine:
                return []
            swept = self.space.retry(lambda: sweep_dead(self.space) + sweep_unfiled(self.space))
            self.space.reap()
            return swept

    def close(self, *, at_exit: bool) -> None:
        """Leave. Views that still live keep their leases, and this client, until the last of them dies or the exit."""
        if self.pid != os.getpid() or self._gone.is_set():
            return
        self.reader.forget()
        self.rings.close()
        self.space.closed = True
        if at_exit or not self._thread:
            self._leave()
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout=0 if self._busy() else _LEAVE_S)

    def _busy(self) -> bool:
        with contextlib.suppress(TensorError, RegistryUnavailable, ScriptRefused):
            self.release_ended()
        return len(self.space.leases) > 0

    def _leave(self) -> None:
        if self._gone.is_set():
            return
        self._gone.set()
        _sessions.discard(self)
        locked = redis_server.registry_lock(self.home) if self.server.ours else contextlib.nullcontext()
        with self._recover_gate, locked:
            with contextlib.suppress(TensorError, RegistryUnavailable, ScriptRefused):
                if self.space.devices is not None:
                    self.space.devices.settle((), block=True)
                self.space.closed = False
                sweep_client(self.space, self.space.client)
            self.space.closed = True
            last = is_last(self.home, self.server, self.space.client)
            self.space.file.close()
            if last:
                redis_server.end_running(self.home)
                remove_root(self.root)
        self._copier.close()
        self.machine.client.close()

    def _join(self) -> None:
        """State all leases. Not for a client that is known: a get of another thread may be between lease and note."""
        leases = [(version, seq) for version, seq in self.space.leases.live() if seq]
        found = self.machine.client.call("HKEYS", f"{self.machine.prefix}c:{self.space.client}:o")
        self.space.registry.join(self.space.client, _line(self.space.identity), leases)
        # Another thread reported these before they were joined.
        if ended := [lease for lease in leases if not self.space.leases.has(lease[0])]:
            self.space.registry.release(self.space.client, ended)
        in_flight = self.writer.in_flight | {self.space.claims.in_flight}
        given_up = {int(word) for word in found} - in_flight  # of which a header was left
        if given_up:
            self.space.take_back_own(self.space.client, given_up)
        for version in given_up:
            self.space.registry.abort(self.space.client, version)
        failpoint("joined")

    def _restart_server(self) -> None:
        if not self.server.ours:
            raise RegistryUnavailable(f"tensor registry at {self.server.address.url} is away")
        if redis_server.was_ended(self.home):  # before the lock, whose file would make a removed home again
            raise RegistryUnavailable("the tensor registry was ended", hint="connect() starts another")
        with redis_server.registry_lock(self.home):
            if redis_server.was_ended(self.home):
                raise RegistryUnavailable("the tensor registry was ended", hint="connect() starts another")
            found = redis_server.find_or_start(self.home, keep=self.server.kept)
        if found.address != self.server.address:
            raise RegistryUnavailable(f"the registry moved to {found.address.url}", hint="connect() again")

    def _keep_house(self) -> None:
        rng = self._random.rng()
        next_age_s = next_linger_s = next_sweep_s = next_trim_s = 0.0
        while not self._gone.wait(_TICK_BUSY_S if self.space.leases.ended else _TICK_IDLE_S):
            if self.pid != os.getpid():
                return
            now_s = self.clock.monotonic_s()
            with self._noting_failures():
                self.release_ended()
                if now_s >= next_age_s:
                    linger, next_age_s = now_s >= next_linger_s, now_s + _AGE_S
                    next_linger_s = now_s + _LINGER_S if linger else next_linger_s
                    self.reader.age(linger)
                    self.rings.end_idle()
                    if linger:
                        self.space.claims.settle_idle()
                if now_s >= next_sweep_s:
                    next_sweep_s = now_s + _SWEEP_S * (1 + rng.uniform(-_JITTER, _JITTER))
                    self.sweep()
                if now_s >= next_trim_s and next_trim_s:
                    self._trim()
                next_trim_s = now_s + _TRIM_S if now_s >= next_trim_s else next_trim_s
            if self.space.closed and not len(self.space.leases):
                self._leave()

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """What fails in housekeeping is tried again at its next turn; ``failure`` keeps what was not expected."""
        try:
            yield
        except (RegistryUnavailable, ScriptRefused, TensorError, OSError):
            pass
        except Exception as error:  # noqa: BLE001  # the edge of the thread: without it leases would never end again
            self.failure = error

    def _trim(self) -> None:
        with self._sweeper.tried() as mine:
            if mine:
                self.writer.free_room(idle_ms=_TRIM_IDLE_MS)
        self.space.segments.forget_gone()
        if self.space.devices is not None:
            self.space.devices.close_unused()

    def _identity(self, client: str) -> Fields:
        own = process.own_id()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        facts = {"client": client, "pid": own.pid, "start_time": own.start_time, "boot": process.boot_id()}
        return {**facts, "pid_namespace": namespace, "label": self.label, "joined_s": self.clock.wall_s()}

    def before_fork(self) -> None:
        """Transfer the leases of this process to a hold that lives as long as the child."""
        self.rings.before_fork()
        leases = self.space.leases.live()
        if not leases or self.space.forked:
            return
        self._forks += 1
        holder, fd = make_fork_hold(self.space.clients, self.space.client, self._forks, leases)
        self._fork_fds.append(fd)
        self.space.retry(lambda: self.space.registry.hold(self.space.client, holder))

    def after_fork_in_parent(self) -> None:
        """The child alone keeps the hold."""
        while self._fork_fds:
            os.close(self._fork_fds.pop())

    def after_fork_in_child(self) -> None:
        """The connection belongs to the parent; every call of the child raises ForkedClient."""
        self.space.forked = True
        self._gone.set()
        self.reader.cache.clear()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _before_fork() -> None:
    for session in list(_sessions):
        session.before_fork()


def _after_in_parent() -> None:
    for session in list(_sessions):
        session.after_fork_in_parent()


def _after_in_child() -> None:
    for session in list(_sessions):
        session.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def _line(identity: Fields) -> str:
    """An identity as one line for the registry."""
    return " ".join(f"{key}={value}" for key, value in identity.items())


def _wipe_after_reboot(folder: Path) -> None:
    """What an earlier boot left in a folder on disk is not shared memory of this boot."""
    mark, boot = folder / "boot", process.boot_id()
    before = _text_of(mark)
    if before not in ("", boot):
        for segment in folder.glob("seg-*"):
            remove_file(segment)
        for path in [folder / "gen", *(folder / "c").iterdir(), *folder.glob("k/*")]:
            path.unlink(missing_ok=True)
    if before != boot:
        process.write_private(mark, boot)


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
