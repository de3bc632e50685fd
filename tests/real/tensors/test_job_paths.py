"""What a job does with the plane: weights from trainer to rollouts, shadow state over a kill, rollback, the end."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.real.tensors.crew import Crew, clean, repeats, wait_until

from rota.job import checkpoint
from rota.job.place import folder_of
from rota.spec.errors import Fenced
from rota.spec.ids import Epoch, InstanceId, JobId, RoleName
from rota.tensors import errors
from rota.tensors.api.store import Plane

KILLED = -signal.SIGKILL


def weights(value: float) -> dict[str, np.ndarray]:
    return {"l0.weight": np.full((8, 4), value, np.float32), "l0.bias": np.full(4, -value, np.float16)}


def test_a_rollout_waits_for_the_step_it_was_told_and_maps_it_whole(plane: Plane, actors: Crew) -> None:
    code = """
        for n in (1, 2, 3):
            ts = plane.get_group('weights/j/e', min_step=n, wait_s=20, as_='numpy')
            assert (ts.step, ts.epoch, ts.meta) == (n, 4, {'loss': n / 2}), (ts.step, ts.epoch, ts.meta)
            assert (ts['l0.weight'] == n).all() and (ts['l0.bias'] == -n).all()
            assert ts['l0.weight'].shape == (8, 4) and ts['l0.bias'].dtype == np.float16
            print('loaded', n, flush=True)
    """
    readers = [actors.start(code) for _ in range(2)]
    for n in (1, 2, 3):
        plane.publish_group("weights/j/e", weights(n), step=n, meta={"loss": n / 2}, label="j/actor/0", epoch=4)
        for reader in readers:
            actors.says(reader, f"loaded {n}")
    for reader in readers:
        assert actors.wait(reader) == 0, actors.output(reader)
    assert clean(plane)["versions"] == {"ready": 1}


@pytest.mark.parametrize("round_", repeats(1, 20))
def test_shadow_state_survives_the_sigkill_of_its_writer(plane: Plane, actors: Crew, round_: int) -> None:
    code = """
        rng = np.random.default_rng(7)
        for n in range(1, 50):
            state = {'w': np.full((300, 500), float(n)), 'step': np.array(n)}
            plane.publish_group('shadow/j/actor/0', state, step=n, retain=2, meta={'n': n, 'rng': [1, n]})
            print('step', n, flush=True)
    """
    writer = actors.start(code, label="j/actor/0", epoch=1)
    actors.says(writer, "step 20")
    actors.kill(writer)
    newest = plane.get_group("shadow/j/actor/0", as_="numpy")
    restarted = """
        ts = plane.get_group('shadow/j/actor/0', step=%d, as_='numpy')
        assert ts.epoch == 1 and ts.meta == {'n': ts.step, 'rng': [1, ts.step]}, ts.meta
        assert (ts['w'] == ts.step).all() and ts['step'] == ts.step
    """
    assert actors.run(restarted % newest.step, epoch=2) == 0
    assert actors.run(restarted % (newest.step - 1), epoch=2) == 0
    with pytest.raises(errors.VersionGone):
        plane.get_group("shadow/j/actor/0", step=newest.step - 2)


def test_a_rollback_takes_back_uncommitted_steps_and_keeps_the_committed_one(plane: Plane) -> None:
    for n in (4, 5, 6):  # step 6 was written, the commit of 6 never came
        plane.publish_group("shadow/j/a/0", weights(n), step=n, retain=2, meta="old", epoch=1)
    plane.publish_group("shadow/j/a/0", weights(60), step=6, retain=2, meta="new", epoch=2)
    assert plane.get_group("shadow/j/a/0", step=6, as_="numpy").meta == "new"
    kept = plane.get_group("shadow/j/a/0", step=5, as_="numpy")  # a second crash before commit 6 restores 5 again
    assert (kept.epoch, kept.meta) == (1, "old")
    plane.publish_group("shadow/j/a/0", weights(3), step=3, retain=2, epoch=3)
    assert plane.get_group("shadow/j/a/0").step == 3
    with pytest.raises((errors.VersionGone, errors.WaitTimeout)):
        plane.get_group("shadow/j/a/0", step=5)


def test_a_writer_of_an_older_epoch_or_step_is_refused_and_leaves_nothing(plane: Plane) -> None:
    plane.publish_group("g", weights(1), step=5, epoch=2)
    with pytest.raises(errors.StaleEpoch, match="epoch 1 is older than 2") as caught:
        plane.publish_group("g", weights(2), step=9, epoch=1)
    assert isinstance(caught.value, Fenced)
    with pytest.raises(errors.StaleStep, match="step 4 is lower than the current step 5"):
        plane.publish_group("g", weights(2), step=4, epoch=2)
    assert clean(plane)["versions"] == {"ready": 1}


def test_a_fence_refuses_the_label_and_all_below_it_but_no_other(plane: Plane) -> None:
    plane.fence("job", 3)
    with pytest.raises(errors.StaleEpoch):
        plane.put("a", np.zeros(1), label="job/actor/0", epoch=2)
    with pytest.raises(errors.StaleEpoch):
        plane.put("a", np.zeros(1), label="job", epoch=0)
    plane.put("a", np.zeros(1), label="job/actor/0", epoch=3)
    plane.put("b", np.zeros(1), label="job2", epoch=0)
    assert plane.fence("job", 1) == 3  # never goes back
    assert [row.name for row in plane.ls()] == ["a", "b"]


def test_a_fence_between_reserve_and_commit_stops_the_publish(plane: Plane) -> None:
    plane.label, plane.epoch = "job/actor/0", 1
    plane.put("w", np.zeros(1))
    with pytest.raises(errors.StaleEpoch), plane.create("w", (1,), "float64", as_="numpy") as w:
        w[:] = 9
        plane.fence("job", 2)
    assert plane.get("w", as_="numpy")[0] == 0.0
    plane.epoch = 2
    with plane.create("w", (1,), "float64", as_="numpy") as w:
        w[:] = 9
    assert plane.get("w", as_="numpy")[0] == 9.0


def test_parts_of_a_step_become_visible_together(plane: Plane, actors: Crew) -> None:
    first = plane.publish_group("ckpt/j", {"0/w": np.zeros(3)}, step=1, part=(0, 2), retain=2, meta="zero")
    assert (first.ready, first.received) == (False, 1)
    with pytest.raises(errors.NotFound):
        plane.get_group("ckpt/j")
    code = "assert plane.publish_group('ckpt/j', {'1/w': np.ones(3)}, step=1, part=(1, 2), retain=2, meta='one').ready"
    assert actors.run(code) == 0
    step = plane.get_group("ckpt/j", as_="numpy")
    assert step["0/w"].tolist() == [0, 0, 0]
    assert step["1/w"].tolist() == [1, 1, 1]
    assert (step.step, step.meta) == (1, ["zero", "one"])
    del step
    plane.publish_group("ckpt/j", {"0/w": np.zeros(3)}, step=2, part=(0, 2), retain=2)
    assert plane.get_group("ckpt/j").step == 1  # half a step is no step
    plane.publish_group("ckpt/j", {"0/w": np.zeros(3)}, step=2, part=(0, 2), retain=2)  # sent twice
    plane.publish_group("ckpt/j", {"1/w": np.zeros(3)}, step=3, part=(1, 2), retain=2, epoch=1)
    plane.publish_group("ckpt/j", {"0/w": np.zeros(3)}, step=3, part=(0, 2), retain=2, epoch=1)
    assert plane.get_group("ckpt/j").step == 3
    with pytest.raises(errors.StaleEpoch):
        plane.publish_group("ckpt/j", {"1/w": np.zeros(3)}, step=2, part=(1, 2), retain=2)
    assert clean(plane)["versions"] == {"ready": 4}  # steps 1 and 3; the incomplete 2 went


@pytest.mark.parametrize("point", ["slot-zero", "committed", "slot-stored"])
def test_a_part_writer_killed_at_the_last_part_leaves_all_or_nothing(plane: Plane, actors: Crew, point: str) -> None:
    plane.publish_group("ckpt/j", {"0/w": np.zeros(3)}, step=1, part=(0, 2))
    code = "plane.publish_group('ckpt/j', {'1/w': np.ones(3)}, step=1, part=(1, 2))"
    assert actors.run(code, die_at=point) == KILLED
    clean(plane)
    if point == "slot-zero":
        with pytest.raises(errors.NotFound):
            plane.get_group("ckpt/j")
        assert actors.run(code) == 0
    assert set(plane.get_group("ckpt/j")) == {"0/w", "1/w"}


def test_the_end_of_a_job_leaves_no_name_no_lease_no_segment(plane: Plane, actors: Crew) -> None:
    plane.put("other", np.arange(3), label="job10")
    trainer = actors.start(
        """
        for n in range(1, 4):
            plane.publish_group('weights/job1/e', {'w': np.full(200_000, float(n))}, step=n)
            plane.publish_group('shadow/job1/actor/0', {'w': np.full(50, float(n))}, step=n, retain=2)
        plane.publish_group('ckpt/job1', {'w': np.zeros(9)}, step=1, part=(0, 2))
        print('done', flush=True); os.read(os.pipe()[0], 1)
        """,
        label="job1/actor/0",
        epoch=1,
    )
    actors.says(trainer, "done")
    pin = plane.pin("weights/job1/e", label="job1")
    held = plane.get_group("weights/job1/e", as_="numpy")
    assert pin.version == held.id
    actors.kill(trainer)
    assert plane.drop_label("job1") == 3
    assert held["w"][0] == 3.0  # a view still reads its bytes
    del held
    wait_until(lambda: plane.stats()["leases"] == 0)
    plane.delete("other")
    stats = clean(plane)
    assert (stats["names"], stats["versions"], stats["leases"]) == (0, {}, 0)
    assert (stats["segments"], stats["file_bytes"]) == (0, 0)
    assert not list(plane._space.folder.glob("seg-*"))


def test_a_pin_keeps_a_version_over_the_death_of_everybody(plane: Plane, actors: Crew) -> None:
    assert actors.run("plane.put('w', np.arange(5)); plane.pin('w', label='job')") == 0
    plane.put("w", np.zeros(5))
    assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
    plane.drop_label("job")
    assert clean(plane)["versions"] == {"ready": 1}


def test_two_publishers_never_show_an_older_version_after_a_newer_one(plane: Plane, actors: Crew) -> None:
    code = """
        for n in range(%d):
            try:
                plane.put('w', np.full(64, n, np.int64), step=n)
            except Exception as e:
                assert type(e).__name__ in ('StaleStep', 'LostRace', 'PublishBlocked'), repr(e)
    """
    rounds = 2000 if len(repeats(1, 2)) > 1 else 200
    pids = [actors.start(code % rounds) for _ in range(2)]
    seen, reads = -1, 0
    while seen < rounds - 1:
        view = plane.get("w", wait_s=10, as_="numpy")
        value = int(view[0])
        assert (view == value).all(), "torn"
        assert value >= seen, "backward"
        seen, reads = value, reads + 1
    for pid in pids:
        assert actors.wait(pid) == 0, actors.output(pid)
    assert reads > 0


def test_a_wait_for_an_unknown_name_ends_with_its_first_version_or_in_time(plane: Plane) -> None:
    with pytest.raises(errors.WaitTimeout, match=r"nothing was published in 0\.05 s"):
        plane.get("later", wait_s=0.05)
    thread = threading.Timer(0.05, lambda: plane.put("later", np.ones(2)))
    thread.start()
    assert plane.get("later", wait_s=10, as_="numpy").tolist() == [1, 1]
    thread.join()
    with pytest.raises(errors.WaitTimeout, match="the newest step is 0, wanted step >= 8"):
        plane.get("later", min_step=8, wait_s=0.05)


def test_leases_of_a_forked_child_outlive_the_killed_parent(plane: Plane, actors: Crew) -> None:
    code = """
        import sys
        view = plane.get('w', as_='numpy')
        if os.fork() == 0:
            try:
                plane.get('w')
            except Exception as e:
                print(type(e).__name__, flush=True)
            while not os.path.exists(%r): os.sched_yield()
            print('child reads', view.tolist(), flush=True)
            os._exit(0)
        print('parent', flush=True)
        os.read(os.pipe()[0], 1)
    """
    plane.put("w", np.arange(3))
    flag = plane._space.folder / "go"
    parent = actors.start(code % str(flag))
    actors.says(parent, "ForkedClient")
    actors.kill(parent)
    for value in range(5):
        plane.put("w", np.full(3, value))
    clean(plane)
    assert plane.stats()["versions"] == {"ready": 1, "doomed": 1}
    flag.touch()
    assert actors.says(parent, "child reads [0, 1, 2]")
    wait_until(lambda: clean(plane)["versions"] == {"ready": 1})


def test_a_commit_goes_from_memory_to_disk_and_the_newer_of_both_comes_back(plane: Plane, tmp_path: Path) -> None:
    """What lies in the memory of a host since before a rollback has the number of a later commit."""
    job, one = JobId("j"), InstanceId(RoleName("a"), 0)
    checkpoint.save(plane, job, one, 5, Epoch(2), {"by": 2})
    checkpoint.publish(plane, job, "a-r", 4, Epoch(2), {"w": np.arange(3.0)})
    folder = folder_of(tmp_path, 5, Epoch(2))
    checkpoint.keep(plane, job, one, 5, folder)
    checkpoint.keep(plane, job, "a-r", 4, folder)
    assert checkpoint.read(checkpoint.file_of(folder, one)) == {"by": 2}
    assert checkpoint.read(checkpoint.file_of(folder, "a-r"))["w"].tolist() == [0.0, 1.0, 2.0]
    for owner, n in ((one, 6), ("a-r", 5), (InstanceId(RoleName("a"), 1), 5)):
        with pytest.raises(checkpoint.StateLost):
            checkpoint.keep(plane, job, owner, n, folder)
    checkpoint.write(folder_of(tmp_path, 5, Epoch(1)), one, {"by": 1})
    assert checkpoint.restored(plane, tmp_path, job, one, 5) == {"by": 2}
    checkpoint.write(folder_of(tmp_path, 5, Epoch(7)), one, {"by": 7})
    assert checkpoint.restored(plane, tmp_path, job, one, 5) == {"by": 7}, "it was committed anew on another host"
    for name in ("shadow/j/a/0", "weights/j/a-r"):
        plane.delete(name)
