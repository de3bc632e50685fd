"""Tensor parallelism for layers that no table of rules names: roles from facts, names, or the order of calls."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from rota.spec.errors import BadInput
from rota.train.parallel.experts import StackedExperts
from rota.train.parallel.mesh import Context, PlanMesh, local
from rota.train.parallel.tensor_parallel import split_ends
from rota.train.plan.model import ParallelPlan
from rota.train.structure.parts import FoundParts

LinearRole = Literal["column", "row"]
COLUMN = frozenset({
    "q_proj", "k_proj", "v_proj", "q", "k", "v", "query", "key", "value", "gate_proj", "up_proj", "up", "fc1", "c_fc",
    "wi", "wi_0", "wi_1", "w1", "w3", "lin1", "linear1", "fc_in", "dense_h_to_4h",
})  # fmt: skip
ROW = frozenset({
    "o_proj", "o", "out_proj", "c_proj", "down_proj", "down", "fc2", "wo", "w2", "lin2", "linear2", "fc_out",
    "dense_4h_to_h",
})  # fmt: skip
JOINED = {"c_attn": 3, "qkv": 3, "Wqkv": 3, "qkv_proj": 3, "gate_up_proj": 2}
"""Linears that compute several outputs of equal width side by side, and how many."""
PLANS: dict[str, LinearRole] = {"colwise": "column", "rowwise": "row"}
"""Of the words in ``_tp_plan`` of transformers those that say how a linear is split."""
HEADS = frozenset({
    "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "num_key_value_heads", "num_kv_heads",
    "n_kv_heads", "n_local_heads",
})  # fmt: skip
WIDTHS = frozenset({"split_size", "inner_dim", "all_head_size"})
"""Numbers that a block keeps beside its linears: heads, and widths of what they make."""

BASE, ADAPTER = ".base_layer", re.compile(r"\.lora_[AB]\.")
"""Names of peft: the linear inside an adapter of low rank, and the two linears that are added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a module is split: the dim of each parameter, in how many joined parts, and what its input and output need.

    ``shared`` parameters are whole on each rank and added to a sum over ranks.
    """

    dims: Mapping[str, int]
    joined: int = 1
    enters: bool = False
    sums: bool = False
    shared: tuple[str, ...] = ()
    joins: Mapping[str, int] = field(default_factory=dict[str, int])
    """Joined parts of single parameters, where they differ."""


def is_linear(module: nn.Module) -> bool:
    """True for torch's Linear and the Conv1D of transformers, whose weight is transposed."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def split_found(piece: nn.Module, parts: FoundParts, plan: ParallelPlan, mesh: PlanMesh) -> None:
    """Split the layers of this piece over ``tp``, and embedding and head where the plan says so.

    Raises BadInput that names the module for one without a role, and for dropout.
    """
    tp = mesh.axis("tp")
    if parts.seen.drops:
        raise BadInput(
            f"mesh.tp = {tp.size()}: {parts.seen.drops[0]} drops values in training, and ranks would draw for parts of "
            "them",
            hint="set its rate to 0 in the configuration of the model, or use data ranks and stages",
        )
    if any(kind.sp for kind in plan.layers):
        raise BadInput(
            f"layers.sp: no rules for {type(piece).__name__} say where the sequence is split",
            hint="give parallelize(..., rules=), or set sp to false",
        )
    facts = cast("Mapping[str, str]", getattr(piece, "_tp_plan", None) or {})
    for index, path, layer in parts.named_layers(piece):
        if parts.kind(plan, index).tp == 1:
            continue
        splits = find_splits(layer, path, facts, parts)
        if not splits:
            raise BadInput(
                f"mesh.tp = {tp.size()}: {path} ({type(layer).__name__}) has no linears that can be split",
                hint='give parallelize(..., rules={"attn.q": "column", "attn.o": "row", ...})',
            )
        divided: set[nn.Module] = set()
        entries: dict[str, Entry] = {}
        for name, split in splits.items():
            owner = layer.get_submodule(base_of(name).rpartition(".")[0])
            module = layer.get_submodule(name)
            if split.enters and owner not in divided:
                divided.add(owner)
                divide_counts(owner, f"{path}.{name}", split, module, tp.size())
            entry = entries.setdefault(base_of(name).rpartition(".")[0], Entry(tp.get_group()))
            split_module(module, f"{path}.{name}", split, tp, entry)
    split_ends(piece, parts, plan, tp, sp=False)


