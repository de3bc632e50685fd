"""What one rank sends in a step: every collective of the runtime, counted, with its bytes.

The counts are those of the built-in models under ``parallelize``: FSDP2 and DDP wrap each layer and the rest of the
model, tensor ranks exchange activations around attention and MLP (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al.
2022 with split sequences), context ranks pass keys and values (Liu et al. 2023) or swap heads for tokens (Jacobs et al.
2023). Bytes are those of the whole tensor: what an all-gather gathers, what a reduce-scatter reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rota.train.plan.memory import NUMBER_BYTES, expand_layers
from rota.train.plan.model import Layer, ModelShape, ParallelPlan, embed_params, head_params, layer_params

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Axis = Literal["data", "fsdp", "dp_replicate", "cp", "tp"]
CONTROL_BYTES = 8 + 4
"""Real tokens of the global batch (int64) and its loss (fp32), one all-reduce each."""
BUCKET_BYTES = 25 << 20
"""DDP sends gradients in buckets of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """``count`` collectives of one kind over one axis in one step, and the bytes of all of them together."""

    operation: Operation
    axis: Axis
    count: int
    size_bytes: int


def traffic(plan: ParallelPlan, model: ModelShape) -> tuple[Traffic, ...]:
    """All collectives of a steady step on one rank of a plan without pipeline and experts, in a fixed order.

    Gradients of replicas under DDP count as one all-reduce for each full bucket; shards are padded to whole rows, so
    sizes are exact where degrees divide rows. Raises ValueError for a plan with a pipeline or expert ranks.
    """
    if plan.mesh.pp > 1 or plan.mesh.ep > 1:
        raise ValueError(f"traffic: pp {plan.mesh.pp} and ep {plan.mesh.ep} must be 1")
    found: Counter[tuple[Operation, Axis]] = Counter()
    sizes: Counter[tuple[Operation, Axis]] = Counter()
    for operation, axis, count, size in (*_gradients(plan, model), *_activations(plan, model)):
        found[operation, axis] += count
        sizes[operation, axis] += count * size
    return tuple(
        Traffic(operation=operation, axis=axis, count=count, size_bytes=sizes[operation, axis])
        for (operation, axis), count in sorted(found.items())
        if count
    )


def bytes_by_collective(plan: ParallelPlan, model: ModelShape) -> dict[str, int] | None:
    """Bytes of a step by operation; None for a plan with a pipeline or expert ranks, which is not counted."""
    if plan.mesh.pp > 1 or plan.mesh.ep > 1:
        return None
    found: Counter[str] = Counter()
    for one in traffic(plan, model):
        found[one.operation] += one.size_bytes
    return dict(found)


Sent = tuple[Operation, Axis, int, int]
"""Operation, axis, how often, bytes of one."""


