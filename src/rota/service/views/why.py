"""Who waits for whom as a document: what the master says now, beside what the log says of recoveries and starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rota.service.models.reasons import WaitGraphDocument
from rota.service.views.failures import failure_list
from rota.service.views.jobs import API, when
from rota.service.views.story import JobStory
from rota.spec.states import JobState


def why_document(story: JobStory, live: Mapping[str, Any]) -> WaitGraphDocument:
    """``WaitGraph``. ``live`` is what the master tells, empty when there is none to ask: then only the log speaks.

    ``culprits`` are past their limit on progress and hold up the rest, ``suspects`` would be if the limit were short;
    each has ``members`` (several wait for each other), ``text`` and ``waiters``. ``stacks`` maps an instance to text.
    ``slow`` members take much longer for a step than their role, ``dropped`` ones use far fewer cores than at work.
    """
    open_failover = next((one for one in reversed(story.failures) if one.ended_at is None), None)
    cause = None if open_failover is None else failure_list(story)["items"][story.failures.index(open_failover)]
    return {
        "api": API,
        "kind": "WaitGraph",
        "job": story.id,
        "state": story.state.value,
        "live": bool(live),
        "culprits": live.get("culprits", []),
        "suspects": live.get("suspects", []),
        "waits": live.get("waits", []),
        "slow": live.get("slow", []),
        "dropped": live.get("dropped", []),
        "vertices": live.get("vertices", []),
        "stacks": live.get("stacks", {}),
        "items": [
            {"instance": str(one.id), "state": one.state.value, "since": when(one.since)}
            for one in story.instances.values()
            if one.state.value not in ("READY", "GONE")
        ],
        "cause": cause,
        "see": f"rota explain {story.id}" if story.state is JobState.QUEUED else f"rota failures {story.id}",
        "next": None,
    }
