"""Column and row sharded layers; sequence parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rota.spec.errors import BadInput
from rota.train.mesh import PlanMesh
from rota.train.parts import Absent, Parts
from rota.train.plan.model import Layer, ParallelPlan

Role = Literal["enter", "column", "row", "norm"]
Rules = Mapping[str, Role]
"""Name of a module inside a layer to its role. ``enter`` is the block whose input its column layers share: it is
prepared once, so that backward sums one gradient instead of one for each of them."""

GPT_RULES: Rules = {
    "attn": "enter",
    **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "column"),
    "attn.o": "row",
    "mlp": "enter",
    "mlp.up": "column",
    "mlp.down": "row",
    "norm1": "norm",
    "norm2": "norm",
}
LLAMA_RULES: Rules = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "column"),
    "self_attn.o_proj": "row",
    "mlp": "enter",
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "column"),
    "mlp.down_proj": "row",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
}


def split_layers(piece: nn.Module, parts: Parts, plan: ParallelPlan, mesh: PlanMesh, rules: Rules | None) -> None:
    """Shard the layers of this piece over ``tp``; embedding and head too where the plan says so.

    Raises BadInput for a layer that no rule fits, and for sequence parallelism in some layers only.
    """
    tp = mesh.axis("tp")
    kinds = {parts.kind(plan, index).sp for index in range(parts.count(piece))}
    if len(kinds) > 1:
        raise BadInput("layers.sp: some layers split the sequence and some do not", hint="set sp for all or none")
    sp = kinds == {True}
    for index, layer in parts.layers(piece):
        kind = parts.kind(plan, index)
        if kind.tp > 1:
            parallelize_module(layer, tp, _styles(layer, kind, rules), src_data_rank=None)
    _split_ends(piece, parts, plan, tp, sp)


def _styles(layer: nn.Module, kind: Layer, rules: Rules | None) -> dict[str, ParallelStyle]:
    names = {name for name, _ in layer.named_modules()}
    tables = [rules] if rules is not None else [GPT_RULES, LLAMA_RULES]
    chosen = next((table for table in tables if set(table) <= names), None)
    if chosen is None:
        raise BadInput(
            f"mesh.tp = {kind.tp}: no rule says how to split {type(layer).__name__} with modules "
            f"{', '.join(sorted(name for name in names if name))}",
            hint='give rules={"attn": "enter", "attn.q": "column", "attn.o": "row", ...}',
        )
    styles = {name: _style(role, kind.sp) for name, role in chosen.items()}
    return {name: style for name, style in styles.items() if style is not None}


def _style(role: Role, sp: bool) -> ParallelStyle | None:
    whole, outside = Replicate(), Shard(1) if sp else Replicate()
    match role:
        case "enter":
            return PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(whole,), use_local_output=False)
        case "column":
            return ColwiseParallel(input_layouts=whole)
        case "row":
            return RowwiseParallel(output_layouts=outside)
        case "norm":
            return SequenceParallel(use_local_output=True) if sp else None


def _split_ends(piece: nn.Module, parts: Parts, plan: ParallelPlan, tp: DeviceMesh, sp: bool) -> None:
    """The sequence is split after the embedding and gathered before the head; their tables are split by vocabulary."""
    embed, head = getattr(piece, parts.embed), getattr(piece, parts.head)
    if not isinstance(embed, Absent):
        table = next((name for name, part in embed.named_modules() if isinstance(part, nn.Embedding)), None)
        styles: dict[str, ParallelStyle] = {}
        if plan.embed.tp > 1 and table is not None:
            styles[table] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if sp:
            styles[""] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        _apply(embed, tp, styles)
    if not isinstance(head, Absent):
        last = [name for name, part in head.named_modules() if isinstance(part, nn.Linear)]
        styles = {}
        if plan.head.tp > 1 and last:
            styles[last[-1]] = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if sp:
            styles[""] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            )
        _apply(head, tp, styles)


def _apply(module: nn.Module, tp: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    for name, style in styles.items():
        parallelize_module(module.get_submodule(name), tp, style, src_data_rank=None)
