"""A world that is not there: one rank of any plan runs its real steps, and every collective is written down.

The process group answers as if all ranks held what this one holds, so that values are wrong but shapes, counts and
bytes are those of the real world.
"""

# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

c10d: Any = _distributed_c10d
NAME = "trace"
Kind = tuple[str, str, int]
"""Operation, group name, bytes of the whole tensor."""


class Traced(dist.ProcessGroup):
    """One rank of a group of ``size``; ``seen`` is shared by all groups of a world."""

    seen: ClassVar[list[Kind]] = []

    def __init__(self, rank: int, size: int) -> None:
        c10d.ProcessGroup.__init__(self, rank, size)
        self._rank, self._size, self._name = rank, size, ""

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _note(self, operation: str, *whole: torch.Tensor) -> None:
        self.seen.append((operation, self._name, sum(one.nbytes for one in whole)))

    def allreduce(self, given: Sequence[torch.Tensor], opts: Any = None) -> Any:
        self._note("all_reduce", *given)
        return _done(list(given))

    allreduce_coalesced = allreduce

    def broadcast(self, given: Sequence[torch.Tensor], opts: Any = None) -> Any:
        self._note("broadcast", *given)
        return _done(list(given))

    def allgather(self, outputs: Any, inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        self._note("all_gather", *(one for many in outputs for one in many))
        for many, one in zip(outputs, inputs, strict=True):
            for output in many:
                output.detach().copy_(one)
        return _done(outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        self._note("all_gather", output)
        output.detach().view(self._size, -1).copy_(input.detach().clone().reshape(1, -1))
        return _done(output)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        self._note("reduce_scatter", input)
        output.detach().view(-1).copy_(input.detach().clone().reshape(self._size, -1)[self._rank])
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return [self.reduce_scatter_single(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, sent: Any = None, received: Any = None, opts: Any = None
    ) -> Any:
        self._note("all_to_all", input)
        output.detach().zero_()
        output.detach().view(-1)[: input.numel()].copy_(input.detach().reshape(-1)[: output.numel()])
        return _done(output)

    alltoall_base = all_to_all_single

    def send(self, given: Sequence[torch.Tensor], *args: Any) -> Any:
        self._note("send", *given)
        return _done(list(given))

    def recv(self, given: Sequence[torch.Tensor], *args: Any) -> Any:
        for one in given:
            one.detach().zero_()
        return _done(list(given))

    def barrier(self, opts: Any = None) -> Any:
        return _done([])


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Traced:
    return Traced(rank, size)


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[list[Kind]]:
    """The default process group of rank ``rank`` of ``size``; yields what was seen so far, in order."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    Traced.seen = []
    os.environ.pop("RANK", None)
    dist.init_process_group(NAME, store=c10d.HashStore(), rank=rank, world_size=size)
    try:
        yield Traced.seen
    finally:
        dist.destroy_process_group()


def count(seen: Sequence[Kind]) -> dict[tuple[str, str], tuple[int, int]]:
    """How often and how many bytes, by operation and group name."""
    times: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for operation, group, whole in seen:
        times[operation, group] += 1
        size[operation, group] += whole
    return {key: (times[key], size[key]) for key in times}
