"""Expert parallelism: experts divided over ranks, and the exchange that sends tokens to their experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from rota.spec.errors import BadInput
from rota.train.parallel.mesh import Context, PlanMesh, all_to_all
from rota.train.parallel.model_parts import Parts


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


class ExpertWeights(nn.Module):
    """The two matrices of each of ``experts`` MLPs, stacked: a rank of an expert group holds some of them."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, inner))
        self.up_bias = nn.Parameter(torch.empty(experts, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down_bias = nn.Parameter(torch.empty(experts, hidden))
        self.group: dist.ProcessGroup | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: uniform within 1/sqrt(inputs), as torch's Linear."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """``rows`` sorted by expert, ``counts`` of each; one output row for each row."""
        up, up_bias, down, down_bias = (
            self._local(weight) for weight in (self.up, self.up_bias, self.down, self.down_bias)
        )
        outs = [
            F.gelu(part @ up[index] + up_bias[index]) @ down[index] + down_bias[index]
            for index, part in enumerate(rows.split(counts))
        ]
        return torch.cat(outs)

    def _local(self, weight: torch.Tensor) -> torch.Tensor:
        """The experts of this rank. Their gradient already sums over the group, whose ranks sent the tokens; the data
        axes left take a mean over fewer ranks than the rest of the model does, hence the factor."""
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        return weight if self.group is None else _ScaleGradient.apply(weight, 1.0 / self.group.size())


class Experts(nn.Module):
    """A mixture of MLPs: each token goes to its ``top_k`` experts, weighted by a softmax over those; none is dropped.

    (Shazeer et al. 2017, without noise and capacity.) ``[B, T, hidden]`` to the same.
    """

    def __init__(self, *, experts: int, top_k: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.weights = ExpertWeights(experts, hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).topk(self.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.experts)
        rows = tokens[order // self.top_k]
        outs = torch.empty_like(rows).index_copy(0, order, self._visit(rows, counts))
        gates = scores.softmax(-1).to(outs.dtype)
        return (outs.unflatten(0, (-1, self.top_k)) * gates[..., None]).sum(1).view_as(x)

    def _visit(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send each row to the rank of its expert, and its output back."""
        group = self.weights.group
        if group is None:
            return self.weights(rows, counts.tolist())
        ranks, mine = group.size(), self.experts // group.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent = counts.view(ranks, mine).sum(1).tolist()
        received = arriving.view(ranks, mine).sum(1).tolist()
        rows = all_to_all(rows, group, sent, received)
        # rows come sorted by sender, then by expert; the weights want them by expert
        expert = torch.arange(mine, device=rows.device).repeat(ranks).repeat_interleave(arriving)
        order = expert.argsort(stable=True)
        outs = self.weights(rows[order], arriving.view(ranks, mine).sum(0).tolist())
        back = torch.empty_like(outs).index_copy(0, order, outs)
        return all_to_all(back, group, received, sent)


def find_experts(module: nn.Module) -> list[ExpertWeights]:
    """All expert weights below a module."""
    return [part for part in module.modules() if isinstance(part, ExpertWeights)]


def spread_experts(piece: nn.Module, parts: Parts, mesh: PlanMesh) -> None:
    """Leave on each rank of an expert group its share of the experts of every layer.

    Raises BadInput when there are no experts or their number does not divide.
    """
    ep = mesh.axis("ep")
    for index, layer in parts.layers(piece):
        found = find_experts(layer)
        if not found:
            raise BadInput(f"mesh.ep = {ep.size()}: layer {index} has no experts", hint="set ep to 1")
        for weights in found:
            if weights.up.shape[0] % ep.size():
                raise BadInput(
                    f"mesh.ep = {ep.size()}: {weights.up.shape[0]} experts do not divide by it",
                    hint="choose ep among the divisors of the number of experts",
                )
            for name, weight in list(weights.named_parameters(recurse=False)):
                split = distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)
                setattr(weights, name, nn.Parameter(split))
            weights.group = ep.get_group()
