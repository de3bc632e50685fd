"""Dominant resource fairness has its published properties; fair shares divide as an independent rule says."""

from __future__ import annotations

import os
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.proof.cases.drf import fill, tasks_after
from tests.proof.cases.reference import dominant, drf_fluid

from rota.cluster.core.quota import Amounts, ShareRequest, fair_shares

EXAMPLES = 10_000 if os.environ.get("ROTA_DEEP") == "1" else 25
RESOURCES = ("cpu", "gpu", "mem")

Demands = dict[str, dict[str, Fraction]]


def amounts(low: int, high: int) -> st.SearchStrategy[dict[str, Fraction]]:
    return st.fixed_dictionaries({r: st.integers(low, high).map(Fraction) for r in RESOURCES})


CAPACITY = amounts(1, 40)
DEMAND = amounts(0, 9).filter(lambda demand: any(demand.values()))
DEMANDS = st.dictionaries(st.sampled_from("abcd"), DEMAND, min_size=2, max_size=4)


def bundle(tasks: Fraction, demand: Amounts) -> dict[str, Fraction]:
    return {r: tasks * need for r, need in demand.items()}


def runs(have: Amounts, demand: Amounts) -> Fraction:
    """Tasks of this demand that a bundle of resources can run."""
    return min(have[r] / need for r, need in demand.items() if need > 0)


@settings(max_examples=EXAMPLES, deadline=None)
@given(CAPACITY, DEMANDS)
def test_nobody_runs_less_than_on_an_equal_part_of_everything(capacity: Amounts, demands: Demands) -> None:
    part = {r: amount / len(demands) for r, amount in capacity.items()}
    tasks = drf_fluid(capacity, demands)
    assert all(tasks[user] >= runs(part, demand) for user, demand in demands.items())


@settings(max_examples=EXAMPLES, deadline=None)
@given(CAPACITY, DEMANDS)
def test_nobody_would_run_more_with_what_another_got(capacity: Amounts, demands: Demands) -> None:
    tasks = drf_fluid(capacity, demands)
    for user, demand in demands.items():
        assert all(runs(bundle(tasks[other], demands[other]), demand) <= tasks[user] for other in demands)


@settings(max_examples=EXAMPLES, deadline=None)
@given(CAPACITY, DEMANDS)
def test_nobody_can_get_more_without_another_getting_less(capacity: Amounts, demands: Demands) -> None:
    tasks = drf_fluid(capacity, demands)
    used = {r: sum((tasks[u] * d[r] for u, d in demands.items()), Fraction(0)) for r in RESOURCES}
    assert all(used[r] <= capacity[r] for r in RESOURCES)
    assert all(any(used[r] == capacity[r] for r in RESOURCES if demand[r] > 0) for demand in demands.values())


@settings(max_examples=EXAMPLES, deadline=None)
@given(CAPACITY, DEMANDS, DEMAND)
def test_nobody_runs_more_by_asking_for_something_else(capacity: Amounts, demands: Demands, lie: Amounts) -> None:
    honest = drf_fluid(capacity, demands)
    for liar, demand in demands.items():
        got = drf_fluid(capacity, {**demands, liar: lie})[liar]
        assert runs(bundle(got, lie), demand) <= honest[liar]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 40), st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1))
def test_with_one_resource_everybody_gets_the_same(total: int, needs: dict[str, int]) -> None:
    tasks = drf_fluid({"gpu": Fraction(total)}, {user: {"gpu": Fraction(need)} for user, need in needs.items()})
    assert {tasks[user] * need for user, need in needs.items()} == {Fraction(total, len(needs))}


@settings(max_examples=EXAMPLES, deadline=None)
@given(CAPACITY, DEMANDS)
def test_whole_tasks_fill_up_and_nobody_is_a_task_ahead_of_one_who_could_have_had_it(
    capacity: Amounts, demands: Demands
) -> None:
    steps = fill(capacity, demands)
    used = steps[-1].used if steps else dict.fromkeys(RESOURCES, Fraction(0))
    tasks = tasks_after(steps, list(demands))
    assert used == {r: sum((tasks[u] * d[r] for u, d in demands.items()), Fraction(0)) for r in RESOURCES}
    assert all(used[r] <= capacity[r] for r in RESOURCES)
    for demand in demands.values():
        assert any(used[r] + demand[r] > capacity[r] for r in RESOURCES), "this one still fits"
    shares = dict.fromkeys(demands, Fraction(0))
    before = dict.fromkeys(RESOURCES, Fraction(0))
    for step in steps:
        able = [u for u, d in demands.items() if all(before[r] + d[r] <= capacity[r] for r in RESOURCES)]
        assert shares[step.user] == min(shares[user] for user in able)
        shares[step.user] += dominant(capacity, demands[step.user])[1]
        before = step.used


CLAIMS = st.dictionaries(
    st.sampled_from("abcde"),
    st.builds(
        ShareRequest,
        deserved=st.integers(0, 12).map(Fraction),
        request=st.integers(0, 16).map(Fraction),
        most=st.none() | st.integers(0, 16).map(Fraction),
        weight=st.integers(0, 3).map(Fraction),
        priority=st.sampled_from([90, 100]),
    ),
    min_size=1,
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 40).map(Fraction), CLAIMS)
def test_fair_shares_keep_what_is_deserved_and_divide_the_rest_by_tier_and_weight(
    total: Fraction, claims: dict[str, ShareRequest]
) -> None:
    shares, left = fair_shares(total, claims)
    ceiling = {n: c.request if c.most is None else min(c.request, c.most) for n, c in claims.items()}
    floor = {n: min(c.deserved or Fraction(0), ceiling[n]) for n, c in claims.items()}
    rest = max(Fraction(0), total - sum(floor.values(), Fraction(0)))
    more = {n: shares[n] - floor[n] for n in claims}
    assert all(more[n] >= 0 and shares[n] <= ceiling[n] for n in claims)
    assert sum(more.values(), Fraction(0)) + left == rest
    hungry = [n for n, c in claims.items() if c.weight > 0 and shares[n] < ceiling[n]]
    assert not (hungry and left)
    for one in hungry:
        assert all(more[n] == 0 for n, c in claims.items() if c.priority < claims[one].priority)
        for other, claim in claims.items():
            if claim.priority == claims[one].priority and claim.weight > 0:
                assert more[one] / claims[one].weight >= more[other] / claim.weight