def _gradients(plan: ParallelPlan, model: ModelShape) -> Iterator[Sent]:
    """What data ranks exchange: control words, gradients, gathered weights, weights that another rank stepped."""
    yield "all_reduce", "data", 1, 8
    yield "all_reduce", "data", 1, CONTROL_BYTES - 8
    mesh, units = plan.mesh, list(_units(plan, model))
    ranks = mesh.dp * mesh.cp
    if ranks == 1:
        return
    master = NUMBER_BYTES[plan.dtype.master]
    if max(kind.zero for _, kind in units) < 2 and mesh.tp == 1:
        whole = sum(params for params, _ in units) * master
        buckets = -(-whole // BUCKET_BYTES)
        yield "all_reduce", "data", buckets, whole // buckets
    else:
        for params, kind in units:
            yield from _unit(plan, params, kind)
    stepped = sum(params for params, kind in units if kind.zero == 1) * master
    if stepped:
        yield "broadcast", "data", ranks, stepped // ranks


def _units(plan: ParallelPlan, model: ModelShape) -> Iterator[tuple[int, Layer]]:
    """Parameters of what is wrapped by itself on a rank: each layer, then embedding and head together."""
    for layer in expand_layers(plan):
        yield layer_params(model, layer.tp), layer
    yield embed_params(model, plan.embed.tp) + head_params(model, plan.head.tp), plan.embed


def _unit(plan: ParallelPlan, params: int, kind: Layer) -> Iterator[Sent]:
    """One wrapped module: ZeRO 2 gathers once a step, 3 in both passes of each micro-batch; both scatter each time."""
    micro, mesh = plan.micro_batches, plan.mesh
    weights, gradients = params * NUMBER_BYTES[plan.dtype.param], params * NUMBER_BYTES[plan.dtype.reduce]
    if kind.zero < 2:
        yield "all_reduce", "data", 1, gradients
        return
    yield "all_gather", "fsdp", 2 * micro if kind.zero == 3 else 1, weights
    yield "reduce_scatter", "fsdp", micro, gradients
    if mesh.dp_replicate > 1:
        yield "all_reduce", "dp_replicate", micro, gradients // (mesh.dp_shard * mesh.cp)


def _activations(plan: ParallelPlan, model: ModelShape) -> Iterator[Sent]:
    """What tensor and context ranks exchange in all micro-batches."""
    number, micro, mesh = NUMBER_BYTES[plan.dtype.param], plan.micro_batches, plan.mesh
    tokens = plan.micro_batch * model.seq // mesh.cp
    whole = tokens * model.hidden * number
    for layer in expand_layers(plan):
        again = 1 if layer.recompute == "full" else 0
        passes = micro * (2 + again)
        last = micro * (4 + again)  # what follows the last sum of a layer needs none of it, so it is not repeated
        if layer.tp > 1 and layer.sp:
            yield "all_gather", "tp", 2 * passes, whole
            yield "reduce_scatter", "tp", last, whole
            norms = 4 * (micro if layer.zero >= 2 else 1)  # two, whose weights every tensor rank has whole
            yield "all_reduce", "tp", norms, model.hidden * number
        elif layer.tp > 1:
            yield "all_reduce", "tp", last, whole
        if mesh.cp > 1:
            yield from _attention(plan, model, layer, tokens, passes)
    yield from _ends(plan, model, whole, tokens)


def _attention(plan: ParallelPlan, model: ModelShape, layer: Layer, tokens: int, passes: int) -> Iterator[Sent]:
    """Ring: the forward pass sends keys and values on, the backward pass these and their gradients once around.

    Ulysses: queries, keys, values and the output, each an all-to-all in either direction.
    """
    cp, number, micro = plan.mesh.cp, NUMBER_BYTES[plan.dtype.param], plan.micro_batches
    forward = passes - micro + (micro if layer.recompute == "selective" else 0)
    keys = tokens * model.key_heads * model.head_dim // layer.tp * number
    if plan.cp_kind == "ring":
        yield "send", "cp", forward * (cp - 1), 2 * keys
        yield "send", "cp", micro * cp, 4 * keys
        return
    queries = tokens * model.hidden // layer.tp * number
    spread = keys if (model.key_heads // layer.tp) % cp == 0 else queries
    yield "all_to_all", "cp", 2 * (forward + micro), queries
    yield "all_to_all", "cp", 2 * (forward + micro), spread


def _ends(plan: ParallelPlan, model: ModelShape, whole: int, tokens: int) -> Iterator[Sent]:
    """Embedding and head: a sum of looked-up rows forward, of the head's input gradient backward, and the logits."""
    number, micro = NUMBER_BYTES[plan.dtype.param], plan.micro_batches
    if plan.embed.tp > 1:
        yield "all_reduce", "tp", micro, whole
    if plan.head.tp > 1:
        yield "all_reduce", "tp", micro, whole
        yield "all_gather", "tp", micro, tokens * model.vocab * number
    if plan.layers[0].sp:
        yield "all_gather", "tp", 2 * micro, whole
