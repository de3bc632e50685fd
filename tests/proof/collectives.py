"""Ring and tree all-reduce on any process group: the algorithms whose cost ``plan/hardware.py`` predicts.

They report what each rank sent, so that the cost formulas can be compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one rank sent: messages, one after the other, and their bytes."""

    messages: int
    bytes: int


def ring_all_reduce(flat: torch.Tensor, group: Any = None) -> Sent:
    """Sum a flat tensor [N] in place: K - 1 steps of reduce-scatter, K - 1 of all-gather, a K-th of N to the next rank.

    Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), section 3.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    padded = pad(flat, (0, -flat.numel() % size))
    parts, sent = padded.view(size, -1), 0
    for step in range(2 * (size - 1)):
        gathering = step >= size - 1
        out = (rank + 1 - (step - size + 1)) % size if gathering else (rank - step) % size
        came = torch.empty_like(parts[0])
        _swap(parts[out], (rank + 1) % size, came, (rank - 1) % size, group)
        into = parts[(out - 1) % size]
        into.copy_(came) if gathering else into.add_(came)
        sent += came.nbytes
    flat.copy_(padded[: flat.numel()])
    return Sent(messages=2 * (size - 1), bytes=sent)


def tree_all_reduce(flat: torch.Tensor, group: Any = None) -> Sent:
    """Sum a flat tensor [N] in place: up a binomial tree to rank 0 and down again, log2(K) steps each way."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    messages, came, step = 0, torch.empty_like(flat), 1
    while step < size and not rank & (step - 1):
        if rank & step:
            dist.send(flat, group_dst=rank - step, group=group)
            messages += 1
        elif rank + step < size:
            dist.recv(came, group_src=rank + step, group=group)
            flat.add_(came)
        step <<= 1
    step = 1 << max(0, (size - 1).bit_length() - 1)
    while step:
        if not rank & (2 * step - 1) and rank + step < size:
            dist.send(flat, group_dst=rank + step, group=group)
            messages += 1
        elif rank & (2 * step - 1) == step:
            dist.recv(flat, group_src=rank - step, group=group)
        step >>= 1
    return Sent(messages=messages, bytes=messages * flat.nbytes)


def _swap(out: torch.Tensor, to: int, came: torch.Tensor, source: int, group: Any) -> None:
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, out, group=group, group_peer=to),
        dist.P2POp(dist.irecv, came, group=group, group_peer=source),
    ])  # fmt: skip
    for work in works:
        work.wait()
