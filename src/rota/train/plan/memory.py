"""Bytes by class that one rank of each stage needs under a plan.

Symbols of the formulas, as in the literature: ``s`` sequence length, ``b`` micro-batch in sequences, ``h`` hidden
width, ``a`` attention heads, ``t`` tensor degree, ``L`` layers, ``p`` pipeline stages, ``v`` chunks a stage, ``m``
micro-batches. Activation bytes of a layer are those of Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), Table 2, for 16-bit activations with dropout masks; flash attention has no ``5as/h`` term.
State is that of Rajbhandari et al., "ZeRO" (2020), section 3, as this runtime holds it: weights, gradients and both
moments in the master format, ``4 + 4 + 8`` bytes a parameter, and in ``buffers`` the 16-bit copy that computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rota.train.plan.model import (
    Dtype,
    Layer,
    Mesh,
    ModelShape,
    Number,
    ParallelPlan,
    Schedule,
    Stage,
    embed_params,
    head_params,
    layer_params,
)

GIB = 2**30
NUMBER_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ADAM_MOMENTS = 2
LOSS_MEMORY_BYTES = 4 + 4 + 4
"""Of one logit in fp32 when the backward pass of the loss begins: itself, the logarithm of its share, its gradient."""
UNSHARDED_LAYERS = 2
"""Layers that ZeRO stage 3 holds whole at once: the one in use and the one being gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes a parameter costs in each class when nothing is sharded."""

    param: int
    grad: int
    optimizer: int

    @property
    def total(self) -> int:
        """All classes together."""
        return self.param + self.grad + self.optimizer


def state_bytes(dtype: Dtype) -> StateBytes:
    """Everything in the master format: ``4 + 4 + 8`` with Adam in fp32."""
    master = NUMBER_BYTES[dtype.master]
    return StateBytes(param=master, grad=master, optimizer=ADAM_MOMENTS * master)


def activation_bytes_per_layer(model: ModelShape, layer: Layer, micro_batch: int, number: Number = "bf16") -> float:
    """Activation bytes that one layer keeps for its backward pass, for one micro-batch on one tensor rank.

    Korthikanti et al. (2022), Table 2: ``s b h (10 + 24/t + 5 a s/(h t))``, with ``sp`` ``s b h (34/t + 5 a s/(h t))``.
    Selective recompute and flash attention keep no ``5 a s/(h t)``; full recompute keeps the 16-bit input, ``2 s b h``,
    over ``t`` with ``sp``. Beyond the table, all are taken as twice that where ``number`` is fp32, the masks of dropout
    too, which stay one byte. A measured ``kept_mib`` for one sequence takes the place of these.
    """
    s, b, h, t = model.seq, micro_batch * NUMBER_BYTES[number] / 2, model.hidden, layer.tp
    if layer.recompute == "full":
        return 2.0 * s * b * h / (t if layer.sp else 1)
    if model.kept_mib:
        return model.kept_mib * 2**20 * micro_batch / t
    keeps_scores = model.attention == "plain" and layer.recompute == "none"
    scores = 5.0 * model.heads * s / (h * t) if keeps_scores else 0.0
    fixed, split = (0.0, 34.0 / t) if layer.sp else (10.0, 24.0 / t)
    return s * b * h * (fixed + split + scores)


def logit_bytes(dtype: Dtype) -> int:
    """Bytes that one logit takes at most: those of the loss, and beside them its own where it has another format."""
    return LOSS_MEMORY_BYTES + (0 if dtype.param == "fp32" else NUMBER_BYTES[dtype.param])


def layers_in_flight(schedule: Schedule, *, stage: int, p: int, m: int, v: int = 1) -> float:
    """How many micro-batches, in units of a whole stage, stage ``stage`` of ``p`` holds at its peak.

    GPipe holds all ``m``; 1F1B ``min(m, p - stage)``; interleaved 1F1B on the first stage ``p (1 + (p-1)/(p v))``
    (Korthikanti et al., section 4.2.3), one stage's worth less for each later stage.
    """
    if schedule in ("none", "gpipe"):
        return float(m)
    plain = min(m, p - stage)
    if schedule == "interleaved" and v > 1 and m >= p:
        return plain + (p - 1) / v
    return float(plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one rank of one pipeline stage at its peak."""

    params: float
    grads: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """All classes together."""
        return self.params + self.grads + self.optimizer + self.activations + self.logits + self.buffers

    def by_class_gib(self) -> dict[str, float]:
        """The classes in GiB, for people and JSON."""
        names = ("params", "grads", "optimizer", "activations", "logits", "buffers")
        return {name: getattr(self, name) / GIB for name in names}


