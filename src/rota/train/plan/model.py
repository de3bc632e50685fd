"""ParallelPlan and the model it is for: the values, their canonical JSON, and the rules that a plan must keep.

All broken rules are reported at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from rota.spec import codec
from rota.spec.errors import BadInput
from rota.train.plan.hardware import Hardware, refuse_unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer as the planner sees it. ``ffn`` is the inner width of the MLP; ``gated`` = three MLP matrices.

    ``kv_heads`` < ``heads`` is grouped-query attention. ``tied`` shares the embedding with the head;
    ``positions`` adds a learned row for each of ``seq`` places. ``kept_mib`` is what the forward pass of a layer was
    measured to keep for one sequence without recompute; it takes the place of the formula.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    name: str = ""
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = True
    attention: Literal["flash", "plain"] = "flash"
    dropout: bool = False
    experts: int = 0
    top_k: int = 1
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    positions: bool = False
    kept_mib: float = 0.0

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Inner width of the MLP; four times hidden unless given."""
        return self.ffn or 4 * self.hidden

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def layer_params(model: ModelShape, tp: int = 1) -> int:
    """Parameters of one layer that one of ``tp`` tensor ranks holds, the experts and their router included.

    ``h`` hidden, ``k`` width of keys and values, ``f`` inner width, ``E`` experts, ``m`` matrices of an MLP. Split are
    column-parallel weights and biases and row-parallel weights: ``2 h^2 + 2 h k + h + 2 k`` of attention and
    ``E (m h f + (m - 1) f)`` of the MLPs. Whole on each rank are row-parallel biases, both norms and the router:
    ``h + E h + 4 h + h E`` (Shoeybi et al., "Megatron-LM", 2019, section 3).
    """
    kv_width = model.key_heads * model.head_dim
    matrices = 3 if model.gated else 2
    experts = max(model.experts, 1)
    split = model.hidden * model.hidden * 2 + 2 * model.hidden * kv_width + model.hidden + 2 * kv_width
    split += experts * (matrices * model.hidden * model.inner + (matrices - 1) * model.inner)
    whole = model.hidden + experts * model.hidden + 4 * model.hidden
    whole += model.hidden * model.experts
    return split // tp + whole


def embed_params(model: ModelShape, tp: int = 1) -> int:
    """The rows of the vocabulary that one of ``tp`` ranks holds, and those of the places."""
    return model.vocab * model.hidden // tp + (model.seq * model.hidden if model.positions else 0)


def head_params(model: ModelShape, tp: int = 1) -> int:
    """The last norm, and the rows of the vocabulary that one of ``tp`` ranks holds."""
    return model.vocab * model.hidden // tp + 2 * model.hidden


