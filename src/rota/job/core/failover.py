"""Recovery: the cause of losses that come together, its level, scope and budget, and what the verdict changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rota.job.core import repetition, shutdown, survival
from rota.job.core.context import (
    FAILED_GRACE_S,
    FAILOVERS_KEPT_MAX,
    PLATFORM_FAULTS_MAX,
    PLATFORM_WINDOW_S,
    Charge,
    Ending,
    Failover,
    InstanceRecord,
    JobContext,
    Loss,
    NotYet,
    replace,
)
from rota.job.core.graph import recovery_scope, replaced
from rota.job.core.repetition import is_secondary
from rota.job.core.resize import (
    OF_THE_NODE,
    PLANNED,
    has_place,
    held,
    is_fit,
    is_world,
    leaving,
    next_scope,
    unplaced,
    world_of,
)
from rota.job.core.transitions import moved, without_process
from rota.spec.events import FailoverStarted
from rota.spec.ids import Epoch, InstanceId, NodeId, RoleName
from rota.spec.job import Restart, RoleSpec
from rota.spec.reasons import INFO, Reason
from rota.spec.states import AskState, GangState, InstanceState, JobState, Level

PLATFORM = frozenset({Reason.NODE_LOST, Reason.ENGINE_LOST, Reason.GANG_TIMEOUT, Reason.SELF_ENDED})
"""Faults of what carries the job: engine, node, reservation; and of a process that ended itself, since its master did
not answer, or since it could not follow a recovery."""
NODE_MOVES_MAX = 2
"""Replacements of a node for one role within its window; the next one widens to the job."""
SUSPECT_S = 30.0
"""Two units of one node that die within this time, with no death elsewhere, make the node suspect."""
REPEAT_N, REPEAT_S = 3, 600.0
"""This number of deaths of several units of one node, with none elsewhere, is the node's fault: no check is asked."""
READY = InstanceState.READY
_LEVELS: dict[Restart, Level] = {"process": Level.PROCESS, "role": Level.ROLE, "node": Level.NODE, "job": Level.JOB}
BACKOFF_MAX_S = 60.0
CHARGES_KEPT_MAX = 1000


@dataclass(frozen=True, slots=True)
class DiagnosisRule:
    """A rule of diagnosis; ``name`` is what people see as the kind of the cause."""

    name: str
    fits: Callable[[Loss], bool]


def _one_of(*reasons: Reason) -> Callable[[Loss], bool]:
    return lambda loss: loss.reason in reasons


RULES: tuple[DiagnosisRule, ...] = (
    DiagnosisRule("engine lost", _one_of(Reason.ENGINE_LOST)),
    DiagnosisRule("node lost", _one_of(Reason.NODE_LOST)),
    DiagnosisRule("device fault", _one_of(Reason.GPU_LOST, Reason.GPU_ECC, Reason.NODE_SUSPECT)),
    DiagnosisRule("out of memory", _one_of(Reason.OOM_KILLED)),
    DiagnosisRule("over its limits", _one_of(Reason.OVER_LIMIT)),
    DiagnosisRule("storage", _one_of(Reason.OUTPUT_FULL, Reason.DATA_UNREACHABLE)),
    DiagnosisRule("killed", _one_of(Reason.SIGNALLED, Reason.SELF_ENDED)),
    DiagnosisRule("culprit of a wait", _one_of(Reason.HANG, Reason.NO_PROGRESS)),
    DiagnosisRule("own exception", lambda loss: not is_secondary(loss)),
    DiagnosisRule("peer lost", lambda loss: True),
)
"""In the order in which they are tried."""


def root_cause(losses: Sequence[Loss]) -> Loss:
    """The one loss that explains the others: of the first rule that fits any, the earliest. ``losses`` is not empty."""
    for rule in RULES:
        fits = [loss for loss in losses if rule.fits(loss)]
        if fits:
            return min(fits, key=lambda loss: loss.at_s)
    raise AssertionError("the last rule fits every loss")


def kind_of(loss: Loss) -> str:
    """Name of the rule that fits a loss."""
    return next(rule.name for rule in RULES if rule.fits(loss))


