"""Training state in shared memory: a process that copies is killed, the next one finds the last whole step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import rota.tensors
from rota.spec.errors import BadInput
from rota.tensors.api.store import Plane
from rota.train.checkpoint import MemoryCheckpoints

RANKS = 2


def copy_until_killed(home: Path, namespace: str) -> None:
    """Two ranks; the second dies before it copies its part of the third step."""
    plane = rota.tensors.connect(home=home, namespace=namespace, keep=True)
    ranks = [MemoryCheckpoints(plane, "run", plan="p", rank=rank, part=(rank, RANKS)) for rank in range(RANKS)]
    for step in (1, 2, 3):
        for rank, one in enumerate(ranks):
            if (step, rank) == (3, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            one.save({"model.w": torch.full((1000,), 10.0 * step + rank)}, step=step, extra={"cursor": step})


def test_the_last_step_that_every_rank_copied_survives_a_kill(plane: Plane, tensor_home: Path, space_name: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            copy_until_killed(tensor_home, space_name)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    for rank in range(RANKS):
        kept = MemoryCheckpoints(plane, "run", plan="p", rank=rank, part=(rank, RANKS))
        held = kept.find()
        assert held is not None
        assert (held.step, held.extra) == (2, {"cursor": 2})
        into = {"model.w": torch.zeros(1000)}
        kept.load(held, into)
        assert (into["model.w"] == 20.0 + rank).all()
        for other in ({"model.w": torch.zeros(1)}, {"model.v": torch.zeros(1000)}, {}):
            with pytest.raises(BadInput, match=r"the copy of step 2 is of another model: model\.[vw]"):
                kept.load(held, other)
    assert MemoryCheckpoints(plane, "run", plan="other").find() is None
    assert MemoryCheckpoints(plane, "run", plan="p", rank=5).find() is None
    MemoryCheckpoints(plane, "run", plan="p").drop()
    assert MemoryCheckpoints(plane, "run", plan="p").find() is None
