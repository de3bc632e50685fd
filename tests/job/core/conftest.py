"""A job driven by hand: every command is carried out at once, as a perfect launcher would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import makers

from rota.job.core import machine
from rota.job.core.context import JobContext
from rota.job.core.desired import next_emit, settle, wanted
from rota.job.core.transitions import ASK, GANG, INSTANCE, JOB
from rota.spec.commands import (
    Assemble,
    CheckNode,
    Command,
    ReleaseGang,
    ReserveGang,
    SaveCommit,
    SetTimer,
    StartInstance,
    StopInstance,
)
from rota.spec.events import (
    CheckpointSaved,
    Event,
    GangGranted,
    GangReleased,
    GangReserved,
    GangWaits,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    MasterStarted,
    NodeChecked,
    Reattached,
    Record,
    TimerFired,
)
from rota.spec.gang import BundleGrant
from rota.spec.ids import Epoch, NodeId, RoleName
from rota.spec.job import JobSpec
from rota.spec.reasons import Reason
from rota.spec.resources import Res
from rota.spec.states import AskState, GangState, JobState

ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Driven(makers.Log):
    """``settle`` carries out what is wanted until nothing more comes; ``hold`` names commands to leave open.

    No loop commits while a job stops: its grace is over at once. ``saves``: a commit can be written to disk.
    ``free`` are nodes that a scheduler would grant to a gang that is asked for; None answers nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pid = 100
        self.alive: dict[tuple[str, int, int], int] = {}
        self.done: list[Command] = []
        self.free: list[str] | None = []
        self.fit: bool | None = True
        self.saves = True

    def outcome(self, command: Command) -> Event | None:
        match command:
            case ReserveGang(gang=gang, epoch=epoch):
                return GangReserved(gang=gang, epoch=epoch)
            case ReleaseGang(gang=gang, epoch=epoch):
                return GangReleased(gang=gang, epoch=epoch)
            case StartInstance(instance=one, epoch=epoch, bundle=bundle):
                key = (one.role, one.rank, epoch)
                if key not in self.alive:
                    self.pid += 1
                    self.alive[key] = self.pid
                return InstanceStarted(role=one.role, rank=one.rank, epoch=epoch, node=bundle.node, pid=self.alive[key])
            case StopInstance(instance=one, started_epoch=epoch):
                self.alive.pop((one.role, one.rank, epoch), None)
                return InstanceStopped(role=one.role, rank=one.rank, epoch=epoch)
            case CheckNode(node=node):
                return None if self.fit is None else NodeChecked(node=node, fit=self.fit)
            case SaveCommit(n=n):
                return CheckpointSaved(n=n, path="/saved", cursor=dict(self.ctx.cursor)) if self.saves else None
            case SetTimer(timer=timer) if timer.startswith("grace/"):
                return TimerFired(timer=timer)
            case Assemble(instance=one, epoch=epoch, restore=restore):
                return InstanceReady(role=one.role, rank=one.rank, epoch=epoch, restored=restore)
            case _:
                return None

    def answer(self) -> Event | None:
        """What the scheduler says to the first ask that it has not answered, or can grant now."""
        for ask in self.ctx.asks if self.free is not None else ():
            node = next((one for one in self.free or () if one not in (*ask.avoid, *ask.apart)), None)
            if ask.state is AskState.ASKED and node is not None:
                bundles = tuple(
                    BundleGrant(index=i, node=NodeId(node), host=node, devices=(), res=Res())
                    for i in range(len(ask.members))
                )
                return GangGranted(gang=ask.gang, bundles=bundles)
            if ask.state is AskState.ASKED and not ask.answered:
                return GangWaits(gang=ask.gang, reason=Reason.NO_FREE_DEVICES)
        return None

    def settle(self, *, hold: str = "\0") -> Driven:
        for _ in range(1000):
            if emit := next_emit(self.ctx):
                self.feed(emit.event, after_s=0.0)
                continue
            if (answer := self.answer()) is not None:
                self.feed(answer, after_s=0.0)
                continue
            for command in wanted(self.ctx):
                event = None if command.id.startswith(hold) else self.outcome(command)
                if event is not None:
                    self.done.append(command)
                    self.feed(event, after_s=0.1)
                    break
            else:
                return self
        raise AssertionError("never settles")

    def master(self, epoch: int = 1, *, dead: tuple[tuple[str, int, int], ...] = ()) -> Driven:
        """A master starts and finds what is alive."""
        for key in dead:
            self.alive.pop(key)
        alive = tuple((RoleName(role), rank, Epoch(e)) for role, rank, e in self.alive)
        gangs = tuple((gang.id, gang.epoch) for gang in self.ctx.gangs if gang.state is GangState.RESERVED)
        self.feed(MasterStarted(master_epoch=Epoch(epoch), pid=1))
        self.feed(Reattached(master_epoch=Epoch(epoch), alive=alive, gangs=gangs))
        return self

    def admit(self, job: JobSpec, *hosts: str) -> Driven:
        self.feed(*makers.submitted(job), makers.admitted(job, hosts=hosts or ("h0",)))
        return self.master()

    def run(self, job: JobSpec, *hosts: str) -> Driven:
        """Up to RUNNING, its bundles on these hosts in turn."""
        return self.admit(job, *hosts).settle()


