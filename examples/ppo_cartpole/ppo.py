"""Proximal policy optimisation: settings, advantages, and the two networks that learn.

Sources: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7; Schulman et al.
2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438), equation 16.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

STEPS = int(os.environ.get("PPO_STEPS", "100"))
ENVS, CHUNKS, LENGTH = 16, 4, 64
"""Games at a time, items of work that they make, moves of each game a step."""
EPOCHS, MINIBATCH, LR = 8, 256, 2e-3
"""Passes over a batch, rows of a gradient step; the rate of step 1 decays to 0."""
GAMMA, LAMBDA, CLIP = 0.98, 0.9, 0.2
Batch = dict[str, NDArray[Any]]


def advantages(batch: Batch, values_TN: NDArray[Any], last_N: NDArray[Any]) -> Batch:
    """Advantages and returns [T * N] of T moves of N games; ``values_TN`` is the critic's view of the states.

    ``last_N`` values the states behind the last move. A game that fell has no value beyond; one that was cut off at
    500 moves counts as fallen too, which costs a little at the very end of perfect games.
    """
    rewards_TN, over_TN = batch["rewards"], batch["over"]
    found, running, after = np.zeros_like(values_TN), np.zeros_like(last_N), last_N
    for t in reversed(range(len(rewards_TN))):
        alive = 1 - over_TN[t]
        delta = rewards_TN[t] + GAMMA * after * alive - values_TN[t]
        running = delta + GAMMA * LAMBDA * alive * running
        found[t], after = running, values_TN[t]
    return {"advantages": found.reshape(-1), "returns": (found + values_TN).reshape(-1)}


def flat(batch: Batch) -> Batch:
    """What the actor learns from, a row a move."""
    return {name: batch[name].reshape(-1, *batch[name].shape[2:]) for name in ("states", "moves", "log_p")}


class Learner:
    """A perceptron of two hidden layers with its optimiser, as actor (2 outputs) or critic (1)."""

    def __init__(self, seed: int, outputs: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(seed + outputs)
        last = nn.Linear(64, outputs)
        torch.nn.init.uniform_(last.weight, -0.01, 0.01)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)
        self._optimiser = torch.optim.Adam(self.net.parameters(), lr=LR, eps=1e-5)

    def values(self, states: NDArray[Any]) -> NDArray[Any]:
        """What a critic thinks of states [..., 4]: [...]."""
        import torch

        with torch.no_grad():
            return self.net(torch.from_numpy(states)).squeeze(-1).numpy()

    def learn(self, batch: Batch, seed: int, step: int) -> dict[str, float]:
        """EPOCHS passes over a batch in minibatches; the last loss. The order is a function of seed and step."""
        import torch

        rows = {name: torch.from_numpy(values) for name, values in batch.items()}
        size = len(next(iter(rows.values())))
        chance = np.random.default_rng((seed, step))
        self._optimiser.param_groups[0]["lr"] = LR * (1 - (step - 1) / STEPS)
        loss = torch.zeros(())
        for _ in range(EPOCHS):
            for part in np.array_split(chance.permutation(size), size // MINIBATCH):
                taken = {name: values[part] for name, values in rows.items()}
                loss = self._surrogate(taken) if "advantages" in taken else self._error(taken)
                self._optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                self._optimiser.step()
        return {"loss": float(loss.detach())}

    def _surrogate(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        gain = rows["advantages"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        log_p = self.net(rows["states"]).log_softmax(dim=-1).gather(1, rows["moves"][:, None]).squeeze(1)
        ratio = (log_p - rows["log_p"]).exp()
        return -(ratio * gain).minimum(ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()

    def _error(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.net(rows["states"]).squeeze(-1) - rows["returns"]).square().mean()

    def state(self) -> dict[str, Any]:
        """All that a step depends on."""
        return {"net": self.net.state_dict(), "optimiser": self._optimiser.state_dict()}

    def restore(self, kept: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self.net.load_state_dict(kept["net"])
        self._optimiser.load_state_dict(kept["optimiser"])
