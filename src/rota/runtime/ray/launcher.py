"""Launcher on Ray: gangs as placement groups, instances as detached named actors, calls to them, and their deaths.

An actor has the name of its instance or master, in the namespace ``rota/<install>``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray._private import state
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rota.runtime import environ, process
from rota.runtime.clock import backoff
from rota.runtime.handshake import KEY_BYTES
from rota.runtime.launcher import (
    Call,
    CallTimeout,
    Found,
    Handle,
    InstanceSpec,
    NotPicklable,
    ProcessGone,
    Reservation,
    ReserveFailed,
    RuntimeEvent,
    handle_of,
    master_name,
    reservation_of,
)
from rota.runtime.node import NODE_ADDRESS
from rota.runtime.process import ProcessId
from rota.runtime.ray.deaths import DeathWatch, cause_of_death, names_dead_node
from rota.runtime.ray.engine import NODE_ID_LABEL, host_selector
from rota.runtime.ray.host import (
    CONTROL_CALLS_MAX,
    NAMESPACE_VARIABLE,
    USER_CALLS_MAX,
    Begun,
    Boot,
    Host,
    Raised,
    own_key,
)
from rota.runtime.ray.machines import hosts
from rota.runtime.socket_calls import CallClient, ConnectionLost, first_line
from rota.spec.codec import JsonObject
from rota.spec.gang import BundleGrant
from rota.spec.ids import JobId
from rota.spec.user_code import UserCode

T = TypeVar("T")

CPUS_MIN = 0.001
"""Ray takes no empty bundle; one whose instances ask for no core holds this much of one."""
_RELEASE_S = 10.0
_MASTER_RETRY_S = (0.05, 0.5)
_MASTER_AWAY_S = 1800.0
"""Longest time without a master for a call that has no limit of its own."""
_GONE_S = 5.0
_FIND_S = 3.0
_POLL_S = 0.05
_UNPLACED_POLL_S = 1.0
_BLOCKING_THREADS_MAX = 32


_as_actor: Any = ray.remote
_REMOTE_HOST = _as_actor(concurrency_groups={"control": CONTROL_CALLS_MAX, "user": USER_CALLS_MAX})(Host)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterStart:
    """How to start a master: its target, arguments, environment and log, like those of an InstanceSpec."""

    job: JobId
    target: str
    args: Mapping[str, object]
    env: Mapping[str, str]
    workdir: str = ""
    log_path: str = ""
    key: bytes = field(repr=False)
    """From which the keys of its instances are derived; every master of a job has the same one (``key_of_job``)."""
    here: bool = False
    """On this machine alone, where its log is a file."""


class RayLauncher:
    """The Launcher on Ray. Without ``watches`` it has no ``events``: for who only starts masters and ends remains.

    ``key`` is that of this process: an instance proves with it that it belongs to its job, and a master derives the
    keys of its instances from it, one for each attempt. It travels as an argument of the actor, and is kept nowhere.

    ``call`` may be used from any event loop of the process; ``events`` and what feeds it belong to the loop in which
    ``start`` and ``find`` are awaited.
    """

    def __init__(self, namespace: str, *, watches: bool = True, key: bytes = b"") -> None:
        self.namespace = namespace
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._here = os.environ.get(NODE_ADDRESS, "")
        self._watching = watches
        self._actors = dict[str, Any]()
        self._sockets = CallClient(fallback=cloudpickle.dumps)  # pyright: ignore[reportPrivateImportUsage] - public
        self._groups = RayGroups(namespace)
        self._deaths = DeathWatch(self.wait_end)
        self._threads = ThreadPoolExecutor(_BLOCKING_THREADS_MAX, thread_name_prefix="ray-launcher")

    @staticmethod
    def here() -> RayLauncher:
        """The launcher inside an instance or master, in the namespace of its host. Raises KeyError elsewhere."""
        return RayLauncher(os.environ[NAMESPACE_VARIABLE], key=own_key())

    async def reserve(
        self, reservation: Reservation, bundles: Sequence[BundleGrant], *, timeout_s: float
    ) -> Reservation:
        """See Launcher. A group that is not granted in time is removed again."""
        if not await self._blocking(lambda: self._groups.ask(reservation.name, bundles, timeout_s)):
            await self.release(reservation)
            where = ", ".join(sorted({bundle.host for bundle in bundles}))
            raise ReserveFailed(f"{reservation.name}: {len(bundles)} bundles on {where} not granted in {timeout_s:g} s")
        return reservation

    async def release(self, reservation: Reservation) -> None:
        """See Launcher. Processes still in it are ended by Ray."""
        await self._blocking(lambda: self._groups.release(reservation.name))

    async def start(self, spec: InstanceSpec, *, timeout_s: float) -> Handle:
        """See Launcher."""
        group = await self._blocking(lambda: self._groups.find(spec.reservation))
        if group is None:
            raise ProcessGone(f"{spec.name}: the engine lost reservation {spec.reservation}", started=False)
        attempt = spec.env.get("ROTA_ATTEMPT", "1")
        boot = Boot(
            name=spec.name,
            namespace=self.namespace,
            target=spec.target,
            args=spec.args,
            env={environ.HOME: str(environ.Home.find().root), **spec.env},  # a given engine knows nothing of ours
            devices=spec.devices,
            cpus=spec.res.cpus,
            workdir=spec.workdir,
            imports=spec.imports,
            log_path=spec.log_path,
            label=f"{attempt}/{spec.epoch}",
            node=spec.node,
            key=hmac.digest(self._key, f"calls of {spec.job} in attempt {attempt}".encode(), "sha256"),
            installation=environ.get(environ.INSTALLATION),
            packages=spec.packages,
            limits={
                "memory": spec.res.memory_bytes,
                "processes": spec.limits.processes,
                "files": spec.limits.files,
                "disk": spec.limits.disk_bytes,
            },
        )
        place = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=spec.bundle, placement_group_capture_child_tasks=False
        )
        options = {"num_cpus": spec.res.cpus, "scheduling_strategy": place, "max_restarts": 0}
        begins = asyncio.ensure_future(self._begin(boot, options, timeout_s))
        unplaced = asyncio.ensure_future(self._until_unplaced(spec.reservation, spec.bundle))
        try:
            await asyncio.wait({begins, unplaced}, return_when=asyncio.FIRST_COMPLETED)
            if begins.done():
                return self._handle(spec.name, begins.result())
        finally:
            begins.cancel()
            unplaced.cancel()
        raise ProcessGone(f"{spec.name}: its node in {spec.reservation} is gone", node_died=True)

    async def _until_unplaced(self, reservation: str, bundle: int) -> None:
        """Until the node of a bundle is gone: Ray would wait for it for ever, and whoever starts there with it."""
        await asyncio.sleep(_UNPLACED_POLL_S)
        while await self._blocking(lambda: self._groups.is_placed(reservation, bundle)):
            await asyncio.sleep(_UNPLACED_POLL_S)

    async def start_master(self, start: MasterStart, *, timeout_s: float, avoid: Sequence[str] = ()) -> Handle:
        """Start the master of a job, or return the living one; Ray starts it again whenever its process dies.

        It starts on this node where ``start.here`` says so, and never on the nodes ``avoid`` (Ray's ids). Those alone
        are named, not the good ones: a master whose good ones are all gone must still start on one that came later.
        """
        boot = Boot(
            name=master_name(start.job),
            namespace=self.namespace,
            target=start.target,
            args=start.args,
            env=start.env,
            workdir=start.workdir,
            log_path=start.log_path,
            restarts=True,
            key=start.key,
        )
        options: dict[str, object] = {"num_cpus": 0, "max_restarts": -1}
        if start.here:
            own = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(own, soft=False)
        elif avoid:
            options["label_selector"] = {NODE_ID_LABEL: f"!in({','.join(avoid)})"}
        begun = await self._begin(boot, options, timeout_s)
        return self._handle(boot.name, begun)

    async def _begin(self, boot: Boot, options: Mapping[str, object], timeout_s: float) -> Begun:
        deadline = time.monotonic() + timeout_s
        actor = await self._blocking(lambda: self._create(boot, options))
        try:
            begun: Begun = await _answer(actor.born.remote(), deadline - time.monotonic())
        except CallTimeout:
            await self._kill(actor)
            raise CallTimeout(f"{boot.name} did not start within {timeout_s:g} s") from None
        except RayError as error:
            text = f"{boot.name} ended while it started: {cause_of_death(error)}"
            raise ProcessGone(text, node_died=names_dead_node(text)) from error
        if begun.failure is not None:
            await self._kill(actor)
            await self._wait_gone(ProcessId(pid=begun.pid, start_time=begun.start_time))
            raise _rebuilt(begun.failure)
        self._actors[boot.name] = actor
        return begun

    def _create(self, boot: Boot, options: Mapping[str, object]) -> Any:
        return _REMOTE_HOST.options(
            name=boot.name,
            namespace=self.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_task_retries=0,
            **options,
        ).remote(boot)

    def _handle(self, name: str, begun: Begun) -> Handle:
        handle = handle_of(
            name,
            pid=begun.pid,
            start_time=begun.start_time,
            node=begun.node,
            address=begun.address,
            breach=begun.breach,
        )
        if self._watching and name != master_name(handle.job):
            self._deaths.watch(handle)
        return handle

    async def find(self, job: JobId) -> Found:
        """See Launcher. The master is not among the instances. A stopped process is found by Ray's table."""
        groups = await self._blocking(lambda: self._groups.names(f"{job}/"))
        names = [name for name in await self.list_names() if name.startswith(f"{job}/") and name != master_name(job)]
        handles = await asyncio.gather(*(self.find_one(name) for name in names))
        return Found(
            reservations=tuple(reservation_of(name) for name in groups),
            instances=tuple(handle for handle in handles if handle is not None),
            hosts=await self._blocking(hosts),
        )

    async def list_names(self) -> tuple[str, ...]:
        """Names of all actors of the namespace that are not dead, sorted."""
        rows: list[Any] = await self._blocking(lambda: ray.util.list_named_actors(all_namespaces=True))
        return tuple(sorted(row["name"] for row in rows if row["namespace"] == self.namespace))

    async def list_reservations(self) -> tuple[Reservation, ...]:
        """All reservations of the namespace, sorted by name."""
        return tuple(reservation_of(name) for name in (await self._blocking(lambda: self._groups.names(""))))

    async def find_one(self, name: str) -> Handle | None:
        """The living process of that name, instance or master, or None. Raises Ray's error when the engine is away.

        One that cannot be reached just now is not gone: Ray's table decides, as for one that is stopped.
        """
        try:
            actor = await self._lookup(name)
        except ProcessGone:
            return None
        try:
            begun: Begun = await _answer(actor.begin.remote(), _FIND_S)
        except (CallTimeout, ActorUnavailableError):
            return await self._blocking(lambda: _from_table(name, actor))
        except (RayActorError, OutOfMemoryError):
            return None
        return self._handle(name, begun)

    async def place_of(self, name: str) -> tuple[int, str]:
        """The pid of a living process and Ray's id of its node, by Ray's table; 0 and empty when there is none."""
        try:
            actor = await self._lookup(name)
        except ProcessGone:
            return 0, ""
        row = await self._blocking(lambda: state.actors(actor._actor_id.hex()))
        alive = bool(row) and row.get("State") == "ALIVE"
        return (int(row["Pid"]), str(row["Address"]["NodeID"])) if alive else (0, "")

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        """See Launcher. Works for a master too, which is then not started again."""
        try:
            actor = await self._lookup(handle.name)
        except ProcessGone:
            return
        known = handle if handle.pid else await self.find_one(handle.name)
        which = None if known is None else ProcessId(pid=known.pid, start_time=known.start_time)
        if which is not None and process.is_stopped(which):  # it can neither say goodbye nor obey Ray
            process.send_signal(which, signal.SIGKILL)
        elif grace_s > 0:
            with contextlib.suppress(CallTimeout, RayActorError, OutOfMemoryError):  # deaf, or gone already: force it
                await _answer(actor.end.remote(), grace_s)
        await self._kill(actor)
        if which is not None:
            await self._wait_gone(which)
        await self._wait_unnamed(handle.name)

    async def _kill(self, actor: Any) -> None:
        await self._blocking(lambda: ray.kill(actor, no_restart=True))

    async def _wait_gone(self, known: ProcessId) -> None:
        """Ray ends a process within a second; one that hangs in the kernel's hands or stopped gets SIGKILL by pid."""
        if await self._blocking(lambda: process.wait_gone((known,), _GONE_S / 2)):
            await self._blocking(lambda: process.stop(known, grace_s=0, kill_s=_GONE_S))

    async def _wait_unnamed(self, name: str) -> None:
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline:
            if await self._blocking(lambda: _find_actor(name, self.namespace)) is None:
                self._actors.pop(name, None)
                return
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"{name} still has its name {_GONE_S:g} s after it was killed")

    async def call(self, to: Handle, call: Call) -> Any:
        """See Launcher. Calls of users go over a socket; those of control and to masters through the engine.

        A handle needs no more than a name, and the address of a process on another machine.
        """
        if to.name.endswith("/master"):
            return await self._call_master(to.name, call)
        if not call.control:
            return await self._ask(to, call)
        try:
            return await self._send(to.name, call)
        except ActorUnavailableError as error:
            raise ProcessGone(f"{to.name} cannot be reached: {error}") from error

    def hang_up(self, handle: Handle) -> None:
        """See Launcher."""
        self._sockets.hang_up(f"{self.namespace}/{handle.name}")

    async def _ask(self, to: Handle, call: Call) -> object:
        """Call a process over its socket."""
        name, left_s = f"{self.namespace}/{to.name}", call.timeout_s
        try:
            connection = self._sockets.ready(name)
            if connection is None:
                began_s = time.monotonic()
                async with asyncio.timeout(left_s):
                    connection = await self._sockets.find(name, self._address(to), self._key)
                left_s = None if left_s is None else max(0.0, left_s - (time.monotonic() - began_s))
            if connection is None:
                raise ProcessGone(f"process {to.name} was not found", started=False)
            answer = await connection.call(([call.method, *call.head], call.args, call.kwargs), left_s)
        except TimeoutError:
            raise CallTimeout(f"{to.name}.{call.method} gave no answer within {call.timeout_s} s") from None
        except ConnectionLost as error:
            text = f"{to.name} is gone: {error}" if error.gone else f"{to.name}: {error}"
            raise ProcessGone(text, unsure=error.unsure) from None
        if isinstance(answer, Raised):
            raise _rebuilt(answer)
        return answer

    def _address(self, to: Handle) -> str:
        """Where to call a process over TCP; empty for one of this machine, or of which no address is known."""
        host = to.address.rpartition(":")[0]
        return to.address if host and self._here and host != self._here else ""

    async def _call_master(self, name: str, call: Call) -> object:
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        pauses = backoff(*_MASTER_RETRY_S)
        until_s = deadline or time.monotonic() + _MASTER_AWAY_S
        while True:
            sent_s = time.monotonic()
            try:
                return await self._send(name, call, deadline)
            except (ProcessGone, ActorUnavailableError) as error:
                now_s = time.monotonic()
                if deadline is None and now_s - sent_s > _FIND_S:  # a master had the call, and died meanwhile
                    until_s = now_s + _MASTER_AWAY_S
                if until_s - now_s <= (pause_s := next(pauses)):
                    limit_s = _MASTER_AWAY_S if deadline is None else call.timeout_s
                    raise CallTimeout(f"{name} gave no answer within {limit_s} s: {error}") from error
                await asyncio.sleep(pause_s)

    async def _send(self, name: str, call: Call, deadline: float | None = None) -> object:
        actor = self._actors.get(name) or await self._lookup(name)
        method = actor.control if call.control else actor.user
        timeout_s = call.timeout_s if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            answer = await _answer(_sent(method, call), timeout_s)
        except CallTimeout:
            raise CallTimeout(f"{name}.{call.method} gave no answer within {call.timeout_s} s") from None
        except (ActorDiedError, OutOfMemoryError, ObjectLostError) as error:
            self._actors.pop(name, None)
            raise ProcessGone(f"{name} is gone: {cause_of_death(error)}") from error
        except RayTaskError as error:  # what the method itself raised comes as Raised
            raise NotPicklable(first_line(error.cause), answer=True) from None
        if isinstance(answer, Raised):
            raise _rebuilt(answer)
        return answer

    async def _lookup(self, name: str) -> Any:
        if name not in self._actors:
            actor = await self._blocking(lambda: _find_actor(name, self.namespace))
            if actor is None:
                raise ProcessGone(f"{name} was not found on the engine: it ended, or never started", started=False)
            self._actors[name] = actor
        return self._actors[name]

    def events(self, job: JobId) -> AsyncIterator[RuntimeEvent]:
        """See Launcher."""
        return self._deaths.events(job)

    async def wait_end(self, name: str) -> str:
        """Wait until the process of that name is gone for good; returns how it ended.

        One pending call that never answers; its failure is the news. An unreachable actor, or a master that Ray is
        starting again, is asked again.
        """
        while True:
            try:
                actor = await self._lookup(name)
                await _answer(actor.until_end.remote(), None)
            except ProcessGone as error:
                return str(error)
            except ActorUnavailableError:
                await asyncio.sleep(_POLL_S)
            except (RayActorError, OutOfMemoryError) as error:
                self._actors.pop(name, None)
                return cause_of_death(error)

    async def close(self) -> None:
        """Stop watching; processes and reservations stay."""
        await self._deaths.close()
        self._sockets.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _blocking(self, work: Callable[[], T]) -> T:
        """Ray's own calls to the GCS block, for minutes while it is away: never in an event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class RayGroups:
    """The placement groups of one namespace; remembers those it asked for or found."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._known = dict[str, PlacementGroup]()

    def ask(self, name: str, bundles: Sequence[BundleGrant], timeout_s: float) -> bool:
        """Ask for a group unless it exists, and wait; False when it is not granted in time (it stays asked for).

        The label of its host pins each bundle; Ray decides nothing.
        """
        group = self._look_up(name) or placement_group(
            [{"CPU": max(bundle.res.cpus, CPUS_MIN)} for bundle in bundles],
            strategy="PACK",
            name=f"{self._namespace}/{name}",
            lifetime="detached",
            bundle_label_selector=[host_selector(bundle.host) for bundle in bundles],
        )
        granted = group.wait(timeout_s)
        if granted:
            self._known[name] = group
        return granted

    def find(self, name: str) -> PlacementGroup | None:
        """A group by name, from memory if known: a start must not read the table of the whole engine."""
        if name not in self._known and (found := self._look_up(name)) is not None:
            self._known[name] = found
        return self._known.get(name)

    def is_placed(self, name: str, bundle: int) -> bool:
        """False when the node of a bundle is gone: Ray looks for another one, which the label of the host forbids."""
        group = self.find(name)
        table: JsonObject = placement_group_table(group) if group else {}
        return table.get("state") != "RESCHEDULING" or bool(table["bundles_to_node_id"].get(bundle))

    def names(self, prefix: str) -> tuple[str, ...]:
        """Names with the prefix of all groups that are not removed, granted or not, sorted."""
        return tuple(sorted(self._table(prefix)))

    def release(self, name: str) -> None:
        """Remove a group; harmless if there is none. Raises TimeoutError when Ray does not do it within 10 s."""
        self._known.pop(name, None)
        deadline = time.monotonic() + _RELEASE_S
        if (group := self._look_up(name)) is None:
            return
        remove_placement_group(group)
        while self._look_up(name) is not None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is still reserved {_RELEASE_S:g} s after its release")
            time.sleep(_POLL_S)

    def _look_up(self, name: str) -> PlacementGroup | None:
        return self._table(name).get(name)

    def _table(self, prefix: str) -> dict[str, PlacementGroup]:
        start = f"{self._namespace}/{prefix}"
        table: dict[str, JsonObject] = placement_group_table()
        return {
            row["name"].removeprefix(f"{self._namespace}/"): PlacementGroup(
                ray.PlacementGroupID.from_hex(row["placement_group_id"])
            )
            for row in table.values()
            if row["name"].startswith(start) and row["state"] != "REMOVED"
        }


