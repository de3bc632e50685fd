"""Process of an instance: epochs, heartbeats and lease around its runner; what the launcher hosts is ``Instance``."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rota.job import checkpoint
from rota.job.core.ledger import FlowCut
from rota.job.core.progress import storage_reason
from rota.job.core.survival import has_copies
from rota.job.health.heartbeat import (
    BEAT_S,
    FENCE_EXIT_S,
    LEASE_S,
    SETTING_UP,
    Answer,
    Heartbeat,
    HeartbeatAnswer,
    ProgressMarks,
)
from rota.job.health.preflight import CHECK_MAX_S, DEVICES_EVERY_S, DeviceWatch, NodeUnfit, Unfit, compute, quick
from rota.job.health.stacks import error_summary, own_reason, own_stacks
from rota.job.inspect import import_target
from rota.job.instance import tenant
from rota.job.instance.flow import LoopRunner
from rota.job.instance.operations import ClassRunner
from rota.job.instance.runners import FunctionRunner, InstanceConfig, Runner, Setup, StillRunning, choose_ports
from rota.job.instance.spmd import CommandRunner, fetch_data, run_setup, setup_environment, unpack_image
from rota.job.place import JobPlace, checkpoint_dir
from rota.job.rpc.client import Refusal, Request, RpcClient
from rota.job.rpc.peers import PeerTable, master_handle
from rota.runtime import secrets
from rota.runtime.clock import Clock, SystemClock
from rota.runtime.environ import Home
from rota.runtime.event_loop import EventLoopThread
from rota.runtime.execute import ExecResult, execute_command
from rota.runtime.launcher import Call, CallTimeout, Launcher, ProcessGone
from rota.runtime.probe import Load
from rota.runtime.process import own_id
from rota.runtime.terminal import TerminalRead, Terminals, TerminalWritten
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, NotReachable, TensorError
from rota.spec.events import InstanceLost
from rota.spec.ids import Epoch, InstanceId
from rota.spec.job import Checkpoint, JobSpec
from rota.spec.reasons import FENCED_EXIT_STATUS, STUCK_EXIT_STATUS, Reason
from rota.spec.user_code import UserCode

BEAT_ANSWER_S = 5.0
SPANS_WRITE_MAX_S = 2.0
"""An instance that stops waits no longer than this for the disk to take its last spans."""
TEXT_MAX, TRACE_MAX = 4000, 20_000
"""Characters of a failure that go into the log of the job."""
DONE: Answer = {"answer": "done"}
STALE: Answer = {"answer": "stale"}


class Instance:
    """One instance of a role as its launcher hosts it. Every method may be called from any event loop.

    ``assemble`` sets it up under an epoch, ``run`` runs a finite workload, ``call`` one operation, ``save`` puts its
    state into shared memory; each names an epoch, and an older one is refused. All of them may be repeated.
    """

    def __init__(
        self,
        *,
        place: Mapping[str, str],
        spec: JsonObject,
        instance: str,
        epoch: int,
        attempt: int,
        devices: list[int],
    ) -> None:
        faulthandler.enable()
        self._control, self._user = EventLoopThread("control"), EventLoopThread("user")
        found = JobPlace.from_json(dict(place))
        clock = SystemClock()
        launcher = open_launcher(found)
        marks = ProgressMarks(clock)
        who = InstanceId.parse(instance)
        job_spec = JobSpec.from_json(dict(spec))
        self._started_epoch = Epoch(epoch)
        self._config = InstanceConfig(
            place=found,
            spec=job_spec,
            role=job_spec.role(who.role),
            id=who,
            attempt=attempt,
            devices=tuple(devices),
            launcher=launcher,
            clock=clock,
            marks=marks,
            rpc=RpcClient(
                job=found.job,
                spec=job_spec,
                launcher=launcher,
                clock=clock,
                caller=who,
                waiting=marks.waiting,
                home=self._control.run,
            ),
            control=self._control,
            user=self._user,
        )
        self._ports = choose_ports(self._config.role)
        self._terminals = Terminals(clock)
        self._data: int | None = None
        self._load, self._devices = Load(clock, own_id()), DeviceWatch(devices)
        self._spans_path = Home.of(found.home).job(found.job).spans / f"{who.role}-{who.rank}.jsonl"
        self._runner: Runner = self._make_runner()
        self._epoch = Epoch(0)
        self._ready = False
        self._fence = threading.Lock()
        self._loop_epoch_max = Epoch(0)
        self._failure: InstanceLost | None = None
        self._following: concurrent.futures.Future[None] | None = None
        self._setup: tuple[Epoch, asyncio.Task[Answer]] | None = None
        self._running: tuple[Epoch, asyncio.Task[Answer]] | None = None
        self._answered_s = clock.monotonic_s()
        self._imported = 0
        self._beat_now = asyncio.Event()
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "spans")
        self._start()

    def _start(self) -> None:
        self._control.submit(self._beats())
        self._control.submit(self._trace())
        if self._config.devices and self._config.role.fail.check != "none":
            self._control.submit(self._watch_devices())

    def adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run user code in the event loop in which ``call`` arrives; its host says so before anything else."""
        self._user.adopt(loop)

    def _make_runner(self) -> Runner:
        role = self._config.role
        if role.run is not None:
            return CommandRunner(self._config)
        kind = role.interface.kind if role.interface else "class"
        if kind == "class":
            return ClassRunner(self._config, self._note_failure)
        return LoopRunner(self._config) if kind == "loop" else FunctionRunner(self._config)

    async def assemble(self, *, epoch: int, world: int, restore: int, restarts: int, index: int, **more: Any) -> Answer:
        """Set up under ``epoch`` with the state of commit ``restore``: ``done``, ``failed`` or ``stale``."""
        setup = Setup(epoch=Epoch(epoch), world=world, restore=restore, restarts=restarts, index=index, **more)
        return await self._control.run(self._assemble(setup))

    async def run(self, *, epoch: int, committed: int, table: JsonObject, cut: FlowCut | None = None) -> Answer:
        """Run a finite workload to its end: ``done``, ``failed`` or ``stale``; repeated, it waits for the same run.

        ``cut`` is what commit ``committed`` says of the streams.
        """
        if isinstance(self._runner, LoopRunner):
            self._runner.cut = {**cut} if cut else {}
        return await self._control.run(self._run(Epoch(epoch), committed, PeerTable.from_json(dict(table))))

    async def peers(self, table: JsonObject) -> None:
        """Take a newer table of peers."""
        self._control.loop.call_soon_threadsafe(self._config.rpc.update, PeerTable.from_json(dict(table)))

    async def ping(self) -> None:
        """Liveness probe."""

    async def stacks(self) -> str:
        """The stacks of the code of the job: of the ranks of a command, else of threads and tasks of this process."""
        if isinstance(self._runner, CommandRunner):
            return await asyncio.to_thread(self._runner.stacks)
        return own_stacks(self._user.loop)

    async def execute(self, argv: list[str], timeout_s: float) -> ExecResult:
        """Run a command in the environment and folder of this process; its end and output, secrets blacked out."""
        argv, env = list(tenant.command(self._config, argv)), setup_environment(self._config)
        done = await self._control.run(execute_command(argv, timeout_s=timeout_s, env=env))
        stdout, stderr = (secrets.redact(text, cut=done["cut"]) for text in (done["stdout"], done["stderr"]))
        return {**done, "stdout": stdout, "stderr": stderr}

    async def open_terminal(self, name: str, user: str, argv: list[str], term: str, size: tuple[int, int]) -> str:
        """Run a command as ``execute`` does, on a terminal; empty, or why it cannot be. See ``Terminals``."""
        argv, env = list(tenant.command(self._config, argv)), setup_environment(self._config, {"TERM": term})
        start = self._terminals.start(name, user, argv, env, size, secrets.redact_bytes)
        return await self._control.run(start)

    async def read_terminal(self, name: str, user: str, after: int, wait_s: float) -> TerminalRead | None:
        """See ``Terminals.read``."""
        return await self._control.run(self._terminals.read(name, user, after, wait_s))

    async def write_terminal(
        self, name: str, user: str, offset: int, data: str, size: tuple[int, int] | None, leave: bool
    ) -> TerminalWritten | None:
        """See ``Terminals.write``; ``data`` is in base64."""

        async def write() -> TerminalWritten | None:
            return self._terminals.write(name, user, offset, base64.b64decode(data), size, leave)

        return await self._control.run(write())

    async def check(self) -> Answer:
        """Is this node fit? ``done``, or ``failed`` with what is wrong. Asked before any code of the job runs here."""
        try:
            await self._control.run(self._find_unfit())
        except NodeUnfit as error:
            return self._failed(error, self._started_epoch)
        return DONE

    async def stop(self, grace_s: float = 30.0) -> None:
        """Release everything within ``grace_s``; the launcher ends the process after that."""
        await self._control.run(self._stop(grace_s))

    async def call(self, head: list[object], /, *args: object, **kwargs: object) -> object:
        """Run one operation, sent as a ``Request``; its value or a ``Refusal``."""
        return await self._user.run(self._call(Request.of_call(head, args, kwargs)))

    async def save(self, *, n: int, epoch: int, loop_epoch: int, edges: tuple[str, ...], folder: str = "") -> Answer:
        """Save the state of commit ``n``: ``done`` with bytes and seconds, ``failed`` or ``stale``.

        The state goes into shared memory and, if given, into the checkpoint ``folder``; ``edges`` are published.
        """
        return await self._control.run(self._save(n, Epoch(epoch), Epoch(loop_epoch), edges, folder))

    async def keep(self, *, owner: str, n: int, folder: str, weights: bool = False) -> Answer:
        """Write commit ``n`` of an instance, or version ``n`` of a weights edge, from memory into ``folder``.

        The owner may be another instance of this host, dead or alive: ``done``, or ``failed`` with a text.
        """
        job = self._config.place.job
        which, there = owner if weights else InstanceId.parse(owner), self._own_folder(folder)
        try:
            await asyncio.to_thread(lambda: checkpoint.keep(checkpoint.opened(), job, which, n, there))
        except (OSError, TensorError, NotReachable) as error:
            return {"answer": "failed", "text": f"{type(error).__name__}: {error}"}
        return DONE

    def _own_folder(self, folder: str) -> Path:
        """The folder of a checkpoint as it is on this machine, whose home may have another path than the sender's."""
        return Path(checkpoint_dir(self._config.spec, self._config.place)) / Path(folder).name

    async def copy(self, *, owner: str, n: int, hosts: list[str], weights: bool = False) -> Answer:
        """Let another machine, of ``hosts`` if possible, have what ``keep`` would write.

        ``done`` with the host and the epoch of the state, or ``failed`` with a text.
        """
        job, which = self._config.place.job, owner if weights else InstanceId.parse(owner)
        try:
            host, epoch = await asyncio.to_thread(lambda: checkpoint.copy(checkpoint.opened(), job, which, n, hosts))
        except (OSError, TensorError, NotReachable) as error:
            return {"answer": "failed", "text": f"{type(error).__name__}: {error}"}
        return {"answer": "done", "host": host, "epoch": epoch}

    async def prune(self, *, newest: int, keep: int) -> None:
        """Remove checkpoints of the job but the ``keep`` newest up to commit ``newest``, which is complete."""
        root = Path(checkpoint_dir(self._config.spec, self._config.place))
        await asyncio.to_thread(checkpoint.prune, root, keep, newest)

    async def _call(self, request: Request) -> object:
        """In the user thread: an operation waits for the one before it, and for nothing else."""
        if not isinstance(self._runner, ClassRunner):
            return Refusal(kind="stale", text=f"{self._config.id} takes no calls")
        refusal = self._refusal(request.epoch, request.loop_epoch)
        if refusal:
            return Refusal(kind="stale", text=refusal)
        return await self._runner.call(request)

    async def _assemble(self, setup: Setup) -> Answer:
        if setup.epoch < self._epoch or (self._setup and setup.epoch < self._setup[0]):
            return STALE
        if self._setup is None or self._setup[0] != setup.epoch:
            older, self._setup = self._setup, None
            self._ready = False
            self._epoch = setup.epoch
            task = asyncio.get_running_loop().create_task(self._form(setup, older[1] if older else None))
            self._setup = (setup.epoch, task)
        return await _answer_of(self._setup[1])

    async def _form(self, setup: Setup, older: asyncio.Task[Answer] | None) -> Answer:
        try:
            await self._runner.dissolve(setup.grace_s)
        except StillRunning as error:
            sys.stderr.write(f"{error}; this process ends, so that another takes its place\n")
            sys.stderr.flush()
            os._exit(STUCK_EXIT_STATUS)
        for task in (older, self._running[1] if self._running else None):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._failure = None
        if has_copies(self._config.spec):
            threading.Thread(target=checkpoint.serve, name="rota-store", daemon=True).start()
        with UserCode() as forming, self._config.marks.running(SETTING_UP):
            if self._data is None:
                self._data = await fetch_data(self._config)
            await unpack_image(self._config)
            await run_setup(self._config)
            await self._runner.form(setup)
        if forming.failed:
            return self._failed(forming.take(), setup.epoch)
        if self._epoch == setup.epoch:
            self._ready = True
        return DONE

    async def _find_unfit(self) -> None:
        config = self._config
        dirs = Home.of(config.place.home).job(config.place.job)
        output = Path(config.spec.output_dir or dirs.output)
        folders = (dirs.work, output, Path(checkpoint_dir(config.spec, config.place)))
        late = f"did not answer in {CHECK_MAX_S:g} s"
        names = ", ".join(str(folder) for folder in dict.fromkeys(folders))
        disk = Unfit(check="disk", reason=Reason.DATA_UNREACHABLE, text=f"one of {names} {late}; check the mount")
        text = f"the devices of this instance, or their driver, {late}; see that it works, drain the node"
        device = Unfit(check="devices", reason=Reason.GPU_LOST, text=text)
        clock = config.clock
        found = await _in_time(clock, lambda: quick(folders), disk) + await _in_time(clock, self._devices.look, device)
        if not found and config.role.fail.check == "full":
            text = f"a product of matrices {late}; drain the node"
            slow = Unfit(check="compute", reason=Reason.NODE_SUSPECT, text=text)
            found = await _in_time(clock, lambda: compute(len(config.devices)), slow)
        if found:
            raise NodeUnfit(found)

    async def _run(self, epoch: Epoch, committed: int, table: PeerTable) -> Answer:
        if epoch != self._epoch or not self._ready:
            return STALE
        self._config.rpc.update(table)
        if self._running is None or self._running[0] != epoch:
            task = asyncio.get_running_loop().create_task(self._run_to_end(epoch, committed))
            self._running = (epoch, task)
        return await _answer_of(self._running[1])

    async def _run_to_end(self, epoch: Epoch, committed: int) -> Answer:
        with UserCode() as running:
            await self._runner.run(committed)
        if running.failed:
            return self._failed(running.take(), epoch)
        await self._terminals.wait_ends_read()
        return DONE

    async def _stop(self, grace_s: float) -> None:
        self._ready = False
        await self._terminals.close()
        await self._runner.stop(grace_s)
        if self._config.spec.run_as:
            await asyncio.to_thread(tenant.remove_shared)
        with contextlib.suppress(TimeoutError):
            async with self._config.clock.timeout(SPANS_WRITE_MAX_S):
                await self._write_spans()

    async def _save(self, n: int, epoch: Epoch, loop_epoch: Epoch, edges: tuple[str, ...], folder: str) -> Answer:
        refusal = self._refusal(epoch, loop_epoch)
        if refusal or not isinstance(self._runner, ClassRunner):
            return {**STALE, "text": refusal or "no class"}
        with UserCode() as saving:
            there = self._own_folder(folder) if folder else None
            answer = await self._runner.save(n, tuple(edges), str(there or ""))
            if there is not None and there != Path(folder):  # who prunes does not see the folder of this machine
                keep = (self._config.spec.checkpoint or Checkpoint()).keep
                await asyncio.to_thread(checkpoint.prune, there.parent, keep + 1, n)
            return answer
        return self._save_failed(saving.take(), epoch)

    def _save_failed(self, error: BaseException, epoch: Epoch) -> Answer:
        self._note_failure(error, epoch)
        return {**self._failed(error, epoch), "text": str(error)}

    def _refusal(self, epoch: Epoch, loop_epoch: Epoch) -> str:
        """Why a call is refused; empty when it may run. A newer loop fences the calls of an older one."""
        silent_s = self._config.clock.monotonic_s() - self._answered_s
        if silent_s > LEASE_S:
            return f"no answer of the master for {silent_s:.0f} s"
        if epoch != self._epoch or not self._ready or self._failure is not None:
            return f"{self._config.id} is at epoch {self._epoch}, {'ready' if self._ready else 'not ready'}"
        with self._fence:
            newest = max(self._loop_epoch_max, self._config.rpc.table.loop_epoch, loop_epoch)
            self._loop_epoch_max = newest
        if loop_epoch < newest:
            return f"loop epoch {loop_epoch} is fenced by {newest}"
        return ""

    def _failed(self, error: BaseException, epoch: Epoch) -> Answer:
        failure = failure_of(error, self._config.id, epoch)
        return {"answer": "failed", "failure": codec.to_json_value(failure)}

    def _note_failure(self, error: BaseException, epoch: Epoch) -> None:
        """User code raised: no further calls under this epoch; the next heartbeat reports it to the master."""
        if self._failure is None and epoch == self._epoch:
            self._failure = failure_of(error, self._config.id, epoch)
            self._control.loop.call_soon_threadsafe(self._beat_now.set)

    async def _beats(self) -> None:
        while True:
            try:
                await self._beat()
            except Exception:  # noqa: BLE001 - whatever went wrong, it was not an answer, and the lease must keep running out
                traceback.print_exc()
            silent_s = self._config.clock.monotonic_s() - self._answered_s
            if silent_s > FENCE_EXIT_S:
                os._exit(FENCED_EXIT_STATUS)
            self._beat_now.clear()
            try:
                async with self._config.clock.timeout(BEAT_S):
                    await self._beat_now.wait()
            except TimeoutError:
                continue

    async def _trace(self) -> None:
        """Beside the beats, with a thread of its own: a disk that hangs holds up no beat and no fence."""
        while True:
            await self._write_spans()
            await self._config.clock.sleep(BEAT_S)

    async def _watch_devices(self) -> None:
        """A device that fails under its work is reported as a failure of this instance: it has to leave the node."""
        while True:
            await self._config.clock.sleep(DEVICES_EVERY_S)
            try:
                found = await asyncio.to_thread(self._devices.look)
            except OSError:
                continue  # the driver is being taken down; the next look shows it
            if found:
                self._note_failure(NodeUnfit(found), self._epoch)

    async def _write_spans(self) -> None:
        write = self._config.marks.waiting.spans.write
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, write, self._spans_path)
        except OSError:
            pass  # a full disk costs the trace, not the instance
        except Exception:  # noqa: BLE001 - whatever is wrong with these spans, the next are written
            traceback.print_exc()

    async def _beat(self) -> None:
        beat = Heartbeat(
            role=self._config.id.role,
            rank=self._config.id.rank,
            epoch=self._epoch,
            started_epoch=self._started_epoch,
            pid=os.getpid(),
            table_version=self._config.rpc.table.version,
            lost=self._failure,
            ports=self._ports,
            weights=self._runner.weights() if isinstance(self._runner, ClassRunner) else (),
        )
        beat = self._config.marks.read(replace(beat, **self._load.read()))
        if SETTING_UP in beat.busy:
            beat = self._with_imports(beat)
        call = Call(method="beat", args=(beat.to_json(),), timeout_s=BEAT_ANSWER_S, control=True)
        try:
            raw = await self._config.launcher.call(master_handle(self._config.place.job), call)
        except (ProcessGone, CallTimeout):
            return
        answer = HeartbeatAnswer.from_json(raw)
        self._answered_s = self._config.clock.monotonic_s()
        if answer.table is not None:
            self._config.rpc.update(answer.table)
        self._follow()

    def _with_imports(self, beat: Heartbeat) -> Heartbeat:
        """On a busy machine imports take minutes, with next to no processor: each is a step of the setup."""
        modules = list(sys.modules)
        moved = len(modules) > self._imported
        self._imported = len(modules)
        return replace(beat, busy=(*beat.busy, f"last import {modules[-1]}"), idle_s=0.0 if moved else beat.idle_s)

    def _follow(self) -> None:
        """A reader with a bounded lag takes new versions without a call; one load at a time, beats do not wait."""
        if (
            self._ready
            and isinstance(self._runner, ClassRunner)
            and (self._following is None or self._following.done())
        ):
            self._following = self._user.submit(self._runner.follow(self._config.rpc.table))


