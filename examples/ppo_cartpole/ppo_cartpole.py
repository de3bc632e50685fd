"""The job: players of many games, an actor and a critic that learn from them, and the loop that takes the steps.

The loop holds the games between two steps, five numbers each, as a part of the commit (`f.kept`). So an item of work is
a function of what it names and of the committed weights: a player that dies costs its item, nothing else, and the run
under kills is the run without, bit for bit. Only actor and critic load torch.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import games
import numpy as np
import ppo

from rota import Each, Workload, op

EVALUATED = 20
"""Greedy games at the end."""


class Learner(Workload):
    """What actor and critic share: a network, its state, a step."""

    outputs = 0

    def setup(self, ctx: Any) -> None:
        import torch

        torch.set_num_threads(1)
        self.seed, self.learner = ctx.seed, ppo.Learner(ctx.seed, self.outputs)
        if ctx.restored is not None:
            self.learner.restore(ctx.restored)

    @op(retry="commit")
    def learn(self, batch: ppo.Batch, step: int) -> dict[str, float]:
        """Learn from the batch of a step."""
        return self.learner.learn(batch, self.seed, step)

    @op.state
    def state(self) -> dict[str, Any]:
        """All that a step depends on."""
        return self.learner.state()


class Actor(Learner):
    """The policy; players follow its weights."""

    outputs = 2

    @op.publish
    def weights(self) -> dict[str, Any]:
        """What players need."""
        return dict(self.learner.net.state_dict())


class Critic(Learner):
    """What a state is worth."""

    outputs = 1

    @op
    def judge(self, batch: ppo.Batch) -> ppo.Batch:
        """How much better than expected each move was, and what each state was worth."""
        return ppo.advantages(batch, self.learner.values(batch["states"]), self.learner.values(batch["last"]))


class Player(Workload):
    """Plays games with the newest committed policy."""

    def setup(self, ctx: Any) -> None:
        self.policy = games.Policy()

    @op.weights
    def load(self, version: int, tensors: dict[str, Any]) -> None:
        """Take over a committed version."""
        self.policy.load(tensors)

    @op(send=Each)
    def play(self, item: dict[str, Any]) -> dict[str, Any]:
        """LENGTH moves of each game of the item."""
        return games.play(self.policy, item["games"], item["seed"])

    @op(send=Each)
    def greedy(self, number: int) -> int:
        """How long a game lasts when the likelier move is always made."""
        return games.greedy_length(self.policy, number)


def split(seed: int, n: int, held: list[games.Game]) -> list[dict[str, Any]]:
    """The games of step n as items of work."""
    size = len(held) // ppo.CHUNKS
    return [{"games": held[at : at + size], "seed": (seed, n, at)} for at in range(0, len(held), size)]


def joined(played: list[dict[str, Any]]) -> tuple[ppo.Batch, list[games.Game]]:
    """One batch of the items of a step, and the games to go on with."""
    names = ("states", "moves", "log_p", "rewards", "over")
    batch = {name: np.concatenate([one[name] for one in played], axis=1) for name in names}
    batch["last"] = np.concatenate([one["last"] for one in played])
    return batch, [game for one in played for game in one["games"]]


def row_of(played: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of a step: the mean length of the games that ended in it."""
    lengths = [length for one in played for length in one["lengths"]]
    return {"games": len(lengths), "length": float(np.mean(lengths)) if lengths else 0.0}


async def fit(f: Any) -> None:
    """STEPS steps, a commit each; the weights that play are those of the commit before. `result.json` at the end."""
    actor, critic, player = f.roles.actor, f.roles.critic, f.roles.player
    if f.committed == 0:
        f.kept["games"] = games.first_games(f.seed)
        await f.commit()  # players need a first version
    for n in range(f.committed, ppo.STEPS + 1):
        played = await player.play(split(f.seed, n, f.kept["games"]))
        batch, held = joined(played)
        judged, rows = await critic.judge(batch), ppo.flat(batch)
        learned = [
            actor.learn({**rows, "advantages": judged["advantages"]}, n),
            critic.learn({"states": rows["states"], "returns": judged["returns"]}, n),
        ]
        await asyncio.gather(*learned)
        f.kept["games"] = held
        await f.commit(row_of(played))
    lengths = await player.greedy(list(range(EVALUATED)))
    (f.output_dir / "result.json").write_text(json.dumps({"greedy": float(np.mean(lengths))}) + "\n")
