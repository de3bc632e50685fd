"""Split long sequences over ranks: ring attention and Ulysses.

Ring: keys and values travel around the ring while each rank keeps its queries; partial results are merged by their
log-sum-exp (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers"). A causal sequence is cut into
2 * cp chunks and rank i holds chunks i and 2 * cp - 1 - i, so that every rank has equal work. Ulysses: an all-to-all
turns a part of the sequence with all heads into the whole sequence with some heads (Jacobs et al. 2023).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rota.spec.errors import BadInput
from rota.train.all_to_all import all_to_all
from rota.train.mesh import PlanMesh
from rota.train.parts import Absent, Parts
from rota.train.plan.model import ParallelPlan


def columns(plan: ParallelPlan, rank: int, seq: int) -> torch.Tensor:
    """Positions of a sequence of ``seq`` tokens that cp rank ``rank`` holds, in its order.

    Raises BadInput when ``seq`` does not divide.
    """
    cp = plan.mesh.cp
    pieces = 2 * cp if plan.cp_kind == "ring" else cp
    if seq % pieces:
        raise BadInput(f"batch: {seq} tokens a sequence do not divide into {pieces} pieces (cp {cp}, {plan.cp_kind})")
    chunks = torch.arange(seq).chunk(pieces)
    return torch.cat([chunks[rank], chunks[pieces - 1 - rank]]) if plan.cp_kind == "ring" else chunks[rank]


def split_attention(piece: nn.Module, parts: Parts, plan: ParallelPlan, mesh: PlanMesh) -> None:
    """Let every attention ``core`` of this piece span the ranks of a cp group.

    Raises BadInput when a layer has no ``core``, or the embedding no ``positions`` to set.
    """
    group = mesh.group("cp")
    for index, layer in parts.layers(piece):
        cores = {
            owner: core for owner in layer.modules() if isinstance(core := getattr(owner, "core", None), nn.Module)
        }
        if not cores:
            raise BadInput(
                f"mesh.cp = {plan.mesh.cp}: layer {index} ({type(layer).__name__}) has no attention module 'core'",
                hint="put softmax(q k) v into a module 'core' that takes q, k, v as [batch, heads, seq, width]",
            )
        for owner, core in cores.items():
            owner.core = RingCore(group) if plan.cp_kind == "ring" else UlyssesCore(core, group)
    embed = getattr(piece, parts.embed)
    if not isinstance(embed, Absent) and not hasattr(embed, "positions"):
        raise BadInput(
            f"mesh.cp = {plan.mesh.cp}: {type(embed).__name__} has no attribute 'positions'",
            hint="read the places of the columns from self.positions when it is set",
        )


class UlyssesCore(nn.Module):
    """Any attention core, run on the whole sequence with 1/cp of the heads."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = core, group

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ranks = self.group.size()
        if k.shape[1] % ranks:  # fewer key heads than ranks: give each query head its own
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        out = self.inner(*(self._whole(part) for part in (q, k, v)))
        # [B, H/cp, T, D] -> rows are pieces of the sequence -> [B, H, T/cp, D]
        rows = out.unflatten(2, (ranks, -1)).movedim(2, 0)
        return all_to_all(rows, self.group).movedim(0, 1).flatten(1, 2)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """[B, H, T/cp, D] -> rows are groups of heads -> [B, H/cp, T, D]."""
        rows = part.unflatten(1, (self.group.size(), -1)).movedim(1, 0)
        return all_to_all(rows, self.group).movedim(0, 2).flatten(2, 3)