def failure_of(error: BaseException, one: InstanceId, epoch: Epoch) -> InstanceLost:
    """The ``InstanceLost`` event for an exception in user code."""
    own = own_reason(error)
    if isinstance(error, ImportError | SyntaxError | BadInput):
        reason = Reason.IMPORT_ERROR if not isinstance(error, BadInput) else Reason.USER_ERROR
    elif isinstance(error, TensorError):
        reason = own or Reason.TENSOR_LOST
    elif (storage := storage_reason(error)) is not None:
        reason = storage
    elif isinstance(error, MemoryError):
        reason = Reason.OOM_KILLED
    else:
        reason = own or Reason.USER_ERROR
    text, trace = error_summary(error)
    text = secrets.redact(str(error) if own else text)
    trace = secrets.redact(getattr(error, "traceback_text", trace))
    return InstanceLost(
        role=one.role,
        rank=one.rank,
        epoch=epoch,
        reason=reason,
        text=text[:TEXT_MAX],
        traceback=trace[-TRACE_MAX:],
        alive=True,
    )


def open_launcher(place: JobPlace) -> Launcher:
    """The launcher of this process, named in ``place`` so that an instance imports no engine but its own."""
    opened: Any = import_target(place.launcher)
    return opened()


async def _in_time(clock: Clock, check: Callable[[], list[Unfit]], late: Unfit) -> list[Unfit]:
    """What a blocking check finds, or that it is ``late``."""
    try:
        async with clock.timeout(CHECK_MAX_S):
            return await asyncio.to_thread(check)
    except TimeoutError:
        return [late]


async def _answer_of(task: asyncio.Task[Answer]) -> Answer:
    """The result of an owned task; ``stale`` when a newer epoch cancelled it. The waiter may go, the task stays."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            return STALE
        raise
