"""Every interleaving of some actors: for models in which each step is one load, one store, or one atomic script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

S = TypeVar("S", bound=Hashable)

STATES_MAX = 5_000_000


def explore_all(
    first: S,
    actors: Sequence[Callable[[S], Iterable[S]]],
    check: Callable[[S], None],
    places_of: Callable[[S], Collection[str]],
    limit: int = STATES_MAX,
) -> tuple[int, set[str]]:
    """How many states can be reached, and the places that actors got to. Raises what ``check`` of a state raises, and
    AssertionError over ``limit`` states."""
    seen, todo, places = {first}, [first], set[str]()
    while todo:
        state = todo.pop()
        check(state)
        places.update(places_of(state))
        for actor in actors:
            for after in actor(state):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        if len(seen) > limit:
            raise AssertionError(f"over {limit} states")
    return len(seen), places
