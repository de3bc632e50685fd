"""Two towers and their data: one makes features of a picture of a digit, the other spells its name from them.

The data are the handwritten digits that come with scikit-learn (1,797 pictures of 8 x 8; E. Alpaydin and C. Kaynak,
"Optical Recognition of Handwritten Digits", UCI, CC BY 4.0). Everything is float64; still the order of summing up shows
after some hundred steps, so whoever compares curves sums up as the job does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from task import BATCH, LR, STEPS
from torch import Tensor, nn

PARTS, WIDTH = 4, 16
"""Features of a picture: so many vectors of so many numbers."""
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LETTERS = "." + "".join(sorted(set("".join(WORDS))))
"""Number 0 begins and ends a word."""
LENGTH = max(map(len, WORDS)) + 1
Sum = Callable[[Tensor], object]


def alone(flat: Tensor) -> None:
    """The sum over one rank."""


class Digits:
    """Pictures [N, 64] in 0..1 and their names as letters [N, LENGTH]."""

    def __init__(self) -> None:
        pictures, digits = load_digits(return_X_y=True)
        self.pictures = torch.from_numpy(pictures / 16)
        spelled = [[LETTERS.index(letter) for letter in word.ljust(LENGTH, ".")] for word in WORDS]
        self.names = torch.tensor(spelled)[torch.from_numpy(digits).long()]


class Tower:
    """A network with its optimiser; ``total`` sums a flat tensor over the ranks of its mesh, in place."""

    def __init__(self, net: nn.Module, total: Sum = alone) -> None:
        self.net: Any = net.double()
        self._total = total
        self._optimiser = torch.optim.Adam(self.net.parameters(), lr=LR)

    def gradient(self) -> Tensor:
        """What the losses since the last call have summed up, over the batch, as one flat tensor."""
        flat = torch.cat([each.grad.flatten() for each in self.net.parameters()]) / BATCH
        self._optimiser.zero_grad()
        return flat

    def update(self, step: int) -> float:
        """Step 1, 2, ... along the mean gradient of the batch, which all ranks have summed up; its norm."""
        parameters, flat = list(self.net.parameters()), self.gradient()
        self._total(flat)
        for each, gradient in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            each.grad = gradient.view_as(each)
        self._optimiser.param_groups[0]["lr"] = LR * (1 - (step - 1) / STEPS)
        self._optimiser.step()
        self._optimiser.zero_grad()
        return float(flat.norm())

    def state(self) -> dict[str, object]:
        """All that a step depends on."""
        return {"net": self.net.state_dict(), "optimiser": self._optimiser.state_dict()}

    def restore(self, kept: dict[str, dict[str, object]]) -> None:
        """Inverse of `state`."""
        self.net.load_state_dict(kept["net"])
        self._optimiser.load_state_dict(kept["optimiser"])


class Vision(nn.Sequential):
    """Pictures [B, 64] to features [B, PARTS, WIDTH]."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        out = nn.Linear(256, PARTS * WIDTH)
        super().__init__(nn.Linear(64, 256), nn.GELU(), out, nn.Unflatten(1, (PARTS, WIDTH)))


class Speller(nn.Module):
    """A recurrent network that attends to the features of a picture and writes letters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed + 1)
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.begin = nn.Linear(PARTS * WIDTH, 64)
        self.cell = nn.GRUCell(2 * WIDTH, 64)
        self.query, self.answer = nn.Linear(64, WIDTH), nn.Linear(64, len(LETTERS))

    def step(self, features: Tensor, state: Tensor, letter: Tensor) -> tuple[Tensor, Tensor]:
        """One letter [B] on: the next state [B, 64] and scores of the next letter [B, LETTERS]."""
        weights = (features @ self.query(state).unsqueeze(2)).softmax(dim=1)
        seen = (weights * features).sum(dim=1)
        state = self.cell(torch.cat([self.letters(letter), seen], dim=1), state)
        return state, self.answer(state)

    def loss(self, features: Tensor, names: Tensor) -> Tensor:
        """Cross entropy of the letters, a mean over a name, summed over the batch."""
        state, letter = self.begin(features.flatten(1)).tanh(), torch.zeros(len(names), dtype=torch.long)
        total = torch.zeros((), dtype=features.dtype)
        for at in range(LENGTH):
            state, scores = self.step(features, state, letter)
            total = total + nn.functional.cross_entropy(scores, names[:, at], reduction="sum")
            letter = names[:, at]
        return total / LENGTH

    @torch.no_grad()
    def spell(self, features: Tensor) -> Tensor:
        """The likeliest letters [B, LENGTH], one after the other."""
        state, letter = self.begin(features.flatten(1)).tanh(), torch.zeros(len(features), dtype=torch.long)
        written: list[Tensor] = []
        for _ in range(LENGTH):
            state, scores = self.step(features, state, letter)
            letter = scores.argmax(dim=1)
            written.append(letter)
        return torch.stack(written, dim=1)
