"""The job: actor, ref, rollout and reward as workloads, and the loops that fit and then reinforce the policy.

`grpo` samples, scores and updates in turn. `grpo_async` takes scored groups from a stream, which rollout and reward
fill while the actor updates. Only the roles that hold a network load torch. Every item is a function of its number and
the weights it is sampled with, so what is run again after a death gives the same items.
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
    def generate(self, item: dict[str, Any]) -> dict[str, Any]:
        """GROUP sampled answers to each problem of the item: `prompts`, `answers` and the `indices` of the problems."""
        from sampling import sample_groups

        groups = sample_groups(self.net, self.seed, item["step"], item["indices"], item["texts"])
        return {**groups, "indices": item["indices"]}

    @op(send=Each, retry="safe", progress="2m")
    def answer(self, texts: list[str]) -> list[str]:
        """The greedy answer to each text."""
        from sampling import greedy_answers

        return greedy_answers(self.net, texts)


class Verifier(Workload):
    """reasoning-gym's own verifier; loads no torch."""

    @op(send=Each, retry="safe", progress="1m")
    def score(self, item: dict[str, Any]) -> dict[str, Any]:
        """The item with the `rewards` [B] of its answers."""
        return {**item, "rewards": task.score_groups(item["answers"], item["indices"])}


async def grpo(f: Any) -> None:
    """120 supervised and 150 reinforcement steps, a commit each; curve and figures go to the output directory."""
    curve = Curve(f.output_dir, f.committed)
    for n in range(f.committed + 1, sft.STEPS + method.STEPS + 1):
        row = await (fit(f, n) if n <= sft.STEPS else reinforce(f, n))
        await commit(f, curve, n, row)
    await finish(f, curve)


async def grpo_async(f: Any) -> None:
    """The same steps; while the actor updates, the rollouts are at work on the problems of steps to come."""
    curve = Curve(f.output_dir, f.committed)
    for n in range(f.committed + 1, sft.STEPS + 1):
        await commit(f, curve, n, await fit(f, n))
    async for batch in f.streams.groups.batches(method.PROMPTS // CHUNK):
        n = f.committed + 1
        row = await learn(f, n, batch)
        await commit(f, curve, n, {**row, "age": max(batch.ages)})
    await finish(f, curve)


async def commit(f: Any, curve: Curve, n: int, row: dict[str, float]) -> None:
    """Write the row of step n, then make the step durable: the next entry drops rows beyond the last commit."""
    curve.add(n, row)
    await f.commit(n, metrics=row)
    if n % 10 == 0:
        f.log(f"step {n}: " + "  ".join(f"{name} {value:.3f}" for name, value in row.items()))


async def finish(f: Any, curve: Curve) -> None:
    """Figures of the whole run."""
    figures = curve.finish(await accuracy(f))
    f.log(f"reward {figures['reward_before']:.3f} -> {figures['reward_after']:.3f}")


async def fit(f: Any, n: int) -> dict[str, float]:
    """Supervised step n."""
    return await f.roles.actor.fit(task.sft_batch(f.seed, n, sft.BATCH))


class Prompts:
    """The data set of the stream `prompts`: item i is chunk `i % (PROMPTS / CHUNK)` of a reinforcement step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return method.STEPS * method.PROMPTS // CHUNK

    def __getitem__(self, index: int) -> dict[str, Any]:
        step, chunk = divmod(index, method.PROMPTS // CHUNK)
        return chunks(self.seed, sft.STEPS + 1 + step)[chunk]


def chunks(seed: int, n: int) -> list[dict[str, Any]]:
    """The problems of step n as items of work."""
    problems = task.problems(seed, n, method.PROMPTS)
    parts = [problems[start : start + CHUNK] for start in range(0, len(problems), CHUNK)]
    return [
        {"step": n, "indices": [each.index for each in part], "texts": [each.text for each in part]} for part in parts
    ]


async def reinforce(f: Any, n: int) -> dict[str, float]:
    """Reinforcement step n: sample, score, learn."""
    sampled = await f.roles.rollout.generate(chunks(f.seed, n))
    return await learn(f, n, await f.roles.reward.score(sampled))


async def learn(f: Any, n: int, scored: list[dict[str, Any]]) -> dict[str, float]:
    """The update of step n: compare within groups, with the policy as it is and as it began."""
    groups = {name: np.concatenate([one[name] for one in scored]) for name in ("prompts", "answers")}
    rewards = np.concatenate([one["rewards"] for one in scored])
    old, base = await asyncio.gather(f.roles.actor.logprobs(groups), f.roles.ref.logprobs(groups))
    advantage = method.advantages(rewards.reshape(-1, method.GROUP)).reshape(-1)
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
