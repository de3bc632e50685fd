"""A path of two stops into a stateful learner that counts what it was given; no torch, so it starts quickly."""

from __future__ import annotations

import asyncio
import json
import os
import time

import numpy as np

import rota

ITEMS, SIZE = int(os.environ.get("ITEMS", "60")), 4


def prompts():
    """The data set: item i is i."""
    return range(ITEMS)


class Rollout(rota.Workload):
    """Answers with the version of its weights; slow enough for kills to hit work under way."""

    def setup(self, ctx) -> None:
        self.weight, self.bad = 0.0, int(os.environ.get("BAD_ITEM", "-1"))

    @rota.op.weights
    def load(self, version, tensors) -> None:
        self.weight = float(tensors["w"][0])

    @rota.op(send=rota.Each, recv=rota.Stream, retry="safe")
    def generate(self, item: int) -> dict[str, object]:
        if item == self.bad:
            raise ValueError(f"cannot answer {item}")
        time.sleep(0.02)
        return {"i": item, "weight": self.weight}


class Judge(rota.Workload):
    """A second stop."""

    @rota.op(send=rota.Each, retry="safe")
    async def score(self, item: dict[str, object]) -> dict[str, object]:
        await asyncio.sleep(0.01)
        return {**item, "score": item["i"] * 2}


class Learner(rota.Workload):
    """Its state is every item that it was ever trained on, in order, and the ages seen by the loop."""

    def setup(self, ctx) -> None:
        kept = ctx.restored or {"seen": [], "ages": [], "steps": 0}
        self.seen, self.ages, self.steps = list(kept["seen"]), list(kept["ages"]), kept["steps"]

    @rota.op(retry="commit")
    def update(self, batch: list[dict[str, float]], ages: list[int]) -> dict[str, int]:
        self.seen += [one["i"] for one in batch]
        # The version that made an item, told by the weights it was made with, against what the ledger says.
        assert all(one["weight"] >= self.steps - age for one, age in zip(batch, ages)), (self.steps, batch, ages)
        self.ages += [self.steps - int(one["weight"]) for one in batch]
        self.steps += 1
        return {"seen": len(self.seen), "score": sum(one["score"] for one in batch)}

    @rota.op.state
    def state(self):
        return {"seen": self.seen, "ages": self.ages, "steps": self.steps}

    @rota.op.publish
    def weights(self):
        return {"w": np.full(3, float(self.steps))}

    @rota.op
    def report(self) -> dict[str, list[int]]:
        return {"seen": self.seen, "ages": self.ages}


async def train(f) -> None:
    """A commit a batch, to the end of the data."""
    async for batch in f.streams.groups.batches(SIZE):
        await f.roles.learner.update(list(batch), batch.ages)
        await f.commit()
    (f.output_dir / "report.json").write_text(json.dumps(await f.roles.learner.report()))


async def in_step(f) -> None:
    """The synchronous twin of ``train``: the same batches by calls."""
    for n in range(f.committed, ITEMS // SIZE):
        items = [None] * SIZE
        async for at, value in f.roles.rollout.generate(list(range(n * SIZE, n * SIZE + SIZE))):
            items[at] = value
        scored = await f.roles.judge.score(items)
        await f.roles.learner.update(scored, [0] * SIZE)
        await f.commit()
    (f.output_dir / "report.json").write_text(json.dumps(await f.roles.learner.report()))


async def circle(f) -> None:
    """Items that only the loop has: put in before a commit, taken after it, then one more round."""
    if f.committed == 0:
        for i in range(6):
            await f.streams.notes.put({"uid": f"n{i}", "array": np.arange(i)})
        f.kept["rounds"] = 1
        await f.commit()
        (f.output_dir / "put").touch()
        while not (f.output_dir / "go").exists():
            await asyncio.sleep(0.02)
    f.streams.notes.close()
    found = []
    async for batch in f.streams.notes.batches(4):
        found += [(uid, int(note["array"].sum())) for uid, note in zip(batch.uids, batch)]
        await f.commit()
    (f.output_dir / "report.json").write_text(json.dumps({"found": found, "kept": f.kept}))