def may_move(cause: Loss) -> bool:
    """True when another node may help: the fault is not in the code."""
    return INFO[cause.reason].fault == "infra" or cause.reason in (*OF_THE_NODE, Reason.MIGRATED_DRAIN)


def is_free(ctx: JobContext, cause: Loss) -> bool:
    """True for a survivor that could not follow the open recovery and ended itself: part of what is charged already.

    It was started before that recovery, so each process comes to this once at most.
    """
    process, failover = ctx.instances[cause.instance].process, ctx.failover
    before = process is not None and failover is not None and process.epoch < failover.epoch
    return before and cause.reason is Reason.SELF_ENDED


def by_platform(ctx: JobContext, cause: Loss) -> bool:
    """True for a fault of the platform: it is not charged to the budgets of the user.

    State that no memory has is one while the last commit is not on disk: an older checkpoint, or the start, is left.
    """
    return cause.reason in PLATFORM or (cause.reason is Reason.STATE_LOST and ctx.checkpoint_n < ctx.committed)


def platform_left(ctx: JobContext, level: Level, at_s: float) -> int:
    """How many faults of the platform the level may still absorb; a commit in between makes them forgotten."""
    since_s = at_s - PLATFORM_WINDOW_S
    used = sum(charge.platform and charge.level is level and charge.at_s > since_s for charge in ctx.charges)
    return PLATFORM_FAULTS_MAX - used


def deaths_of_one_node(ctx: JobContext, cause: Loss, within_s: float) -> int:
    """Number of deaths on the node of the cause; 0 when others died elsewhere, or all were of one unit."""
    past = [one.cause for one in ctx.failovers]
    seen = (one for one in (*past, *ctx.losses) if one.reason not in (*PLANNED, Reason.SELF_ENDED))
    recent = (one for one in seen if cause.at_s - one.at_s <= within_s and may_move(one))
    died = {(one.instance, one.at_s, one.node) for one in recent if one.node}
    units = {ctx.plan.unit(one) for one, _, _ in died if one in ctx.instances}
    return len(died) if len({node for _, _, node in died}) == 1 and len(units) > 1 else 0


