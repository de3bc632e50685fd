"""Versions reserved ahead: who publishes one name again and again asks the registry once for each publish."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.real.tensors.crew import DEEP, Cases, Crew, left_over, stop_housekeeping, wait_until
from tests.real.tensors.test_many import trips_of
from tests.real.tensors.test_recover import kill_server, own_home, plane

from rota.runtime.redis import client as redis_client
from rota.tensors import ahead, errors
from rota.tensors.api.store import Plane
from rota.tensors.core import blocks_in_slab

__all__ = ["own_home", "plane"]  # fixtures: a server of this file alone, since its tests kill it

WRITER = """
from rota.tensors import errors
step, churn, seen = {first}, {churn}, 0
while True:
    try:
        plane.put('w', np.full({size}, step), step=None if churn else step)
    except errors.Aborted:
        continue
    os.write(1, b'%d\\n' % step)
    if churn and step % 3 == 0:
        plane.delete('w')
        os.write(1, b'-%d\\n' % step)
    step += 1
"""
READER = """
seen = 0
while True:
    try:
        v = plane.get('w', as_='numpy')
    except Exception as error:
        if type(error).__name__ in ('NotFound', 'VersionGone', 'PublishBlocked'):
            continue
        raise
    assert (v == v[0]).all(), ('torn', v)
    now, before = int(v[0]), seen
    seen = max(seen, now)
    if now < before:
        os.write(1, b'stale %d %d\\n' % (now, before))
    plane.release('w')
    del v
