"""Handlers of signals may raise in the middle of a call, or use the plane themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from tests.real.tensors.crew import Crew, end, joined, stop_housekeeping
from tests.real.tensors.test_claims import value

from rota.tensors.api.store import Plane


class Hit(Exception):
    """What the handler of a signal raises."""


def raise_at(nth: int) -> None:
    """Raise Hit at the nth moment from now, of those at which the handler of a signal can come."""
    left = nth

    def look(_: FrameType, event: str, arg: object) -> None:
        nonlocal left
        left -= event in ("call", "return", "c_return")
        if not left:
            sys.setprofile(None)
            raise Hit

    sys.setprofile(look)


def unknown_blocks(plane: Plane) -> set[int]:
    """Blocks that the registry gave to a client for puts by itself, and that this client has lost sight of."""
    claims, space = plane._space.claims, plane._space
    shown = [each.shown for each in claims._names.values() if each.shown is not None]
    known = [*shown, *claims._used, *(block for stock in claims._stock.values() for block in stock)]
    return {each[0] for each in space.registry.claims(space.client)[1]} - {each.id for each in known}


@pytest.mark.slow
@pytest.mark.parametrize(("done", "what"), [(0, "put"), (1, "put"), (4, "put"), (1, "delete"), (3, "settle")])
def test_a_put_or_delete_of_a_claimed_name_may_be_ended_at_any_moment(
    tensor_home: Path, plane: Plane, done: int, what: str
) -> None:
    own = joined(plane)
    stop_housekeeping(own)
    n, hits = 0, 0
    while n == 3 * hits:
        own._space.claims.shed()
        for _ in range(2 + done):  # the second claims, the third takes blocks, the seventh uses replaced ones again
            own.put("w", np.full(512, n))
        if what == "settle":  # as another client has to
            own._space.claims._torn = True
        try:
            raise_at(hits + 1)
            _ = own.delete("w") if what == "delete" else own.put("w", np.full(512, n + 1))
        except Hit:
            hits += 1
        sys.setprofile(None)
        n += 3
        own._session.release_ended()
        if own.ls("w") if hits % 2 else what != "delete":
            assert value(own) in (n - 3, n - 2)
        own.put("w", np.full(512, n - 1))
        for _ in range(9):  # so often that every block is used again
            before, now = own.get("w", as_="numpy"), own.put("w", np.full(512, n)) and value(own)
            assert (before == before[0]).all()
            assert (before[0], now) in ((n - 1, n), (n, n))
            del before
            own._session.release_ended()
            own._space.claims.settle_idle()  # as the housekeeping does
        assert unknown_blocks(own) == set()
    assert hits > 50
    assert own.fsck()["violations"] == []
    if what != "settle":  # what was reserved and not put is undone with its client
        end(own)
    own._session.close(at_exit=True)
    assert plane.fsck()["violations"] == []


def test_a_call_that_a_signal_ends_mixes_no_replies_and_leaves_the_plane_usable(plane: Plane, actors: Crew) -> None:
    code = """
        import random
        from rota.tensors import errors
        class Hit(Exception): pass
        def hit(*_): raise Hit
        signal.signal(signal.SIGALRM, hit)
        hits, done, rng = 0, 0, random.Random(7)
        while hits < 300:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.005), 0.2)
                    while True:
                        plane.put('s', np.full(3000, done))
                        view = plane.get('s', as_='numpy')
                        assert view.shape == (3000,) and (view == view[0]).all()
                        with plane.create('c', (10,), 'float32', as_='numpy') as array:
                            array[:] = 1
                        assert plane.get('c', as_='numpy').tolist() == [1] * 10
                        done += 1
                except Hit:
                    hits += 1
            except Hit:
                hits += 1
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert plane.put('s', np.ones(3)).ready and plane.get('s', as_='numpy').tolist() == [1] * 3
        found = plane.fsck()['violations']
        assert found == [], found
        view = array = None
        plane._session.release_ended()
        left = plane.stats()['versions']
        assert left.get('pending', 0) + left.get('doomed', 0) < 45, left  # nothing of nearly all of them
    """
    assert actors.run(code) == 0


def test_a_handler_may_publish_and_read_in_the_middle_of_a_publish(plane: Plane, actors: Crew) -> None:
    code = """
        from rota.tensors import errors
        hits, blocked = 0, 0
        def handle(*_):
            global hits, blocked
            hits += 1
            plane.put('mine', np.full(500, hits))
            seen = plane.get('mine', as_='numpy')
            assert seen.shape == (500,) and (seen == seen[0]).all()
            try:
                plane.put('s', np.zeros(3000))
            except errors.PublishBlocked as error:
                assert 'this thread is publishing it' in str(error)
                blocked += 1
            except errors.LostRace:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0.005)  # not before this handler is done
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        while hits < 150:
            try:
                plane.put('s', np.ones(3000))
            except errors.LostRace:
                pass
            view = plane.get('s', as_='numpy')
            assert view.shape == (3000,) and (view == view[0]).all()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert blocked < hits and plane.fsck()['violations'] == []
    """
    assert actors.run(code) == 0
    assert plane.fsck()["violations"] == []
