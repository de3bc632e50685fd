"""Time moves only forward; the same seed gives the same numbers."""

from __future__ import annotations

import asyncio
import time
from itertools import islice

import pytest

from rota.runtime.clock import SystemClock, backoff, iso, within_cpu_time
from rota.runtime.random import SeededRandom, SystemRandom, encode, ulid
from rota.testing.memory import VirtualClock


def test_a_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(start_s=5, wall_start_s=1000)
    assert (clock.monotonic_s(), clock.wall_s()) == (5, 1000)
    clock.advance(2.5)
    assert (clock.monotonic_s(), clock.wall_s()) == (7.5, 1002.5)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_the_system_clock_does_not_run_backwards() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_s() for _ in range(100)]
    assert readings == sorted(readings)


def test_pauses_double_up_to_their_limit() -> None:
    assert list(islice(backoff(0.2, 1.0), 5)) == [0.2, 0.4, 0.8, 1.0, 1.0]


def test_times_are_shown_in_utc_with_milliseconds() -> None:
    assert iso(0.0625) == "1970-01-01T00:00:00.062Z"


def test_the_same_seed_repeats_and_the_system_does_not() -> None:
    assert [SeededRandom(7).new_id() for _ in range(2)] == [SeededRandom(7).new_id() for _ in range(2)]
    assert SeededRandom(7).new_id() != SeededRandom(8).new_id()
    assert len({SystemRandom().new_id() for _ in range(100)}) == 100


def test_identifiers_sort_by_time() -> None:
    random_source = SeededRandom(1)
    made = [ulid(1000.0 + i, random_source) for i in range(20)]
    assert made == sorted(made)
    assert {len(text) for text in made} == {26}
    assert encode(0, 10) == "00"


def test_a_call_is_limited_by_the_processor_time_of_its_thread_and_not_by_the_clock() -> None:
    def waits() -> str:
        time.sleep(0.6)
        return "waited"

    def computes() -> None:
        until_s = time.thread_time() + 0.4
        while time.thread_time() < until_s:
            pass

    assert asyncio.run(within_cpu_time(waits, 0.1)) == "waited"
    with pytest.raises(TimeoutError, match=r"more than 0\.1 s of processor time"):
        asyncio.run(within_cpu_time(computes, 0.1))


def test_what_a_limited_call_raises_is_raised() -> None:
    def fails() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        asyncio.run(within_cpu_time(fails, 1.0))
