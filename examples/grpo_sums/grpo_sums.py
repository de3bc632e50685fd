"""The job: actor, ref, rollout and reward as workloads, and the loop `grpo` that fits and then reinforces the policy.

Only the roles that hold a network load torch. Every step is a function of the state at the commit before it, so a step
that is run again after a death gives the same items.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpo as method
import numpy as np
import sft
import task
from curve import Curve

from rota import Concat, Each, Mean, Shard, Workload, op

CHUNK = 8
"""Problems in one item of work: four items a step keep two rollouts busy and let a lost one cost little."""
EVALUATE_EVERY, EVALUATION_ITEMS = 25, 4


class Policy(Workload):
    """The policy: trained as role `actor`; as role `ref` the start of the reinforcement phase, for the KL term."""

    def setup(self, ctx: Any) -> None:
        import torch
        import torch.distributed as dist
        from learner import Learner, alone

        torch.set_num_threads(1)
        if ctx.world_size > 1:
            ctx.process_group()
        self.learner = Learner(ctx.seed, dist.all_reduce if ctx.world_size > 1 else alone)
        if ctx.restored is not None:
            self.learner.restore(ctx.restored)

    @op(send=Shard("dp"), recv=Mean, retry="commit", deadline="10m")
    def fit(self, batch: dict[str, Any]) -> dict[str, float]:
        """One supervised step."""
        return self.learner.fit(batch)

    @op(send=Shard("dp"), recv=Mean, retry="commit", deadline="10m")
    def update(self, batch: dict[str, Any]) -> dict[str, float]:
        """One reinforcement step."""
        return self.learner.update(batch)

    @op(send=Shard("dp", pad="repeat"), recv=Concat("dp"), retry="safe")
    def logprobs(self, batch: dict[str, Any]) -> Any:
        """Log-probability [B, T] of each token of the answers."""
        return self.learner.logprobs(batch).numpy()

    @op.state
    def state(self) -> dict[str, Any]:
        """All that a step depends on."""
        return self.learner.state()

    @op.publish
    def weights(self) -> dict[str, Any]:
        """What the readers of the policy need."""
        return dict(self.learner.net.state_dict())

    @op.weights
    def load(self, version: int, tensors: dict[str, Any]) -> None:
        """The frozen policy follows the supervised phase and then stands still."""
        if version <= sft.STEPS:
            self.learner.net.load_state_dict(tensors)


class Rollout(Workload):
    """Answers problems with the newest committed policy."""

    def setup(self, ctx: Any) -> None:
        import torch
        from model import GPT

        torch.set_num_threads(1)
        self.seed = ctx.seed
        self.net = GPT(ctx.seed)

    @op.weights
    def load(self, version: int, tensors: dict[str, Any]) -> None:
        """Take over a committed version."""
        self.net.load_state_dict(tensors)

    @op(send=Each, retry="safe", progress="2m")
    def generate(self, item: dict[str, Any]) -> dict[str, task.Tokens]:
        """GROUP sampled answers to each problem of the item."""
        from sampling import sample_groups

        return sample_groups(self.net, self.seed, item["step"], item["indices"], item["texts"])

    @op(send=Each, retry="safe", progress="2m")
    def answer(self, texts: list[str]) -> list[str]:
        """The greedy answer to each text."""
        from sampling import greedy_answers

        return greedy_answers(self.net, texts)


class Verifier(Workload):
    """reasoning-gym's own verifier; loads no torch."""

    @op(send=Each, retry="safe", progress="1m")
    def score(self, item: dict[str, Any]) -> Any:
        """Rewards [B] of the answers to the problems of the item."""
        return task.score_groups(item["answers"], item["indices"])


async def grpo(f: Any) -> None:
    """120 supervised and 150 reinforcement steps, a commit each; curve and figures go to the output directory."""
    curve = Curve(f.output_dir, f.committed)
    for n in range(f.committed + 1, sft.STEPS + method.STEPS + 1):
        row = await (fit(f, n) if n <= sft.STEPS else reinforce(f, n))
        # The row is written first: the next entry drops rows beyond the last commit, so that each commit has just one.
        curve.add(n, row)
        await f.commit(n, metrics=row)
        if n % 10 == 0:
            f.log(f"step {n}: " + "  ".join(f"{name} {value:.3f}" for name, value in row.items()))
    figures = curve.finish(await accuracy(f))
    f.log(f"reward {figures['reward_before']:.3f} -> {figures['reward_after']:.3f}")


async def fit(f: Any, n: int) -> dict[str, float]:
    """Supervised step n."""
    return await f.roles.actor.fit(task.sft_batch(f.seed, n, sft.BATCH))


async def reinforce(f: Any, n: int) -> dict[str, float]:
    """Reinforcement step n: sample, score, compare within groups, update."""
    problems = task.problems(f.seed, n, method.PROMPTS)
    chunks = [problems[start : start + CHUNK] for start in range(0, len(problems), CHUNK)]
    indices = [[each.index for each in chunk] for chunk in chunks]
    texts = [[each.text for each in chunk] for chunk in chunks]
    sampled = await f.roles.rollout.generate(
        [{"step": n, "indices": one, "texts": two} for one, two in zip(indices, texts, strict=True)]
    )
    groups = {name: np.concatenate([one[name] for one in sampled]) for name in ("prompts", "answers")}
    scored, old, base = await asyncio.gather(
        f.roles.reward.score(
            [{"answers": one["answers"], "indices": two} for one, two in zip(sampled, indices, strict=True)]
        ),
        f.roles.actor.logprobs(groups),
        f.roles.ref.logprobs(groups),
    )
    rewards = np.concatenate(scored)
    advantage = method.advantages(rewards.reshape(method.PROMPTS, method.GROUP)).reshape(-1)
    step = n - sft.STEPS
    row = await f.roles.actor.update({**groups, "old": old, "base": base, "advantage": advantage, "step": step})
    row["reward"] = float(rewards.mean())
    if step % EVALUATE_EVERY == 1:
        row["accuracy"] = await accuracy(f)
    return row


async def accuracy(f: Any) -> float:
    """Share of the held-out problems that the committed policy answers rightly when greedy."""
    texts = [each.text for each in task.held_out()]
    width = len(texts) // EVALUATION_ITEMS
    answers = await f.roles.rollout.answer([texts[at : at + width] for at in range(0, len(texts), width)])
    return task.share_right([answer for chunk in answers for answer in chunk])
