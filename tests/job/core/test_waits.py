"""The wait-for graph: sinks without progress beside brute force, deadlocks, chains, collectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.job.core.progress import RankStatus, VertexStatus, WaitEdge, WaitGraph, collective_waits, components

NAMES = tuple("abcdefg")


def graph(edges: str, stuck: str = "", excused: str = "") -> WaitGraph:
    """``"ab bc"``: a waits for b, b for c; the vertices of ``stuck`` made no progress within their limit of 5 s."""
    pairs = edges.split()
    return WaitGraph(
        waits=tuple(WaitEdge(source=a, target=b, kind="call", age_s=10.0 + n) for n, (a, b) in enumerate(pairs)),
        statuses={
            name: VertexStatus(
                name=name, limit_s=5.0, still_s=10.0 if name in stuck else 0.0, excuse="rest" * (name in excused)
            )
            for name in sorted({*"".join(pairs), *stuck})
        },
    )


def members(graph: WaitGraph) -> list[str]:
    return ["".join(root.members) for root in graph.roots()]


def test_the_end_of_a_chain_is_the_culprit_and_not_those_who_wait_for_it() -> None:
    found = graph("ab bc", stuck="abc")
    (root,) = found.roots()
    assert (root.members, root.deadlock, found.waiters(root)) == (("c",), False, ("a", "b"))


def test_a_sink_that_makes_progress_excuses_all_who_wait_for_it() -> None:
    assert members(graph("ab bc", stuck="ab")) == []


def test_a_sink_with_a_declared_silence_is_no_culprit() -> None:
    assert members(graph("ab", stuck="ab", excused="b")) == []


def test_several_that_wait_for_each_other_are_a_deadlock_printed_as_a_cycle() -> None:
    (root,) = graph("ab bc ca dc", stuck="abcd").roots()
    assert root.members == ("a", "b", "c")
    assert [(wait.source, wait.target) for wait in root.cycle] == [("a", "b"), ("b", "c"), ("c", "a")]


def test_one_that_waits_for_itself_is_a_deadlock_of_one() -> None:
    (root,) = graph("aa ba", stuck="ab").roots()
    assert root.members == ("a",) and root.deadlock


def test_a_cycle_with_one_member_that_makes_progress_is_none() -> None:
    assert members(graph("ab ba", stuck="a")) == []


def test_a_cycle_that_waits_for_somebody_else_is_not_the_root() -> None:
    assert members(graph("ab ba bc", stuck="abc")) == ["c"]


def test_one_who_waits_for_nobody_and_makes_no_progress_is_its_own_culprit() -> None:
    assert members(graph("", stuck="a")) == ["a"]


edges = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=16)


def reach(after: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        for target in after[todo.pop()] - found:
            found.add(target)
            todo.append(target)
    return found


def test_a_second_circle_that_waits_for_the_first_is_a_component_of_its_own() -> None:
    after = {"a": ["b"], "b": ["a"], "c": ["a", "d"], "d": ["c"], "e": ["d"]}
    assert components(after) == (("a", "b"), ("c", "d"), ("e",))


@pytest.mark.slow
@given(edges)
def test_components_are_those_of_mutual_reachability_and_come_after_what_they_wait_for(pairs) -> None:
    after = {name: {b for a, b in pairs if a == name} for name in NAMES}
    far = {name: reach(after, name) for name in NAMES}
    slow = {frozenset({a, *(b for b in NAMES if b in far[a] and a in far[b])}) for a in NAMES}
    found = components({name: sorted(targets) for name, targets in after.items()})
    assert {frozenset(each) for each in found} == slow
    place = {name: n for n, each in enumerate(found) for name in each}
    assert all(place[b] <= place[a] for a, b in pairs)


@given(edges, st.sets(st.sampled_from(NAMES)))
def test_roots_are_the_sinks_without_progress_of_brute_force(pairs, stuck) -> None:
    found = graph(" ".join(a + b for a, b in pairs), stuck="".join(sorted(stuck)))
    after = {name: {b for a, b in pairs if a == name} for name in NAMES}
    far = {name: reach(after, name) for name in NAMES}
    slow = {
        tuple(sorted({a, *far[a]})) for a in stuck if far[a] <= stuck and all(a in far[b] or a == b for b in far[a])
    }
    assert {root.members for root in found.roots()} == slow
    for root in found.roots():
        assert root.deadlock == any(a in root.members for a, _ in pairs)
        assert {name for name in NAMES if far[name] & set(root.members)} - set(root.members) == set(found.waiters(root))


@given(edges)
def test_when_nobody_makes_progress_everybody_reaches_a_root(pairs) -> None:
    found = graph(" ".join(a + b for a, b in pairs), stuck="".join(NAMES))
    told = {name for root in found.roots() for name in (*root.members, *found.waiters(root))}
    assert told == set(NAMES)


def rank(name: str, entered: int, *, inside: bool = True, silent: bool = False, still_s: float = 9.0) -> RankStatus:
    return RankStatus(name=name, entered=entered, inside=inside, silent=silent, still_s=still_s)


def waited(*ranks: RankStatus) -> set[tuple[str, str]]:
    return {(wait.source, wait.target) for wait in collective_waits(ranks, still_min_s=2.0)}


def test_ranks_in_a_collective_wait_for_those_that_did_not_enter_it() -> None:
    assert waited(rank("a", 4), rank("b", 4), rank("c", 3, inside=False)) == {("a", "c"), ("b", "c")}


def test_at_the_same_count_they_wait_for_the_one_that_does_not_answer() -> None:
    assert waited(rank("a", 4), rank("b", 4), rank("c", 4, silent=True)) == {("a", "c"), ("b", "c")}


def test_at_the_same_count_those_inside_wait_for_those_outside() -> None:
    assert waited(rank("a", 4), rank("b", 4, inside=False)) == {("a", "b")}


def test_a_collective_that_all_entered_and_none_leaves_is_waiting_for_each_other() -> None:
    assert waited(rank("a", 4), rank("b", 4)) == {("a", "b"), ("b", "a")}


def test_members_that_make_progress_and_groups_that_were_never_made_wait_for_nobody() -> None:
    assert waited(rank("a", 4, still_s=0.1), rank("b", 3, still_s=0.1)) == set()
    assert waited(rank("a", -1), rank("b", -1)) == set()
