"""Rounds of exchange between the ranks of one machine through one shared tensor of the plane.

In round n every rank writes its slot, stores n in its sequence word, waits until all words are at least n and reads the
other slots. A rank writes round n + 1 before it waits for round n, so copies overlap. Slots have ``DEPTH`` buffers: a
peer whose word is at least n has read round n - 2, and a writer of round n + 1 knows that all words are at least n - 1,
so all have read n - 3 and the buffer (n + 1) mod 4 is free without a further word.

Words are aligned 64-bit stores. Their order behind the stores of the slot holds on x86-64 (total store order) and is
proved by the tests; on other processors ``make_group`` keeps to Gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from rota.runtime import process
from rota.runtime.clock import Clock, blocking_sleep
from rota.spec.errors import RotaError

CHUNK_BYTES: Final = 512 * 1024
"""Bytes of one slot: four buffers of two ranks stay in the last-level cache."""
DEPTH: Final = 4
LINE: Final = 64
_WORDS: Final = LINE // 8
_SEQ, _TAG, _PID, _STARTED = 0, 1, 5, 6
"""Words of a rank: sequence, tag of each of the four buffers, process id, start time in milliseconds since boot."""
_TAG_NAMES: Final = 48
LOOK_S: Final = 0.05
SPINS: Final = 2_000
NAP_S: Final = 0.0001


class PeerLost(RotaError):
    """A rank of the group died or did not come in time; fields: rank, operation, sequence. The group is of no use."""

    code = "PEER_LOST"


class CollectiveMismatch(RotaError):
    """Two ranks are in different collectives; fields: rank, operation, peer, peer_operation."""

    code = "COLLECTIVE_MISMATCH"


class Arena:
    """One rank's view of the shared memory of a group of ``size`` ranks. Not thread-safe."""

    def __init__(self, memory: torch.Tensor, rank: int, size: int, *, timeout_s: float, clock: Clock) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._clock, self._memory = clock, memory
        words: Any = memory[: size * LINE].numpy()
        self._words = memoryview(words).cast("B").cast("Q")
        data = memory[size * LINE :].view(size, DEPTH, CHUNK_BYTES)
        self._slots = [[data[peer, depth] for peer in range(size)] for depth in range(DEPTH)]
        self._peers = [peer for peer in range(size) if peer != rank]
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._next, self._operation = 1, ""
        self._lost: PeerLost | None = None
        self._ids: dict[int, process.ProcessId] = {}
        own = process.own_id()
        self._words[rank * _WORDS + _STARTED] = round(own.start_time * 1000)
        self._words[rank * _WORDS + _PID] = own.pid

    @staticmethod
    def bytes_for(size: int) -> int:
        """Bytes of the shared tensor of a group."""
        return size * (LINE + DEPTH * CHUNK_BYTES)

    def slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """The slots as flat tensors of ``dtype``: [buffer][rank]."""
        found = self._typed.get(dtype)
        if found is None:
            found = [[slot.view(dtype) for slot in buffers] for buffers in self._slots]
            self._typed[dtype] = found
        return found

    def run(
        self,
        operation: str,
        like: torch.Tensor,
        total: int,
        rounds: int,
        put: Callable[[int, torch.Tensor], object] | None,
        take: Callable[[int, list[torch.Tensor]], object] | None,
    ) -> None:
        """``rounds`` rounds of a collective: ``put(i, slot)`` writes round i, ``take(i, slots)`` reads it.

        ``total`` is the number of elements that all ranks must agree on, with the dtype of ``like``; slots come as
        flat tensors of that dtype. Raises PeerLost, CollectiveMismatch.
        """
        if self._lost is not None:
            raise self._lost
        typed = self.slots(like.dtype)
        tag = _tag_of(operation, like.dtype, total)
        first, self._operation = self._next, operation
        self._next = first + rounds
        words, base = self._words, self.rank * _WORDS
        for i in range(rounds + 1):
            if i < rounds:
                buffer = (first + i) % DEPTH
                if put is not None:
                    put(i, typed[buffer][self.rank])
                words[base + _TAG + buffer] = tag
                words[base + _SEQ] = first + i
            if i > 0:
                self._wait(first + i - 1, tag)
                if take is not None:
                    take(i - 1, typed[(first + i - 1) % DEPTH])

    def _wait(self, sequence: int, tag: int) -> None:
        words = self._words
        for peer in self._peers:
            at = peer * _WORDS
            if words[at + _SEQ] < sequence:
                self._wait_for(peer, sequence)
            if words[at + _TAG + sequence % DEPTH] != tag:
                raise self._mismatch(peer, tag, words[at + _TAG + sequence % DEPTH])

    def _wait_for(self, peer: int, sequence: int) -> None:
        """Spin, then yield the processor, then nap; look whether the peer lives every ``LOOK_S``."""
        words, at = self._words, peer * _WORDS
        for _ in range(SPINS):
            if words[at] >= sequence:
                return
            os.sched_yield()
        start_s = look_s = self._clock.monotonic_s()
        while words[at] < sequence:
            blocking_sleep(NAP_S)
            now_s = self._clock.monotonic_s()
            if now_s - look_s > LOOK_S:
                look_s = now_s
                dead = next((one for one in self._peers if not self._lives(one)), None)
                if dead is not None and words[at] < sequence:
                    raise self._lose(dead, sequence, "died")
            if now_s - start_s > self.timeout_s:
                raise self._lose(peer, sequence, f"did not come within {self.timeout_s:g} s")

    def _lives(self, peer: int) -> bool:
        known = self._ids.get(peer)
        if known is None:
            at = peer * _WORDS
            if not self._words[at + _PID]:
                return True  # not yet here: the time-out decides
            started = self._words[at + _STARTED] / 1000
            known = self._ids[peer] = process.ProcessId(pid=self._words[at + _PID], start_time=started)
        return process.is_alive(known)

    def _lose(self, peer: int, sequence: int, how: str) -> PeerLost:
        text = f"rank {peer} {how} in {self._operation}, round {sequence} of the group"
        hint = "form a new group of the ranks that live; this one is of no use any more"
        self._lost = PeerLost(text, hint=hint, rank=peer, operation=self._operation, sequence=sequence)
        return self._lost

    def _mismatch(self, peer: int, own_tag: int, peer_tag: int) -> CollectiveMismatch:
        mine, theirs = _tag_text(own_tag), _tag_text(peer_tag)
        return CollectiveMismatch(
            f"rank {self.rank} is in {mine}, rank {peer} in {theirs}: all ranks call the same collectives in one order",
            rank=self.rank, operation=mine, peer=peer, peer_operation=theirs,
        )  # fmt: skip


OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
_DTYPES: Final = tuple(
    torch.empty(0, dtype=getattr(torch, name)).dtype
    for name in ("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64")
)


def carries(tensor: torch.Tensor) -> bool:
    """True for a dense CPU tensor of a dtype that the arena exchanges."""
    return tensor.dtype in _DTYPES and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _tag_of(operation: str, dtype: torch.dtype, total: int) -> int:
    return (OPERATIONS.index(operation) + 1) << 56 | _DTYPES.index(dtype) << _TAG_NAMES | total


def _tag_text(tag: int) -> str:
    operation, dtype, total = tag >> 56, tag >> _TAG_NAMES & 0xFF, tag & ((1 << _TAG_NAMES) - 1)
    return f"{OPERATIONS[operation - 1]} of {total} {str(_DTYPES[dtype]).removeprefix('torch.')}"


def pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` of pieces of at most ``most`` elements."""
    return ((at, min(at + most, total)) for at in range(0, total, most))


def reduce_into(out: torch.Tensor, parts: list[Any], op: str) -> None:
    """Combine ``parts`` in the order given, so that all ranks and all runs get the same bits."""
    combine = _COMBINE[op]
    combine(parts[0], parts[1], out=out) if len(parts) > 1 else out.copy_(parts[0])
    for part in parts[2:]:
        combine(out, part, out=out)


_COMBINE: Final[dict[str, Callable[..., Any]]] = {
    "sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul,
}  # fmt: skip
