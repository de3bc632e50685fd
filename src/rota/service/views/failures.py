"""The failure timeline: what was lost, what was decided, when it was over, what it cost."""

from __future__ import annotations

from collections.abc import Iterable

from rota.runtime.probe import master_part
from rota.service.models.reasons import FailureList, FailureRow, LossRow
from rota.service.views.culprit import culprit_in, culprit_of
from rota.service.views.jobs import API, end_document, loss_document, when
from rota.service.views.story import Failure, JobStory
from rota.spec.events import InstanceLost, PartReplaced
from rota.spec.reasons import INFO


def failure_list(story: JobStory, *, attempt: int | None = None, replaced: Iterable[PartReplaced] = ()) -> FailureList:
    """Every recovery of the job in order, and the end if the job failed; ``first`` is the culprit of ``culprit_of``.

    ``open_losses`` no recovery has begun for: they wait for a verdict, or the job ended with them. ``masters`` are
    those of the ``replaced`` parts that were the master of this job: they cost it nothing, and count as no failure.
    """
    items = [_item(n, one) for n, one in enumerate(story.failures, 1) if attempt in (None, one.attempt)]
    open_losses = [_loss(at, loss) for at, loss in story.unclaimed]
    first = culprit_of(story, attempt=attempt)
    return {
        "api": API,
        "kind": "FailureList",
        "job": story.id,
        "state": story.state.value,
        "first": None if first is None else {**_loss(first.at, first.loss), "instance": first.instance},
        "items": items,
        "end": None if (end := end_document(story)) is None else {"at": when(story.ended_at), **end},
        "open_losses": open_losses,
        "masters": [
            {"pid": one.pid, "text": one.text, "at": when(one.found_at)}
            for one in replaced
            if one.part == master_part(story.id)
        ],
        "next": None,
    }


def _item(n: int, one: Failure) -> FailureRow:
    cause = one.cause
    return {
        "n": n,
        "failover": one.number,
        "attempt": one.attempt,
        "level": one.level.value,
        "moved_from": None if one.moved_from is None else one.moved_from.value,
        "move_reason": one.move_reason,
        "reason": cause.reason,
        "fault": INFO[cause.reason].fault,
        "text": cause.text or INFO[cause.reason].text,
        "role": cause.role,
        "rank": cause.rank,
        "instance": culprit_in(one).instance,
        "traceback": cause.traceback,
        "scope": [{"instance": f"{role}/{rank}", "epoch": epoch} for role, rank, epoch in one.scope],
        "restore": one.restore,
        "restored_from": one.restored_from,
        "lost_commits": one.lost_commits,
        "seen_at": when(one.seen_at),
        "decided_at": when(one.decided_at),
        "ended_at": when(one.ended_at),
        "detect_to_decide_s": round(one.decided_at - one.seen_at, 3),
        "seconds": None if one.ended_at is None else round(one.ended_at - one.seen_at, 3),
        "joined_by": one.joined_by,
        "healed": one.ended_at is not None,
        "losses": [_loss(at, loss) for at, loss in one.losses],
    }


def _loss(at: float, loss: InstanceLost) -> LossRow:
    return {"instance": f"{loss.role}/{loss.rank}", **loss_document(at, loss), "process_alive": loss.alive}
