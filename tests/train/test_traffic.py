"""Predicted collectives and bytes of state against what ``parallelize`` really sends and holds, plan by plan."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rota.train.apply import Parallel, parallelize
from rota.train.models.gpt import Gpt
from rota.train.optim import ZeroOneOptimizer, local
from rota.train.parallel.mesh import plan_mesh
from rota.train.plan.memory import memory
from rota.train.plan.model import Layer, Mesh, ModelShape, ParallelPlan, Stage
from rota.train.plan.traffic import traffic
from tests.train import equal, trace

SHAPE = ModelShape(layers=3, hidden=32, heads=8, seq=32, vocab=64, tied=False)
GROUPED = replace(SHAPE, kv_heads=2)


def plan(mesh: Mesh, kind: Layer | None = None, *, micro_batches: int = 2, **rest: object) -> ParallelPlan:
    kind = kind or Layer()
    return ParallelPlan(
        mesh=mesh,
        stages=(Stage(layers=(0, SHAPE.layers), embed=True, head=True),),
        layers=(replace(kind, count=SHAPE.layers),),
        embed=replace(kind, count=1),
        head=replace(kind, count=1),
        micro_batches=micro_batches,
        **rest,  # type: ignore[arg-type]
    )


ADAMW = partial(torch.optim.AdamW, lr=1e-3)
OWN: dict[str, ParallelPlan] = {
    "one rank": plan(Mesh()),
    "ddp of 64": plan(Mesh(dp_replicate=64)),
    "zero 1 of 8": plan(Mesh(dp_replicate=8), Layer(zero=1)),
    "zero 2 of 32": plan(Mesh(dp_shard=32), Layer(zero=2), micro_batches=3),
    "zero 3 of 16": plan(Mesh(dp_shard=16), Layer(zero=3), micro_batches=4),
    "zero 3, full recompute": plan(Mesh(dp_shard=4), Layer(zero=3, recompute="full")),
    "hsdp of 4 x 8": plan(Mesh(dp_replicate=4, dp_shard=8), Layer(zero=3)),
    "hsdp with zero 2": plan(Mesh(dp_replicate=2, dp_shard=4), Layer(zero=2)),
    "tp of 8": plan(Mesh(tp=8), Layer(tp=8)),
    "tp of 2 with split sequence": plan(Mesh(tp=2), Layer(tp=2, sp=True), micro_batches=1),
    "tp, full recompute": plan(Mesh(tp=2), Layer(tp=2, recompute="full")),
    "tp, split sequence, full recompute": plan(Mesh(tp=2), Layer(tp=2, sp=True, recompute="full")),
    "tp, selective recompute": plan(Mesh(tp=2), Layer(tp=2, recompute="selective")),
    "tp x zero 2": plan(Mesh(dp_shard=4, tp=2), Layer(tp=2, zero=2)),
    "tp x zero 1": plan(Mesh(dp_replicate=4, tp=4), Layer(tp=4, zero=1)),
    "tp x hsdp": plan(Mesh(dp_replicate=2, dp_shard=4, tp=2), Layer(tp=2, sp=True, zero=3)),
    "512 ranks": plan(Mesh(dp_replicate=16, dp_shard=8, tp=4), Layer(tp=4, zero=3)),
    "ring of 8": plan(Mesh(cp=8)),
    "ring, full recompute": plan(Mesh(cp=2), Layer(recompute="full")),
    "ring, selective recompute": plan(Mesh(cp=2), Layer(recompute="selective")),
    "ring x zero 2": plan(Mesh(cp=2, dp_shard=4), Layer(zero=2)),
    "ulysses x zero 3": plan(Mesh(cp=2, dp_shard=4), Layer(zero=3), cp_kind="ulysses"),
    "ulysses, full recompute": plan(Mesh(cp=4), Layer(recompute="full"), cp_kind="ulysses"),
    "ring x tp with split sequence": plan(Mesh(cp=2, tp=2), Layer(tp=2, sp=True)),
    "ulysses x tp": plan(Mesh(cp=2, tp=2), Layer(tp=2), cp_kind="ulysses"),
    "ring, grouped keys": plan(Mesh(cp=4)),
    "ulysses, grouped keys": plan(Mesh(cp=4), cp_kind="ulysses"),
}
SHARED = {
    name: one
    for name, one in equal.PLANS.items()
    if one.mesh.pp == one.mesh.ep == 1 and one.dtype == equal.plan(Mesh()).dtype and "experts" not in name
}
PLANS = {**OWN, **SHARED}


def shape_of(name: str) -> ModelShape:
    return equal.SHAPE if name in SHARED else GROUPED if "grouped" in name else SHAPE


QUICK = (
    "zero 1 of 8",
    "zero 2 of 32",
    "zero 3, full recompute",
    "hsdp with zero 2",
    "tp, split sequence, full recompute",
    "tp x hsdp",
    "512 ranks",
    "ring x zero 2",
    "ulysses x tp",
    "ulysses, grouped keys",
    "zero 3, all on the host",
    "zero 0 and 3 by layer",
)
NAMES = tuple(PLANS) if os.environ.get("ROTA_DEEP") else QUICK


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_sends_and_holds_what_the_planner_says(name: str, tmp_path: Path) -> None:
    one, model = PLANS[name], Gpt(shape_of(name))
    plan_mesh.cache_clear()
    held: list[int] = []
    with trace.world(one.mesh.world) as seen:
        trained = parallelize(model, one, optimizer=ADAMW, offload_folder=tmp_path)
        parameters = [parameter for piece in trained.pieces for parameter in piece.parameters()]
        trained.optimizer.register_step_pre_hook(
            lambda *_: held.append(bytes_of(one.grad for one in parameters if one.grad is not None))
        )
        ids = torch.zeros(trained.local_batch, model.shape.seq, dtype=torch.long)
        for _ in range(3):  # DDP settles on its buckets in the second step
            seen.clear()
            trained.step(ids, ids)
        axes = {axis: trained.mesh.group(axis).group_name for axis in ("data", "fsdp", "dp_replicate", "cp", "tp")}
    expected: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for sent in traffic(one, model.shape):
        expected[sent.operation, axes[sent.axis]] += sent.count
        sizes[sent.operation, axes[sent.axis]] += sent.size_bytes
    assert trace.count(seen) == {key: (times, sizes[key]) for key, times in expected.items()}
    need = memory(on_device(one), model.shape)[0]
    assert bytes_of(parameters) == need.params
    assert held[-1] == need.grads
    assert state_bytes(trained) == need.optimizer


def on_device(one: ParallelPlan) -> ParallelPlan:
    """The plan without offload: what is on the host is counted, too."""
    layers = tuple(replace(layer, offload="none") for layer in (*one.layers, one.embed, one.head))
    return replace(one, layers=layers[:-2], embed=layers[-2], head=layers[-1])


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(one.detach()).nbytes for one in tensors)


def state_bytes(trained: Parallel) -> float:
    """Of Adam's moments on this rank; where whole parameters are dealt out, the mean over the ranks."""
    if isinstance(trained.optimizer, ZeroOneOptimizer):
        return 2 * bytes_of(trained.optimizer.all) / trained.optimizer.group.size()
    return bytes_of(value for kept in trained.optimizer.state.values() for value in kept.values() if value.dim())


def test_a_plan_with_a_pipeline_is_not_counted() -> None:
    with pytest.raises(ValueError, match="pp 2"):
        traffic(replace(PLANS["one rank"], mesh=Mesh(pp=2)), SHAPE)
