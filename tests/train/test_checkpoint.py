"""Checkpoints of training: whole or not at all, verified, the newest good one found."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from rota.spec.errors import BadInput
from rota.train.checkpoint import MANIFEST, Checkpoints, candidates

KILLS = 100 if os.environ.get("ROTA_DEEP") else 15


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((64, 64), float(step)), "optim.a.step": torch.tensor(float(step))}


def save(folder: Path, *steps: int) -> Checkpoints:
    made = Checkpoints(folder, keep=2)
    for step in steps:
        made.save(tensors(step), step=step, extra={"cursor": 10 * step}, wait=True)
    return made


def loaded(made: Checkpoints) -> tuple[int, float]:
    """(step, value of all elements) of the newest good one."""
    found = made.find()
    assert found is not None
    into = tensors(-1)
    made.load(found, into)
    assert (into["model.a"] == into["optim.a.step"]).all(), "torn: two steps in one checkpoint"
    assert found.extra == {"cursor": 10 * found.step}
    return found.step, into["optim.a.step"].item()


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    made = save(tmp_path, 1, 2, 3)
    assert loaded(made) == (3, 3.0)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000003.1", "step-00000002.1"]


def test_a_step_saved_again_after_a_rollback_replaces_the_first(tmp_path: Path) -> None:
    made = save(tmp_path, 1)
    other = {name: tensor + 6 for name, tensor in tensors(1).items()}
    made.save(other, step=1, extra={"cursor": 10}, wait=True)
    assert loaded(made) == (1, 7.0)


def test_training_may_change_the_tensors_while_a_save_is_written(tmp_path: Path) -> None:
    made, live = Checkpoints(tmp_path), tensors(5)
    made.save(live, step=5, extra={"cursor": 50})
    for tensor in live.values():
        tensor.fill_(99)
    made.wait()
    assert loaded(made) == (5, 5.0)


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "remove", "manifest", "manifest step", "manifest list", "manifest empty"]
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    made = save(tmp_path, 1, 2)
    newest = candidates(tmp_path)[0]
    data = max(newest.glob("__0_*"), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    match damage:
        case "flip":
            raw[len(raw) // 2] ^= 1
            data.write_bytes(raw)
        case "cut":
            data.write_bytes(raw[:-1])
        case "remove":
            data.unlink()
        case "manifest step":
            text = (newest / MANIFEST).read_text()
            assert '"step": 2' in text
            (newest / MANIFEST).write_text(text.replace('"step": 2', '"step": 3'))
        case "manifest list":
            (newest / MANIFEST).write_text("[]")
        case "manifest empty":
            (newest / MANIFEST).write_text('{"files": {}}')
        case _:
            (newest / MANIFEST).write_text("{")
    assert loaded(made) == (1, 1.0)
    found = made.find()
    assert found is not None
    assert newest.name in found.refused[0]


def test_a_folder_without_a_checkpoint_has_none_and_one_with_damaged_ones_alone_is_refused(tmp_path: Path) -> None:
    """Where nothing is found training begins at step 0, which must not follow from damage."""
    assert Checkpoints(tmp_path).find() is None
    made = save(tmp_path, 1, 2)
    for path in candidates(tmp_path):
        (path / MANIFEST).unlink()
    with pytest.raises(
        BadInput, match=r"all 2 in .* are damaged: step-00000002\.1: manifest\.json.*step-00000001\.1"
    ) as error:
        made.find()
    assert str(tmp_path) in error.value.message
    assert "to begin at step 0, give an empty folder" in error.value.hint


def test_weights_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    made, layers = Checkpoints(tmp_path), {f"model.layers.{index}.w": torch.ones(2) for index in range(4)}
    made.save(layers, step=1, extra={}, wait=True)
    found, into = made.find(), {name: torch.zeros(2) for name in list(layers)[:2]}
    assert found is not None
    with pytest.raises(BadInput, match=r"this model has no model\.layers\.2\.w, model\.layers\.3\.w \(build the model"):
        made.load(found, into)
    assert all(not tensor.any() for tensor in into.values())


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    made = save(tmp_path, 1)
    found = made.find()
    assert found is not None
    with pytest.raises(BadInput, match=r"model\.a of shape \(3,\) has shape \(64, 64\) in it"):
        made.load(found, {"model.a": torch.zeros(3)})
    with pytest.raises(BadInput, match=r"model\.b of shape \(3,\) is not in it"):
        made.load(found, {"model.b": torch.zeros(3)})


def test_a_save_that_fails_is_told_and_leaves_the_older_one(tmp_path: Path) -> None:
    made = save(tmp_path, 1)
    (tmp_path / ".draft-2").write_text("a file where the draft should be")
    made.save(tensors(2), step=2, extra={"cursor": 20})
    with pytest.raises(OSError, match="draft-2"):
        made.wait()
    assert loaded(made) == (1, 1.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_disk_that_fills_up_during_a_save_is_told_and_its_draft_goes(tmp_path: Path) -> None:
    """torch's own error for it is no Exception; the next save that has room removes the draft."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _save_without_room(tmp_path)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert [path.name for path in candidates(tmp_path)] == ["step-00000003.1", "step-00000001.1"]
    assert not list(tmp_path.glob(".draft-*"))


def _save_without_room(folder: Path) -> int:
    """0 when step 2 is told as failed and steps 1 and 3 are written."""
    torch.set_num_threads(1)
    made, before = save(folder, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    made.save(tensors(2), step=2, extra={"cursor": 20})
    with pytest.raises(OSError, match=r": step 2 \(\d+\.\d MiB free\): rank 0: .*"):
        made.wait()
    assert list(folder.glob(".draft-2"))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    made.save(tensors(3), step=3, extra={"cursor": 30}, wait=True)
    return 0 if loaded(made) == (3, 3.0) else 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_a_good_checkpoint_is_found(tmp_path: Path) -> None:
    """A child saves without end and is killed; nothing it had acknowledged is lost, nothing torn is loaded."""
    torch.set_num_threads(1)
    chance, told = random.Random(11), tmp_path / "acknowledged"
    torn, folder = 0, tmp_path / "checkpoints"
    save(folder, 1)
    told.write_text("1")
    for _ in range(KILLS):
        child = os.fork()
        if child == 0:
            _save_without_end(folder, told)
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += any(folder.glob(".draft-*"))
        step, value = loaded(Checkpoints(folder))
        assert step == value
        assert step >= int(told.read_text() or 0)
    assert torn, "no kill fell into a save: the test proves nothing"


def _save_without_end(folder: Path, told: Path) -> None:
    try:
        made, step = Checkpoints(folder), int(told.read_text())
        while True:
            step += 1
            made.save(tensors(step), step=step, extra={"cursor": 10 * step}, wait=True)
            draft = told.with_suffix(".draft")
            draft.write_text(json.dumps(step))
            draft.replace(told)
    finally:
        os._exit(1)
