"""Random placement by a seed: what a placement has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.jobs import Held, JobRow
from rota.cluster.core.placement import place
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.fifo import ByArrival, LimitsOnly


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number spread over all 64 bits, as it is on every machine. Source: SplitMix64 (Steele et al., OOPSLA'14)."""
    z = numbers * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class RandomFit:
    """Random placement: every bundle goes to any node that has room, all alike.

    Which one follows from the seed, the job and the bundle, so that a trial and the start after it agree.
    """

    seed: int = 0

    def place(self, state: State, txn: Txn, row: JobRow) -> tuple[Held, ...] | None:
        job = mixed(np.array([self.seed % 2**64], dtype=np.uint64)) ^ np.uint64(crc32(row.ask.id.encode()))
        bundle = count()

        def drawn(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
            of_bundle = mixed(mixed(job) ^ np.uint64(next(bundle)))
            return (mixed(of_bundle ^ nodes.astype(np.uint64)) >> np.uint64(1)).astype(np.int64)

        return place(state, txn, row.ask.shape, prefer=drawn, close=False)


def random() -> Profile:
    """First come, first served; placed at random, by the seed of the run."""
    return Profile(name="random", order=ByArrival(), division=LimitsOnly(), placer=RandomFit(), block="queue")
