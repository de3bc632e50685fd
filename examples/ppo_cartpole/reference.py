"""The same training in one process, without Rota: the figures that the job must reach."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import ppo
import torch
from games import Policy, first_games, greedy_length, play
from ppo_cartpole import EVALUATED, joined, row_of, split


def main() -> None:
    """Train with the given seed and print the figures as one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    seed: int = arguments.parse_args().seed
    torch.set_num_threads(1)
    actor, critic, policy = ppo.Learner(seed, 2), ppo.Learner(seed, 1), Policy()
    games, curve = first_games(seed), list[dict[str, float]]()
    for n in range(1, ppo.STEPS + 1):
        policy.load(actor.net.state_dict())
        played = [play(policy, item["games"], item["seed"]) for item in split(seed, n, games)]
        batch, games = joined(played)
        judged = ppo.advantages(batch, critic.values(batch["states"]), critic.values(batch["last"]))
        rows = ppo.flat(batch)
        actor.learn({**rows, "advantages": judged["advantages"]}, seed, n)
        critic.learn({"states": rows["states"], "returns": judged["returns"]}, seed, n)
        curve.append(row_of(played))
    policy.load(actor.net.state_dict())
    lengths = [greedy_length(policy, number) for number in range(EVALUATED)]
    figures = {"seed": seed, "greedy": float(np.mean(lengths)), "cpu_seconds": round(time.process_time(), 1)}
    print(json.dumps({**figures, "first": curve[0], "last": curve[-1]}))


if __name__ == "__main__":
    main()
