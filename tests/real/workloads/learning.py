"""A stateful mesh, a reader of its weights, and the loop over both: every number is a function of the commit alone.

Only the learner loads torch, so that the others start quickly.
"""

from __future__ import annotations

import asyncio
import os

import numpy as np

import rota


class Learner(rota.Workload):
    """Adds the mean of each batch to its vector; all ranks must agree, or the update raises."""

    def setup(self, ctx) -> None:
        import torch

        self.ctx, self.torch = ctx, torch
        ctx.process_group()
        kept = ctx.restored
        self.vector = kept["vector"] if kept else torch.zeros(4)
        self.updates = kept["updates"] if kept else 0
        assert self.updates == ctx.committed, f"restored {self.updates} updates at commit {ctx.committed}"

    @rota.op(send=rota.Shard("dp"), recv=rota.Mean, retry="commit")
    def update(self, batch) -> dict[str, float]:
        trap = self.ctx.output_dir / "raise-update"
        if trap.exists() and self.ctx.rank == 1:
            trap.unlink()
            raise RuntimeError("planned failure in update")
        grad = self.torch.tensor(batch["x"]).mean(dim=0)
        self.torch.distributed.all_reduce(grad)
        self.vector += grad / self.ctx.world_size
        self.updates += 1
        with (self.ctx.work_dir / "updates.txt").open("a") as file:
            file.write(f"{self.ctx.epoch} {self.updates}\n")
        return {"total": float(self.vector.sum()), "updates": self.updates}

    @rota.op.state
    def state(self):  # has no publishing method: its readers get the tensors of this
        return {"vector": self.vector, "updates": self.updates}


class Reader(rota.Workload):
    """Answers with what it has loaded."""

    def setup(self, ctx) -> None:
        self.version, self.total = 0, 0.0

    @rota.op.weights
    def load(self, version, tensors) -> None:
        self.version, self.total = version, float(tensors["vector"].sum())

    @rota.op(send=rota.Each)
    async def look(self, item: int) -> tuple[int, float]:
        await asyncio.sleep(0)
        return self.version, self.total


def totals(n: int) -> float:
    """The total of the learner after ``n`` updates."""
    return n * (n + 1) / 2 * 14.0


async def training(f) -> None:
    """STEPS updates; every answer of a reader must be of the last commit."""
    pause_at, steps, total = int(os.environ.get("PAUSE_AT", "-1")), int(os.environ["STEPS"]), 0.0
    for n in range(f.committed + 1, steps + 1):
        seen = set(await f.roles.reader.look(list(range(4))))
        assert len(seen) == 1 and seen.pop()[0] == n - 1 == f.weights_version, (n, seen)
        if os.environ.get("LATE"):
            ((version, late_total),) = set(await f.roles.late.look([0, 1]))
            assert version == (n - 1) // 2 * 2 and late_total == totals(version), (n, version, late_total)
        rows = np.tile(np.arange(8, dtype=np.float32).reshape(4, 2), 2) * np.float32(n)
        got = await f.roles.learner.update({"x": rows})
        assert got["updates"] == n, got
        total = got["total"]
        if n == pause_at:
            (f.output_dir / f"paused-{f.committed}").touch()
            while not (f.output_dir / "go").exists():
                await asyncio.sleep(0.02)
        await f.commit({"total": total})
