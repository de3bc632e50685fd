"""Handlers of signals may raise in the middle of a call, or use the plane themselves."""

from __future__ import annotations

from tests.real.tensors.crew import Crew

from rota.tensors.api.store import Plane


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