"""


@pytest.fixture
def running(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """A plane that has published a name often enough to have a version of it ahead, however slow the machine is."""
    monkeypatch.setattr(ahead, "_IN_A_ROW_S", 60.0)
    stop_housekeeping(plane)
    plane.put("w", np.zeros(4))
    plane.delete("w")  # the scripts are known from here on
    for step in range(4):
        plane.put("w", np.full(4, step))
    assert [*plane._writer.ahead._spares] == ["w"]
    yield plane
    plane._writer.ahead.end_idle(0)


def own_of(plane: Plane) -> dict[str, str]:
    """The pending versions of this process."""
    return plane._space.registry.dump().get(f"c:{plane._space.client}:o", {})


def numbers(text: str) -> list[int]:
    return [int(line) for line in text.split("\n")[:-1]]


def test_a_name_that_is_published_again_and_again_costs_one_round_trip_a_publish(
    running: Plane, actors: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = trips_of(running, monkeypatch)
    for step in range(4, 20):
        assert running.put("w", np.full(4, step)).step == step
    assert trips == [1] * 16
    for _ in range(5):
        running._space.reap()
        trips.clear()
        running.delete("w")
        assert running.put("w", np.full(4, 7)).step == 0, "a delete resets the order"
        assert trips == [1, 1]
    assert running.put("w", np.full(4, 8), step=5).step == 5
    with pytest.raises(errors.StaleStep, match="step 3 is lower than the current step 5"):
        running.put("w", np.full(4, 9), step=3)
    assert actors.run("assert plane.get('w', as_='numpy')[0] == 8; assert plane.info('w').step == 5") == 0


def test_what_was_reserved_ahead_is_not_used_when_something_else_is_published(running: Plane, actors: Crew) -> None:
    assert actors.run("assert plane.put('w', np.full(4, 9)).step == 4") == 0
    assert running.put("w", np.full(4, 5)).step == 5
    assert running.put("w", np.full((2, 2), 6)).step == 6, "of another shape"
    assert actors.run("plane.delete('w'); plane.put('w', np.full(4, 1), step=8)") == 0
    assert running.put("w", np.full(4, 9)).step == 9
    for step in range(10, 14):
        assert running.put("w", np.full(4, step)).step == step
    running.delete("w")
    running.publish_group("w", {"a": np.ones(3)})
    running.delete("w")
    assert left_over(running) == {}


def test_a_version_ahead_that_is_not_used_is_given_back(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_IN_A_ROW_S", 60.0)
    monkeypatch.setattr(ahead, "_IDLE_S", 1.0)
    for step in range(5):
        plane.put("w", np.full(4, step))
    assert len(own_of(plane)) == 1
    wait_until(lambda: own_of(plane) == {}, 10.0)
    assert plane.stats()["versions"] == {"ready": 1}


def test_a_commit_whose_reply_was_lost_reserves_one_version(running: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = redis_client._Connection.exchange
    lost: list[int] = []

    def exchange(self: Any, commands: Any) -> list[Any]:
        replies = real(self, commands)
        if lost:
            return replies
        lost.append(len(commands))
        self.close()
        raise ConnectionResetError("the reply is lost")

    for step in range(4, 8):
        lost.clear()
        monkeypatch.setattr(redis_client._Connection, "exchange", exchange)
        assert running.put("w", np.full(4, step)).step == step
        assert lost == [1]
        assert len(own_of(running)) == 1


def test_a_version_ahead_makes_room_for_others(running: Plane) -> None:
    block = running.ls("w")[0].block
    running._space.registry.configure(quota=1)  # no further file
    names = 0
    with pytest.raises(errors.QuotaExceeded):
        for names in range(blocks_in_slab(block) + 1):
            running.put(f"x/{names}", np.full(4, 1))
    assert names == blocks_in_slab(block) - 1, "all but the block of w"


def test_a_registry_that_was_lost_since_has_given_the_version_ahead_to_nobody(
    running: Plane, actors: Crew, cases: Cases
) -> None:
    for round_ in cases(5, running, 1, deep=10):
        last = [running.put("w", np.full(4, step)).step for step in range(4)][-1]
        kill_server(running.home)
        for name in "abcd":  # who takes what the lost registry had reserved
            assert actors.run(f"plane.put('{name}', np.full(4, 1))") == 0
        assert running.put("w", np.full(4, 10 + round_)).step == last + 1
        for name in "abcd":
            assert (running.get(name, as_="numpy") == 1).all()
            running.release(name)
        assert running.get("w", as_="numpy")[0] == 10 + round_
        running.release("w")
        running._writer.ahead.end_idle(0)


@pytest.mark.parametrize("churn", [False, True])
@pytest.mark.parametrize("point", ["reserved", "copying", "copied", "slot-zero", "committed", "slot-stored"])
def test_a_writer_killed_with_a_version_ahead_leaves_what_it_acknowledged(
    plane: Plane, actors: Crew, cases: Cases, point: str, churn: bool
) -> None:
    for round_ in cases(1, plane, 1, deep=10):
        code = WRITER.format(first=1, size=500, churn=churn)
        pid = actors.start(code, die_at=f"{point}:{5 + round_ * 3}")
        assert actors.wait(pid) == -signal.SIGKILL, actors.output(pid)
        last = numbers(actors.output(pid))[-1]
        if round_ % 2:
            kill_server(plane.home)
        for _ in range(2):
            rows = plane.ls("w")
            value = int(plane.get("w", as_="numpy")[0]) if rows else 0
            assert value in ((last, last + 1) if last > 0 else (0, -last + 1)) or (last % 3 == 0 and not value)
            plane.release("w")
            plane.gc()


def test_random_kills_of_processes_and_of_the_registry_under_one_name(plane: Plane, actors: Crew, cases: Cases) -> None:
    """Nothing torn, stale, lost or left: each round a writer is killed at any moment, the registry in some; the next
    goes on from what is there while two readers look."""
    rng, rounds = random.Random(7), 400 if DEEP else 20
    readers = [actors.start(READER) for _ in range(2)]
    first = 1
    for round_ in range(rounds):
        pid = actors.start(WRITER.format(first=first, size=rng.choice((10, 500, 5000)), churn=False))
        wanted = rng.choice((1, 5, 20, 60))
        wait_until(lambda pid=pid, wanted=wanted: actors.output(pid).count("\n") > wanted)
        time.sleep(rng.random() * 0.01)
        if rng.random() < 0.3:
            kill_server(plane.home)
            time.sleep(rng.random() * 0.02)
        actors.kill(pid)
        said = numbers(actors.output(pid))
        found = plane.get("w", as_="numpy")
        assert (found == found[0]).all()
        assert found[0] in (said[-1], said[-1] + 1), (round_, found[0], said[-1])
        first = int(found[0]) + 1
        del found
        plane.release("w")
        cases._record("fault group", 1)
    for reader in readers:
        assert actors.output(reader) == ""
        actors.kill(reader)
    cases.done(5, plane)