@pytest.fixture
def driven() -> Driven:
    return Driven()


@pytest.fixture(autouse=True)
def invariants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every step of every test keeps the rules of ``check_step``; what it ended with survives being kept and read."""
    last: dict[str, JobContext] = {}
    fold = machine.fold

    def checked(ctx: JobContext, record: Record) -> JobContext:
        after = fold(ctx, record)
        if after is not ctx:
            check_step(ctx, after, record.event)
            last[ctx.job] = after
        return after

    monkeypatch.setattr(machine, "fold", checked)
    yield
    for ctx in last.values():
        assert JobContext.from_json(ctx.to_json()) == ctx


def check_step(before: JobContext, after: JobContext, event: Event) -> None:
    """Only declared transitions, an end that lasts, nothing left to settle, each command wanted once.

    Where no event is due, it is said what the next one waits for.
    """
    due = next_emit(after)
    assert due or due.why, f"no event is due after {event}, and nothing says why"
    assert after.state in {before.state, *JOB[before.state]}, f"{before.state} -> {after.state} by {event}"
    for one in after.instances.values():
        if one.id in before.instances and before.attempt == after.attempt and before.graph is after.graph:
            was = before.instances[one.id].state
            assert one.state in {was, *INSTANCE[was]}, f"{one.id} {was} -> {one.state} by {event}"
    gangs = {(one.id, one.epoch): one.state for one in before.gangs}
    for gang in after.gangs:
        was = gangs.get((gang.id, gang.epoch))
        may = {was, *GANG[was]} if was else {GangState.RESERVING, GangState.RELEASING}
        assert gang.state in may, f"gang {gang.id} {was} -> {gang.state} by {event}"
    asks = {ask.gang: ask.state for ask in before.asks}
    for ask in after.asks:
        was = asks.get(ask.gang)
        may = {was, *ASK[was]} if was else {AskState.WANTED}
        assert ask.state in may, f"the ask for gang {ask.gang} {was} -> {ask.state} by {event}"
    ids = [command.id for command in wanted(after)]
    assert len(ids) == len(set(ids))
    assert settle(after) == after
    check_what_rows_rely_on(after, event)
    if before.state.terminal:
        assert after.state is before.state
        assert wanted(after) == ()


def check_what_rows_rely_on(ctx: JobContext, event: Event) -> None:
    """Rows of ``machine.ROWS`` that leave a state out say nothing there: what they speak of does not exist in it."""
    if ctx.state in (*machine.WAITING, JobState.ADMITTED):
        there = [str(one.id) for one in ctx.instances.values() if one.process is not None]
        assert not there, f"{ctx.state} with processes of {there} after {event}"
    if ctx.losses and ctx.ending is None:
        assert ctx.state is JobState.RECOVERING, f"{ctx.state} with losses after {event}"
    decided = ctx.state in (JobState.PREEMPTING, JobState.STOPPING)
    assert decided or ctx.ending is None or ctx.state in (JobState.RECOVERING, *ENDS), f"{ctx.state}: {ctx.ending}"
    assert not decided or ctx.ending is not None, f"{ctx.state} without an ending after {event}"
    if ctx.uploads:
        assert ctx.state is JobState.STOPPING or ctx.state.terminal, f"{ctx.state} uploads after {event}"
