"""Executor: carries out commands of the job machine by a Launcher; outcomes, and how a process died, become events."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rota.job.core.context import START_MAX_S, START_TIMEOUT_S, JobContext
from rota.job.core.resize import places
from rota.job.core.survival import CUT
from rota.job.place import JobPlace, checkpoint_dir, folder_of
from rota.job.rpc.peers import table_of
from rota.runtime import secrets
from rota.runtime.clock import Clock, backoff
from rota.runtime.environ import NODE, Home
from rota.runtime.launcher import (
    Call,
    CallTimeout,
    Handle,
    InstanceSpec,
    Launcher,
    NodeDied,
    ProcessDied,
    ProcessGone,
    RemoteError,
    Reservation,
    ReserveFailed,
    handle_of,
    instance_name,
    remote_traceback,
    reservation_name,
)
from rota.runtime.packages import PackagesFailed
from rota.runtime.process import signal_name
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.commands import (
    Assemble,
    CheckNode,
    Command,
    CopyCommit,
    Emit,
    ReleaseGang,
    ReserveGang,
    RunInstance,
    SaveCommit,
    Saving,
    SetTimer,
    StartInstance,
    StopInstance,
)
from rota.spec.events import (
    CheckpointSaved,
    CommitCopied,
    GangReleased,
    GangReserved,
    GangReserveFailed,
    InstanceEnded,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobEvent,
    NodeChecked,
    TimerFired,
)
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.job import Checkpoint, JobSpec
from rota.spec.reasons import ENDED_ITSELF, Reason

INSTANCE_TARGET = "rota.job.instance.instance:Instance"
RESERVE_MAX_S = 120.0
RETRY_S = (0.5, 10.0)
"""Pause before a command that failed in the engine is tried again: first, and at most."""
GIVE_UP_S = 300.0
"""Limit of the attempts at a command; then its failure is an event."""
LIMITED = (ReserveGang, Assemble, RunInstance)
"""Commands that are given up after ``GIVE_UP_S``. The others are tried until the job stops wanting them: what gives
back holds resources until it has succeeded, a start has the timer of its job, and the rest a limit of its own."""
LATE_LOOK_S = 0.1
"""Pause between two looks at a start that is late; what is left of its limit may be less than a clock resolves."""
CHECK = Call(method="check", control=True)
CHECK_ANSWER_S = 10.0
"""Limit of each answer of a suspected node; a verdict waits for it."""
COPY_RETRY_S = (5.0, 60.0)
"""Pause before a copy that failed is tried again: first, and at most."""
UNSEEN_DEATH_S = 5.0
"""A call that found its process gone waits this long for the launcher's report of the death."""


