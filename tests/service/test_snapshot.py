"""A service that starts from a snapshot and the records after it equals one that read the whole log."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.logs.record import OTHERS, books_of
from tests.logs.test_recorded_logs import WORLDS, records_of
from tests.service.standing import HELLO, Standing, standing, with_service

from rota.cluster.live import Scheduler
from rota.cluster.policies import PROFILES, get_profile
from rota.job.core.placement import requests_of
from rota.runtime.environ import Home
from rota.service.accounts import AccountBook
from rota.service.config import load_settings
from rota.service.control.snapshot import SnapshotFile, Views, digest_of
from rota.service.jobfile.reader import read_job
from rota.service.metrics import Counts
from rota.service.process.snapshot import make_snapshot
from rota.service.views.installation import Installation
from rota.spec import codec
from rota.spec.events import (
    ClusterEvent,
    Committed,
    Event,
    JobEnded,
    JobQueued,
    JobRequeued,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    NodeMarked,
    Record,
)
from rota.spec.ids import Epoch, JobId
from rota.spec.reasons import Reason
from rota.spec.resources import Health, pretend_nodes
from rota.spec.states import JobState

NOW = 1_800_000_000.0


def fresh(profile: str = "default") -> Views:
    scheduler = Scheduler(get_profile(profile), requests_of)
    return Views(installation=Installation(), scheduler=scheduler, counts=Counts(), accounts=AccountBook())


def looked_at(views: Views) -> dict[str, Any]:
    """Everything that the parts know, in values that compare: of the scheduler also what it would decide."""
    scheduler, found = views.scheduler, {}
    for part in (views.installation, views.counts, views.accounts):
        found[type(part).__name__] = part
    others = ("profile", "_requests_of", "_idle", "_empties", "_state", "_laid_out_at")
    found |= {name: value for name, value in vars(scheduler).items() if name not in others}
    state = scheduler.state
    for name in ("lines", "waiting", "arrivals", "running", "ranked", "ends", "parts", "happened", "version", "events"):
        found[name] = getattr(state, name)
    return found | {"digest": state.digest(), "books": books_of(scheduler), "state_keys": sorted(vars(state))}


class Rows:
    """The part of an event log that a snapshot reads."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def read(self, *, after: int = 0, limit: int = 10_000) -> tuple[Record, ...]:
        return tuple(one for one in self.records if one.number > after)[:limit]


def start(path: Path, records: Sequence[Record], cut: int, before: Views, profile: str) -> dict[str, Any]:
    """What a start finds with a snapshot as of record ``cut``."""
    file = SnapshotFile(path=path, program="this")
    file.write(before, records[cut - 1])
    found = fresh(profile)
    assert file.restore(found, Rows(records)) == records[cut - 1].number == file.number()
    found.apply(records[cut:])
    return looked_at(found) | {"decided": found.scheduler.decide(NOW)}


