"""Records what a later version has to read: whole logs of simulated systems, and each kind of event that those lack.

``PYTHONHASHSEED=0 python -m tests.logs.record`` writes ``<version>-world-<seed>.json.gz`` and ``<version>-events.json``
into this folder: once a version, before it is released.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from collections import Counter
from pathlib import Path
from typing import Any

from rota.cluster.live import Scheduler
from rota.cluster.policies.basic import fifo
from rota.cluster.policies.default import default
from rota.job.core.placement import requests_of
from rota.spec import events
from rota.spec.events import Event, Record, event_to_json
from rota.spec.ids import Epoch, JobId, NodeId, RoleName
from rota.spec.reasons import Reason
from tests.makers import replay
from tests.world.world import World, play

FOLDER = Path(__file__).parent
SEEDS = 60
LOOKS = 8
"""How often within a log the books of the scheduler are recorded."""
OTHERS: tuple[Event, ...] = (
    events.ServiceStarted(install_epoch=Epoch(3), pid=4711, version="0.1.0"),
    events.DowntimePassed(since=1_700_000_000.25),
    events.EngineLost(text="the control store lost its state"),
    events.EngineStateVolatile(text="no RocksDB"),
    events.PartReplaced(part="gateway", pid=77, text="gave no answer for 10 s", found_at=1_700_000_000.5),
    events.NodeLost(node=NodeId("n1"), text="no report for 30 s"),
    events.QueuesChanged(queues=({"path": "team", "guaranteed": {"gpus": 4}},), by="ada"),
    events.UserChanged(name="ada", grants=(("team", "admin"),), by="local"),
    events.TokenMade(id="t1", user="ada", digest="0" * 64, name="laptop", role="user", expires_at=1_800_000_000.0),
    events.TokenRevoked(id="t1", by="ada"),
    events.SecretChanged(owner="ada", name="WANDB_KEY", removed=True, by="ada"),
    events.WebhookSet(id="w1", url="https://hooks.example/x", on=("failed", "lost"), queue="team", by="ada"),
    events.WebhookRemoved(id="w1", by="ada"),
    events.AlertAcknowledged(alert="hang/j1/3", by="ada", text="known"),
    events.JobChanged(changes={"priority": 50, "time_limit_s": 3600.0}, by="ada"),
    events.FencedWrite(scope="job/j1", epoch=Epoch(2), fence=Epoch(3), count=4),
    events.CommitCopied(
        n=7, loop_epoch=Epoch(2), copies=((RoleName("actor"), 0, "n2", Epoch(1)),), seconds=0.5, cursor={"cut": {}}
    ),
    events.UploadStarted(url="s3://team/run7"),
    events.UploadEnded(url="s3://team/run7", files=3, bytes=4096, seconds=1.5, error="busy", notes=("log.txt@m2",)),
    events.ProgressStalled(
        role=RoleName("actor"), rank=1, epoch=Epoch(2), idle_s=301.5, stacks="train.py:7", reason=Reason.NO_PROGRESS
    ),
)
"""Kinds that no simulated system writes, each with more than its defaults."""


def books_of(scheduler: Scheduler) -> dict[str, Any]:
    """What the scheduler knows after a log: who holds what, who waits, which nodes are fit."""
    state = scheduler.state
    return {
        "jobs": {
            job: {
                "phase": live.phase,
                "attempt": live.attempt,
                "held": [[state.nodes[one.node].id, list(one.devices), one.cpu_milli] for one in live.held],
            }
            for job, live in sorted(state.jobs.items())
        },
        "health": {node.id: int(state.node_health[row]) for node in state.nodes for row in [state.node_row[node.id]]},
    }


def looks(records: list[Record], *, limited: bool) -> list[tuple[int, dict[str, Any]]]:
    """Number of a record, and the books after it, at ``LOOKS`` places of a log."""
    scheduler = Scheduler(default() if limited else fifo(), requests_of)
    at = {len(records) * n // LOOKS - 1 for n in range(1, LOOKS + 1)}
    found = list[tuple[int, dict[str, Any]]]()
    for i, record in enumerate(records):
        scheduler.apply(record)
        if i in at:
            found.append((record.number, books_of(scheduler)))
    return found


def record_world(world: World, version: str) -> None:
    """Write the log of one run, the contexts of its jobs, and the books of its scheduler."""
    records = list(world.log.read(limit=10**9))
    jobs = sorted({one.job for one in records if one.job is not None})
    document = {
        "version": version,
        "limited": world.swarm.limited,
        "records": [
            {"number": one.number, "job": one.job, "seq": one.seq, "at": one.at, "event": event_to_json(one.event)}
            for one in records
        ],
        "contexts": {job: replay(JobId(job), [one for one in records if one.job == job]).to_json() for job in jobs},
        "books": looks(records, limited=world.swarm.limited),
    }
    body = json.dumps(document, sort_keys=True).encode()
    (FOLDER / f"{version}-world-{world.seed}.json.gz").write_bytes(gzip.compress(body, mtime=0))


def main() -> None:
    """Choose the fewest runs that write what no recording has yet, and record them; recordings are never replaced."""
    version = importlib.metadata.version("rota")
    runs = {seed: play(seed) for seed in range(SEEDS)}
    left = set(sum((one.seen for one in runs.values()), Counter[str]()))
    recorded = set[str]()
    for path in FOLDER.glob("*-world-*.json.gz"):
        runs.pop(int(path.name.split("-")[2].split(".")[0]), None)
        recorded |= {one["event"]["kind"] for one in json.loads(gzip.decompress(path.read_bytes()))["records"]}
    others = {type(one).__name__ for one in OTHERS}
    if missing := events.KINDS.keys() - left - others:
        raise SystemExit(f"neither a run nor OTHERS has {', '.join(sorted(missing))}: add them")
    left -= recorded
    while left:
        best = max(runs.values(), key=lambda run: (len(left & set(run.seen)), -run.seen.total()))
        left -= set(best.seen)
        record_world(best, version)
    text = json.dumps([event_to_json(one) for one in OTHERS], indent=1, sort_keys=True)
    (FOLDER / f"{version}-events.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