@dataclass(frozen=True, slots=True)
class Move:
    """The chosen level; if it is not where the contract starts, from where and why it moved."""

    level: Level
    moved_from: Level | None = None
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class FailoverCoordinator:
    """The verdict about the losses of a context."""

    ctx: JobContext

    def verdict(self) -> FailoverStarted | NotYet:
        """The recovery that the present losses call for, or what the verdict waits for."""
        ctx = self.ctx
        if not ctx.losses or ctx.ending is not None:
            return NotYet("nothing that a recovery could bring back is lost")
        if not self.judged:
            return NotYet("the cause is not known: what was reported looks like the consequence of another loss")
        cause = root_cause(ctx.losses)
        suspect = self.suspect(cause)
        if suspect is not None and not self.condemned(cause) and (ctx.checked is None or ctx.checked[0] != suspect):
            return NotYet(f"node {suspect} is being checked")
        move = self.move(cause)
        leave, restore = self.leaving(move, cause), self.restore(move.level, cause)
        if restore < ctx.committed and move.reason is not Reason.SAME_ERROR:
            move = Move(move.level, Level.NODE, Reason.STATE_LOST)
        return FailoverStarted(
            failover=ctx.failover_count + 1,
            level=move.level,
            scope=next_scope(ctx, self.scope(move.level, cause, restore)),
            restore=restore,
            reason=cause.reason,
            role=cause.instance.role,
            rank=cause.instance.rank,
            text=cause.text,
            traceback=cause.traceback,
            moved_from=move.moved_from,
            move_reason=move.reason,
            leave=tuple((member.role, member.rank) for member in leave),
        )

    @property
    def judged(self) -> bool:
        """False while every loss looks like the consequence of one that has not been reported yet."""
        return self.ctx.diagnosed or any(not is_secondary(loss) for loss in self.ctx.losses)

    def move(self, cause: Loss) -> Move:
        """The narrowest level that still has budget and is possible."""
        ladder = list(self.ladder(cause))
        if repetition.is_hopeless(self.ctx, cause):
            return Move(Level.JOB, ladder[0] if ladder[0] is not Level.JOB else None, Reason.SAME_ERROR)
        if self.ctx.escalated is Level.NODE:
            fit = may_move(cause) and is_fit(self.ctx, cause)
            return Move(Level.PROCESS if fit else Level.JOB, Level.NODE, Reason.NO_NODE)
        if cause.reason is Reason.ENGINE_LOST and self.is_part(cause):
            return Move(Level.PROCESS, Level.JOB, Reason.SCOPE_NARROW)
        if (suspect := self.suspect(cause)) is not None and (self.condemned(cause) or self.ctx.checked is not None):
            if self.condemned(cause) or self.ctx.checked == (suspect, False):
                return Move(Level.NODE, ladder[0], Reason.NODE_SUSPECT)
            if self.budget_left(cause, ladder[0]) > 0:
                return Move(ladder[0], Level.NODE, Reason.NODE_HEALTHY)
        for level in ladder:
            if self.budget_left(cause, level) > 0:
                if level is ladder[0]:
                    return self._first(cause, level)
                return self._wider(cause, ladder[0], level)
        return Move(Level.JOB, ladder[0], Reason.BUDGET_PROCESS)

    def suspect(self, cause: Loss) -> NodeId | None:
        """The node to be checked before the verdict: its device failed, or units died there one after another.

        Deaths of a job that is on one node say nothing about it, and a fault of the code comes along to any other.
        """
        ctx = self.ctx
        level = next(self.ladder(cause))
        if level not in (Level.PROCESS, Level.ROLE) or ctx.escalated is not None or cause.instance not in ctx.bound:
            return None
        nodes = {bundle.node for _, bundle in ctx.bound.values()}
        alone = len(nodes) < 2 and cause.reason not in OF_THE_NODE
        if alone or not may_move(cause) or self.budget_left(cause, Level.NODE) <= 0:
            return None
        here = ctx.bundle(cause.instance)[1].node
        if cause.reason in OF_THE_NODE:
            return here
        several = deaths_of_one_node(self.ctx, cause, SUSPECT_S) > 1 or self.repeats(cause)
        return here if several else None

    def condemned(self, cause: Loss) -> bool:
        """True when no check of the node is asked for: one has found it unfit, or its deaths say enough."""
        return cause.reason in OF_THE_NODE or self.repeats(cause)

    def repeats(self, cause: Loss) -> bool:
        """True when the node has lost processes again and again, whatever a check of it says."""
        return deaths_of_one_node(self.ctx, cause, REPEAT_S) >= REPEAT_N

    def is_part(self, cause: Loss) -> bool:
        """True when all that was lost is one reservation of several, and an instance outside of it still runs."""
        touched = frozenset(self.scope(Level.PROCESS, cause))
        others = [one for one in self.ctx.instances.values() if one.id not in touched and one.active]
        return any(one.state is READY for one in others) and any(
            gang.state is GangState.RESERVED for gang in self.ctx.gangs
        )

    def _wider(self, cause: Loss, start: Level, level: Level) -> Move:
        """A wider level, unless the role may continue with the instances that it still has."""
        if self.may_degrade(cause):
            return Move(Level.PROCESS, start, Reason.RESIZED_DEGRADED)
        if level is Level.JOB and self.budget_left(cause, Level.NODE) <= 0:
            return Move(level, Level.NODE, Reason.BUDGET_NODE)
        return Move(level, start, Reason.BUDGET_PROCESS)

    def may_degrade(self, cause: Loss) -> bool:
        """True when enough members are left for ``degrade`` and no other instance needs the lost one."""
        role = self._role(cause)
        if is_world(role):
            others = any(loss.instance.role != role.name for loss in self.ctx.losses)
            return may_move(cause) and not others and self._goes_on(role, self._gone(Level.PROCESS, cause))
        if role.fail.degrade is None or role.finite or len(self.ctx.plan.unit(cause.instance)) > 1:
            return False
        if role.name in self.ctx.plan.stateful or any(loss.instance.role != role.name for loss in self.ctx.losses):
            return False
        left = sum(one.state is InstanceState.READY for one in self.ctx.of_role(role.name))
        return left >= role.fail.degrade

    def _goes_on(self, role: RoleSpec, gone: set[InstanceId]) -> bool:
        """True when the role may continue without the lost members and those whose gang is claimed by others."""
        going = gone | {member for ask in self.ctx.asks if ask.back for member in ask.everybody}
        left = [one for one in self.ctx.active_of(role.name) if one.id not in going]
        if is_world(role):
            return bool(left) and world_of(role, len(left)) > 0
        if not role.serves:
            return False
        spares = sum(one.spare and one.state is READY and one.id not in gone for one in self.ctx.of_role(role.name))
        ready = sum(one.state is READY for one in left)
        return ready + spares >= (role.fail.degrade or role.replicas_min)

    def leaving(self, move: Move, cause: Loss) -> tuple[InstanceId, ...]:
        """Members that the job continues without for now, where their roles allow it.

        Of a world those leave too who are above the largest allowed size of what is left; they may come back where
        they were.
        """
        ctx = self.ctx
        if move.reason is not Reason.RESIZED_DEGRADED and move.level is not Level.NODE:
            return ()
        if move.level is Level.NODE and not may_move(cause):
            return ()
        gone = self._gone(move.level, cause)
        leave: list[InstanceId] = []
        for role in ctx.roles:
            mine = [one.id for one in ctx.of_role(role.name) if one.id in gone]
            degrades = move.reason is Reason.RESIZED_DEGRADED and role.name == cause.instance.role
            if not mine or not (degrades or self._goes_on(role, gone)):
                continue
            left = [one.id for one in ctx.active_of(role.name) if one.id not in gone]
            leave += [*mine, *(left[world_of(role, len(left)) :] if is_world(role) else ())]
        return tuple(leave)

    def restore(self, level: Level, cause: Loss) -> int:
        """The commit to go back to: the last one, or, when its state was in the memory of a lost node, that on disk.

        It is the worst case: who comes up again on the same host finds the last commit there (``survival.restorable``).
        """
        ctx = self.ctx
        gone = self.lost(level, cause) if level is Level.NODE and cause.reason in OF_THE_NODE else ()
        return survival.surviving(ctx, gone)

    def lost(self, level: Level, cause: Loss) -> tuple[InstanceId, ...]:
        """Instances that were lost; at the level of a node all on it; in a move, those with another place."""
        if cause.reason is Reason.MIGRATED_DRAIN:
            place = held(self.ctx)
            return place.everybody if place else ()
        lost = [loss.instance for loss in self.ctx.losses]
        if level is Level.NODE and cause.instance in self.ctx.bound:
            home = self.ctx.bundle(cause.instance)[1].node
            lost += [one for one, (_, bundle) in self.ctx.bound.items() if bundle.node == home]
        return tuple(one for one in dict.fromkeys(lost) if not self.ctx.instances[one].retired)

    def _gone(self, level: Level, cause: Loss) -> set[InstanceId]:
        """Who was lost, without those whom only the end of another took along: they come up again where they are."""
        lost, home = self.lost(level, cause), cause.node if level is Level.NODE else None
        if is_secondary(cause):
            return set(lost)
        along = {loss.instance for loss in self.ctx.losses if is_secondary(loss) and loss.node != home}
        return set(lost) - along

    def ladder(self, cause: Loss) -> Iterator[Level]:
        """Levels to try for this cause, narrowest first: the contract of the role, then its ``then``."""
        role = self._role(cause)
        if cause.reason in (Reason.ENGINE_LOST, Reason.DATA_ERROR):
            yield Level.JOB
        elif cause.reason is Reason.NODE_LOST:
            yield from (Level.NODE, Level.JOB)
        else:
            levels = [_LEVELS[one] for one in (role.restart, *role.fail.then)]
            # Which node of the mesh spoils a sum is not known, so none is left.
            wrong = cause.reason is Reason.COLLECTIVE_WRONG
            yield from (Level.JOB if wrong and one is Level.NODE else one for one in levels)

    def budget_left(self, cause: Loss, level: Level) -> int:
        """How many failures of the role the level may still absorb in the window that ends now."""
        if level is Level.JOB or is_free(self.ctx, cause):
            return 1
        if level is not Level.NODE and by_platform(self.ctx, cause):
            return platform_left(self.ctx, level, cause.at_s)
        fail = self._role(cause).fail
        limit_n = NODE_MOVES_MAX if level is Level.NODE else fail.limit_n
        since_s = cause.at_s - fail.limit_window_s
        used = sum(
            1
            for charge in self.ctx.charges
            if charge.role == cause.instance.role and charge.level is level and charge.at_s > since_s
            if level is Level.NODE or not charge.platform
        )
        return limit_n - used

    def scope(self, level: Level, cause: Loss, restore: int | None = None) -> tuple[InstanceId, ...]:
        """Every instance that the recovery touches, those of an open recovery that it joins included.

        Where commits after ``restore`` are given up, readers of weights must not keep those of a later one.
        """
        graph, ctx = self.ctx.plan, self.ctx
        if level is Level.JOB:
            return graph.instances
        lost = self.lost(level, cause)
        before = ctx.failover.scope if ctx.failover else ()
        joined = [one for one in before if not ctx.instances[one].retired]
        # A standby is in no world: its loss touches it alone.
        edges = ctx.spec.weights if ctx.spec is not None and restore is not None and restore < ctx.committed else ()
        readers = {edge.target for edge in edges}
        seeds = [one for one in (*lost, *joined) if ctx.instances[one].active]
        seeds += [one for one in graph.instances if one.role in readers and ctx.instances[one].active]
        touched = recovery_scope(graph, seeds, self.whole_roles(level, cause.instance.role)) if seeds else ()
        return tuple(one for one in graph.instances if (one in touched and ctx.instances[one].active) or one in lost)

    def whole_roles(self, level: Level, role: RoleName) -> frozenset[RoleName]:
        """Roles that get new processes as a whole: by their contract, or because the recovery widened to the role."""
        wide = {
            loss.instance.role
            for loss in self.ctx.losses
            if self._role(loss).restart == "role" and self.ctx.instances[loss.instance].active
        }
        return frozenset(wide | ({role} if level is Level.ROLE else set()))

    def _first(self, cause: Loss, level: Level) -> Move:
        """The level where the contract starts. A fault of the code restarts here: another node would raise it too."""
        if level is Level.NODE and not may_move(cause):
            if self.budget_left(cause, Level.PROCESS) > 0:
                return Move(Level.PROCESS, Level.NODE, Reason.NO_NODE)
            return Move(Level.JOB, Level.NODE, Reason.BUDGET_PROCESS)
        return Move(level)

    def _role(self, cause: Loss) -> RoleSpec:
        return self.ctx.role(cause.instance.role)


