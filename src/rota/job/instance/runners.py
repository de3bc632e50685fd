"""Runners: the protocol of what an instance runs, its context and process group, and the runner of a plain function."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import inspect
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rota.job.health.heartbeat import QUIET_MAX_S, ProgressMarks
from rota.job.health.preflight import NodeUnfit, collective, findings_for, pairwise, slow_text
from rota.job.inspect import import_target
from rota.job.place import JobPlace, checkpoint_dir
from rota.job.rpc.client import RpcClient
from rota.job.rpc.dispatch import coordinates
from rota.job.rpc.peers import master_handle
from rota.runtime.clock import Clock, SystemClock
from rota.runtime.environ import NODE, Home, export, get, snapshot
from rota.runtime.event_loop import EventLoopThread
from rota.runtime.launcher import Call, CallTimeout, Launcher, ProcessGone
from rota.runtime.node import NODE_ADDRESS, accelerator, group_backend
from rota.spec.errors import BadInput
from rota.spec.ids import Epoch, InstanceId
from rota.spec.job import JobSpec, RoleSpec


@dataclass(kw_only=True)
class InstanceContext:
    """Given to ``setup(ctx)`` of a workload and to a plain function workload.

    ``mesh`` maps axis to size, ``coords`` axis to this instance's place on it. ``restored`` is what ``@op.state``
    returned at commit ``committed``, None at the start of a job. ``devices`` are the device indices it may use,
    ``seed`` that of the job. ``node`` is the name of its machine in ``rota nodes``, ``address`` where other machines
    reach it; the loopback address where it is alone. Folders exist; ``work_dir`` is this instance's own, the others
    belong to the job.
    """

    job: str
    role: str
    rank: int
    world_size: int
    mesh: Mapping[str, int]
    coords: Mapping[str, int]
    epoch: int
    committed: int
    seed: int
    devices: tuple[int, ...]
    env: Mapping[str, str]
    output_dir: Path
    work_dir: Path
    checkpoint_dir: Path
    node: str = ""
    address: str = "127.0.0.1"
    restored: Any = None
    marks: ProgressMarks = field(default_factory=lambda: ProgressMarks(SystemClock()), repr=False)
    make_group: Callable[[], Any] | None = field(default=None, repr=False)

    def process_group(self) -> Any:
        """Initialise ``torch.distributed`` for the mesh of this instance and return the default group.

        Gloo, and where torch sees devices the backend of their family for tensors on them (NCCL for CUDA). The
        rendezvous belongs to this epoch: after a recovery every member makes a new one. Calling it again returns the
        same group. Raises RuntimeError outside an instance.
        """
        if self.make_group is None:
            raise RuntimeError("process_group() needs an instance that runs in a job")
        return self.make_group()

    def progress(self, n: float | None = None, unit: str = "steps") -> None:
        """Mark progress, ``n`` being how far it is; limits on silence count from here."""
        self.marks.mark(n, unit)

    def quiet(self, why: str, max_s: float = QUIET_MAX_S) -> AbstractContextManager[None]:
        """Declare a legal silence: ``with ctx.quiet("checkpoint", max_s=600):``."""
        return self.marks.quiet(why, max_s)

    def waiting(self, target: str, what: str = "") -> AbstractContextManager[None]:
        """Say that this code waits for ``target`` (``role/rank``, or any name) over a channel of its own.

        ``with ctx.waiting("rollout/0", "my socket"):`` makes the wait an edge of the graph that ``rota why`` shows.
        """
        return self.marks.waiting.on(target, "declared", what)

    def log(self, message: str) -> None:
        """One line in the log of this instance; the log adds the time."""
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """What stays the same for an instance through all its epochs."""

    place: JobPlace
    spec: JobSpec
    role: RoleSpec
    id: InstanceId
    attempt: int
    devices: tuple[int, ...]
    launcher: Launcher
    clock: Clock
    marks: ProgressMarks
    rpc: RpcClient
    control: EventLoopThread
    user: EventLoopThread


def environment_of(config: InstanceConfig) -> dict[str, str]:
    """The variables of this process for what users' code starts, with those that the job names."""
    given = (*config.spec.env, *config.role.env)
    own = snapshot({*config.spec.secrets, *(name for name, _ in given)})
    return {"RAY_TMPDIR": str(ray_folder(config)), **own}


