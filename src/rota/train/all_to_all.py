"""All-to-all of rows between ranks that autograd goes through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    count = rows.shape[0] if received is None else sum(received)
    out = rows.new_empty((count, *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def all_to_all(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """Send ``sent[i]`` rows to rank i and receive ``received[i]`` from it, in rank order; equal parts when None.

    The gradient takes the way back.
    """
    return _AllToAll.apply(rows, sent, received, group)
