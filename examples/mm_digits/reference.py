"""The same two towers in one process, without Rota: the curve that the job must give, and its figure."""

from __future__ import annotations

import argparse
import json
import time

import task
import torch
from towers import Digits, Speller, Tower, Vision


def main() -> None:
    """Train with a seed; a line a step, then the share of held-out pictures whose name is spelled rightly."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    seed: int = arguments.parse_args().seed
    torch.set_num_threads(1)
    data, vision, speller = Digits(), Tower(Vision(seed)), Tower(Speller(seed))
    for n in range(1, task.STEPS + 1):
        numbers = task.batch(seed, n)
        loss = speller.net.loss(vision.net(data.pictures[numbers]), data.names[numbers])
        loss.backward()
        row = {"loss": float(loss.detach()) / len(numbers), "vision": vision.update(n), "speller": speller.update(n)}
        print(json.dumps(row))
    with torch.no_grad():
        written = speller.net.spell(vision.net(data.pictures[task.HELD_OUT]))
    right = (written == data.names[task.HELD_OUT]).all(dim=1).double().mean()
    print(json.dumps({"right": float(right), "cpu_seconds": round(time.process_time(), 1)}))


if __name__ == "__main__":
    main()