def open_failover(ctx: JobContext, event: FailoverStarted) -> JobContext:
    """Apply a verdict, or a change of size: from here on the older epochs of its scope are fenced."""
    planned = event.reason in PLANNED and not ctx.losses
    if event.failover != ctx.failover_count + 1 or not (ctx.losses or (planned and ctx.open_failover is None)):
        return ctx
    one = ctx.instances[InstanceId(event.role, event.rank)]
    # A change of size or place has the form of a loss, though nothing was lost.
    cause = ctx.loss(one, event.reason, event.text) if planned else root_cause(ctx.losses)
    new = _record(ctx, event, cause)
    platform = by_platform(ctx, cause)
    charge = Charge(role=event.role, level=event.level, at_s=ctx.at_s, platform=platform)
    charges = () if planned or is_free(ctx, cause) or (platform and event.level is Level.JOB) else (charge,)
    resized = bool(event.join) or any(is_world(ctx.role(role)) for role, _ in event.leave)
    ctx = replace(
        ctx,
        failovers=(*_superseded(ctx, new), new)[-FAILOVERS_KEPT_MAX:],
        failover_count=new.number,
        charges=(*ctx.charges, *charges)[-CHARGES_KEPT_MAX:],
        resized_s=ctx.at_s if resized else ctx.resized_s,
        boundary=False,
    )
    if event.level is Level.NODE and not may_move(cause):
        return replace(ctx, escalated=Level.NODE)
    if not planned:
        ctx = repetition.noted(ctx, cause)
    match event.level:
        case Level.JOB:
            return _restart_job(ctx, cause, hopeless=event.move_reason is Reason.SAME_ERROR)
        case Level.PROCESS | Level.ROLE | Level.NODE:
            return _restart_scope(ctx, new, event)


