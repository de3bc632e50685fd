"""Which worker trains which samples, decided: shards by lease, offsets that count once, the order of an epoch.

A data set of ``samples`` is cut into shards of ``shard_size``. A worker leases a shard, advances its offset as samples
are trained, and takes the next one: fast workers take more. When a worker dies (a newer epoch of it comes) or its lease
runs out, its shard is taken up from the last offset. An offset that was counted is never given out again.

::

    todo --lease--> leased(worker, epoch, offset, deadline) --advance to the end--> done
     ^                 |
     +---- died, ran out, rolled back

All of an epoch is done before the next begins, so that every sample counts once in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What is dealt out: ``samples`` in shards of ``shard_size``, ``epochs`` times, in an order that ``seed`` gives.

    A lease ends ``lease_s`` seconds after it was last advanced.
    """

    samples: int
    shard_size: int
    epochs: int = 1
    seed: int = 0
    lease_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Positions ``[offset, end)`` of the order of data epoch ``epoch``; ``number`` is never used twice."""

    number: int
    epoch: int
    begin: int
    end: int
    offset: int
    worker: int
    worker_epoch: int
    deadline_s: float


@dataclass(slots=True, kw_only=True)
class ShardTable:
    """The shards of one data set. Methods that return None or False changed nothing; all times are given."""

    spec: DataSpec
    epoch: int = 0
    fresh: int = 0
    """Positions from here on were never leased in this epoch."""
    returned: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Rests ``(offset, end)`` of shards that came back."""
    leases: dict[int, Lease] = field(default_factory=dict[int, Lease])
    worker_epochs: dict[int, int] = field(default_factory=dict[int, int])
    counted: int = 0
    """Samples of this epoch that were counted."""
    next_number: int = 1

    def lease(self, worker: int, worker_epoch: int, now_s: float) -> Lease | Literal["WAIT", "END", "FENCED"]:
        """The next shard for a worker; WAIT while others hold the last ones, END after the last epoch."""
        if not self.join(worker, worker_epoch):
            return "FENCED"
        self.expire(now_s)
        if self.counted == self.spec.samples and self.epoch + 1 < self.spec.epochs:
            self.epoch, self.fresh, self.counted = self.epoch + 1, 0, 0
        if self.returned:
            begin, end = self.returned.pop(0)
        elif self.fresh < self.spec.samples:
            begin, end = self.fresh, min(self.fresh + self.spec.shard_size, self.spec.samples)
            self.fresh = end
        else:
            return "END" if self.counted == self.spec.samples else "WAIT"
        lease = Lease(
            number=self.next_number, epoch=self.epoch, begin=begin, end=end, offset=begin, worker=worker,
            worker_epoch=worker_epoch, deadline_s=now_s + self.spec.lease_s,
        )  # fmt: skip
        self.next_number += 1
        self.leases[lease.number] = lease
        return lease

    def advance(self, number: int, offset: int, now_s: float) -> Lease | None:
        """Count the samples up to ``offset``; the lease that goes on (or is done), None when it is no longer held."""
        lease = self.leases.get(number)
        if lease is None or not lease.offset <= offset <= lease.end:
            return None
        self.counted += offset - lease.offset
        moved = Lease(
            number=number, epoch=lease.epoch, begin=lease.begin, end=lease.end, offset=offset, worker=lease.worker,
            worker_epoch=lease.worker_epoch, deadline_s=now_s + self.spec.lease_s,
        )  # fmt: skip
        if offset == lease.end:
            del self.leases[number]
        else:
            self.leases[number] = moved
        return moved

    def join(self, worker: int, worker_epoch: int) -> bool:
        """A worker came under an epoch: what it held under older ones comes back. False for an old epoch."""
        known = self.worker_epochs.get(worker, 0)
        if worker_epoch < known:
            return False
        self.worker_epochs[worker] = worker_epoch
        if worker_epoch > known:
            self._give_back([one for one in self.leases.values() if one.worker == worker])
        return True

    def expire(self, now_s: float) -> None:
        """Take back the leases that ran out."""
        self._give_back([one for one in self.leases.values() if one.deadline_s < now_s])

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            del self.leases[lease.number]
            self.returned.append((lease.offset, lease.end))

    def snapshot(self) -> dict[str, Any]:
        """The cursor, for a checkpoint: what is counted stays counted, what is leased will be given out again."""
        rests = sorted([*self.returned, *((one.offset, one.end) for one in self.leases.values())])
        return {
            "epoch": self.epoch, "fresh": self.fresh, "counted": self.counted, "next_number": self.next_number,
            "returned": [list(one) for one in rests],
            "worker_epochs": {str(worker): epoch for worker, epoch in self.worker_epochs.items()},
        }  # fmt: skip

    def restore(self, kept: dict[str, Any]) -> None:
        """Roll back to a snapshot: every lease ends. Numbers and worker epochs never go back: old leases stay dead."""
        self.epoch, self.fresh, self.counted = kept["epoch"], kept["fresh"], kept["counted"]
        self.next_number = max(self.next_number, kept["next_number"])
        self.returned = [(begin, end) for begin, end in kept["returned"]]
        self.leases.clear()
        for worker, epoch in kept["worker_epochs"].items():
            self.worker_epochs[int(worker)] = max(self.worker_epochs.get(int(worker), 0), epoch)


def sample_at(position: int, samples: int, seed: int, epoch: int) -> int:
    """The sample at a position of the order of an epoch: a permutation of ``range(samples)`` in constant memory.

    Four rounds of a Feistel network over the next even power of two, walked until it falls inside (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3).
    """
    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    mask, key = (1 << half) - 1, mix(seed ^ mix(epoch + 1))
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            left, right = right, left ^ (mix(right ^ key ^ (turn << 60)) & mask)
        position = left << half | right
        if position < samples:
            return position


def mix(value: int) -> int:
    """splitmix64: 64 bits to 64 well mixed bits; the seed of a sample is ``mix(seed ^ mix(epoch ^ mix(index)))``."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