def find_splits(layer: nn.Module, path: str, facts: Mapping[str, str], parts: FoundParts) -> dict[str, Split]:
    """How the modules of a layer are split, by name inside it. Raises BadInput for a linear whose role is not known."""
    held: list[str] = []
    for name, module in layer.named_modules():
        whole = isinstance(module, nn.MultiheadAttention)  # uses the weights of its linears, does not call them
        if (whole or StackedExperts.fits(module)) and name:
            held.append(name)
    linears = {
        name: module
        for name, module in layer.named_modules()
        if is_linear(module) and not any(name.startswith(f"{one}.") for one in held)
    }
    adapters = {name: linears.pop(name) for name in list(linears) if ADAPTER.search(name)}
    star = ".".join("*" if one.isdigit() else one for one in path.split("."))
    roles: dict[str, LinearRole] = {}
    for name in linears:
        base = base_of(name)
        fact = facts.get(f"{star}.{base}") or next((v for k, v in facts.items() if k.endswith(f".*.{base}")), None)
        role = PLANS.get(fact or "") or _by_name(base.rpartition(".")[2])
        if role is not None:
            roles[name] = role
    if set(roles) != set(linears):
        roles = by_order(linears, path, parts)
    splits = {name: _of_linear(name, linears[name], role) for name, role in roles.items()}
    for name, module in adapters.items():
        half: LinearRole = "column" if ".lora_B." in name else "row"  # which of the two has the width that is split
        if roles.get(f"{base_of(name)}{BASE}") == half:
            splits[name] = _of_linear(name, module, half)
    for name, module in layer.named_modules():
        if StackedExperts.fits(module):
            splits[name] = of_experts(module)
        owner = name.rpartition(".")[0]
        if isinstance(module, nn.Embedding) and any(
            role == "column" and one.startswith(f"{owner}.") for one, role in roles.items()
        ):
            splits[name] = Split(dims={"weight": 1})  # a bias of each head, as in T5
    return splits


def _by_name(key: str) -> LinearRole | None:
    return "column" if key in COLUMN or key in JOINED else "row" if key in ROW else None


def by_order(linears: Mapping[str, nn.Module], path: str, parts: FoundParts) -> dict[str, LinearRole]:
    """Roles by the order of calls: linears that share an input are columns, the one that reads what they make is a row.

    Raises BadInput where a layer is of another form.
    """
    seen = parts.seen
    order = sorted(
        (one for one in linears if f"{path}.{one}" in seen.first), key=lambda one: seen.first[f"{path}.{one}"]
    )
    groups: list[list[str]] = []
    for name in order:
        if groups and seen.inputs[f"{path}.{groups[-1][0]}"] == seen.inputs[f"{path}.{name}"]:
            groups[-1].append(name)
        else:
            groups.append([name])
    rows = [group for group in groups[1::2] if len(group) > 1]
    if rows or len(groups) % 2 or not groups:
        named = ", ".join(linears) or "none"
        raise BadInput(
            f"mesh.tp: the linears of {path} ({named}) do not come in pairs of column and row",
            hint='give parallelize(..., rules={"attn.q": "column", "attn.o": "row", ...})',
        )
    return {name: "row" if index % 2 else "column" for index, group in enumerate(groups) for name in group}


def _of_linear(name: str, module: nn.Module, role: LinearRole) -> Split:
    out_dim = 0 if isinstance(module, nn.Linear) else 1
    biased = getattr(module, "bias", None) is not None
    if role == "row":
        return Split(dims={"weight": 1 - out_dim}, sums=True, shared=("bias",) if biased else ())
    dims = {"weight": out_dim} | ({"bias": 0} if biased else {})
    return Split(dims=dims, joined=JOINED.get(base_of(name).rpartition(".")[2], 1), enters=True)


def base_of(name: str) -> str:
    """The name that a linear, or one of its adapters, had before an adapter was put around it."""
    return ADAPTER.split(name)[0].removesuffix(BASE)


def of_experts(module: nn.Module) -> Split:
    """Stacked experts: the matrices into the inner width by their outputs, the one out of it by its inputs."""
    shapes = {name: tuple(one.shape) for name, one in module.named_parameters(recurse=False)}
    known = {"gate_up_proj": 1, "down_proj": 2}
    if set(shapes) != set(known) or shapes["gate_up_proj"][2] != shapes["down_proj"][1]:
        raise BadInput(
            f"mesh.tp: {type(module).__name__} holds {', '.join(shapes)}, of which the inner width is not known",
            hint="use ep, stages or data ranks for it",
        )
    return Split(dims=known, enters=True, sums=True, joins={"gate_up_proj": 2})