def job_level_ending(ctx: JobContext, cause: Loss) -> Ending:
    """What a restart of the whole job means: the queue again, or the end for the reason of the cause.

    A fault of the platform never uses up a retry: it has a budget of its own.
    """
    assert ctx.spec is not None
    free = by_platform(ctx, cause)
    own = ctx.retries < ctx.spec.retry and cause.reason is not Reason.DATA_ERROR
    requeue = platform_left(ctx, Level.JOB, ctx.at_s) > 0 if free else own
    fails = INFO[cause.reason].ends_in is not None
    return Ending(
        reason=cause.reason if fails else Reason.INTERNAL,
        requeue=requeue,
        counts=not free,
        grace_s=FAILED_GRACE_S,
        save_s=ctx.spec.grace_s if requeue else 0.0,
        text=cause.text,
        role=cause.instance.role,
        rank=cause.instance.rank,
        traceback=cause.traceback,
    )


def _record(ctx: JobContext, event: FailoverStarted, cause: Loss) -> Failover:
    scope = tuple(InstanceId(role, rank) for role, rank, _ in event.scope)
    coordinator = FailoverCoordinator(ctx)
    # A world that changes its size continues in the processes that live.
    shrinks = {role for role, _ in event.leave if is_world(ctx.role(role))}
    wide = coordinator.whole_roles(event.level, event.role) - shrinks
    lost = coordinator.lost(event.level, cause) if ctx.losses or cause.reason is not Reason.RESIZED else ()
    fresh = replaced(ctx.plan, lost, wide)
    delay_s = _backoff_s(ctx, cause) if ctx.losses else 0.0
    return Failover(
        number=event.failover,
        level=event.level,
        scope=scope,
        replaced=tuple(member for member in scope if member in fresh),
        epoch=max((epoch for _, _, epoch in event.scope), default=ctx.epoch_max),
        restore=event.restore,
        cause=cause,
        started_s=ctx.at_s,
        moved_from=event.moved_from,
        move_reason=event.move_reason,
        delay_s=delay_s,
        released=delay_s == 0.0,
        rolled_back=event.level is Level.JOB
        or (event.level is Level.NODE and not may_move(cause))  # it opens nothing
        or not any(member.role in ctx.plan.stateful for member in scope),
    )