def _sent(method: Any, call: Call) -> Any:
    """The Ray reference of a call that was sent. Raises NotPicklable, or Ray's error."""
    with UserCode() as pickling:
        # One by one, not as a Call: Ray passes plain bytes, texts and lists on without pickling them.
        return method.remote([call.method, *call.head], *call.args, **call.kwargs)
    error = pickling.take()
    raise error if isinstance(error, RayError) else NotPicklable(first_line(error.__cause__ or error), answer=False)


async def _answer(ref: Any, timeout_s: float | None) -> Any:
    """The value of a Ray reference, awaited without CPU. Raises CallTimeout, or Ray's error.

    An answer that came in time counts also when the waiting loop was held up until after the limit.
    """
    loop, answered = asyncio.get_running_loop(), ref.future()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    answered.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(wake))
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    try:
        await woken
    finally:
        if timer is not None:
            timer.cancel()
    if not answered.done():
        raise CallTimeout(f"no answer within {timeout_s} s")
    return answered.result()


def _rebuilt(answer: Raised) -> BaseException:
    error = answer.error
    if not getattr(error, "trace", ""):
        error.add_note(answer.traceback)
    return error


def _find_actor(name: str, namespace: str) -> Any:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    except (RayError, RaySystemError) as error:
        raise ActorUnavailableError(f"{name}: the engine does not answer: {error}", None) from error


def _from_table(name: str, actor: Any) -> Handle | None:
    row = state.actors(actor._actor_id.hex())
    pid = int(row.get("Pid", 0)) if row and row.get("State") == "ALIVE" else 0
    start_time = process.start_time_of(pid) if pid else None
    return None if start_time is None else handle_of(name, pid=pid, start_time=start_time, node="")