def memory(plan: ParallelPlan, model: ModelShape) -> tuple[StageMemory, ...]:
    """The need of one rank of each pipeline stage, first stage first.

    ``plan`` must have passed ``check``. Chunks of an interleaved stage are summed.
    """
    per_layer = expand_layers(plan)
    return tuple(
        _stage_memory(plan, model, rank, [per_layer[i] for chunk in _chunks(plan, rank) for i in range(*chunk.layers)])
        for rank in range(plan.mesh.pp)
    )


def ends_bytes(plan: ParallelPlan, model: ModelShape, rank: int) -> float:
    """Bytes of pipeline rank ``rank`` without its layers; each adds ``layer_bytes``."""
    return _stage_memory(plan, model, rank, []).total


def layer_bytes(model: ModelShape, layer: Layer, mesh: Mesh, dtype: Dtype) -> float:
    """Bytes of state that a layer adds to a rank; ``activation_bytes_per_layer`` come on top.

    ``layer_params(t)`` times the bytes of each class by the share of it that the rank has, plus the copy that computes.
    """
    costs, shares = state_bytes(dtype), _shares(layer, mesh)
    copy = NUMBER_BYTES[dtype.param] if _copied(layer, mesh, dtype) else 0
    each = costs.param * shares[0] + costs.grad * shares[1] + costs.optimizer * shares[2] + copy
    return layer_params(model, layer.tp) * each


def expand_layers(plan: ParallelPlan) -> tuple[Layer, ...]:
    """One entry a layer, from the run-length list."""
    return tuple(run for run in plan.layers for _ in range(run.count))


def _chunks(plan: ParallelPlan, rank: int) -> tuple[Stage, ...]:
    return plan.stages[rank :: plan.mesh.pp]


def _stage_memory(plan: ParallelPlan, model: ModelShape, rank: int, layers: Sequence[Layer]) -> StageMemory:
    costs, chunks, pp = state_bytes(plan.dtype), _chunks(plan, rank), plan.mesh.pp
    in_flight = layers_in_flight(plan.schedule, stage=rank, p=pp, m=_live(plan), v=len(chunks))
    held = [(float(count * layer_params(model, layer.tp)), layer) for layer, count in Counter(layers).items()]
    held += _ends(plan, model, chunks)
    has_head = any(chunk.head for chunk in chunks)
    tokens = model.seq * plan.micro_batch / plan.mesh.cp
    return StageMemory(
        params=sum(params * costs.param * _shares(layer, plan.mesh)[0] for params, layer in held),
        grads=sum(params * costs.grad * _shares(layer, plan.mesh)[1] for params, layer in held),
        optimizer=sum(params * costs.optimizer * _shares(layer, plan.mesh)[2] for params, layer in held),
        activations=sum(
            count
            * activation_bytes_per_layer(model, layer, plan.micro_batch, plan.dtype.param)
            * in_flight
            / plan.mesh.cp
            for layer, count in Counter(layers).items()
        ),
        logits=tokens * model.vocab * logit_bytes(plan.dtype) / plan.head.tp if has_head else 0.0,
        buffers=_copies(plan, model, held),
    )