def _backoff_s(ctx: JobContext, cause: Loss) -> float:
    """0 for the first failure of the role in its window, then the base of the contract, doubled each time."""
    fail = ctx.role(cause.instance.role).fail
    earlier = sum(
        1
        for charge in ctx.charges
        if charge.role == cause.instance.role and charge.at_s > cause.at_s - fail.limit_window_s
    )
    return min(BACKOFF_MAX_S, fail.backoff_s * 2.0 ** (earlier - 1)) if earlier else 0.0


def _superseded(ctx: JobContext, by: Failover) -> tuple[Failover, ...]:
    """The records with the open recovery taken over by the new one; a level that was not possible changes nothing."""

    def taken_over(one: Failover) -> bool:
        impossible = one.level is Level.NODE and one.number == by.number - 1 and one.superseded_by is None
        opens = by.level is not Level.NODE or may_move(by.cause)
        return opens and (one.number == ctx.open_failover or impossible)

    return tuple(replace(one, superseded_by=by.number) if taken_over(one) else one for one in ctx.failovers)


def end_or_retry(ctx: JobContext, ending: Ending) -> JobContext:
    """End the attempt at a commit: for good, or for another one."""
    return shutdown.begin(ctx, ending, JobState.RECOVERING if ending.requeue else JobState.STOPPING)


def _restart_job(ctx: JobContext, cause: Loss, *, hopeless: bool) -> JobContext:
    ending = job_level_ending(ctx, cause)
    if hopeless:
        ending = replace(ending, requeue=False, save_s=0.0, text=repetition.conclusion(ctx, cause))
    ctx = end_or_retry(ctx, ending)
    return replace(ctx, losses=(), escalated=None, diagnosed=False, checked=None, open_failover=None)


