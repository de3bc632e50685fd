"""Weights of transformers in, 20 steps under tensor and data ranks, and out again: four processes over Gloo."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rota.spec.errors import BadInput
from rota.train.apply import cross_entropy_sum, parallelize
from rota.train.batch import call
from rota.train.plan.model import Layer, Mesh, ParallelPlan
from rota.train.weights import load_weights, save_weights
from tests.real.train.ranks import LONG_S, run_ranks
from tests.train import zoo

deep = pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="ROTA_DEEP is not set")
STEPS = 20
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
PLAN = zoo.plan(Mesh(tp=2, dp_replicate=2), Layer(tp=2))
CASES: tuple[tuple[str, ParallelPlan], ...] = (
    ("Llama", PLAN),
    ("Qwen2, tied", PLAN),
    ("GPT-2, tied", PLAN),
    ("Qwen3", replace(zoo.plan(Mesh(tp=2, dp_shard=2), Layer(tp=2, zero=3)), micro_batches=2)),
    ("Llama", replace(zoo.PLANS["pp"], mesh=Mesh(pp=2, dp_replicate=2), micro_batches=2, micro_batch=2)),
)


def other_logits(name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the model that one process trained, and of the one that transformers loads."""
    model = zoo.fresh(name)
    optimizer = ADAMW(model.parameters())
    for inputs, targets in zoo.batches(name, STEPS):
        (cross_entropy_sum(call(model, inputs), targets) / (targets != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    loaded = cast("Any", importlib.import_module("transformers"))
    again = getattr(loaded, type(model).__name__).from_pretrained(folder)
    inputs, _ = next(zoo.batches(name))
    with torch.no_grad():
        return (cast("Any", call(one.eval(), inputs)).logits for one in (model, again))  # type: ignore[return-value]


def _rank(rank: int, _size: int, folder: str) -> None:
    for number, (name, plan) in enumerate(CASES):
        given, made = Path(folder, str(number), "in"), Path(folder, str(number), "out")
        if rank == 0:
            cast("Any", zoo.fresh(name)).save_pretrained(given)
        dist.barrier()
        torch.manual_seed(7)
        trained = parallelize(zoo.MODELS[name]().train(), plan, optimizer=ADAMW)
        load_weights(trained, given)
        for inputs, targets in zoo.batches(name, STEPS):
            trained.step(zoo.share(trained.rows, inputs), targets[trained.rows])
        save_weights(trained, made, shard_bytes=4000 if name == "Llama" else 1 << 30)
        with pytest.raises(BadInput, match="has weights"):
            save_weights(trained, made)
        if rank == 0:
            assert len(list(made.glob("*.safetensors"))) == (1 if name != "Llama" else len(list(made.glob("*-of-*"))))
            mine, theirs = other_logits(name, made)
            Path(folder, f"{number}.difference").write_text(str(float((mine - theirs).abs().max())))
        dist.barrier()


@deep
@pytest.mark.real
@pytest.mark.timeout(900)
def test_weights_come_in_and_go_out_as_transformers_has_them(tmp_path: Path) -> None:
    run_ranks(_rank, 4, str(tmp_path), home=tmp_path, limit_s=LONG_S)
    differences = [float(Path(tmp_path, f"{number}.difference").read_text()) for number in range(len(CASES))]
    assert all(one <= 1e-5 for one in differences), dict(zip([name for name, _ in CASES], differences, strict=True))
