"""Symptoms to one cause: rules over losses that were seen together; the first rule that fits names the cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rota.job.core.context import PLATFORM_FAULTS_MAX, PLATFORM_WINDOW_S, JobContext, Loss
from rota.job.core.sizing import OF_THE_NODE, PLANNED
from rota.spec.reasons import INFO, Reason
from rota.spec.states import Level

SECONDARY_TEXTS = (
    "connection reset by peer",
    "connection closed by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "read error",
    "nccl communicator was aborted",
    "application timeout caused pair closure",
    "roledown",
    "role_down",
    "calllost",
    "call_lost",
)
"""What an instance reports when another one went away; in lower case."""


PLATFORM = frozenset({Reason.NODE_LOST, Reason.ENGINE_LOST, Reason.GANG_TIMEOUT, Reason.SELF_ENDED})
"""Faults of what carries the job: engine, node, reservation; and of a process that ended itself, since its master did
not answer, or since it could not follow a recovery."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of diagnosis; ``name`` is what people see as the kind of the cause."""

    name: str
    fits: Callable[[Loss], bool]


def is_secondary(loss: Loss) -> bool:
    """True for an error that only says that somebody else is gone: it is never the root."""
    if loss.reason is Reason.COLLECTIVE_TIMEOUT:
        return True
    if loss.reason not in (Reason.USER_ERROR, Reason.EXIT_NONZERO):
        return False
    last = " ".join(line for line in (loss.text, loss.traceback.strip().rpartition("\n")[2]) if line).lower()
    return any(text in last for text in SECONDARY_TEXTS)


def _one_of(*reasons: Reason) -> Callable[[Loss], bool]:
    return lambda loss: loss.reason in reasons


RULES: tuple[Rule, ...] = (
    Rule("engine lost", _one_of(Reason.ENGINE_LOST)),
    Rule("node lost", _one_of(Reason.NODE_LOST)),
    Rule("device fault", _one_of(Reason.GPU_LOST, Reason.GPU_ECC, Reason.NODE_SUSPECT)),
    Rule("out of memory", _one_of(Reason.OOM_KILLED, Reason.GPU_OOM)),
    Rule("storage", _one_of(Reason.OUTPUT_FULL, Reason.DATA_UNREACHABLE, Reason.CHECKPOINT_BAD)),
    Rule("killed", _one_of(Reason.SIGNALLED, Reason.SELF_ENDED)),
    Rule("culprit of a wait", _one_of(Reason.HANG, Reason.NO_PROGRESS)),
    Rule("own exception", lambda loss: not is_secondary(loss)),
    Rule("peer lost", lambda loss: True),
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
    """How many died where the cause did; 0 when somebody died elsewhere too, or all were of one unit."""
    past = [one.cause for one in ctx.failovers]
    seen = (one for one in (*past, *ctx.losses) if one.reason not in (*PLANNED, Reason.SELF_ENDED))
    recent = (one for one in seen if cause.at_s - one.at_s <= within_s and may_move(one))
    died = {(one.instance, one.at_s, one.node) for one in recent if one.node}
    units = {ctx.plan.unit(one) for one, _, _ in died if one in ctx.instances}
    return len(died) if len({node for _, _, node in died}) == 1 and len(units) > 1 else 0
