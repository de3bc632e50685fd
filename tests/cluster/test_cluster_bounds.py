"""Work and memory that grow with users, cells and ended jobs have a bound, and it changes no answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_makers import ask, node, slot, state
from test_cluster_promises import gpus

from rota.cluster.core import run_time
from rota.cluster.core.events import JobArrived, JobGone, JobHolds, JobReleased, apply
from rota.cluster.core.jobs import Allocation, LineKey
from rota.cluster.core.run_time import expected
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile, hived
from rota.cluster.policies.capacity import user_limit
from rota.cluster.sim.forecast import Forecast
from rota.cluster.virtual.cells import VirtualCells
from rota.spec.ids import JobId
from rota.spec.queue import OwnedCells, Queue


def holds(s: State, name: str, user: str, queue: str, device: int, at: float = 0.0) -> None:
    apply(s, JobArrived(ask=ask(name, queue=queue, user=user, at=at)), at)
    apply(s, JobHolds(job=JobId(name), held=(Allocation(0, (device,), 0, 0, 0),)), at)


def test_a_user_counts_once_in_a_queue_for_what_runs_and_waits_there_and_no_line_is_looked_at() -> None:
    class Unread(dict[LineKey, list[tuple[float, JobId]]]):
        def __iter__(self) -> Iterator[LineKey]:
            raise AssertionError("every line is looked at for one job")

    s = state(node("n", 8), queues=(Queue(path="q", guaranteed=gpus(8), min_user_percent=1.0), Queue(path="other")))
    holds(s, "a0", "ada", "q", 0)
    holds(s, "b0", "bob", "q", 1)
    for i in range(3):
        apply(s, JobArrived(ask=ask(f"a{i + 1}", slot(i + 1), queue="q", user="ada", at=1.0)), 1.0)
    apply(s, JobArrived(ask=ask("c0", queue="q", user="cy", at=1.0)), 1.0)
    apply(s, JobArrived(ask=ask("d0", queue="other", user="dan", at=1.0)), 1.0)
    lines, s.lines = s.lines, Unread(s.lines)
    assert user_limit(s, s.queues.row["q"], 0) == 8000 // 3, "ada, bob and cy"
    s.lines = lines
    with s.txn() as txn:  # a trial leaves no trace
        s.drop(txn, JobId("c0"))
        assert user_limit(s, s.queues.row["q"], 0) == 4000
    assert user_limit(s.copy(), s.queues.row["q"], 0) == 8000 // 3
    apply(s, JobReleased(job=JobId("b0")), 2.0)
    assert user_limit(s, s.queues.row["q"], 0) == 8000 // 3, "bob waits now"
    for job in ("b0", "c0"):
        apply(s, JobGone(job=JobId(job)), 3.0)
    assert user_limit(s, s.queues.row["q"], 0) == 8000


def test_groups_of_ended_jobs_are_forgotten_when_none_of_them_ended_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_time, "GROUPS_MAX", 20)
    s, sizes = state(node("n", 1)), list[int]()
    for i in range(200):
        at, name = float(10 * i), f"j{i}"
        user = "often" if i % 2 else f"u{i}"
        apply(s, JobArrived(ask=ask(name, user=user, at=at, est_s=100.0)), at)
        apply(s, JobHolds(job=JobId(name), held=(Allocation(0, (0,), 0, 0, 0),)), at)
        apply(s, JobGone(job=JobId(name)), at + (1.0 if i % 2 else 5.0))
        sizes.append(len(s.taken))
    assert max(sizes) <= 20 and min(sizes[20:]) >= 10
    assert expected(s.taken, ask("next", user="often", est_s=100.0))[0] == 1.0, "who still runs jobs is remembered"
    assert s.taken["asked",].ended == 200


def test_cells_that_are_not_there_are_left_out_in_a_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    built = list[int]()

    class Counted(VirtualCells):
        def __init__(self, *given: object) -> None:
            built.append(1)
            super().__init__(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(hived, "VirtualCells", Counted)
    for there, first, second in ((400, 250, 150), (60, 30, 30), (3, 2, 1)):
        built.clear()
        owns = {"a": 250, "b": 150}
        queues = tuple(Queue(path=name, cells=(OwnedCells(level="node", count=n),)) for name, n in owns.items())
        s = state(*(node(f"n{i:03}", 2) for i in range(there)), queues=queues)
        owned = hived.book_of(s).owned
        assert len(built) <= 14, "each trial lays out the whole cluster"
        assert (owned["a"], owned["b"]) == (2 * first, 2 * second)


def test_a_play_in_which_a_job_never_starts_counts_as_the_latest_start() -> None:
    s = state(node("n", 1))
    for i in range(run_time.EVIDENCE):
        apply(s, JobArrived(ask=ask(f"j{i}", at=float(i), est_s=100.0)), float(i))
    found = Forecast(s, get_profile("fifo"), 10.0)
    found._ended = run_time.EVIDENCE  # pyright: ignore[reportPrivateUsage]
    together = found._together  # pyright: ignore[reportPrivateUsage]
    assert together([30.0, 20.0, 10.0]) == (10.0, 20.0, 30.0)
    assert together([None, 20.0, 10.0]) == (10.0, 20.0, None)
    assert together([None, None, 10.0]) == (10.0, None, None)
    assert together([None, None, None]) == (None, None, None)