def divide_counts(owner: nn.Module, name: str, split: Split, module: nn.Module, ranks: int) -> None:
    """Numbers of heads and widths that the block of a column linear keeps, for the part of a rank."""
    dim = split.dims.get("weight")
    width = None if dim is None else cast("torch.Tensor", module.weight).shape[dim] // split.joined
    for key, value in list(vars(owner).items()):
        counts = key in HEADS or (key in WIDTHS and value == width)
        if counts and isinstance(value, int):
            if value % ranks:
                raise BadInput(
                    f"mesh.tp = {ranks}: {name.rpartition('.')[0]} has {key} {value}, which does not divide by it",
                    hint=f"choose tp among the divisors of {value}",
                )
            setattr(owner, key, value // ranks)


def split_module(module: nn.Module, name: str, split: Split, tp: DeviceMesh, entry: Entry) -> None:
    """Leave this rank's part of each parameter, and compute on it. Raises BadInput for a width that does not divide."""
    joined: dict[str, int] = {}
    for key, dim in split.dims.items():
        whole = cast("nn.Parameter", getattr(module, key))
        parts = split.joins.get(key, split.joined)
        if whole.shape[dim] % (parts * tp.size()):
            raise BadInput(
                f"mesh.tp = {tp.size()}: {name}.{key} has {whole.shape[dim]} columns in {parts} parts, which do not "
                "divide by it",
                hint="choose another tp",
            )
        value = whole.detach()
        if parts > 1:  # joined parts in a dim of their own, so that a rank holds a piece of each
            value, joined[key] = value.unflatten(dim, (parts, -1)), dim
        made = distribute_tensor(value, tp, [Shard(dim + (parts > 1))], src_data_rank=None)
        setattr(module, key, nn.Parameter(made, requires_grad=whole.requires_grad))
    module.forward = LocalForward(module, split, joined, tp.get_group(), entry)


class Entry:
    """The input of a block, whose gradient is summed over ranks once for all modules that read it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._last: tuple[Callable[[], object], Callable[[], torch.Tensor | None]] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The same value; its gradient is the sum of those of all ranks."""
        if not x.requires_grad:
            return x
        if self._last is not None and self._last[0]() is x and (made := self._last[1]()) is not None:
            return made
        made = cast("torch.Tensor", _SumGradient.apply(x, self.group))
        self._last = weakref.ref(x), weakref.ref(made)
        return made


class LocalForward:
    """``forward`` of a split module: its own code, which finds this rank's part of each parameter."""

    def __init__(
        self, module: nn.Module, split: Split, joined: Mapping[str, int], group: dist.ProcessGroup, entry: Entry
    ) -> None:
        self.module, self.split, self.joined, self.group, self.entry = module, split, joined, group, entry
        self.inner = module.forward

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        """As the whole module; a column gives its part of the output."""
        held, split = vars(self.module), self.split
        if split.enters:
            args = tuple(self._entered(one) for one in args)
            kwargs = {key: self._entered(one) for key, one in kwargs.items()}
        for key in split.dims:
            part = local(cast("torch.Tensor", self.module._parameters[key]))
            held[key] = part.flatten(dim, dim + 1) if (dim := self.joined.get(key)) is not None else part
        for key in split.shared:
            held[key] = _Share.apply(local(cast("torch.Tensor", self.module._parameters[key])), self.group.size())
        size = held.get("nf")
        if size is not None and split.enters:  # Conv1D of transformers keeps its width
            held["nf"] = size // self.group.size()
        try:
            out = self.inner(*args, **kwargs)
        finally:
            for key in (*split.dims, *split.shared):
                held.pop(key, None)
            if size is not None:
                held["nf"] = size
        return cast("torch.Tensor", _Sum.apply(out, self.group)) if split.sums else out

    def _entered(self, one: object) -> object:
        return self.entry(one) if isinstance(one, torch.Tensor) and one.is_floating_point() else one


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = x.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Share(torch.autograd.Function):
    """A share of a value that all ranks add up; each has the gradient of the whole."""

    @staticmethod
    def forward(ctx: Context, value: torch.Tensor, ranks: int) -> torch.Tensor:
        return value / ranks

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
