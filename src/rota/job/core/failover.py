"""FailoverCoordinator: from losses to the level, scope and budget of a recovery; the verdict changes nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rota.job.core import memory
from rota.job.core.context import JobContext, Loss
from rota.job.core.diagnosis import (
    by_platform,
    deaths_of_one_node,
    is_free,
    is_secondary,
    may_move,
    platform_left,
    root_cause,
)
from rota.job.core.graph import recovery_scope
from rota.job.core.sizing import OF_THE_NODE, held, is_fit, is_world, world_of
from rota.spec.events import FailoverStarted
from rota.spec.ids import Epoch, InstanceId, NodeId, RoleName
from rota.spec.job import Restart, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, Level

NODE_MOVES_MAX = 2
"""Replacements of a node for one role within its window; the next one widens to the job."""
SUSPECT_S = 30.0
"""Two units of one node that die within so long, while nobody dies elsewhere, cast doubt on the node."""
REPEAT_N, REPEAT_S = 3, 600.0
"""So many deaths of several units of one node within so long, and none elsewhere, are the node's: no check is asked."""
READY = InstanceState.READY
_LEVELS: dict[Restart, Level] = {"process": Level.PROCESS, "role": Level.ROLE, "node": Level.NODE, "job": Level.JOB}


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

    def verdict(self) -> FailoverStarted | None:
        """The recovery that the present losses call for; None while there is none, or its cause may still come."""
        ctx = self.ctx
        if not ctx.losses or ctx.ending is not None or not self.judged:
            return None
        cause = root_cause(ctx.losses)
        suspect = self.suspect(cause)
        if suspect is not None and not self.condemned(cause) and (ctx.checked is None or ctx.checked[0] != suspect):
            return None
        move = self.move(cause)
        leave, restore = self.leaving(move, cause), self.restore(move.level, cause)
        if restore < ctx.committed:
            move = Move(move.level, Level.NODE, Reason.STATE_LOST)
        epoch = Epoch(ctx.epoch_max + 1)
        return FailoverStarted(
            failover=ctx.failover_count + 1,
            level=move.level,
            scope=tuple((member.role, member.rank, epoch) for member in self.scope(move.level, cause, restore)),
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
        """The narrowest level of the ladder that still has budget and is possible."""
        ladder = list(self.ladder(cause))
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
        """True when everything that was lost is one reservation of several, and somebody outside of it goes on."""
        touched = frozenset(self.scope(Level.PROCESS, cause))
        others = [one for one in self.ctx.instances.values() if one.id not in touched and one.active]
        return any(one.state is READY for one in others) and any(gang.state == "reserved" for gang in self.ctx.gangs)

    def _wider(self, cause: Loss, start: Level, level: Level) -> Move:
        """A wider level, unless the role may go on with the instances that it still has."""
        if self.may_degrade(cause):
            return Move(Level.PROCESS, start, Reason.RESIZED_DEGRADED)
        if level is Level.JOB and self.budget_left(cause, Level.NODE) <= 0:
            return Move(level, Level.NODE, Reason.BUDGET_NODE)
        return Move(level, start, Reason.BUDGET_PROCESS)

    def may_degrade(self, cause: Loss) -> bool:
        """True when enough members are left for ``degrade`` and no one else needs the lost one to go on."""
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
        """True when the role may go on without those who are gone, and those whose gang others want back."""
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
        """Members that the job goes on without for now, their roles being able to.

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
        for role in ctx.spec.roles if ctx.spec else ():
            mine = [one.id for one in ctx.of_role(role.name) if one.id in gone]
            degrades = move.reason is Reason.RESIZED_DEGRADED and role.name == cause.instance.role
            if not mine or not (degrades or self._goes_on(role, gone)):
                continue
            left = [one.id for one in ctx.active_of(role.name) if one.id not in gone]
            leave += [*mine, *(left[world_of(role, len(left)) :] if is_world(role) else ())]
        return tuple(leave)

    def restore(self, level: Level, cause: Loss) -> int:
        """The commit to go back to: the last one, or, when its state was in the memory of a lost node, that on disk.

        It is the worst case: who comes up again on the same host finds the last commit there (``memory.restorable``).
        """
        ctx = self.ctx
        gone = self.lost(level, cause) if level is Level.NODE and cause.reason in OF_THE_NODE else ()
        lost_memory = memory.missing(ctx) or any(memory.keeps_on_host(ctx, member) for member in gone)
        return min(ctx.checkpoint_n, ctx.committed) if lost_memory else ctx.committed

    def lost(self, level: Level, cause: Loss) -> tuple[InstanceId, ...]:
        """Who was lost; at the level of a node everybody on it; in a move, who has another place."""
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
        # What stands by is in nobody's world: its loss touches it alone.
        edges = ctx.spec.weights if ctx.spec is not None and restore is not None and restore < ctx.committed else ()
        readers = {edge.target for edge in edges}
        seeds = [one for one in (*lost, *joined) if ctx.instances[one].active]
        seeds += [one for one in graph.instances if one.role in readers and ctx.instances[one].active]
        touched = recovery_scope(graph, seeds, self.whole_roles(level, cause.instance.role)) if seeds else ()
        return tuple(one for one in graph.instances if (one in touched and ctx.instances[one].active) or one in lost)

    def whole_roles(self, level: Level, role: RoleName) -> frozenset[RoleName]:
        """Roles that get new processes as a whole: by their contract, or because the recovery widened to the role."""
        assert self.ctx.spec is not None
        wide = {
            loss.instance.role
            for loss in self.ctx.losses
            if self.ctx.spec.role(loss.instance.role).restart == "role" and self.ctx.instances[loss.instance].active
        }
        return frozenset(wide | ({role} if level is Level.ROLE else set()))

    def _first(self, cause: Loss, level: Level) -> Move:
        """The level where the contract starts. A fault of the code restarts here: it would come along."""
        if level is Level.NODE and not may_move(cause):
            if self.budget_left(cause, Level.PROCESS) > 0:
                return Move(Level.PROCESS, Level.NODE, Reason.NO_NODE)
            return Move(Level.JOB, Level.NODE, Reason.BUDGET_PROCESS)
        return Move(level)

    def _role(self, cause: Loss) -> RoleSpec:
        assert self.ctx.spec is not None
        return self.ctx.spec.role(cause.instance.role)
