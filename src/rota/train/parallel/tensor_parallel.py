"""Tensor parallelism: column and row sharded layers; sequence parallel."""

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
from rota.train.parallel.mesh import PlanMesh
from rota.train.parallel.model_parts import Absent, Parts
from rota.train.plan.model import Layer, ParallelPlan

Role = Literal["enter", "column", "row", "norm", "inside", "outside"]
Rules = Mapping[str, Role]
"""Name of a module inside a layer to its role. ``enter`` is the block whose input its column layers share: it is
prepared once, so that backward sums one gradient instead of one for each of them.

Of modules (or parameters) that every rank holds whole, ``norm`` works on the residual stream token by token, on
DTensors with ``sp``; ``outside`` does the same on plain tensors; ``inside`` works between column and row, on the heads
of a rank, as a norm of queries. Gradients of ``inside``, and of ``outside`` with ``sp``, are partial and summed."""

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
QWEN3_RULES: Rules = {**LLAMA_RULES, "self_attn.q_norm": "inside", "self_attn.k_norm": "inside"}


def split_layers(piece: nn.Module, parts: Parts, plan: ParallelPlan, mesh: PlanMesh, rules: Rules | None) -> list[str]:
    """Shard the layers of this piece over ``tp``; embedding and head too where the plan says so.

    Returns the names of parameters whose gradients are of a part on each rank. Raises BadInput for a layer that no rule
    fits, for weights of which no rule says whether they see parts, and for sequence parallelism in some layers only.
    """
    tp = mesh.axis("tp")
    kinds = {parts.kind(plan, index).sp for index in range(parts.count(piece))}
    if len(kinds) > 1:
        raise BadInput("layers.sp: some layers split the sequence and some do not", hint="set sp for all or none")
    sp, partial = kinds == {True}, list[str]()
    for index, path, layer in parts.named_layers(piece):
        kind = parts.kind(plan, index)
        if kind.tp > 1:
            chosen = _rules_of(layer, kind, rules)
            partial += [f"{path}.{name}" for name in partial_names(layer, chosen, sp)]
            styles = {name: _style(name, role, chosen, sp) for name, role in chosen.items()}
            given = {name: style for name, style in styles.items() if style is not None}
            parallelize_module(layer, tp, given, src_data_rank=None)
    split_ends(piece, parts, plan, tp, sp)
    return partial


def partial_names(layer: nn.Module, rules: Rules, sp: bool) -> list[str]:
    """Parameters of a layer that every rank holds whole and that see a part of the heads or, with ``sp``, the tokens.

    Raises BadInput for those that no rule names: beside column and row layers, and anywhere with ``sp``.
    """
    blocks = {name.rpartition(".")[0] for name, role in rules.items() if role in ("column", "row")}
    found: list[str] = []
    unknown: list[str] = []
    for name, parameter in layer.named_parameters():
        role = next((role for rule, role in rules.items() if role != "enter" and _below(name, rule)), None)
        if role == "inside" or (role == "outside" and sp):
            found.append(name)
        elif role is None and parameter.requires_grad and (sp or any(_below(name, block) for block in blocks)):
            unknown.append(name)
    if unknown:
        raise BadInput(
            f"mesh.tp: no rule names {', '.join(unknown)} of {type(layer).__name__}, so it is unknown whether their "
            f"gradients are whole on each rank{', sp splits the tokens' if sp else ''}",
            hint='add rules={"attn.q_norm": "inside", ...} between column and row layers, else "norm" or "outside"',
        )
    return found


def _below(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _rules_of(layer: nn.Module, kind: Layer, rules: Rules | None) -> Rules:
    names = {name for name, _ in layer.named_modules()} | {name for name, _ in layer.named_parameters()}
    tables = [rules] if rules is not None else [GPT_RULES, QWEN3_RULES, LLAMA_RULES]
    chosen = next((table for table in tables if set(table) <= names), None)
    if chosen is None:
        raise BadInput(
            f"mesh.tp = {kind.tp}: no rule says how to split {type(layer).__name__} with modules "
            f"{', '.join(sorted(name for name, _ in layer.named_modules() if name))}",
            hint='give rules={"attn": "enter", "attn.q": "column", "attn.o": "row", ...}',
        )
    return chosen


def _style(name: str, role: Role, rules: Rules, sp: bool) -> ParallelStyle | None:
    whole, outside = Replicate(), Shard(1) if sp else Replicate()
    match role:
        case "enter":
            return PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(whole,), use_local_output=False)
        case "column":
            entered = any(other == "enter" and _below(name, block) for block, other in rules.items())
            return ColwiseParallel(input_layouts=whole if entered else outside)
        case "row":
            return RowwiseParallel(output_layouts=outside)
        case "norm":
            return SequenceParallel(use_local_output=True) if sp else None
        case "inside" | "outside":
            return None


def split_ends(piece: nn.Module, parts: Parts, plan: ParallelPlan, tp: DeviceMesh, sp: bool) -> None:
    """The sequence is split after the embedding and gathered before the head; their tables are split by vocabulary."""
    before, after = ([one for one in end if not isinstance(one, Absent)] for end in parts.ends(piece))
    for embed in before:
        table = next((name for name, part in embed.named_modules() if isinstance(part, nn.Embedding)), None)
        styles: dict[str, ParallelStyle] = {}
        if plan.embed.tp > 1 and table is not None:
            styles[table] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if sp:
            styles[""] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        _apply(embed, tp, styles)
    for head in after:
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
