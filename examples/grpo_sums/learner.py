"""The policy under training: supervised and reinforcement updates over any number of ranks, and its whole state.

Used by the role `actor` of the job and by the one-process reference alike; they differ only in `reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpo
import sft
import torch
from model import GPT, answer_logprobs, answer_mask
from torch import Tensor

Reduce = Callable[[Tensor], object]
"""Adds a flat tensor over all ranks, in place."""


def alone(flat: Tensor) -> None:
    """The reduction of a single process."""


def _tensor(value: Any) -> Tensor:
    """A tensor of its own: arrays that came by reference are shared and read-only."""
    return torch.tensor(value) if not isinstance(value, Tensor) else value


class Learner:
    """A network with its optimiser. All ranks hold equal weights because they apply equal gradients."""

    def __init__(self, seed: int, reduce: Reduce = alone) -> None:
        self.net = GPT(seed)
        self._reduce = reduce
        self._begin("sft", sft.BETAS)

    def _begin(self, phase: str, betas: tuple[float, float]) -> None:
        self._phase = phase
        # A supervised policy is calibrated as it is; only rewards say that it should be sharper.
        self.net.sharpness.requires_grad_(phase == "grpo")
        self._trained = [each for each in self.net.parameters() if each.requires_grad]
        self._optimiser = torch.optim.Adam(self._trained, betas=betas)

    # -- steps --------------------------------------------------------------------------------------------------------

    def fit(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """One supervised step on `prompts` [B, P] and right `answers` [B, T]; `step` counts from 1."""
        prompts, answers = _tensor(batch["prompts"]), _tensor(batch["answers"])
        loss = sft.sft_loss(answer_logprobs(self.net, prompts, answers), answer_mask(answers))
        (mean,) = self._apply(loss, sft.learning_rate(batch["step"]), len(prompts))
        return {"loss": mean}

    def update(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """`grpo.UPDATES` steps on sampled `answers` with `advantage` [B] and the log-probabilities `old` and `base`
        [B, T]; `step` counts from 1. The first one begins with fresh averages of the optimiser.
        """
        if self._phase != "grpo":
            self._begin("grpo", grpo.BETAS)
        prompts, answers = _tensor(batch["prompts"]), _tensor(batch["answers"])
        old, base = _tensor(batch["old"]), _tensor(batch["base"])
        advantage, mask = _tensor(batch["advantage"]), answer_mask(answers)
        shown: dict[str, float] = {}
        for _ in range(grpo.UPDATES):
            loss = grpo.policy_loss(answer_logprobs(self.net, prompts, answers), old, base, advantage, mask)
            rate = grpo.learning_rate(batch["step"])
            mean, kl, clipped = self._apply(loss.total, rate, len(prompts), loss.kl, loss.clipped)
            shown = {"loss": mean, "kl": kl, "clipped": clipped}
        return shown

    def logprobs(self, batch: Mapping[str, Any]) -> Tensor:
        """Log-probability [B, T] of each token of `answers` after `prompts`."""
        with torch.no_grad():
            return answer_logprobs(self.net, _tensor(batch["prompts"]), _tensor(batch["answers"]))

    def _apply(self, loss: Tensor, rate: float, rows: int, *shown: Tensor) -> list[float]:
        """One optimiser step with the gradient of the mean over the rows of all ranks; the means of what is shown.

        Gradients, sums and the number of rows go in one reduction, so shards of unequal length weigh what they hold.
        """
        self._optimiser.zero_grad()
        loss.backward()
        gradients = [each.grad for each in self._trained if each.grad is not None]
        sums = torch.stack([loss.detach(), *shown, torch.tensor(float(rows))])
        flat = torch.cat([sums, *(each.flatten() for each in gradients)])
        self._reduce(flat)
        flat /= flat[len(sums) - 1].clone()
        offset = len(sums)
        for each in gradients:
            each.copy_(flat[offset : offset + each.numel()].view_as(each))
            offset += each.numel()
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        return flat[: len(sums) - 1].tolist()

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Weights, phase and averages of the optimiser: everything a step depends on beside its batch."""
        averages = self._optimiser.state_dict()["state"]
        return {
            "net": dict(self.net.state_dict()),
            "phase": self._phase,
            "adam": {str(index): dict(each) for index, each in averages.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; the tensors are copied."""
        self.net.load_state_dict(state["net"])
        self._begin(state["phase"], sft.BETAS if state["phase"] == "sft" else grpo.BETAS)
        whole = self._optimiser.state_dict()
        whole["state"] = {
            int(index): {name: torch.as_tensor(value).clone() for name, value in each.items()}
            for index, each in state["adam"].items()
        }
        self._optimiser.load_state_dict(whole)
