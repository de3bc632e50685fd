"""The same training in one process without Rota: `python examples/grpo_sums/reference.py`, the figures to reach."""

from __future__ import annotations

import argparse
import json
import time

import grpo
import numpy as np
import sft
import task
import torch
from learner import Learner
from model import GPT
from sampling import greedy_answers, sample_groups


def accuracy(net: GPT) -> float:
    """Share of the held-out problems whose greedy answer is exactly right."""
    held_out = task.held_out()
    return task.share_right(greedy_answers(net, [each.text for each in held_out]))


def reinforce(learner: Learner, seed: int, step: int, reference: Learner) -> float:
    """One reinforcement step, counted from 1; the mean sampled reward."""
    problems = task.problems(seed, sft.STEPS + step, grpo.PROMPTS)
    indices = [each.index for each in problems]
    groups = sample_groups(learner.net, seed, sft.STEPS + step, indices, [each.text for each in problems])
    rewards = task.score_groups(groups["answers"], indices).reshape(len(indices), grpo.GROUP)
    batch = {
        **groups,
        "step": step,
        "advantage": grpo.advantages(rewards).reshape(-1),
        "old": learner.logprobs(groups),
        "base": reference.logprobs(groups),
    }
    learner.update(batch)
    return float(rewards.mean())


def main() -> None:
    """Train with the given seed and print the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed: int = parser.parse_args().seed
    torch.set_num_threads(1)
    learner = Learner(seed)
    for step in range(1, sft.STEPS + 1):
        learner.fit(task.sft_batch(seed, step, sft.BATCH))
    before = accuracy(learner.net)
    reference = Learner(seed)
    reference.restore(learner.state())
    curve = [reinforce(learner, seed, step, reference) for step in range(1, grpo.STEPS + 1)]
    figures = {
        "seed": seed,
        "parameters": sum(each.numel() for each in learner.net.parameters()),
        "reward_before": round(float(np.mean(curve[: grpo.WINDOW])), 3),
        "reward_after": round(float(np.mean(curve[-grpo.WINDOW :])), 3),
        "accuracy_before": round(before, 3),
        "accuracy_after": round(accuracy(learner.net), 3),
        "cpu_seconds": round(time.process_time(), 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
