"""The task: one-digit sums from reasoning-gym's `chain_sum`, its verifier, and text as token ids; loads no torch.

Every draw is a function of (seed, step): the same step asked again, after a crash or on another machine, gives the same
problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

Tokens = NDArray[np.int64]

ALPHABET = "\n 0123456789+-="
END, PAD = 0, 1
TERMS_MIN, TERMS_MAX = 2, 3
PROMPT_LEN = 2 * TERMS_MAX
"""Width of a prompt in tokens: digits and signs of the longest sum and its `=`; shorter ones are padded on the left."""
ANSWER_LEN = 4
"""Width of an answer in tokens: sign, two digits, end."""
HELD_OUT = 256
DATASET_SEED = 20_250_101
TRAIN_SIZE = 1_000_000_000
"""Problems are made from their index, so the size only bounds the index."""

_TOKEN_OF = {char: token for token, char in enumerate(ALPHABET)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One sum: its number in the data set, the text shown to the model and the expected answer."""

    index: int
    text: str
    answer: str


@lru_cache(maxsize=1)
def dataset() -> ChainSumDataset:
    """The endless data set of sums of 2 or 3 one-digit terms."""
    return ChainSumDataset(
        ChainSumConfig(
            min_terms=TERMS_MIN, max_terms=TERMS_MAX, min_digits=1, max_digits=1, seed=DATASET_SEED, size=TRAIN_SIZE
        )
    )


def problem(index: int) -> Problem:
    """The problem with this index."""
    entry: dict[str, Any] = dataset()[index]
    text = entry["metadata"]["expression"].replace(" ", "") + "="
    return Problem(index=index, text=text, answer=entry["answer"])


@lru_cache(maxsize=1)
def held_out() -> tuple[Problem, ...]:
    """The first 256 problems of the data set. Their three-term sums are kept out of training; of two-term sums only 200
    exist, so they may occur in both.
    """
    return tuple(problem(index) for index in range(HELD_OUT))


@lru_cache(maxsize=1)
def _kept_out() -> frozenset[str]:
    return frozenset(each.text for each in held_out() if len(each.text) == PROMPT_LEN)


def problems(seed: int, step: int, count: int) -> list[Problem]:
    """The `count` problems of a training step; none is a held-out three-term sum."""
    chance = np.random.default_rng([seed, step])
    drawn: list[Problem] = []
    while len(drawn) < count:
        candidate = problem(int(chance.integers(HELD_OUT, TRAIN_SIZE)))
        if candidate.text not in _kept_out():
            drawn.append(candidate)
    return drawn


def score(answer: str, index: int) -> float:
    """Reward in [0, 1] given by reasoning-gym's own verifier of problem `index`."""
    return float(dataset().score_answer(answer, dataset()[index]))


def score_groups(answers: Tokens, indices: Sequence[int]) -> NDArray[np.float64]:
    """Rewards [B] of `answers` [B, T], which hold an equal number of rows for each problem, problem by problem."""
    texts, group = decode_answers(answers), len(answers) // len(indices)
    return np.array([score(text, indices[row // group]) for row, text in enumerate(texts)])


def share_right(answers: Sequence[str]) -> float:
    """Share of the held-out problems to which these are exactly the right answers."""
    return sum(got == each.answer for got, each in zip(answers, held_out(), strict=True)) / HELD_OUT


def sft_batch(seed: int, step: int, count: int) -> dict[str, Any]:
    """Problems of a supervised step with their right answers: `prompts` [B, P], `answers` [B, T] and `step`."""
    drawn = problems(seed, step, count)
    return {
        "prompts": encode_prompts([each.text for each in drawn]),
        "answers": encode_answers([each.answer for each in drawn]),
        "step": step,
    }


def encode_prompts(texts: Sequence[str]) -> Tokens:
    """Token ids [len(texts), PROMPT_LEN], padded on the left."""
    return np.array([[_TOKEN_OF[char] for char in text.rjust(PROMPT_LEN)] for text in texts], dtype=np.int64)


def encode_answers(answers: Sequence[str]) -> Tokens:
    """Token ids [len(answers), ANSWER_LEN]: the answer, then end tokens up to the width."""
    return np.array([[_TOKEN_OF[char] for char in text.ljust(ANSWER_LEN, "\n")] for text in answers], dtype=np.int64)


def decode_answers(tokens: Tokens) -> list[str]:
    """Text of each row up to its first end token."""
    return ["".join(ALPHABET[token] for token in row).split("\n")[0] for row in tokens.tolist()]


def uniforms(seed: int, step: int, index: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The uniform numbers that decide the samples of one prompt; a function of (seed, step, problem index) alone."""
    return np.random.default_rng([seed, step, index, 1]).random(shape)