FORMAT_VERSION = 1

Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "zb", "zbv"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer_cpu", "all_cpu", "optimizer_nvme", "all_nvme"]
SyncMode = Literal["allreduce", "ps_sync", "ps_async", "ps_ssp", "local_sgd"]
Compression = Literal["none", "fp16", "bf16", "int8", "topk", "powersgd"]
Number = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of parallelism, outer to inner: ``pp, dp_replicate, dp_shard, cp, tp``; ``ep`` reuses dp_shard x cp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of ranks: the product of all axes but ``ep``."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers ``[first, last)`` of one pipeline stage; ``chunk`` > 0 for the further chunks of an interleaved one."""

    layers: tuple[int, int]
    chunk: int = 0
    embed: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """``count`` equal layers in a row: tensor degree, sequence parallel, ZeRO stage 0-3, recompute, offload.

    Nothing is refused here, as a search makes many: ``check`` and ``ParallelPlan.from_json`` name what is wrong.
    """

    count: int = 1
    tp: int = 1
    sp: bool = False
    zero: int = 0
    recompute: Recompute = "none"
    offload: Offload = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """How replicas agree. ``s`` bounds the clock lead (ps_ssp), ``H`` is the steps of local SGD, ``backup`` workers."""

    mode: SyncMode = "allreduce"
    hierarchical: bool = False
    compression: Compression = "none"
    s: int = 0
    H: int = 1
    backup: int = 0
    servers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """Number formats of parameters, of gradient reduction, and of the optimizer's master copy."""

    param: Number = "fp32"
    reduce: Number = "fp32"
    master: Number = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCadence:
    """How often state is kept: on disk every ``every_s`` seconds, in memory every ``memory_every`` steps."""

    every_s: float = 60.0
    memory_every: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GangShape:
    """What the scheduler must know of a plan.

    ``ranks_together`` consecutive ranks are one tensor-parallel group and must share a node; ``ranks_adjacent``, with
    context ranks, should, and must where the plan was priced so; ``servers`` further instances hold shards of a
    parameter server; ``memory_bytes`` is the predicted need of one rank, 0 when unknown.
    """

    world: int
    ranks_together: int
    ranks_adjacent: int
    servers: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How one model is parallelised; both the scheduler and the training code read it.

    The global batch in sequences is ``mesh.dp * micro_batch * micro_batches``. ``prediction`` and ``certificate`` come
    from the planner and do not count for ``id``.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    layers: tuple[Layer, ...]
    embed: Layer = Layer()
    head: Layer = Layer()
    schedule: Schedule = "none"
    micro_batch: int = 1
    micro_batches: int = 1
    sync: Sync = Sync()
    dtype: Dtype = Dtype()
    cp_kind: Literal["ring", "ulysses"] = "ring"
    backend: Literal["auto", "nccl", "gloo", "shm", "mpi", "fake"] = "auto"
    transport: str = "auto"
    checkpoint: CheckpointCadence = CheckpointCadence()
    prediction: dict[str, Any] | None = None
    certificate: dict[str, Any] | None = None
    rota_plan: int = FORMAT_VERSION

    @property
    def global_batch(self) -> int:
        """Sequences that one optimizer step sees."""
        return self.mesh.dp * self.micro_batch * self.micro_batches

    @property
    def id(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON without prediction and certificate."""
        bare = replace(self, prediction=None, certificate=None)
        return hashlib.sha256(codec.dumps(bare).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return codec.dumps(self)

    @staticmethod
    def from_json(text: str) -> ParallelPlan:
        """Inverse of ``to_json``; of the document of ``rota plan search`` its plan.

        Raises BadInput that names the field for malformed or unknown content, and for a search without a plan.
        """
        try:
            read: object = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadInput(f"plan: line {error.lineno}, column {error.colno}: {error.msg}") from error
        raw = cast("Any", read)
        if isinstance(read, dict) and "plan" in read and (raw := raw["plan"]) is None:
            raise BadInput("plan: the search found none", hint="see what would help: 'helps' of its document")
        _refuse_unknown_below(raw)
        if raw.get("rota_plan", FORMAT_VERSION) != FORMAT_VERSION:
            raise BadInput(f"plan.rota_plan: {raw['rota_plan']} is not {FORMAT_VERSION}, the format this version reads")
        try:
            return codec.from_json_value(ParallelPlan, raw)
        except (TypeError, ValueError) as error:
            raise BadInput(f"plan: {error}") from error

    def check(self, model: ModelShape, hardware: Hardware | None = None) -> tuple[Fault, ...]:
        """All faults of this plan for ``model``, on ``hardware`` when it is given; empty when it can be applied."""
        return check(self, model, hardware)

    def gang(self) -> GangShape:
        """The shape of the gang this plan needs."""
        memory = (self.prediction or {}).get("memory_gib")
        return GangShape(
            world=self.mesh.world,
            ranks_together=self.mesh.tp,
            ranks_adjacent=self.mesh.tp * self.mesh.cp,
            servers=self.sync.servers,
            memory_bytes=int(memory * 2**30) if isinstance(memory, int | float) else 0,
        )


_NESTED: dict[str, type] = {
    "mesh": Mesh,
    "stages": Stage,
    "layers": Layer,
    "embed": Layer,
    "head": Layer,
    "sync": Sync,
    "dtype": Dtype,
    "checkpoint": CheckpointCadence,
}


def _refuse_unknown_below(raw: object) -> None:
    for key, value in refuse_unknown(ParallelPlan, raw, "plan").items():
        if (inner := _NESTED.get(key)) is None:
            continue
        if key not in ("stages", "layers"):
            refuse_unknown(inner, value, f"plan.{key}")
        elif not isinstance(value, list):
            raise BadInput(f"plan.{key}: expected a list, got {type(value).__name__}")
        else:
            for index, item in enumerate(cast("list[object]", value)):
                refuse_unknown(inner, item, f"plan.{key}[{index}]")


def data_parallel(*, layers: int, dp: int, micro_batch: int = 1, micro_batches: int = 1, zero: int = 0) -> ParallelPlan:
    """The plainest plan: every rank has the whole model (``zero`` 0) or a shard of it (1 to 3)."""
    mesh = Mesh(dp_replicate=dp) if zero < 2 else Mesh(dp_shard=dp)
    return ParallelPlan(
        mesh=mesh,
        stages=(Stage(layers=(0, layers), embed=True, head=True),),
        layers=(Layer(count=layers, zero=zero),),
        embed=Layer(zero=zero),
        head=Layer(zero=zero),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
    )


_PS_MODES = ("ps_sync", "ps_async", "ps_ssp")


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule: the field, its value, the rule with its numbers, and the next step."""

    field: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value}: {self.rule}; {self.remedy}"


