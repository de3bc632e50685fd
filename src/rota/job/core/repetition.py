"""Repetition: the same error of a unit, try after try, with nothing gained in between: another would fail as well.

What counts is an error of the job's own code: an exception, an import, an environment, an exit status. Signals, memory,
lost nodes and engines, and errors that only report the loss of another instance say nothing about the code.
"""

from __future__ import annotations

import re

from rota.job.core.context import JobContext, Loss, RepeatedError, replace
from rota.spec.ids import InstanceId
from rota.spec.reasons import Reason

OWN_ERRORS = frozenset({Reason.USER_ERROR, Reason.IMPORT_ERROR, Reason.ENV_SETUP_FAILED, Reason.EXIT_NONZERO})
HEALED_S, HEALED_OWN_S = 60.0, 3600.0
"""A recovery is healed by a commit, or once the job has run for this long after it: after a fault from outside, and
after an error of its own code, which comes again where the code comes to the same line."""

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

_SIGNAL_STATUS = range(129, 166)
"""Exit statuses with which a shell reports that its child was ended by a signal (128 + number)."""
_CHILD_SIGNALLED = re.compile(r"\bSIG[A-Z]{3,6}\b")
"""A launcher inside a command (torchrun, accelerate) names the signal that ended its child, and ends with a status."""
_STATUS = re.compile(r"ended with exit status (\d+)(?:: (.*))?", re.DOTALL)
_KIND = re.compile(r"(?:rank \d+: )?([A-Za-z_][\w.]*)(?=:|$)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_CHAINED = re.compile(r"\n(?:During handling of the above|The above exception was the direct cause)")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
_ROTA = f"{__file__.rsplit('/', 3)[0]}/"
_VOLATILE = re.compile(
    r"(?P<temp>(?:/var)?/tmp/[^\s'\",;:)]+|/dev/shm/[^\s'\",;:)]+)"
    r"|0x[0-9a-fA-F]+|\b(?=[a-f-]*\d)[0-9a-f][0-9a-f-]{7,}\b|\d+(?:[.,_]\d+)*(?:[eE][-+]?\d+)?"
)
"""Temporary paths, addresses, identifiers and numbers."""


def is_secondary(loss: Loss) -> bool:
    """True for an error that only reports the loss of another instance: it is never the root."""
    if loss.reason is Reason.COLLECTIVE_TIMEOUT:
        return True
    if loss.reason not in (Reason.USER_ERROR, Reason.EXIT_NONZERO):
        return False
    last = " ".join(line for line in (loss.text, loss.traceback.strip().rpartition("\n")[2]) if line).lower()
    return any(text in last for text in SECONDARY_TEXTS)


def is_own_error(loss: Loss) -> bool:
    """True for an error that a further try of the same code may well end with again.

    An exit has a status, and an exception whose frames are known has one in code of the job: a process that ended while
    it was started, and an error of the engine, say nothing about that code.
    """
    if loss.reason not in OWN_ERRORS or is_secondary(loss):
        return False
    if _CHILD_SIGNALLED.search(loss.text) or _CHILD_SIGNALLED.search(loss.traceback):
        return False
    if loss.reason is Reason.EXIT_NONZERO:
        found = _STATUS.search(loss.text)
        return found is not None and int(found[1]) not in _SIGNAL_STATUS
    return not _FRAME.search(loss.traceback) or bool(place_of(loss.traceback))


def healed_after_s(cause: Loss) -> float:
    """How long the job must run after a recovery from this failure until it counts as healed without a commit."""
    return HEALED_OWN_S if is_own_error(cause) else HEALED_S


def repeated(ctx: JobContext, cause: Loss) -> RepeatedError | None:
    """This failure with those before it that were the same; None for one that does not count."""
    if not is_own_error(cause):
        return None
    unit, identity = _unit(ctx, cause), identity_of(cause)
    before = next((one for one in ctx.repeats if one.unit == unit and one.identity == identity), None)
    return RepeatedError(unit=unit, identity=identity, count=1 + (before.count if before else 0))


def noted(ctx: JobContext, cause: Loss) -> JobContext:
    """The context once the recovery from this failure has begun."""
    heals_s = max(ctx.heals_s or 0.0, healed_after_s(cause))
    ctx = replace(ctx, heals_s=heals_s, runs_since_s=None)
    if (now := repeated(ctx, cause)) is None:
        return ctx
    return replace(ctx, repeats=(*(one for one in ctx.repeats if one.unit != now.unit), now))


def is_hopeless(ctx: JobContext, cause: Loss) -> bool:
    """True when this failure is the same one for the number of times that the role allows (``fail.same``)."""
    most, now = ctx.role(cause.instance.role).fail.same, repeated(ctx, cause)
    return now is not None and 0 < most <= now.count


def healed(ctx: JobContext) -> JobContext:
    """A commit, or time that it ran: what repeated itself is forgotten, and every recovery that is over has healed."""
    if ctx.heals_s is None and not ctx.repeats:
        return ctx
    over = ctx.failover is None and not ctx.losses
    return replace(ctx, heals_s=None if over else ctx.heals_s, repeats=())


def conclusion(ctx: JobContext, cause: Loss) -> str:
    """Why the job ends, for people."""
    count = next(one.count for one in ctx.repeats if one.unit == _unit(ctx, cause))
    place, between = place_of(cause.traceback), ", no commit between" if ctx.plan.loop else ""
    where = f" at {place}" if place else ""
    return f"gave up after {count} tries: the same {_kind(cause)}{where} each time{between}"


def identity_of(cause: Loss) -> str:
    """What two failures have in common that are the same: role, reason, error, text without what varies, and line."""
    status = _STATUS.search(cause.text)
    said = "" if status is None else status[1]
    text = _VOLATILE.sub("#", cause.text)
    return "|".join((cause.instance.role, cause.reason, said, _kind(cause), text, place_of(cause.traceback)))


def place_of(traceback: str) -> str:
    """``FILE:LINE`` of the innermost call in code of the job; empty where the traceback has none."""
    for part in (_CHAINED.split(traceback)[-1], traceback):
        frames = [(path, line) for path, line in _FRAME.findall(part) if not _is_library(path)]
        if frames:
            return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}"
    return ""


def _is_library(path: str) -> bool:
    return path.startswith(_ROTA) or _LIBRARY.search(path) is not None


def _kind(cause: Loss) -> str:
    status = _STATUS.search(cause.text)
    found = _KIND.match(cause.text if status is None else status[2] or "")
    if status is not None and (found is None or not found[1].endswith(("Error", "Exception"))):
        return f"exit status {status[1]}"
    return found[1] if found else cause.reason.value


def _unit(ctx: JobContext, cause: Loss) -> InstanceId:
    """Who fails together: the first of the unit, or of the role where all of it is restarted."""
    one = cause.instance
    whole = ctx.role(one.role).restart != "process"
    return ctx.plan.unit(ctx.plan.ranks[one.role][0] if whole else one)[0]