def _restart_scope(ctx: JobContext, failover: Failover, event: FailoverStarted) -> JobContext:
    fresh, join = frozenset(failover.replaced), {InstanceId(*pair) for pair in event.join}
    lost = frozenset(loss.instance for loss in ctx.losses)
    away = frozenset(FailoverCoordinator(ctx).lost(event.level, failover.cause)) if event.level is Level.NODE else lost
    leave = {InstanceId(*pair) for pair in event.leave}
    if not leave and event.move_reason is Reason.RESIZED_DEGRADED:
        leave = set(lost)  # as logs say it that do not list who leaves

    stays = event.move_reason is Reason.NO_NODE
    excluded = {} if stays else {one.id: one.excluded for one in ctx.instances.values() if one.excluded}
    movers = away if failover.cause.reason is Reason.MIGRATED_DRAIN else frozenset[InstanceId]()
    if (event.level is Level.NODE and not movers) or leave:
        # Who was lost elsewhere, by its peer's end, says nothing of its own node.
        own = {loss.node for loss in ctx.losses if loss.instance in leave or loss.reason in OF_THE_NODE}
        bad = own | {failover.cause.node}
        homes = {one: ctx.bundle(one)[1].node for one in away if one in ctx.bound and not ctx.instances[one].excluded}
        excluded |= {one: (node,) for one, node in homes.items() if node in bad}

    def changed(member: InstanceId) -> InstanceRecord:
        one = ctx.instances[member]
        if member in leave:
            return leaving(one, failover.epoch, excluded=excluded.get(member, ()))
        if member in join:
            return replace(_re_form(one, failover.epoch), spare=False)
        if member not in fresh:
            return replace(_re_form(one, failover.epoch), excluded=excluded.get(member, ()))
        new = _replace(one, failover.epoch, lost=member in away)
        return replace(new, spare=one.spare or _in_background(ctx, member, lost), excluded=excluded.get(member, ()))

    # Without another node no instance waits for one: who is not replaced now comes up again where it was, too.
    back = [one for one in unplaced(ctx) if stays and one.id not in failover.scope and has_place(ctx, one)]
    asks = tuple(
        moved(ask, AskState.GRANTED) if ask.state is AskState.HELD and frozenset(ask.everybody) == movers else ask
        for ask in ctx.asks
    )
    instances = [*(changed(member) for member in failover.scope), *(replace(one, excluded=()) for one in back)]
    return replace(
        ctx.with_instances(instances).with_placement(ctx.placement, asks),
        open_failover=failover.number,
        epoch_max=Epoch(max(ctx.epoch_max, failover.epoch)),
        starting_s=ctx.at_s,
        losses=(),
        escalated=None,
        diagnosed=False,
        checked=None,
    )


def _in_background(ctx: JobContext, member: InstanceId, lost: frozenset[InstanceId]) -> bool:
    """True when the job does not wait for the replacement: a spare takes over, or fewer members suffice."""
    role = ctx.role(member.role)
    if member not in lost or not role.serves:
        return False
    members = [one for one in ctx.of_role(role.name) if one.id not in lost and one.state is InstanceState.READY]
    spares = sum(one.spare for one in members)
    mine = sorted(one for one in lost if one.role == role.name and ctx.instances[one].active)
    fewest = role.fail.degrade or (role.replicas_min if role.replicas_max > role.replicas_min else None)
    if fewest is not None and len(members) - spares >= fewest:
        return True
    return member in mine[:spares]


def _replace(one: InstanceRecord, epoch: Epoch, *, lost: bool) -> InstanceRecord:
    """A new process under ``epoch``; one that was only asked for and did not fail is as good as new and stays."""
    if one.state is InstanceState.PLANNED or (not lost and one.state is InstanceState.STARTING):
        return replace(one, epoch=epoch)
    new = without_process(one, InstanceState.PLANNED, epoch)
    return replace(new, ended=False, retired=False, restarts=one.restarts + 1)


def _re_form(one: InstanceRecord, epoch: Epoch) -> InstanceRecord:
    """The same process under ``epoch``, to be assembled anew; without a process it starts like any other."""
    state = InstanceState.STALE if one.alive else one.state
    if one.process is None:
        state = InstanceState.PLANNED
    return moved(one, state, epoch=epoch, running=False, ended=False, retired=False)
