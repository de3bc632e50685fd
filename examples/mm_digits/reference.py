"""The same two towers in one process, without Rota: the curve that the job must give, and its figure.

It learns from the parts of each batch that the ranks of the job get, and sums their gradients up in the same order:
what is rounded away is then the same, and 300 steps of both end in the same figures.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import task
import torch
from towers import Digits, Speller, Tower, Vision

RANKS, MICRO = 2, 4
"""Ranks of a tower, and micro-batches of the gradient edge, as in `job.yaml`."""


def main() -> None:
    """Train with a seed; a line a step, then the share of held-out pictures whose name is spelled rightly."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    seed: int = arguments.parse_args().seed
    torch.set_num_threads(1)
    first: dict[str, torch.Tensor] = {}
    data = Digits()
    vision = Tower(Vision(seed), lambda flat: flat.add_(first["vision"]))
    speller = Tower(Speller(seed), lambda flat: flat.add_(first["speller"]))
    for n in range(1, task.STEPS + 1):
        total = 0.0
        for rank in range(RANKS):
            for micro in np.split(task.batch(seed, n), MICRO):
                numbers = np.split(micro, RANKS)[rank]
                loss = speller.net.loss(vision.net(data.pictures[numbers]), data.names[numbers])
                loss.backward()
                total += float(loss.detach())
            if rank == 0:
                first = {"vision": vision.gradient(), "speller": speller.gradient()}
        row = {"loss": total / task.BATCH, "vision": vision.update(n), "speller": speller.update(n)}
        print(json.dumps(row))
    with torch.no_grad():
        written = speller.net.spell(vision.net(data.pictures[task.HELD_OUT]))
    right = (written == data.names[task.HELD_OUT]).all(dim=1).double().mean()
    print(json.dumps({"right": float(right), "cpu_seconds": round(time.process_time(), 1)}))


if __name__ == "__main__":
    main()
