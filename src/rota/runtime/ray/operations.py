"""Operations of the gateway in Ray: masters kept alive and watched, names listed, the remains of a job ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import grpc
import ray
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
from ray.exceptions import RayError

from rota.runtime import process
from rota.runtime.clock import backoff, blocking_sleep
from rota.runtime.environ import INSTALLATION, Home
from rota.runtime.execute import ExecResult
from rota.runtime.launcher import (
    Call,
    CallTimeout,
    Handle,
    ProcessGone,
    RemoteError,
    handle_of,
    instance_name,
    master_name,
)
from rota.runtime.probe import ANSWER_S, LOOK_S, SILENT_LOOKS, HangWatch, end_hung, master_part, note_replaced
from rota.runtime.ray import machines
from rota.runtime.ray.agent import Agents, end_agents
from rota.runtime.ray.client import (
    EXECUTE_EXTRA_S,
    FoundDocument,
    MachinesDocument,
    MasterDocument,
    ProcessDocument,
    SweptDocument,
)
from rota.runtime.ray.directory import RayDirectory, key_of_job
from rota.runtime.ray.engine import HOST_LABEL, EngineState, host_selector
from rota.runtime.ray.launcher import MasterStart, RayLauncher
from rota.runtime.ray.machines import Machines, RayNode, ask_machine
from rota.runtime.ray.pairs import check_machines
from rota.spec.codec import JsonObject
from rota.spec.errors import EngineUnavailable, RotaError
from rota.spec.ids import Epoch, InstanceId, JobId, RoleName
from rota.spec.measured import CheckFacts, MachineUsage

_BACKOFF_S = (0.2, 5.0)
_START_S = 60.0
_STATUS_S = 1.0
_WHY_S = 15.0
"""Stacks are taken meanwhile: of a process that does not answer, from outside."""


_LOOK_THERE_S = 60.0
"""Limit of a look at a process of another machine: a process is started for it there, and looks for ten seconds."""

WARM_PAUSE_S = (3.0, 30.0)
"""Between two looks: first, and at most. The first is long enough for a job that took processes to be up by itself."""
_PRESTART_S = 10.0
_WARM_KEPT_S = 365 * 86_400
"""Time for which the raylet does not end an idle process by itself."""
_IDLE, _STARTING = "ray::IDLE", "default_worker.py"


def connect(address: str, namespace: str) -> GatewayOps:
    """Connect this process to the engine; its environment must be set already. Blocks. Raises ConnectionError."""
    ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    return GatewayOps(namespace)


class GatewayOps:
    """One method an operation; arguments and results are JSON."""

    def __init__(self, namespace: str) -> None:
        self._run = Home.find().run
        """Where it is noted what was replaced."""
        self._launcher = RayLauncher(namespace, watches=False)
        self._directory = RayDirectory(namespace, "", "")
        self._warm: asyncio.Task[None] | None = None
        self._kept = dict[JobId, asyncio.Task[None]]()
        self._watched = dict[JobId, asyncio.Task[None]]()
        self._locks = WeakValueDictionary[JobId, asyncio.Lock]()
        """One start of a master at a time; a lock is gone with the last who uses it."""
        home = Home.find()
        self._agents = Agents(namespace, home)
        ask = partial(ask_machine, home=str(home.root), installation=self._agents.installation)
        self.machines = Machines(ask)

    async def nodes(self, holder: str) -> MachinesDocument:
        """``nodes``: the machines of the engine with what each said it has; ``alive``: the names of all that live.

        They are those of this installation from now on, but for those that another one has.
        """
        rows = await asyncio.to_thread(ray.nodes)
        named = [row["NodeID"] for row in rows if row["Alive"]]
        held = await asyncio.to_thread(machines.claim, named, self._launcher.namespace, holder)
        return await self.machines.look(rows, held)

    async def usage(self, host: str) -> MachineUsage:
        """Usage of a machine, measured there."""
        wanted = host_selector(host).items()
        rows = await asyncio.to_thread(ray.nodes)
        found = [row["NodeID"] for row in rows if row["Alive"] and wanted <= row["Labels"].items()]
        if len(found) != 1:
            raise ValueError(f"{host} is not a machine of the engine now")
        return await machines.usage_of(found[0])

    async def check_machines(self) -> CheckFacts:
        """Names, clocks, ports and bandwidth between all machines, and versions on each."""
        rows = await asyncio.to_thread(ray.nodes)
        there = {row["NodeID"]: row["Labels"].get(HOST_LABEL, "") for row in rows if row["Alive"]}
        names = {one: self.machines.name_of(one) or name or one[:8] for one, name in there.items()}
        return await check_machines(sorted((name, one) for one, name in names.items()))

    async def let_go(self) -> None:
        """The machines may be those of another installation."""
        await asyncio.to_thread(end_agents, self._launcher.namespace)
        await asyncio.to_thread(machines.let_go, self._launcher.namespace)

    def keep_warm(self, state: EngineState, count: int) -> None:
        """Keep idle processes ready for masters and instances from now on."""
        self._warm = asyncio.get_running_loop().create_task(keep_warm(state, count))

    async def ensure_master(
        self,
        job: str,
        target: str,
        args: Mapping[str, object],
        env: Mapping[str, str],
        log_path: str,
        here: bool = False,
    ) -> MasterDocument:
        """Start the master or find it alive; from now on start it again whenever it is dead for good."""
        key = await asyncio.to_thread(key_of_job, self._directory, JobId(job))
        wanted = MasterStart(job=JobId(job), target=target, args=args, env=env, log_path=log_path, here=here, key=key)
        if env.get(INSTALLATION):
            await self._agents.serve()
        lock = self._locks.setdefault(wanted.job, asyncio.Lock())
        loop = asyncio.get_running_loop()
        async with lock:
            if wanted.job not in self._watched:  # one that is there already may hang, and would hold up the start
                self._watched[wanted.job] = loop.create_task(self._watch(wanted.job))
            handle = await self._start(wanted)
            if wanted.job not in self._kept:
                self._kept[wanted.job] = loop.create_task(self._keep(wanted))
        return {"name": handle.name, "pid": handle.pid, "start_time": handle.start_time}

    async def _start(self, wanted: MasterStart) -> Handle:
        return await self._launcher.start_master(wanted, avoid=self.machines.unusable, timeout_s=_START_S)

    async def _keep(self, wanted: MasterStart) -> None:
        pauses = backoff(*_BACKOFF_S)
        while True:
            cause = await self._launcher.wait_end(master_name(wanted.job))
            await asyncio.sleep(next(pauses))
            try:
                await self._start(wanted)
                pauses = backoff(*_BACKOFF_S)
            except Exception as error:  # noqa: BLE001 - a constructor may raise anything; it is tried again, more slowly
                _say(f"master of {wanted.job} ended ({cause}) and does not start: {type(error).__name__}: {error}")

    async def _watch(self, job: JobId) -> None:
        """End a master that hangs, also while it starts; Ray starts it again, as after any other death."""
        looks = HangWatch()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look(job, looks)
            except Exception as error:  # noqa: BLE001 - whatever Ray raises while the engine or the master is away
                _say(f"the {master_part(job)} is looked at later: {type(error).__name__}: {error}")

    async def _look(self, job: JobId, looks: HangWatch) -> None:
        part, answers, which = master_part(job), await self._answers(job), looks.which
        if which is None or not process.is_alive(which):
            pid, node = await self._launcher.place_of(master_name(job))
            if node != ray.get_runtime_context().get_node_id():
                if pid and not answers and (why := await _end_if_hung_there(node, pid)):
                    note_replaced(self._run, part, pid, why)
                    _say(f"the {part}, process {pid}, {why}: it is started again")
                return
            which = process.identify(pid)
        if which is not None and (why := looks.look(which, answers=answers)) and end_hung(which, self._run, part, why):
            _say(f"the {part}, process {which.pid}, {why}: it is started again")

    async def _answers(self, job: JobId) -> bool:
        """True when the loop of the master turns."""
        try:
            await self._launcher.call(_master(job), Call(method="ping", timeout_s=ANSWER_S, control=True))
        except (ProcessGone, CallTimeout):
            return False
        return True

    async def find(self, job: str) -> FoundDocument:
        """Master, instances and reservations of a job."""
        found = await self._launcher.find(JobId(job))
        master = await self._launcher.find_one(master_name(JobId(job)))
        return {
            "master": None if master is None else _plain(master),
            "instances": [_plain(handle) for handle in found.instances],
            "reservations": [asdict(reservation) for reservation in found.reservations],
        }

    async def master_status(self, job: str) -> JsonObject | None:
        """What the master says of its job and of the last beat of each instance; None while it does not answer."""
        return await self._ask_master(job, "status", _STATUS_S)

    async def master_why(self, job: str) -> JsonObject | None:
        """The wait-for graph of the job, with the stacks of the culprits; None while the master does not answer."""
        return await self._ask_master(job, "why", _WHY_S)

    async def execute(self, job: str, role: str, rank: int, argv: list[str], timeout_s: float) -> ExecResult | None:
        """Run a command beside an instance; None when that does not run, or no more."""
        found = await self._newest(job, role, rank)
        return None if found is None else await self._ask_instance(found, "execute", [argv, timeout_s], timeout_s)

    async def terminal(
        self, job: str, role: str, rank: int, epoch: int, method: str, head: list[object], timeout_s: float
    ) -> list[object] | None:
        """Epoch and answer of a method of an instance about its terminals, by its epoch, or 0 for the newest.

        None when that does not run.
        """
        instance = InstanceId(RoleName(role), rank)
        given = handle_of(instance_name(JobId(job), instance, Epoch(epoch))) if epoch else None
        found = given or await self._newest(job, role, rank)
        answer = None if found is None else await self._ask_instance(found, method, head, timeout_s)
        return None if found is None or answer is None else [int(found.epoch or 0), answer]

    async def _newest(self, job: str, role: str, rank: int) -> Handle | None:
        names = [name for name in await self._launcher.list_names() if name.startswith(f"{job}/{role}/{rank}/")]
        return max(map(handle_of, names), key=lambda one: one.epoch, default=None)

    async def _ask_instance(self, to: Handle, method: str, head: list[object], timeout_s: float) -> Any:
        limit_s = timeout_s + EXECUTE_EXTRA_S
        try:
            return await self._launcher.call(to, Call(method=method, head=tuple(head), timeout_s=limit_s, control=True))
        except ProcessGone:
            return None

    async def list_files(self, host: str, job: str, area: str, path: str, after: str) -> JsonObject:
        """Files of a job on another machine: ``value`` as ``JobFiles.listed`` gives it, or ``error``."""
        return _answered(await self._ask_agent(host, "listed", job, area, path, after))

    async def read_file(self, host: str, job: str, area: str, path: str, offset: int, count: int) -> JsonObject:
        """A range of a file of a job on another machine: ``value`` in base64, or ``error``."""
        found = _answered(await self._ask_agent(host, "read", job, area, path, offset, count))
        return {name: base64.b64encode(value).decode() if name == "value" else value for name, value in found.items()}

    async def _ask_agent(self, node: str, method: str, *args: object) -> object:
        try:
            return await self._agents.ask(node, self.machines.host_of(node), method, *args)
        except EngineUnavailable as error:  # the engine is there: the refusal is of this machine alone
            return error

    async def _ask_master(self, job: str, method: str, timeout_s: float) -> JsonObject | None:
        try:
            return await self._launcher.call(_master(job), Call(method=method, timeout_s=timeout_s, control=True))
        except (ProcessGone, CallTimeout, RemoteError):
            return None

    async def kill_master(self, job: str) -> None:
        """End the master and stop keeping it."""
        await self._let_go(JobId(job))
        await self._launcher.stop(_master(job), grace_s=0.0)

    async def sweep(self, job: str, grace_s: float = 0.0, give_back: str = "") -> SweptDocument:
        """End everything of a job: the master first, so that it starts nothing meanwhile.

        ``give_back`` frees what the job left on machines that did not answer at its end, see ``Agent.give_back``.
        """
        await self.kill_master(job)
        found = await self._launcher.find(JobId(job))
        await asyncio.gather(*(self._launcher.stop(handle, grace_s=grace_s) for handle in found.instances))
        await asyncio.gather(*(self._launcher.release(reservation) for reservation in found.reservations))
        left = await asyncio.to_thread(self._directory.left) if give_back else set[tuple[str, JobId]]()
        await asyncio.gather(*(self._ask_back(of, host, give_back) for host, of in left if of == job))
        return {
            "instances": [handle.name for handle in found.instances],
            "reservations": [reservation.name for reservation in found.reservations],
        }

    async def _ask_back(self, job: JobId, host: str, target: str) -> None:
        try:
            await self._agents.ask(host, host, "give_back", job, target)
            await asyncio.to_thread(self._directory.settle, host, job)
        except EngineUnavailable as error:  # it is asked again at the next sweep
            _say(f"tensors of {job} are still on {host}: {error.message}")

    async def list_jobs(self) -> list[str]:
        """Jobs of which an actor or a reservation exists, or tensors on a machine that did not answer at their end."""
        names, reservations, left = await asyncio.gather(
            self._launcher.list_names(), self._launcher.list_reservations(), asyncio.to_thread(self._directory.left)
        )
        return sorted(
            {name.partition("/")[0] for name in names}
            | {str(each.job) for each in reservations}
            | {job for _, job in left}
        )

    async def close(self) -> None:
        """Keep no master any more; everything in the engine stays."""
        if self._warm is not None:
            self._warm.cancel()
            await asyncio.gather(self._warm, return_exceptions=True)
        for job in (*self._kept, *self._watched):
            await self._let_go(job)
        await self._launcher.close()

    async def _let_go(self, job: JobId) -> None:
        tasks = [task for tasks in (self._kept, self._watched) if (task := tasks.pop(job, None)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end_if_hung_there(node: str, pid: int) -> str:
    """Look at a process of another machine, from there; why it was ended, empty while it is busy or nothing answers."""
    try:
        return str(await machines.ask_node(node, _LOOK_THERE_S, _end_if_hung, pid))
    except (TimeoutError, RayError):
        return ""


@ray.remote(num_cpus=0, max_retries=0)
def _end_if_hung(pid: int) -> str:
    """Ten looks at a silent process of this machine; one that hangs is ended."""
    if (which := process.identify(pid)) is None:
        return ""
    looks = HangWatch()
    for _ in range(SILENT_LOOKS + 1):
        if why := looks.look(which, answers=False):
            process.send_signal(which, signal.SIGKILL)
            return why
        blocking_sleep(LOOK_S)
    return ""


def _master(job: str) -> Handle:
    return handle_of(master_name(JobId(job)))


def _plain(handle: Handle) -> ProcessDocument:
    return {
        "name": handle.name,
        "role": handle.instance.role,
        "rank": handle.instance.rank,
        "epoch": handle.epoch,
        "node": handle.node,
        "pid": handle.pid,
        "start_time": handle.start_time,
    }


def _answered(answer: object) -> JsonObject:
    """What an agent gave, or the error that it refuses the request with."""
    if not isinstance(answer, RotaError):
        return {"value": answer}
    return {"error": {"code": answer.code, "text": answer.message, "hint": answer.hint}}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the log of the gateway


async def keep_warm(state: EngineState, count: int) -> None:
    """Keep ``count`` idle processes under the raylet while it lives. To be run by a driver of that engine.

    None is added while others start, which need the cores; what does not come is asked for ever more seldom.
    """
    pauses = backoff(*WARM_PAUSE_S)
    while process.is_alive(state.raylet):
        enough = await warm_up(state, count)
        await asyncio.sleep(next(pauses))
        pauses = backoff(*WARM_PAUSE_S) if enough else pauses


async def warm_up(state: EngineState, count: int) -> bool:
    """Ask for as many processes as are missing, unless some start; True when none is missing."""
    commands = [process.command_line(pid) for pid in process.children_of(state.raylet.pid)]
    missing = count - sum(command.startswith(_IDLE) for command in commands)
    if missing > 0 and not any(_STARTING in command for command in commands):
        with contextlib.suppress(
            grpc.RpcError, RayError, OSError
        ):  # the raylet is busy, or on its way out: asked again
            await asyncio.to_thread(_prestart, state, missing)
    return missing <= 0


def _prestart(state: EngineState, count: int) -> None:
    """Ask the raylet of this node for processes; it answers before they are there."""
    nodes: list[RayNode] = [one for one in ray.nodes() if one["Alive"] and one["NodeID"] == _own_node()]
    if not nodes:
        return  # not known as alive yet, or no more: asked again
    node = nodes[0]
    languages: Any = common_pb2
    proto: Any = node_manager_pb2
    request = proto.PrestartWorkersRequest(
        language=languages.Language.Value("PYTHON"),
        num_workers=count,
        keep_alive_duration_secs=_WARM_KEPT_S,
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
    )
    token = Path(state.token_path).read_text().strip()
    with grpc.insecure_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        stub: Any = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(request, timeout=_PRESTART_S, metadata=(("authorization", f"Bearer {token}"),))


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())