@dataclass(slots=True)
class Executor:
    """Runs each command as a task of its own; a command that is already under way is not started twice.

    ``report`` takes the event of an outcome. No outcome is reported for a command that was dropped meanwhile.
    """

    launcher: Launcher
    clock: Clock
    place: JobPlace
    report: Callable[[JobEvent], None]
    coming: Callable[[], tuple[float, dict[str, str]]]
    """Seconds without progress in the present start, and what each instance last reported."""
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    handles: dict[str, Handle] = field(default_factory=dict[str, Handle])
    stopping: set[str] = field(default_factory=set[str])
    """Names of processes that were asked to end: their deaths are not reported."""

    def launch(self, command: Command, ctx: JobContext) -> None:
        """Start carrying out a command."""
        if command.id not in self.tasks and not isinstance(command, Emit):
            older = self.tasks.get(_superseded(command))
            task = asyncio.get_running_loop().create_task(self._carry_out(command, ctx, older), name=command.id)
            self.tasks[command.id] = task
            task.add_done_callback(lambda _: self.tasks.pop(command.id, None))

    def keep(self, wanted: frozenset[str]) -> None:
        """Drop timers and waits for answers that the job stopped wanting; effects on the engine run to their end."""
        for name, task in list(self.tasks.items()):
            if name not in wanted and name.startswith(("timer/", "assemble/", "run/", "save/", "copy/")):
                task.cancel()

    async def close(self) -> None:
        """Cancel what is under way; the next master asks for it again."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def know(self, handle: Handle) -> None:
        """Remember a process that was found alive."""
        self.handles[handle.name] = handle

    async def _carry_out(self, command: Command, ctx: JobContext, older: asyncio.Task[None] | None) -> None:
        if older is not None:
            older.cancel()
            await asyncio.gather(older, return_exceptions=True)
        pauses, began_s = backoff(*RETRY_S), self.clock.monotonic_s()
        while True:
            try:
                event = await self._effect(command, ctx)
                break
            except Exception as error:  # noqa: BLE001 - the engine may fail in any way; effects are idempotent by name
                late = self.clock.monotonic_s() - began_s > GIVE_UP_S
                if late and isinstance(command, LIMITED):
                    event = _given_up(command, error)
                    break
                pause_s = next(pauses)
                sys.stderr.write(f"{command.id}: {type(error).__name__}: {error}; again in {pause_s:g} s\n")
                await self.clock.sleep(pause_s)
        if event is not None:
            self.report(event)

    async def _effect(self, command: Command, ctx: JobContext) -> JobEvent | None:
        match command:
            case ReserveGang():
                return await self._reserve(command)
            case ReleaseGang(gang=gang, epoch=epoch):
                await self.launcher.release(Reservation(job=self.place.job, gang=gang, epoch=epoch))
                return GangReleased(gang=gang, epoch=epoch, gone=ctx.ending is None and gang not in places(ctx))
            case StartInstance():
                return await self._start(command, ctx)
            case Assemble():
                return await self._assemble(command, ctx)
            case RunInstance():
                return await self._run(command, ctx)
            case StopInstance():
                return await self._stop(command)
            case CheckNode():
                return await self._check(command)
            case SaveCommit():
                return await self._save(command, ctx)
            case CopyCommit():
                return await self._copy(command, ctx)
            case SetTimer():
                return await self._wait(command)
            case _:
                return None

    async def _wait(self, command: SetTimer) -> JobEvent:
        """Until the timer is due. A start is late only when it made no progress for the whole limit."""
        due_s = command.since_s + command.after_s
        await self.clock.sleep(max(0.0, due_s - self.clock.wall_s()))
        if not command.timer.startswith("start/"):
            return TimerFired(timer=command.timer)
        end_s = due_s + START_MAX_S - START_TIMEOUT_S
        while True:
            still_s, doing = self.coming()
            left_s = min(START_TIMEOUT_S - still_s, end_s - self.clock.wall_s())
            if left_s <= 0.0:
                return TimerFired(timer=command.timer, doing=doing)
            await self.clock.sleep(max(left_s, LATE_LOOK_S))

    async def _reserve(self, command: ReserveGang) -> JobEvent:
        reservation = Reservation(job=self.place.job, gang=command.gang, epoch=command.epoch)
        try:
            await self.launcher.reserve(reservation, command.bundles, timeout_s=RESERVE_MAX_S)
        except ReserveFailed as error:
            return GangReserveFailed(
                gang=command.gang, epoch=command.epoch, reason=Reason.GANG_TIMEOUT, text=str(error)
            )
        return GangReserved(gang=command.gang, epoch=command.epoch)

    async def _start(self, command: StartInstance, ctx: JobContext) -> JobEvent:
        assert ctx.spec is not None, "an instance is started only for a job that has a spec"
        spec = instance_spec(command, ctx.spec, ctx.attempt, self.place)
        try:
            handle = await self.launcher.start(spec, timeout_s=START_MAX_S)
        except ProcessGone as error:
            reason = Reason.NODE_LOST if error.node_died else Reason.EXIT_NONZERO
            return _lost(command.instance, command.epoch, reason, f"died at its start: {error}")
        except CallTimeout as error:
            return _lost(command.instance, command.epoch, Reason.START_TIMEOUT, str(error))
        except PackagesFailed as error:
            return _lost(command.instance, command.epoch, Reason.ENV_SETUP_FAILED, str(error))
        except Exception as error:  # noqa: BLE001 - the constructor of a process may raise anything; it becomes an event
            text, trace = f"{type(error).__name__}: {error}", remote_traceback(error)
            return _lost(command.instance, command.epoch, Reason.USER_ERROR, text, trace)
        self.know(handle)
        if ctx.role(command.instance.role).fail.check != "none":
            found = await self._ask(command.instance, command.epoch, CHECK)
            if isinstance(found, InstanceLost):
                return replace(found, epoch=command.epoch, alive=False)
        return InstanceStarted(
            role=command.instance.role,
            rank=command.instance.rank,
            epoch=command.epoch,
            node=command.bundle.node,
            pid=handle.pid,
            start_time=handle.start_time,
            address=handle.address,
        )

    async def _assemble(self, command: Assemble, ctx: JobContext) -> JobEvent | None:
        """No limit here: the start timer of the machine decides when it has taken too long."""
        kwargs = {
            "epoch": command.epoch,
            "world": len(command.peers),
            "index": command.peers.index(command.instance),
            "restore": command.restore,
            "restarts": ctx.instances[command.instance].restarts,
            "grace_s": command.grace_s,
            "source": command.source,
            "source_epoch": command.source_epoch,
        }
        answer = await self._ask(
            command.instance, command.started_epoch, Call(method="assemble", kwargs=kwargs, control=True)
        )
        if isinstance(answer, InstanceLost):
            return replace(answer, epoch=command.epoch)
        if answer is None:
            return None
        role, rank = command.instance.role, command.instance.rank
        return InstanceReady(role=role, rank=rank, epoch=command.epoch, restored=command.restore)

    async def _run(self, command: RunInstance, ctx: JobContext) -> JobEvent | None:
        kwargs = {"epoch": command.epoch, "committed": command.committed, "table": table_of(ctx).to_json()}
        if command.instance.role == ctx.plan.loop:
            kwargs["cut"] = dict(ctx.cursor.get(CUT, {}))
        answer = await self._ask(
            command.instance, command.started_epoch, Call(method="run", kwargs=kwargs, control=True)
        )
        if isinstance(answer, InstanceLost):
            return replace(answer, epoch=command.epoch)
        if answer is None:
            return None
        return InstanceEnded(role=command.instance.role, rank=command.instance.rank, epoch=command.epoch)

    async def _ask(self, instance: InstanceId, started: Epoch, call: Call) -> InstanceLost | str | None:
        """``done``, a failure, or None when it is out of date: what ``assemble``, ``run`` and ``check`` answer."""
        try:
            raw: JsonObject = await self.launcher.call(self.handle(instance, started), call)
        except ProcessGone as error:
            # The launcher's event of the death says more; this is only for a death that was not seen.
            await self.clock.sleep(UNSEEN_DEATH_S)
            return _lost(instance, started, Reason.SIGNALLED, str(error))
        if raw["answer"] == "failed":
            return codec.from_json_value(InstanceLost, raw["failure"])
        return "done" if raw["answer"] == "done" else None

    async def _stop(self, command: StopInstance) -> JobEvent:
        handle = self.handle(command.instance, command.started_epoch)
        self.stopping.add(handle.name)
        await self.launcher.stop(handle, grace_s=command.grace_s)
        self.handles.pop(handle.name, None)
        return InstanceStopped(role=command.instance.role, rank=command.instance.rank, epoch=command.started_epoch)

    async def _check(self, command: CheckNode) -> JobEvent:
        """Ask one after another of those that live on the node; the first answer decides."""
        problems, call = "no instance on it answers", replace(CHECK, timeout_s=CHECK_ANSWER_S)
        for instance, started in command.processes:
            try:
                found = await self.launcher.call(self.handle(instance, started), call)
                problems = found["failure"]["text"] if found["answer"] == "failed" else ""
                break
            except (ProcessGone, CallTimeout, RemoteError):
                continue
        return NodeChecked(node=command.node, fit=not problems, text=problems)

    async def _save(self, command: SaveCommit, ctx: JobContext) -> JobEvent:
        """Every part is written by a process of the host whose memory has it. Raises what is tried again."""
        assert ctx.spec is not None, "only a job with a spec commits"
        began_s = self.clock.monotonic_s()
        folder = str(folder_of(Path(checkpoint_dir(ctx.spec, self.place)), command.n, ctx.loop_epoch))
        await asyncio.gather(*(self._save_part(part, command.n, folder) for part in command.parts))
        first, keep = command.parts[0], (ctx.spec.checkpoint or Checkpoint()).keep
        older = Call(method="prune", kwargs={"newest": command.n, "keep": keep}, control=True)
        await self.launcher.call(self.handle(first.process, first.started_epoch), older)
        seconds = round(self.clock.monotonic_s() - began_s, 6)
        return CheckpointSaved(n=command.n, path=folder, seconds=seconds, cursor=dict(ctx.cursor))

    async def _copy(self, command: CopyCommit, ctx: JobContext) -> JobEvent:
        """Every part is sent by a process of the host whose memory has it; what fails is asked for again, later."""
        began_s = self.clock.monotonic_s()
        found = await asyncio.gather(*(self._copy_part(part, command) for part in command.parts))
        copies = tuple(one for one in found if not isinstance(one, str))
        missing = "; ".join(one for one in found if isinstance(one, str) and one)
        if missing and command.fails:  # with its outcome the next one begins, of the last commit then
            await self.clock.sleep(min(COPY_RETRY_S[0] * 2 ** (command.fails - 1), COPY_RETRY_S[1]))
        return CommitCopied(
            n=command.n,
            loop_epoch=command.loop_epoch,
            copies=() if missing else copies,
            text=missing,
            seconds=round(self.clock.monotonic_s() - began_s, 6),
            cursor={} if missing else dict(ctx.cursor),
        )

    async def _copy_part(self, part: Saving, command: CopyCommit) -> tuple[RoleName, int, str, Epoch] | str:
        """Which machine has the state now, or why none has it; of weights nothing, when one has them."""
        kwargs = {**_what(part, command.n), "hosts": list(command.hosts)}
        call = Call(method="copy", kwargs=kwargs, control=True)
        try:
            answer = await self.launcher.call(self.handle(part.process, part.started_epoch), call)
        except (ProcessGone, CallTimeout, RemoteError) as error:
            answer = {"answer": "failed", "text": str(error)}
        if answer["answer"] != "done":
            return f"{part.owner} is on one machine only: {answer.get('text', '')}"
        if isinstance(part.owner, str):
            return ""
        return part.owner.role, part.owner.rank, str(answer["host"]), Epoch(int(answer["epoch"]))

    async def _save_part(self, part: Saving, n: int, folder: str) -> None:
        call = Call(method="keep", kwargs={**_what(part, n), "folder": folder}, control=True)
        answer = await self.launcher.call(self.handle(part.process, part.started_epoch), call)
        if answer["answer"] != "done":
            raise RuntimeError(f"{part.owner} was not saved by {part.process}: {answer.get('text', answer)}")

    def handle(self, instance: InstanceId, started: Epoch) -> Handle:
        """Address of a process, known from its start or by its name alone."""
        name = instance_name(self.place.job, instance, started)
        return self.handles.get(name) or handle_of(name)


def _what(part: Saving, n: int) -> JsonObject:
    """What an instance is asked to save with commit ``n``."""
    return {"owner": str(part.owner), "n": n if part.n is None else part.n, "weights": part.n is not None}


def instance_spec(command: StartInstance, spec: JobSpec, attempt: int, place: JobPlace) -> InstanceSpec:
    """The process of one instance: what it runs, with which environment, where."""
    role = spec.role(command.instance.role)
    dirs = Home.of(place.home).job(place.job)
    own = {} if spec.run_as else {**dict(spec.env), **dict(role.env)}  # of a tenant: set as its user, by tenant.py
    env = {
        **own,
        "ROTA_HOME": place.home,
        "ROTA_JOB": place.job,
        "ROTA_ROLE": role.name,
        "ROTA_INSTANCE": str(command.instance),
        "ROTA_EPOCH": str(command.epoch),
        "ROTA_ATTEMPT": str(attempt),
        NODE: str(command.bundle.node),
        "ROTA_OUTPUT_DIR": spec.output_dir or str(dirs.output),
        "ROTA_CHECKPOINT_DIR": checkpoint_dir(spec, place),
        "PYTHONUNBUFFERED": "1",
        secrets.VARIABLE: " ".join((place.owner, *spec.secrets)) if spec.secrets else "",
    }
    if spec.data is not None and not spec.data_url:  # a copy of it is named by the instance
        env["ROTA_DATA_DIR"] = spec.data
    return InstanceSpec(
        job=place.job,
        instance=command.instance,
        epoch=command.epoch,
        target=INSTANCE_TARGET,
        args={
            "place": place.to_json(),
            "spec": spec.to_json(),
            "instance": str(command.instance),
            "epoch": int(command.epoch),
            "attempt": attempt,
            "devices": list(command.bundle.devices),
        },
        env=env,
        reservation=reservation_name(place.job, command.gang, command.gang_epoch),
        bundle=command.bundle.index,
        node=command.bundle.node,
        devices=command.bundle.devices,
        res=role.res,
        limits=role.limits,
        packages=spec.packages_of(role),
        workdir=place.workdir,
        imports=spec.run_as is None,
        log_path=place.log_path(command.instance),
    )


def death_event(death: ProcessDied) -> InstanceLost:
    """The event of the death of a process; its epoch is the one the process was started under."""
    if death.exceeded:
        reason, text = Reason.OVER_LIMIT, f"ended for its limits: it {death.exceeded}"
    elif death.signal is not None:
        reason, text = Reason.SIGNALLED, f"ended by {signal_name(death.signal)}"
    elif (why := ENDED_ITSELF.get(death.exit_code or 0)) is not None:
        reason, text = Reason.SELF_ENDED, f"ended itself with exit status {death.exit_code}: {why}"
    elif death.exit_code is not None:
        reason, text = Reason.EXIT_NONZERO, f"ended with exit status {death.exit_code}"
    else:
        reason, text = Reason.SIGNALLED, death.text or "its process is gone"
    return InstanceLost(
        role=death.instance.role,
        rank=death.instance.rank,
        epoch=death.epoch,
        reason=Reason.OOM_KILLED if death.out_of_memory else reason,
        text=text,
        exit_code=death.exit_code,
        signal=death.signal,
    )


def losses_with(ctx: JobContext, died: NodeDied) -> tuple[InstanceLost, ...]:
    """Losses of all instances on a node that the engine gave up; it is reported once for each of its processes."""
    return tuple(
        InstanceLost(role=one.id.role, rank=one.id.rank, epoch=one.epoch, reason=Reason.NODE_LOST, text=died.text)
        for one in ctx.instances.values()
        if one.process is not None and one.process.node == died.node and one.alive
    )


def _superseded(command: Command) -> str:
    """The id of the command that this one takes the place of: its effect is given up before this one begins."""
    match command:
        case StopInstance(instance=instance, started_epoch=epoch):
            return f"start/{instance}/{epoch}"
        case ReleaseGang(gang=gang, epoch=epoch):
            return f"reserve/{gang}/{epoch}"
        case _:
            return ""


def _given_up(command: ReserveGang | Assemble | RunInstance, error: Exception) -> JobEvent:
    """The event of a command that the engine did not carry out."""
    text = f"the engine did not carry it out within {GIVE_UP_S:g} s: {type(error).__name__}: {error}"
    match command:
        case ReserveGang(gang=gang, epoch=epoch):
            return GangReserveFailed(gang=gang, epoch=epoch, reason=Reason.GANG_TIMEOUT, text=text)
        case Assemble(instance=instance, epoch=epoch) | RunInstance(instance=instance, epoch=epoch):
            return _lost(instance, epoch, Reason.START_TIMEOUT, text)


def _lost(instance: InstanceId, epoch: Epoch, reason: Reason, text: str, trace: str = "") -> InstanceLost:
    return InstanceLost(
        role=instance.role, rank=instance.rank, epoch=epoch, reason=reason, text=text, traceback=trace, alive=False
    )