def check(plan: ParallelPlan, model: ModelShape, hardware: Hardware | None = None) -> tuple[Fault, ...]:
    """All faults of ``plan`` for ``model``, on ``hardware`` when it is given; empty when it can be applied."""
    return (
        *_positive(plan),
        *_experts(plan, model),
        *_stages(plan, model),
        *_schedule(plan),
        *_layers(plan, model),
        *(fault for name, kind in _kinds(plan) for fault in (*_zero(plan, name, kind), *_offload(plan, name, kind))),
        *_tensor(plan, model, hardware),
        *_sequence(plan, model),
        *_sync(plan),
        *_servers(plan),
        *_numbers(plan),
    )


def _kinds(plan: ParallelPlan) -> list[tuple[str, Layer]]:
    """What the plan says of each run of layers and of the ends, by field."""
    runs = [(f"layers[{index}]", layer) for index, layer in enumerate(plan.layers)]
    return [*runs, ("embed", plan.embed), ("head", plan.head)]


def _positive(plan: ParallelPlan) -> Iterator[Fault]:
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        if (size := getattr(plan.mesh, axis)) < 1:
            yield Fault(f"mesh.{axis}", size, "a degree is at least 1", "use 1 to turn it off")
    for name in ("micro_batch", "micro_batches"):
        if (size := getattr(plan, name)) < 1:
            yield Fault(name, size, "is at least 1", "use 1")
    for index, layer in enumerate(plan.layers):
        if layer.count < 1:
            yield Fault(f"layers[{index}].count", layer.count, "a run has at least 1 layer", "leave the run out")


