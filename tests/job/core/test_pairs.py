"""Two rounds of pairs find the broken and the slow member of a mesh, and nobody else."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from rota.job.core.progress import Pair, Verdict, first_round, second_round, verdict


def judged(world: int, *, broken: frozenset[int] = frozenset(), slow: Mapping[int, float] | None = None) -> Verdict:
    """The verdict on a mesh whose pairs take as long as their slower member, and fail with a broken one."""

    def took(pairs: tuple[Pair, ...]) -> dict[Pair, float | None]:
        return {pair: None if broken & {*pair} else max((slow or {}).get(n, 1.0) for n in pair) for pair in pairs}

    first = took(first_round(world))
    return verdict(first, took(second_round(world, first)))


def test_the_broken_one_of_two_neighbours_is_named_and_the_other_is_cleared():
    assert first_round(5) == ((0, 1), (2, 3))
    assert second_round(5, {(0, 1): None, (2, 3): 1.0}) == ((2, 0), (3, 1), (2, 4))
    assert judged(4, broken=frozenset({1})) == Verdict(faulty=(1,))


def test_the_slow_one_of_two_neighbours_is_named_with_how_slow_it_is():
    assert judged(4, slow={2: 3.0}) == Verdict(slow={2: 3.0})
    assert judged(4, slow={2: 1.4}) == Verdict(), "within the factor"


def test_where_no_pair_is_good_nobody_is_named():
    assert judged(2, broken=frozenset({0})) == judged(4, broken=frozenset({0, 3})) == judged(1) == Verdict()


@given(world=st.integers(2, 40), data=st.data())
def test_with_one_good_pair_exactly_those_who_are_broken_or_slow_are_named(world: int, data: st.DataObject):
    clean = {0, 1}
    broken = data.draw(st.frozensets(st.integers(0, world - 1))) - clean
    late = dict.fromkeys(data.draw(st.frozensets(st.integers(2, 40), max_size=1)) & {*range(world)} - broken, 4.0)
    found = judged(world, broken=broken, slow=late)
    assert set(found.faulty) == broken
    assert found.slow == late