def starts(
    path: Path, records: Sequence[Record], profile: str, cuts: Collection[int]
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Each cut, what a start with a snapshot of it finds, and what a replay of the whole log does."""
    whole, before = fresh(profile), fresh(profile)
    whole.apply(records)
    expected = looked_at(whole)
    expected["decided"] = whole.scheduler.decide(NOW)
    for cut in range(1, len(records) + 1):
        before.apply(records[cut - 1 : cut])
        if cut in cuts:
            yield cut, start(path, records, cut, before, profile), expected


def test_a_start_from_a_snapshot_equals_a_replay_of_recorded_systems(tmp_path: Path) -> None:
    """Systems with losses, recoveries, moves, preemptions, drained and lost nodes."""
    for number, path in enumerate(WORLDS):
        document = json.loads(gzip.decompress(path.read_bytes()))
        records = records_of(document)
        others = [one for one in OTHERS if isinstance(one, ClusterEvent)]
        more = [
            Record(number=records[-1].number + i, job=None, seq=0, at=records[-1].at, event=one)
            for i, one in enumerate(others, start=1)
        ]
        profile = "default" if document["limited"] else "fifo"
        cuts = {len(records), *range(20 * number + 1, len(records), 97)}
        for cut, found, expected in starts(tmp_path / "snapshot", [*records, *more], profile, cuts):
            assert found == expected, f"cut after {cut} of {len(records)}"


NODES = pretend_nodes("2x2x4", host="here")
SPECS = [read_job(HELLO.replace("gpus: 2", f"gpus: {gpus}"), filename="job.yaml") for gpus in (1, 2, 4)]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, len(SPECS) - 1), st.integers(-10, 90)),
        st.tuples(st.sampled_from(("end", "requeue", "commit", "decide", "lose", "drain", "join")), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=25,
)


def played(actions: Sequence[tuple[Any, ...]], profile: str) -> list[Record]:
    """The log of a scheduler that decides now and then, while jobs and nodes come and go."""
    views, records = fresh(profile), list[Record]()
    seqs: dict[JobId | None, Iterator[int]] = {}

    def append(job: JobId | None, *events: Event) -> None:
        for event in events:
            seq = 0 if job is None else next(seqs.setdefault(job, count(1)))
            records.append(Record(number=len(records) + 1, job=job, seq=seq, at=NOW + len(records), event=event))
            views.apply(records[-1:])

    append(None, *(NodeJoined(node=node) for node in NODES))
    for name, *values in (*actions, ("decide", 0)):
        live = list(views.installation.live.values())
        held = [one for one in live if one.state.holds_devices]
        node = NODES[values[0] % len(NODES)].id
        if name == "submit":
            job = JobId(f"work-{len(views.installation.jobs) + 1}")
            spec = replace(SPECS[values[0]], priority=values[1])
            append(job, JobSubmitted(spec=spec, user=f"user{values[0]}", uid=str(job)), JobQueued())
        elif name == "decide":
            for job, event in views.scheduler.decide(NOW + len(records)).events:
                append(job, event)
        elif name == "end" and live:
            append(live[values[0] % len(live)].id, JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED))
        elif name == "requeue" and held:
            one = held[values[0] % len(held)]
            append(one.id, JobRequeued(attempt=len(one.attempts), reason=Reason.NODE_LOST))
        elif name == "commit" and held:
            append(held[values[0] % len(held)].id, Committed(n=1, loop_epoch=Epoch(1)))
        elif name == "lose":
            append(None, NodeLost(node=node))
        elif name == "drain":
            append(None, NodeMarked(node=node, health=Health.DRAINED, notice_s=60.0))
        elif name == "join":
            append(None, NodeJoined(node=NODES[values[0] % len(NODES)]))
    return records


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_start_from_a_snapshot_equals_a_replay_under_every_policy(
    profile: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("home") / "snapshot"

    @settings(max_examples=3 if profile != "default" else 10, deadline=None)
    @given(ACTIONS, st.integers(1, 1000))
    def any_cut(actions: Sequence[tuple[Any, ...]], cut: int) -> None:
        records = played(actions, profile)
        for at, found, expected in starts(path, records, profile, {cut % len(records) + 1}):
            assert found == expected, f"cut after {at} of {len(records)}"

    any_cut()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(ACTIONS, st.sampled_from(sorted(PROFILES)))
def test_a_start_from_a_snapshot_equals_a_replay_at_every_cut(
    tmp_path_factory: pytest.TempPathFactory, actions: Sequence[tuple[Any, ...]], profile: str
) -> None:
    records = played(actions, profile)
    every = range(1, len(records) + 1)
    for cut, found, expected in starts(tmp_path_factory.mktemp("home") / "snapshot", records, profile, every):
        assert found == expected, f"cut after {cut} of {len(records)}"


ALIKE = [*[("submit", 2, 50)] * 7, ("decide", 0), ("submit", 2, 50)]
"""More jobs of one shape than there are devices for, and one more."""


def write_alike(path: str) -> None:
    """A snapshot right before the last of the jobs that are alike came."""
    records, views = played(ALIKE, "default"), fresh()
    last = next(one.number for one in reversed(records) if isinstance(one.event, JobSubmitted)) - 1
    views.apply(records[:last])
    SnapshotFile(path=Path(path), program="this").write(views, records[last - 1])


@pytest.mark.slow
def test_a_start_from_a_snapshot_of_a_process_with_other_hashes_equals_a_replay(tmp_path: Path) -> None:
    run = "import sys; from tests.service.test_snapshot import write_alike; write_alike(sys.argv[1])"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    path, root = tmp_path / "snapshot", Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", run, str(path)], cwd=root, env=os.environ | {"PYTHONHASHSEED": seed}, check=True
    )
    records, whole, found = played(ALIKE, "default"), fresh(), fresh()
    number = SnapshotFile(path=path, program="this").restore(found, Rows(records))
    assert 0 < number < len(records)
    found.apply(records[number:])
    whole.apply(records)
    assert looked_at(found) == looked_at(whole)
    assert found.scheduler.decide(NOW) == whole.scheduler.decide(NOW)


def submitted(home: Path, jobs: int) -> None:
    async def some(service: Standing) -> None:
        for _ in range(jobs):
            await service.submit()

    with_service(home, some)


def started(home: Path) -> tuple[list[str], int]:
    """The jobs that a service knows when it answers, and the records that it read for that."""

    async def main() -> tuple[list[str], int]:
        read = 0
        with pytest.MonkeyPatch.context() as patch:
            from rota.runtime.event_log.sql import SqlLog

            whole = SqlLog.read

            def counted(log: SqlLog, **given: Any) -> tuple[Record, ...]:
                nonlocal read
                found = whole(log, **given)
                read += len(found)
                return found

            patch.setattr(SqlLog, "read", counted)
            async with standing(home) as service:
                return list(service.app.loop.installation.jobs), read

    return asyncio.run(main())


def test_a_start_reads_the_records_after_the_snapshot_alone(tmp_path: Path) -> None:
    """However long the history is: the cost of a start is counted in records."""
    costs = []
    for jobs in (3, 30):
        home = tmp_path / str(jobs)
        submitted(home, jobs)
        assert make_snapshot(load_settings({"home": str(home), "pretend": "1x2x4"}, environ={})) > jobs
        known, read = started(home)
        assert known == [f"hello-{n}" for n in range(1, jobs + 1)]
        costs.append(read)
    assert costs[0] == costs[1] <= 5


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in its head": lambda raw: raw[:40],
    "cut in its body": lambda raw: raw[:-100],
    "empty": lambda raw: b"",
    "a flipped bit": lambda raw: raw[:-50] + bytes([raw[-50] ^ 1]) + raw[-49:],
    "another name": lambda raw: raw.replace(b"hello-2", b"jello-2"),
    "of another program": lambda raw: raw.replace(b'"program": "', b'"program": "0', 1),
    "of another log": lambda raw: raw.replace(b'"record": "', b'"record": "0', 1),
    "of a longer log": lambda raw: raw.replace(b'"number": ', b'"number": 9', 1),
    "not one": lambda raw: b"{}\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_snapshot_that_cannot_be_trusted_is_not_used(damage: str, tmp_path: Path) -> None:
    submitted(tmp_path, 3)
    make_snapshot(load_settings({"home": str(tmp_path), "pretend": "1x2x4"}, environ={}))
    path = Home.of(tmp_path).snapshot
    raw = path.read_bytes()
    path.write_bytes(DAMAGE[damage](raw))
    assert path.read_bytes() != raw
    known, read = started(tmp_path)
    assert known == ["hello-1", "hello-2", "hello-3"]
    assert read > 6


def test_a_start_under_another_policy_reads_the_log(tmp_path: Path) -> None:
    submitted(tmp_path, 2)
    make_snapshot(load_settings({"home": str(tmp_path), "pretend": "1x2x4", "profile": "fifo"}, environ={}))
    assert started(tmp_path)[1] > 4


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_the_snapshot_before(tmp_path: Path) -> None:
    submitted(tmp_path, 2)
    given = {"home": str(tmp_path), "pretend": "1x2x4"}
    make_snapshot(load_settings(given, environ={}))
    path = Home.of(tmp_path).snapshot
    before = path.read_bytes()
    submitted(tmp_path, 1)
    dies = "import os, signal; os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
    run = f"{dies}from rota.service.process.snapshot import main; main([{json.dumps(json.dumps(given))}])"
    assert subprocess.run([sys.executable, "-c", run], check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert started(tmp_path)[0] == ["hello-1", "hello-2", "hello-3"]
    make_snapshot(load_settings(given, environ={}))
    assert [one.name for one in path.parent.iterdir()] == [path.name], "the half-written one is gone"


def test_the_digest_of_a_record_tells_logs_apart() -> None:
    one = Record(number=1, job=None, seq=0, at=1.0, event=OTHERS[0])
    assert digest_of(one) != digest_of(replace(one, at=2.0)) != digest_of(replace(one, event=OTHERS[1]))
    assert codec.dumps(one)
