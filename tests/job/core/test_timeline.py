"""Critical path, idle shares and lanes, beside brute force on a grid of time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rota.job.core.progress import Span, busy_s, critical_path, idle_shares, lanes, shares


def call(target: str, at_s: float, s: float, kind: str = "call") -> Span:
    return Span(kind=kind, name="op", at_s=at_s, s=s, target=target)


def names(*waits: Span, begin_s: float = 0.0, end_s: float = 10.0) -> list[tuple[str, float, float]]:
    return [(one.name, one.at_s, one.s) for one in critical_path(waits, begin_s, end_s)]


def test_one_call_after_another_and_the_time_between_are_the_path() -> None:
    assert names(call("rollout/0", 1, 4), call("reward/0", 6, 3)) == [
        ("loop", 0, 1), ("rollout", 1, 4), ("loop", 5, 1), ("reward", 6, 3), ("loop", 9, 1),
    ]  # fmt: skip


def test_of_calls_at_the_same_time_the_one_that_ends_last_bounds() -> None:
    assert names(call("rollout/0", 0, 4), call("rollout/1", 0, 9), call("reward/0", 9, 1)) == [
        ("rollout", 0, 9), ("reward", 9, 1),
    ]  # fmt: skip


def test_a_wait_that_began_before_the_step_counts_from_its_begin_and_commits_and_recoveries_have_their_names() -> None:
    waits = (call("reward", -5, 8, "ready"), call("master", 9, 1, "commit"))
    assert names(*waits) == [("reward not ready", 0, 3), ("loop", 3, 6), ("commit", 9, 1)]


def test_shares_are_of_the_whole_the_largest_first() -> None:
    found = shares(critical_path([call("reward/0", 2, 5), call("rollout/0", 7, 3)], 0.0, 10.0))
    assert list(found.items()) == [("reward", 0.5), ("rollout", 0.3), ("loop", 0.2)]


def run(at_s: float, s: float) -> Span:
    return Span(kind="run", name="op", at_s=at_s, s=s)


def test_a_role_is_idle_for_the_time_in_which_its_instances_run_nothing() -> None:
    spans = {"a/0": [run(0, 5), run(4, 2)], "a/1": [run(8, 9)], "b/0": [call("a/0", 0, 10)]}
    assert idle_shares(spans, 0.0, 10.0) == {"a": 0.6000000000000001, "b": 1.0}


times = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=12)


@given(times)
def test_busy_time_is_that_of_brute_force_and_the_path_covers_the_whole_without_overlap(pairs) -> None:
    spans = [call("r/0", float(at), float(s)) for at, s in pairs]
    grid = sum(any(at <= t < at + s for at, s in pairs) for t in range(10))
    assert busy_s(spans, 0.0, 10.0) == grid
    path = critical_path(spans, 0.0, 10.0)
    assert sum(one.s for one in path) == 10.0
    assert all(a.at_s + a.s == b.at_s for a, b in pairwise(path))
    assert sum(one.s for one in path if one.name == "loop") == 10 - grid, "own time is what no wait covers"


@given(times)
def test_no_two_spans_of_a_lane_overlap_and_there_are_no_more_lanes_than_spans_at_one_time(pairs) -> None:
    rows = lanes(call("r/0", float(at), float(s)) for at, s in pairs)
    assert sorted((one.at_s, one.s) for row in rows for one in row) == sorted(pairs)
    assert all(a.end_s <= b.at_s for row in rows for a, b in pairwise(row))
    assert len(rows) == max((sum(at <= t < at + s for at, s in pairs) for t in range(20)), default=0)
