"""Four roles whose every number is a function of the commit; the loop writes each commit into a file of its own."""

from __future__ import annotations

import hashlib
import os

import numpy as np

import rota

WIDTH = 64


def batch_of(n: int, rank: int) -> np.ndarray:
    """What a rollout makes for commit ``n``."""
    return np.sin(np.arange(WIDTH) * (rank + 1.0) + n)


def score_of(batch: np.ndarray) -> float:
    """What the judge says of a batch."""
    return float(np.tanh(batch.sum()))


def updated(weights: np.ndarray, batches: list[np.ndarray], scores: list[float]) -> np.ndarray:
    """The weights after one step: rounding differs with the order, so that a step twice or too few shows for good."""
    return weights * 0.999 + sum(score * batch for score, batch in zip(scores, batches, strict=True)) / 7.0


def checksum(weights: np.ndarray) -> str:
    """What identifies weights bit by bit."""
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def reference(steps: int) -> list[str]:
    """The checksum after each step of a run in one process."""
    weights, found = np.zeros(WIDTH), list[str]()
    for n in range(1, steps + 1):
        batches = [batch_of(n, rank) for rank in range(2)]
        weights = updated(weights, batches, [score_of(batch) for batch in batches])
        found.append(checksum(weights))
    return found


class Learner(rota.Workload):
    """Holds the weights."""

    def setup(self, ctx) -> None:
        self.weights = np.array(ctx.restored["weights"]) if ctx.restored else np.zeros(WIDTH)

    @rota.op(retry="commit")
    def update(self, batches, scores) -> str:
        self.weights = updated(self.weights, batches, scores)
        return checksum(self.weights)

    @rota.op.state
    def state(self):
        return {"weights": self.weights}


class Rollout(rota.Workload):
    """Makes batches."""

    @rota.op(send=rota.Each)
    def make(self, item) -> np.ndarray:
        return batch_of(*item)


class Judge(rota.Workload):
    """Scores batches."""

    @rota.op(send=rota.Each)
    def score(self, batch) -> float:
        return score_of(batch)


async def training(f) -> None:
    """Steps until the file ``go`` exists. A row is on the disk before its commit is, so that none can be missing."""
    with (f.output_dir / "commits.txt").open("a") as file:
        while not (f.output_dir / "go").exists():
            n = f.committed + 1
            batches = await f.roles.rollout.make([(n, rank) for rank in range(2)])
            scores = await f.roles.judge.score(batches)
            found = await f.roles.learner.update(batches, scores)
            file.write(f"{n} {found}\n")
            file.flush()
            os.fsync(file.fileno())
            await f.commit({"checksum": found})