def _experts(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    mesh = plan.mesh
    if mesh.ep > 1 and (mesh.dp_shard * mesh.cp) % mesh.ep:
        product = f"dp_shard {mesh.dp_shard} x cp {mesh.cp} = {mesh.dp_shard * mesh.cp}"
        yield Fault("mesh.ep", mesh.ep, f"{product} does not divide by ep {mesh.ep}", "choose ep among the divisors")
    if mesh.ep > 1 and (not model.experts or model.experts % mesh.ep):
        rule = f"{model.experts} experts do not divide by ep {mesh.ep}"
        yield Fault("mesh.ep", mesh.ep, rule, "choose ep among the divisors of the experts, 1 without experts")


def _stages(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    expected, end = 0, len(plan.stages) - 1
    for index, stage in enumerate(plan.stages):
        first, last = stage.layers
        if first != expected or last < first:
            rule = f"stages cover every layer once in order, so this one begins at {expected}"
            yield Fault(f"stages[{index}].layers", f"[{first}, {last})", rule, "close the gap or the overlap")
        expected = max(expected, last)
        if plan.mesh.pp > 1 and (stage.embed, stage.head) != (index == 0, index == end):
            held = f"embed {stage.embed}, head {stage.head}"
            yield Fault(f"stages[{index}]", held, "the first stage has the embedding, the last the head", "set these")
    if expected != model.layers:
        rule = f"the model has {model.layers} layers"
        yield Fault("stages", f"end at layer {expected}", rule, "extend or shorten the last stage")


def _schedule(plan: ParallelPlan) -> Iterator[Fault]:
    pp, count = plan.mesh.pp, len(plan.stages)
    many = plan.schedule == "interleaved"
    wanted = 2 * pp if plan.schedule == "zbv" and pp > 1 else pp
    if pp < 1 or (count % pp if many else count != wanted) or not count:
        rule = f"pp is {pp}: one stage a pipeline rank, a multiple of it when interleaved, two when zbv"
        yield Fault("stages", f"{count} stages", rule, f"cut the model into {wanted} stages")
    if pp > 1 and plan.schedule == "none":
        yield Fault("schedule", "none", f"pp is {pp}", "use gpipe, 1f1b or interleaved")
    if plan.schedule == "1f1b" and plan.micro_batches < pp:
        rule = f"1f1b needs a micro-batch for each stage; got {plan.micro_batches} for pp {pp}"
        yield Fault("micro_batches", plan.micro_batches, rule, f"use {pp} or more, or schedule gpipe")
    if many and pp >= 1 and plan.micro_batches % pp:
        rule = f"interleaved needs micro_batches {plan.micro_batches} % pp {pp} == 0"
        yield Fault("micro_batches", plan.micro_batches, rule, f"use a multiple of {pp}")


def _layers(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    counted = sum(layer.count for layer in plan.layers)
    if counted != model.layers:
        rule = f"the counts of the runs add up to {counted}, the model has {model.layers} layers"
        yield Fault("layers", f"{counted} layers", rule, "correct the counts")


def _zero(plan: ParallelPlan, name: str, kind: Layer) -> Iterator[Fault]:
    if kind.zero not in (0, 1, 2, 3):
        yield Fault(f"{name}.zero", kind.zero, "ZeRO has stages 0 to 3", "0..3")
    if kind.zero >= 2 and plan.mesh.dp_shard == 1 and plan.mesh.dp_replicate > 1:
        rule, remedy = "stages 2 and 3 shard over dp_shard, which is 1", "move the degree from dp_replicate to dp_shard"
        yield Fault(f"{name}.zero", kind.zero, rule, remedy)


def _offload(plan: ParallelPlan, name: str, kind: Layer) -> Iterator[Fault]:
    """State is stepped on the host as whole weights or as shards of ZeRO; weights in files are not there yet."""
    rule = remedy = ""
    if kind.offload == "all_nvme":
        rule, remedy = "weights in files are not there yet", "use optimizer_nvme or all_cpu"
    elif kind.offload == "all_cpu" and kind.zero < 2:
        rule, remedy = f"needs ZeRO 2 or 3; got zero {kind.zero}", "use optimizer_cpu, or zero 2 or 3"
    elif kind.offload == "optimizer_cpu" and (kind.zero >= 2 or kind.tp > 1 or plan.mesh.ep > 1):
        rule = f"needs zero 0 or 1 and tp = ep = 1; got zero {kind.zero}, tp {kind.tp}, ep {plan.mesh.ep}"
        remedy = "use all_cpu with zero 2 or 3"
    if rule:
        yield Fault(f"{name}.offload", kind.offload, rule, remedy)


def _tensor(plan: ParallelPlan, model: ModelShape, hardware: Hardware | None) -> Iterator[Fault]:
    if (tp := plan.mesh.tp) < 1:
        return
    for name, size in (("heads", model.heads), ("kv_heads", model.key_heads), ("ffn", model.inner)):
        if size % tp:
            rule = f"{name} {size} does not divide by tp {tp}"
            yield Fault("mesh.tp", tp, rule, f"choose tp among the divisors of {size}")
    if hardware is not None and (near := hardware.levels[0].size) and tp > near:
        level = f"a {hardware.levels[0].name} of {hardware.name}"
        rule = f"tensor ranks talk in every layer, and {level} has {near} devices"
        yield Fault("mesh.tp", tp, rule, f"use {near} at most")
    for name, kind in _kinds(plan):
        if kind.tp not in (1, tp):
            rule = f"a stage has one tensor degree, and the mesh has tp {tp}"
            yield Fault(f"{name}.tp", kind.tp, rule, f"use {tp}, or 1 to replicate the layer")
        if kind.sp and kind.tp == 1:
            rule = "sequence parallelism splits over the tensor axis, which is 1 here"
            yield Fault(f"{name}.sp", "true", rule, "set tp, or turn sp off")
        elif kind.sp and model.seq % tp:
            rule = f"seq {model.seq} does not divide by tp {tp}"
            yield Fault(f"{name}.sp", "true", rule, "turn sp off, or choose another tp")


def _sequence(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    cp, tp = plan.mesh.cp, plan.mesh.tp
    if cp > 1 and plan.cp_kind == "ring" and model.seq % (2 * cp):
        rule = f"ring attention needs seq {model.seq} % (2 x cp {cp}) == 0"
        yield Fault("mesh.cp", cp, rule, "choose another cp or sequence length")
    if cp > 1 and plan.cp_kind == "ulysses" and model.heads % (tp * cp):
        rule = f"ulysses needs heads {model.heads} % (tp {tp} x cp {cp}) == 0"
        yield Fault("mesh.cp", cp, rule, "choose another cp, or cp_kind ring")


def _sync(plan: ParallelPlan) -> Iterator[Fault]:
    sync, mesh, zero = plan.sync, plan.mesh, max((kind.zero for _, kind in _kinds(plan)), default=0)
    if sync.mode in (*_PS_MODES, "local_sgd") and (mesh.pp, mesh.tp, mesh.cp, zero) != (1, 1, 1, 0):
        got = f"pp {mesh.pp}, tp {mesh.tp}, cp {mesh.cp}, zero {zero}"
        rule = f"{sync.mode} needs pp = tp = cp = 1 and zero 0; got {got}"
        yield Fault("sync.mode", sync.mode, rule, "use mode allreduce, or turn the other axes off")
    if sync.compression not in ("none", "fp16", "bf16") and zero > 1:
        rule = f"compression other than fp16 and bf16 needs zero 0 or 1; got {zero}"
        yield Fault("sync.compression", sync.compression, rule, "use fp16, or a lower ZeRO stage")
    if sync.mode == "local_sgd" and sync.H < 1:
        yield Fault("sync.H", sync.H, "local SGD takes at least 1 local step", "use 1 or more")
    chosen = [f"mode {sync.mode}"] if sync.mode != "allreduce" else []
    chosen += [f"compression {sync.compression}"] if sync.compression != "none" else []
    chosen += ["hierarchical"] if sync.hierarchical else []
    if len(chosen) > 1:
        rule = f"replicas agree in one way; got {', '.join(chosen)}"
        yield Fault("sync", " and ".join(chosen), rule, f"leave all but {chosen[0]} out")


def _servers(plan: ParallelPlan) -> Iterator[Fault]:
    sync, dp = plan.sync, plan.mesh.dp
    if sync.mode in _PS_MODES and sync.servers < 1:
        yield Fault("sync.servers", sync.servers, f"{sync.mode} needs a server", "use 1 or more")
    if sync.backup and (sync.mode != "ps_sync" or not 0 < sync.backup < dp):
        rule = f"backup workers are some of the {dp} of mode ps_sync; got mode {sync.mode}"
        yield Fault("sync.backup", sync.backup, rule, f"use mode ps_sync and at most {max(dp - 1, 0)}, or 0")
    if sync.s < 0:
        yield Fault("sync.s", sync.s, "a lead is 0 or more", "use 0 for lock step")


def _numbers(plan: ParallelPlan) -> Iterator[Fault]:
    """Uses of fp16 in which small numbers are lost whatever the scale of the loss is."""
    dtype, sync = plan.dtype, plan.sync
    if dtype.master == "fp16":
        rule = "steps below 1/2048 of a weight are lost in it"
        yield Fault("dtype.master", "fp16", rule, "use fp32, or bf16 where parameters are bf16, too")
    if "fp16" in (dtype.param, dtype.reduce) and (sync.mode != "allreduce" or sync.compression != "none"):
        rule = (
            f"gradients have a scale that changes, which mode {sync.mode} with compression {sync.compression} adds up"
        )
        yield Fault("dtype", f"param {dtype.param}, reduce {dtype.reduce}", rule, "use bf16")
