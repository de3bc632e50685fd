"""The job: a tower that sees, a tower that spells, each a mesh of two, and a gradient edge between them.

The loop knows numbers of pictures and nothing else: each tower loads its own half of the data; features and their
gradients go from tower to tower. Both towers step, then a commit makes the step durable. Only the towers load torch.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import task

from rota import Concat, Mean, Shard, Workload, op


class Tower(Workload):
    """What both towers share: a mesh that sums gradients up, an update, the state of a commit."""

    network = ""

    def setup(self, ctx: Any) -> None:
        import torch
        import torch.distributed as dist
        import towers

        torch.set_num_threads(1)
        ctx.process_group()
        self.data = towers.Digits()
        self.tower = towers.Tower(getattr(towers, self.network)(ctx.seed), dist.all_reduce)
        if ctx.restored is not None:
            self.tower.restore(ctx.restored)

    @op(retry="commit")
    def update(self, step: int) -> float:
        """Step along the gradients that came over the edge; their norm."""
        return self.tower.update(step)

    @op.state
    def state(self) -> dict[str, Any]:
        """All that a step depends on."""
        return self.tower.state()


class Vision(Tower):
    """Pictures to features."""

    network = "Vision"

    @op(send=Shard("dp"), recv=Concat("dp"), retry="commit")
    def encode(self, numbers: Any) -> Any:
        """Features of the pictures: what goes over the gradient edge."""
        return self.tower.net(self.data.pictures[numbers])

    @op(send=Shard("dp", pad="repeat"), recv=Concat("dp"))
    def look(self, numbers: Any) -> Any:
        """Features of the pictures, for nobody to learn from."""
        return self.tower.net(self.data.pictures[numbers]).detach()


class Speller(Tower):
    """Features to letters."""

    network = "Speller"

    @op(send=Shard("dp"), recv=Mean, retry="commit")
    def read(self, features: Any, numbers: Any) -> float:
        """Learn to spell the names of the pictures from their features; the loss."""
        loss = self.tower.net.loss(features, self.data.names[numbers])
        loss.backward()
        return float(loss.detach()) / len(numbers)

    @op(send=Shard("dp", pad="repeat"), recv=Concat("dp"))
    def right(self, batch: tuple[Any, Any]) -> Any:
        """For each picture whether its whole name is spelled rightly."""
        features, numbers = batch
        return (self.tower.net.spell(features) == self.data.names[numbers]).all(dim=1).numpy()


async def fit(f: Any) -> None:
    """STEPS steps, a commit each; `curve.jsonl` and `result.json` are in the output folder."""
    path = f.output_dir / "curve.jsonl"
    rows = path.read_text().splitlines(keepends=True)[: f.committed] if f.committed else []
    path.write_text("".join(rows))
    with path.open("a") as curve:
        for n in range(f.committed + 1, task.STEPS + 1):
            numbers = task.batch(f.seed, n)
            row = {"loss": await f.gradients("vision.encode", numbers, numbers)}
            row["vision"], row["speller"] = await asyncio.gather(f.roles.vision.update(n), f.roles.speller.update(n))
            curve.write(json.dumps(row) + "\n")
            curve.flush()
            await f.commit(row)
    right = await f.roles.speller.right((await f.roles.vision.look(task.HELD_OUT), task.HELD_OUT))
    (f.output_dir / "result.json").write_text(json.dumps({"right": float(right.mean())}) + "\n")
