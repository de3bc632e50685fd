"""Skip-gram word vectors with negative sampling on a short story: data, gradients and the held-out measure, in numpy.

Source: Mikolov et al. 2013, "Distributed Representations of Words and Phrases" (arXiv 1310.4546), equation 4.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from reasoning_gym.data import read_data_file

WINDOW, NEGATIVES, BATCH = 3, 5, 256
HELD_OUT_EVERY = 10
"""Each tenth pair is never trained on."""
Array = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Pairs (word, word near it) [N, 2], and how often negatives draw each word [V]."""

    words: tuple[str, ...]
    train: Array
    held_out: Array
    noise: Array


@cache
def corpus() -> Corpus:
    """ "In the Year 2889" as reasoning-gym ships it: 2,078 distinct words, 52,548 pairs."""
    text = re.findall(r"[a-z]+", read_data_file("in_the_year_2889.txt").lower())
    counts = Counter(text)
    words = tuple(sorted(counts))
    index = {word: at for at, word in enumerate(words)}
    ids = np.array([index[word] for word in text])
    near = [np.stack([ids[:-gap], ids[gap:]], 1) for gap in range(1, WINDOW + 1)]
    pairs = np.concatenate([*near, *(pair[:, ::-1] for pair in near)])
    held = np.arange(len(pairs)) % HELD_OUT_EVERY == 0
    noise = np.array([counts[word] for word in words]) ** 0.75
    return Corpus(words=words, train=pairs[~held], held_out=pairs[held], noise=noise / noise.sum())


def batch(samples: list[int], epoch: int) -> tuple[Array, Array]:
    """Words [B] and candidates [B, 1 + NEGATIVES] of pairs, the true neighbour first; a function of its arguments."""
    rng, data = np.random.default_rng([epoch, samples[0]]), corpus()
    pairs = data.train[samples]
    negatives = rng.choice(len(data.words), (len(pairs), NEGATIVES), p=data.noise)
    return pairs[:, 0], np.concatenate([pairs[:, 1:], negatives], 1)


def gradients(word_BD: Array, candidates_BCD: Array) -> tuple[float, Array, Array]:
    """Mean loss of a batch and the gradients of its SUM: rows that a batch names twice learn twice."""
    score = np.einsum("bd,bcd->bc", word_BD, candidates_BCD)
    score[:, 0] *= -1
    loss = np.logaddexp(0, score).sum(1).mean()
    slope = 1 / (1 + np.exp(-score))
    slope[:, 0] *= -1
    return float(loss), np.einsum("bc,bcd->bd", slope, candidates_BCD), slope[:, :, None] * word_BD[:, None, :]


def ranked_right(words_VD: Array, near_VD: Array) -> float:
    """Share of held-out pairs whose neighbour beats a random word: 0.5 is chance, 0.615 is word frequency."""
    data, rng = corpus(), np.random.default_rng(0)
    word, right = data.held_out.T
    wrong = rng.choice(len(data.words), len(word), p=data.noise)
    scores = [np.einsum("nd,nd->n", words_VD[word], near_VD[other]) for other in (right, wrong)]
    return float((scores[0] > scores[1]).mean() + 0.5 * (scores[0] == scores[1]).mean())
