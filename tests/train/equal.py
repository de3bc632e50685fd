"""The plans that must equal one process, and the processes that run them one after the other."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from rota.train.apply import IGNORED, Parallel, cross_entropy_sum, parallelize
from rota.train.checkpoint import Checkpoints
from rota.train.models.gpt import Gpt
from rota.train.plan.model import Dtype, Layer, Mesh, ModelShape, ParallelPlan, Stage
from tests.real.train.ranks import LONG_S, run_ranks

WORLD = 4
STEPS = 20
BATCH = 8
PLANS_A_WORLD = 8
"""Groups live as long as their world, and their threads get in each other's way."""
SHAPE = ModelShape(layers=4, hidden=16, heads=4, seq=16, vocab=32, tied=False)
EXPERTS = replace(SHAPE, experts=4, top_k=2, ffn=16)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens; some targets are padding, unevenly over sequences and so over ranks."""
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids = torch.randint(0, SHAPE.vocab, (BATCH, SHAPE.seq + 1), generator=draw)
        targets = ids[:, 1:].clone()
        targets[step % BATCH, : (step % 5) * 3] = IGNORED
        yield ids[:, :-1], targets


def fresh_model(shape: ModelShape = SHAPE) -> Gpt:
    torch.manual_seed(0)
    return Gpt(shape)


@cache
def reference(shape: ModelShape, steps: int = STEPS) -> list[float]:
    """Losses of plain torch on one process, gradients clipped to norm 1."""
    model = fresh_model(shape)
    optimizer = ADAMW(model.parameters())
    losses: list[float] = []
    for inputs, targets in batches(steps):
        loss = cross_entropy_sum(model(inputs), targets) / (targets != IGNORED).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plan(
    mesh: Mesh, kind: Layer | None = None, *, chunks: int = 1, micro_batches: int = 2, **rest: Any
) -> ParallelPlan:
    """Four equal layers of one kind, cut evenly."""
    kind, pieces = kind or Layer(), mesh.pp * chunks
    cuts = [round(index * SHAPE.layers / pieces) for index in range(pieces + 1)]
    stages = tuple(
        Stage(layers=(cuts[i], cuts[i + 1]), chunk=i // mesh.pp, embed=i == 0, head=i == pieces - 1)
        for i in range(pieces)
    )
    return ParallelPlan(
        mesh=mesh,
        stages=stages,
        layers=(replace(kind, count=SHAPE.layers),),
        embed=replace(kind, count=1),
        head=replace(kind, count=1),
        micro_batches=micro_batches,
        micro_batch=BATCH // mesh.dp // micro_batches,
        **rest,
    )


BF16 = Dtype(param="bf16")
PLANS: dict[str, ParallelPlan] = {
    "ddp": plan(Mesh(dp_replicate=4)),
    "ddp, full recompute": plan(Mesh(dp_replicate=4), Layer(recompute="full")),
    "ddp, bf16": plan(Mesh(dp_replicate=4), dtype=BF16),
    "zero 1": plan(Mesh(dp_replicate=4), Layer(zero=1)),
    "zero 1 x tp": plan(Mesh(dp_replicate=2, tp=2), Layer(zero=1, tp=2)),
    "zero 0 and 3 by layer": replace(
        plan(Mesh(dp_shard=4)), layers=(Layer(count=2), Layer(count=2, zero=3)), head=Layer(zero=3)
    ),
    "optimizer on the host": plan(Mesh(dp_replicate=4), Layer(offload="optimizer_cpu")),
    "1f1b x dp, optimizer on the host": plan(
        Mesh(pp=2, dp_replicate=2), Layer(offload="optimizer_cpu"), schedule="1f1b", micro_batches=4
    ),
    "optimizer in files": plan(Mesh(dp_shard=4), Layer(zero=3, offload="optimizer_nvme")),
    "zero 2": plan(Mesh(dp_shard=4), Layer(zero=2)),
    "zero 3": plan(Mesh(dp_shard=4), Layer(zero=3)),
    "zero 3, selective recompute": plan(Mesh(dp_shard=4), Layer(zero=3, recompute="selective")),
    "zero 3, bf16": plan(Mesh(dp_shard=4), Layer(zero=3), dtype=BF16),
    "zero 3, all on the host": plan(Mesh(dp_shard=4), Layer(zero=3, offload="all_cpu")),
    "hsdp": plan(Mesh(dp_replicate=2, dp_shard=2), Layer(zero=3)),
    "gpipe": plan(Mesh(pp=4), schedule="gpipe", micro_batches=4),
    "1f1b": plan(Mesh(pp=4), schedule="1f1b", micro_batches=4),
    "zero bubble": plan(Mesh(pp=4), schedule="zb", micro_batches=4),
    "interleaved x dp": plan(Mesh(pp=2, dp_replicate=2), schedule="interleaved", chunks=2),
    "zero bubble V x dp": plan(Mesh(pp=2, dp_replicate=2), schedule="zbv", chunks=2, micro_batches=4),
    "1f1b x dp": plan(Mesh(pp=2, dp_replicate=2), schedule="1f1b", micro_batches=4),
    "1f1b x zero 3": plan(Mesh(pp=2, dp_shard=2), Layer(zero=3), schedule="1f1b", micro_batches=4),
    "tp": plan(Mesh(tp=4), Layer(tp=4)),
    "tp with split sequence": plan(Mesh(tp=4), Layer(tp=4, sp=True)),
    "tp x dp": plan(Mesh(tp=2, dp_replicate=2), Layer(tp=2)),
    "tp with split sequence x zero 3": plan(Mesh(tp=2, dp_shard=2), Layer(tp=2, sp=True, zero=3)),
    "tp x 1f1b": plan(Mesh(tp=2, pp=2), Layer(tp=2, sp=True), schedule="1f1b"),
    "ring": plan(Mesh(cp=4)),
    "ring x zero 3": plan(Mesh(cp=2, dp_shard=2), Layer(zero=3)),
    "ring x tp": plan(Mesh(cp=2, tp=2), Layer(tp=2)),
    "ring x 1f1b": plan(Mesh(cp=2, pp=2), schedule="1f1b"),
    "ulysses": plan(Mesh(cp=4), cp_kind="ulysses"),
    "ulysses x dp": plan(Mesh(cp=2, dp_replicate=2), cp_kind="ulysses"),
    "experts": plan(Mesh(dp_shard=4, ep=4), Layer(zero=2)),
    "experts x zero 3": plan(Mesh(dp_shard=4, ep=2), Layer(zero=3)),
    "experts, replicated rest": plan(Mesh(dp_shard=4, ep=4)),
    "experts x 1f1b": plan(Mesh(dp_shard=2, ep=2, pp=2), Layer(zero=2), schedule="1f1b"),
}
CHANGES = (
    "ddp -> zero bubble",
    "zero 3 -> tp x dp",
    "tp with split sequence x zero 3 -> ddp",
    "zero 1 -> hsdp",
    "1f1b x zero 3 -> zero 1",
    "interleaved x dp -> ring x zero 3",
    "experts -> experts x 1f1b",
    "optimizer in files -> optimizer on the host",
)
QUICK = ("ddp, full recompute", "zero 3", "1f1b")
TOLERANCE = {"bf16": 5e-3, "fp32": 1e-5}


def shape_of(name: str) -> ModelShape:
    """The model that a plan is for."""
    return EXPERTS if "experts" in name else SHAPE


def losses_under(one: ParallelPlan, shape: ModelShape, folder: Path) -> list[float]:
    """Losses of ``STEPS`` steps from the fresh model."""
    trained = begin(one, shape, folder)
    losses = [trained.step(trained.share(inputs), trained.share(targets)).loss for inputs, targets in batches(STEPS)]
    trained.close()
    return losses


def begin(one: ParallelPlan, shape: ModelShape, folder: Path) -> Parallel:
    return parallelize(fresh_model(shape), one, optimizer=ADAMW, clip_norm=1.0, offload_folder=folder / "offload")


def losses_over_change(before: ParallelPlan, after: ParallelPlan, shape: ModelShape, folder: Path) -> list[float]:
    """Half of the steps under one plan, a checkpoint, the rest under another from a model that had other weights."""
    given = list(batches(STEPS))
    first = begin(before, shape, folder)
    losses = [first.step(first.share(inputs), first.share(targets)).loss for inputs, targets in given[: STEPS // 2]]
    saved = Checkpoints(folder / "checkpoints")
    saved.save(first.state_dict(), step=STEPS // 2, extra={}, wait=True)
    first.close()
    second = begin(after, shape, folder)
    second.step(second.share(given[0][0]), second.share(given[0][1]))
    found = saved.find()
    assert found is not None
    saved.load(found, second.state_dict())
    losses += [second.step(second.share(x), second.share(y)).loss for x, y in given[STEPS // 2 :]]
    saved.close()
    second.close()
    return losses


def _rank(rank: int, _size: int, folder: str, names: tuple[str, ...]) -> None:
    for name in names:
        before, change, after = name.partition(" -> ")
        if change:
            here = Path(folder, name)
            losses = losses_over_change(PLANS[before], PLANS[after], shape_of(name), here)
        else:
            losses = losses_under(PLANS[name], shape_of(name), Path(folder))
        gc.collect()  # models under a plan hold cycles
        if rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(losses))


class Worlds:
    """Losses of plans: ``WORLD`` processes run ``PLANS_A_WORLD`` in turn when one of these is first asked for."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder, self.names = folder, names

    def losses(self, name: str) -> list[float]:
        """Of every step under the plan."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            first = self.names.index(name) // PLANS_A_WORLD * PLANS_A_WORLD
            together = self.names[first : first + PLANS_A_WORLD]
            run_ranks(_rank, WORLD, str(self.folder), together, home=self.folder, limit_s=LONG_S)
        return json.loads(file.read_text())