def _copies(plan: ParallelPlan, model: ModelShape, held: Sequence[tuple[float, Layer]]) -> float:
    """Bytes of weights in the format that computes, beside their shards or master copies.

    Under ZeRO 3 only the layers in use are whole; with a pipeline each stays whole from its backward pass to its next
    forward pass.
    """
    first = plan.layers[0]
    kept = sum(params for params, kind in held if _copied(kind, plan.mesh, plan.dtype))
    passing = first.zero == 3 and plan.mesh.pp == 1
    moving = UNSHARDED_LAYERS * layer_params(model, first.tp) if passing else 0
    return (kept + moving) * NUMBER_BYTES[plan.dtype.param]


def _copied(layer: Layer, mesh: Mesh, dtype: Dtype) -> bool:
    mixed = dtype.param != dtype.master
    return layer.zero == 2 or (layer.zero < 2 and mixed) or (layer.zero == 3 and mesh.pp > 1)


def _ends(plan: ParallelPlan, model: ModelShape, chunks: tuple[Stage, ...]) -> list[tuple[float, Layer]]:
    """Parameters of the embedding and of the head on this stage; a tied head on the same stage adds its norm alone."""
    held: list[tuple[float, Layer]] = []
    embed = any(chunk.embed for chunk in chunks)
    if embed:
        held.append((embed_params(model, plan.embed.tp), plan.embed))
    if any(chunk.head for chunk in chunks):
        rows = model.vocab * model.hidden // plan.head.tp if model.tied and embed else 0
        held.append((head_params(model, plan.head.tp) - rows, plan.embed))  # wrapped together, by one ZeRO stage
    return held


def _live(plan: ParallelPlan) -> int:
    """Micro-batches whose activations can be alive at once; without a pipeline each is finished before the next."""
    return plan.micro_batches if plan.mesh.pp > 1 else 1


def _shares(layer: Layer, mesh: Mesh) -> tuple[float, float, float]:
    """Which part of parameters, gradients and optimizer of a layer is on the device of one rank.

    The stages of a pipeline scatter their gradients with the last micro-batch only. What is offloaded is on the host.
    """
    shards = mesh.dp_shard * mesh.cp if layer.zero >= 2 else mesh.dp * mesh.cp
    if layer.offload.startswith("all"):
        return (0.0, 0.0, 0.0)
    return (
        1 / shards if layer.zero >= 2 else 1.0,
        1 / shards if layer.zero >= 2 and mesh.pp == 1 else 1.0,
        0.0 if layer.offload != "none" else 1 / shards if layer.zero >= 1 else 1.0,
    )


def host_bytes(plan: ParallelPlan, model: ModelShape) -> float:
    """Host bytes behind the fullest rank: all state that is offloaded, or moments with a copy of the weights.

    ZeRO-Offload (Ren et al. 2021) keeps both there: ``4 + 8`` bytes a parameter, over the data ranks with ZeRO 1.
    """
    kind, costs = plan.layers[0], state_bytes(plan.dtype)
    if kind.offload == "none":
        return 0.0
    shards = plan.mesh.dp * plan.mesh.cp if kind.zero else 1
    each = costs.total if kind.offload.startswith("all") else costs.param + costs.optimizer
    return held_params(plan, model) / shards * each


def held_params(plan: ParallelPlan, model: ModelShape) -> float:
    """Parameters of the fullest rank: its layers and one embedding."""
    per_layer = expand_layers(plan)
    each = {tp: layer_params(model, tp) for tp in {layer.tp for layer in plan.layers}}
    most = 0.0
    for rank in range(plan.mesh.pp):
        chunks = plan.stages[rank :: plan.mesh.pp]
        layers = [per_layer[i] for chunk in chunks for i in range(*chunk.layers)]
        held = sum(each[layer.tp] for layer in layers)
        if any(chunk.embed or chunk.head for chunk in chunks):
            held += head_params(model, plan.head.tp)
        most = max(most, float(held))
    return most