class RingCore(nn.Module):
    """Causal attention over a sequence that the ranks of ``group`` hold in chunks as ``columns`` says."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _Ring.apply(q, k, v, self.group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        queries = [part.float() for part in q.chunk(2, dim=2)]
        outs = [torch.zeros_like(part) for part in queries]
        sums = [part.new_full(part.shape[:-1], -math.inf) for part in queries]
        moving = torch.stack([k, v])
        for turn in range(group.size()):
            coming = _pass_on(moving, group) if turn + 1 < group.size() else None
            for mine, theirs, causal in _pairs(group, turn):
                keys, values = (_chunk(part, theirs, q.shape[1]) for part in moving)
                scores = _scores(queries[mine], keys, causal)
                part_sum = scores.logsumexp(-1)
                both = torch.logaddexp(sums[mine], part_sum)
                part_out = (scores - part_sum[..., None]).exp() @ values
                outs[mine] = outs[mine] * (sums[mine] - both).exp()[..., None]
                outs[mine] = outs[mine] + part_out * (part_sum - both).exp()[..., None]
                sums[mine] = both
            moving = _arrived(coming) if coming else moving
        out = torch.cat(outs, dim=2).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, torch.cat(sums, dim=2))
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """With the sum of all blocks known, each block's share of the softmax is exact: p = exp(score - sum)."""
        q, k, v, out, sums = ctx.saved_tensors
        group, heads = ctx.group, q.shape[1]
        queries, d_outs = ([part.float() for part in whole.chunk(2, dim=2)] for whole in (q, grads[0]))
        whole_sums = sums.chunk(2, dim=2)
        dots = (grads[0].float() * out.float()).sum(-1).chunk(2, dim=2)
        d_queries = [torch.zeros_like(part) for part in queries]
        moving = torch.stack([k.float(), v.float(), torch.zeros_like(k.float()), torch.zeros_like(v.float())])
        scale = 1.0 / math.sqrt(q.shape[-1])
        for turn in range(group.size()):
            for mine, theirs, causal in _pairs(group, turn):
                keys, values = (_chunk(part, theirs, heads) for part in moving[:2])
                share = (_scores(queries[mine], keys, causal) - whole_sums[mine][..., None]).exp()
                d_share = d_outs[mine] @ values.transpose(-1, -2)
                d_scores = share * (d_share - dots[mine][..., None]) * scale
                d_queries[mine] += d_scores @ keys
                _add(moving[2], theirs, d_scores.transpose(-1, -2) @ queries[mine])
                _add(moving[3], theirs, share.transpose(-1, -2) @ d_outs[mine])
            moving = _arrived(_pass_on(moving, group))  # the last turn brings the gradients home
        return torch.cat(d_queries, dim=2).to(q.dtype), moving[2].to(k.dtype), moving[3].to(v.dtype), None


def _pairs(group: dist.ProcessGroup, turn: int) -> list[tuple[int, int, bool]]:
    """(my chunk, their chunk, on the diagonal) for the blocks that causal attention needs in this turn."""
    ranks, rank = group.size(), group.rank()
    other = (rank - turn) % ranks
    held, theirs = (rank, 2 * ranks - 1 - rank), (other, 2 * ranks - 1 - other)
    return [(i, j, held[i] == theirs[j]) for i in range(2) for j in range(2) if held[i] >= theirs[j]]


def _scores(queries: torch.Tensor, keys: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def _chunk(part: torch.Tensor, index: int, heads: int) -> torch.Tensor:
    """One of the two chunks in fp32, its heads repeated for grouped queries."""
    return part.chunk(2, dim=2)[index].float().repeat_interleave(heads // part.shape[1], dim=1)


def _add(total: torch.Tensor, index: int, grad: torch.Tensor) -> None:
    """Add to one chunk in place, summing over the query heads that share a key head."""
    total.chunk(2, dim=2)[index].add_(grad.unflatten(1, (total.shape[1], -1)).sum(2))


def _pass_on(moving: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[dist.Work]]:
    """Send to the next rank of the ring, receive from the one before; the caller waits."""
    ranks, rank = group.size(), group.rank()
    received = torch.empty_like(moving)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, moving, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    return received, works


def _arrived(coming: tuple[torch.Tensor, list[dist.Work]]) -> torch.Tensor:
    for work in coming[1]:
        work.wait()
    return coming[0]
