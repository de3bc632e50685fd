"""Expert parallelism: experts divided over ranks, and the exchange that sends tokens to their experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable

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
        return visit(rows, counts, group, self.weights)


def visit(
    rows: torch.Tensor,
    counts: torch.Tensor,
    group: dist.ProcessGroup,
    compute: Callable[[torch.Tensor, list[int]], torch.Tensor],
) -> torch.Tensor:
    """Send rows, sorted by expert with ``counts`` of each, to the ranks of their experts, and the outputs back.

    ``compute`` gets the rows that arrive, sorted by its experts, and how many each of these has.
    """
    ranks, mine = group.size(), len(counts) // group.size()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent = counts.view(ranks, mine).sum(1).tolist()
    received = arriving.view(ranks, mine).sum(1).tolist()
    rows = all_to_all(rows, group, sent, received)
    # rows come sorted by sender, then by expert; the weights want them by expert
    expert = torch.arange(mine, device=rows.device).repeat(ranks).repeat_interleave(arriving)
    order = expert.argsort(stable=True)
    outs = compute(rows[order], arriving.view(ranks, mine).sum(0).tolist())
    back = torch.empty_like(outs).index_copy(0, order, outs)
    return all_to_all(back, group, received, sent)


class StackedExperts:
    """``forward`` of experts of another library, spread over ranks: their own code on the experts of this rank.

    They take rows ``[N, hidden]``, the experts ``[N, k]`` of each and their weights, as those of transformers do.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module, self.group, self.inner = module, group, module.forward

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """True for experts whose parameters are stacked and that are called so."""
        count = getattr(module, "num_experts", None)
        own = list(module.parameters(recurse=False))
        stacked = bool(own) and all(one.dim() > 1 and one.shape[0] == count for one in own)
        if not stacked or not any(one.dim() == 3 for one in own):
            return False
        taken = list(inspect.signature(type(module).forward).parameters)
        return len(taken) >= 4 and "index" in taken[2] and "weights" in taken[3]

    def __call__(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Outputs of all rows, each from the rank of its expert."""
        k, flat = index.shape[-1], index.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.module.num_experts)  # type: ignore[arg-type] - of a module, so typed as one
        outs = visit(rows[order // k], counts, self.group, self._compute)
        outs = torch.empty_like(outs).index_copy(0, order, outs).unflatten(0, (-1, k))
        return (outs * weights[..., None].to(outs.dtype)).sum(1)

    def _compute(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        held, own = vars(self.module), list(self.module._parameters)
        for name in own:
            part = self.module._parameters[name]
            assert part is not None
            held[name] = _ScaleGradient.apply(
                part.to_local() if isinstance(part, DTensor) else part, 1.0 / self.group.size()
            )
        count, held["num_experts"] = held["num_experts"], len(counts)
        try:
            if not len(rows):  # no token came, and every parameter takes part in backward all the same
                return rows + 0 * sum(held[name].sum() for name in own)
            index = torch.arange(len(counts), device=rows.device).repeat_interleave(
                torch.tensor(counts, device=rows.device)
            )
            return self.inner(rows, index[:, None], torch.ones_like(rows[:, :1]))
        finally:
            held["num_experts"] = count
            for name in own:
                held.pop(name, None)


def find_experts(module: nn.Module) -> list[nn.Module]:
    """All expert weights below a module."""
    return [part for part in module.modules() if isinstance(part, ExpertWeights) or StackedExperts.fits(part)]


def spread_experts(piece: nn.Module, parts: Parts, mesh: PlanMesh) -> None:
    """Leave on each rank of an expert group its share of the experts of every layer.

    Raises BadInput when the model has no experts or their number does not divide.
    """
    ep = mesh.axis("ep")
    for index, layer in parts.layers(piece):
        found = find_experts(layer)
        if not found:
            raise BadInput(f"mesh.ep = {ep.size()}: layer {index} has no experts", hint="set ep to 1")
        for weights in found:
            count = next(weights.parameters(recurse=False)).shape[0]
            if count % ep.size():
                raise BadInput(
                    f"mesh.ep = {ep.size()}: {count} experts do not divide by it",
                    hint="choose ep among the divisors of the number of experts",
                )
            for name, weight in list(weights.named_parameters(recurse=False)):
                split = distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)
                setattr(weights, name, nn.Parameter(split))
            if isinstance(weights, ExpertWeights):
                weights.group = ep.get_group()
            else:
                weights.forward = StackedExperts(weights, ep.get_group())