def ray_folder(config: InstanceConfig) -> Path:
    """Where a Ray that the command starts has its files. In one that jobs share, ``ray.init()`` would join the Ray of
    another job. Its sockets have at most 107 letters, so it is not in the folder of the job."""
    mark = hashlib.sha256(f"{config.place.home} {config.place.job} {config.id}".encode()).hexdigest()[:8]
    return Path(f"/tmp/rota-{mark}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One set-up of an instance: its epoch, the size of its mesh and its place in it, the commit that it restores.

    A command that still runs under an older epoch has ``grace_s`` to end.
    """

    epoch: Epoch
    world: int
    restore: int
    restarts: int = 0
    index: int = 0
    grace_s: float = 0.0
    source: str = ""
    """The machine that has the state, when the own one has not; ``source_epoch`` is the epoch of it there."""
    source_epoch: int = 0


class StillRunning(Exception):
    """Code of an older epoch does not end, and two must not run in one process: it has to be replaced."""


class Runner(Protocol):
    """The part of an instance that depends on its workload. All methods run in the control thread."""

    async def form(self, setup: Setup) -> None:
        """Set up under an epoch. Raises what user code raises."""
        ...

    async def run(self, committed: int) -> None:
        """Run a finite workload to its end. Raises what user code raises."""
        ...

    async def dissolve(self, grace_s: float) -> None:
        """Give up the present epoch: cancel what runs, leave the process group. Raises StillRunning."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End for good within ``grace_s``."""
        ...


def make_context(config: InstanceConfig, setup: Setup) -> InstanceContext:
    """What user code sees; makes the folders."""
    home = Home.of(config.place.home)
    dirs = home.job(config.place.job)
    work = dirs.work / f"{config.id.role}-{config.id.rank}"
    output = Path(config.spec.output_dir or dirs.output)
    checkpoints = Path(checkpoint_dir(config.spec, config.place))
    named = (
        (config.spec.output_dir, config.spec.checkpoint and config.spec.checkpoint.dir)
        if config.spec.run_as
        else ("", "")
    )
    for path, by_tenant in ((work, ""), (output, named[0]), (checkpoints, named[1])):
        if not by_tenant:  # what a tenant names must be there, and be its user's
            path.mkdir(parents=True, exist_ok=True)
    mesh = config.role.mesh or ((("rank", setup.world),) if setup.world > 1 else ())
    return InstanceContext(
        job=config.place.job,
        role=config.id.role,
        rank=config.id.rank,
        world_size=setup.world,
        mesh=dict(mesh),
        coords=coordinates(mesh, config.id.rank),
        epoch=setup.epoch,
        committed=setup.restore,
        seed=config.spec.seed,
        devices=config.devices,
        env=environment_of(config),
        output_dir=output,
        work_dir=work,
        checkpoint_dir=checkpoints,
        node=get(NODE),
        address=own_address(),
        marks=config.marks,
    )


class FunctionRunner:
    """A plain function of one InstanceContext (or none), run once to its end."""

    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._setup: Setup | None = None
        self._function: Callable[..., Any] | None = None

    async def form(self, setup: Setup) -> None:
        """Import the function."""
        self._setup = setup
        workload = self._config.role.workload or ""
        found = await self._config.user.do(lambda: import_target(workload))
        assert callable(found), "the interface of the role says that it is a function"
        self._function = found

    async def run(self, committed: int) -> None:
        """Call it in the user thread."""
        assert self._setup is not None and self._function is not None, "form() comes before run()"
        function, ctx = self._function, make_context(self._config, self._setup)
        args = (ctx,) if inspect.signature(function).parameters else ()
        with self._config.marks.running(function.__name__):
            value = await self._config.user.do(lambda: function(*args))
        if isinstance(value, Generator | Coroutine | AsyncGenerator):
            raise BadInput(
                f"{function.__name__} returned a {type(value).__name__}, so nothing in it has run",
                hint="let the function do its work itself, without 'yield' or 'async'",
            )

    async def dissolve(self, grace_s: float) -> None:
        """A plain function cannot be interrupted; the next epoch waits for its end, or the process is replaced."""

    async def stop(self, grace_s: float) -> None:
        """Nothing to give back."""


GROUP_TIMEOUT_S = 1800.0
"""Longest collective before torch gives up; limits on progress act long before."""
MEET_MAX_S = 240.0
RETRY_S = 0.5


class Superseded(Exception):
    """A newer epoch has begun, so this one will never be complete."""


class ProcessGroup:
    """The process group of one epoch: made on demand in the user thread, dropped from the control thread."""

    def __init__(self, config: InstanceConfig, setup: Setup) -> None:
        self._config = config
        self._setup = setup
        self._store: Any = None
        self._group: Any = None
        self._task: asyncio.Task[Any] | None = None
        self._over = False

    def make(self) -> Any:
        """Meet the other members and initialise ``torch.distributed``. Called from user code, in the user thread."""
        if self._group is not None:
            return self._group
        if self._over:
            raise Superseded(f"epoch {self._setup.epoch} of {self._config.id} is over")
        dist = importlib.import_module("torch.distributed")
        rank, world, mine = self._setup.index, self._setup.world, ""
        if rank == 0:
            self._store, mine = open_store()
        address = self._config.control.submit(self._meet(mine)).result()
        if rank != 0:
            name, _, port = address.rpartition(":")
            self._store = dist.TCPStore(name, int(port), is_master=False, use_libuv=True)
        backend = group_backend()
        dist.init_process_group(
            backend=backend,
            store=dist.PrefixStore(f"{self._config.id.role}/{self._setup.epoch}", self._store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        self._group = dist.group.WORLD
        if self._config.role.fail.check == "full":
            self._check(rank, world, accelerator() if backend != "gloo" else "cpu")
        return self._group

    def _check(self, rank: int, world: int, device: str) -> None:
        """Raises NodeUnfit in the member that is broken, or in all of them when only their sum is wrong."""
        pairs = importlib.import_module("torch.distributed").PrefixStore("pairs", self._store)
        judged = pairwise(self._group, pairs, rank, world, device)
        if found := findings_for(judged, rank, exclude=self._config.role.fail.slow == "exclude"):
            raise NodeUnfit(found)
        if rank in judged.slow:
            sys.stderr.write(f"rota: {slow_text(judged.slow[rank])}\n")
        # With a broken member a sum of all is impossible; it leaves, and everybody meets again without it.
        if not judged.faulty and (found := collective(self._group, rank, world, device)):
            raise NodeUnfit(found)

    async def _meet(self, address: str) -> str:
        self._task = asyncio.current_task()
        return await meet(self._config, self._setup, address)

    def leave(self) -> None:
        """End the group; unblocks members that wait in a collective with this one. Called from the control thread."""
        self._over = True
        if self._task is not None:
            self._task.cancel()
        if self._group is not None:
            dist = importlib.import_module("torch.distributed")
            with contextlib.suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group(self._group)
        self._group = None
        self._store = None


async def meet(config: InstanceConfig, setup: Setup, address: str) -> str:
    """Wait at the master until every member of this epoch is there; the address that rank 0 gave.

    Raises Superseded when a newer epoch has begun.
    """
    kwargs = {
        "role": config.id.role,
        "rank": config.id.rank,
        "epoch": setup.epoch,
        "world": setup.world,
        "address": address,
    }
    call = Call(method="meet", kwargs=kwargs, timeout_s=MEET_MAX_S)
    while True:  # without a master for FENCE_EXIT_S this process ends itself
        try:
            with config.marks.waiting.on("master", "meeting", f"epoch {setup.epoch}"):
                found: str | None = await config.launcher.call(master_handle(config.place.job), call)
        except (ProcessGone, CallTimeout):
            await config.clock.sleep(RETRY_S)  # the master is back within seconds; everybody comes to it again
            continue
        if found is None:
            raise Superseded(f"epoch {setup.epoch} of {config.id} is over")
        return found


def open_store() -> tuple[Any, str]:
    """A store of torch in this process and its ``host:port``. Imports torch.

    It listens on a port of its own choice before anybody hears of it: none is picked and released.
    """
    host = own_address()
    store = importlib.import_module("torch.distributed").TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def choose_ports(role: RoleSpec) -> tuple[tuple[str, str], ...]:
    """Where each port of this instance is, ``address:port``: numbers that are free now, for its program to listen at.

    They are in its environment from here on, as ``ROTA_PORT_NAME``.
    """
    host, probes = own_address(), list[socket.socket]()
    try:
        for name in role.ports:
            probes.append(socket.create_server((host, 0)))
            export(f"ROTA_PORT_{name.upper().replace('-', '_')}", str(probes[-1].getsockname()[1]))
        return tuple((name, f"{host}:{probe.getsockname()[1]}") for name, probe in zip(role.ports, probes))
    finally:
        for probe in probes:
            probe.close()


def own_address() -> str:
    """Where other members reach this process: its node's address in the engine, else the loopback address."""
    return get(NODE_ADDRESS, "127.0.0.1")
