"""The streams of a job as its last commit left them: what came in, where it is, what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rota.job.rpc.peers import CUT
from rota.service.models.jobs import StreamRow
from rota.spec.events import Committed


def stream_rows(commit: Committed | None) -> list[StreamRow]:
    """One row a ledger: ``admitted = pending + leased + queued + trained + dropped`` holds in each.

    ``leased`` are with their producers; ``again`` counts productions begun anew; ``age`` is in model versions.
    """
    cuts: Mapping[str, Mapping[str, Any]] = commit.cursor.get(CUT, {}).get("streams", {}) if commit else {}
    return [
        {
            "name": name,
            "admitted": cut["admitted"],
            "pending": cut["pending"],
            "leased": cut["running"],
            "queued": cut["queued"],
            "trained": cut["trained"],
            "dropped": dict(cut["dropped"]),
            "again": cut["again"],
            "age": cut["age"],
        }
        for name, cut in cuts.items()
    ]
