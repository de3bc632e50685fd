"""ParallelPlan: the value, its rules, its canonical JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from rota.spec import codec
from rota.spec.check import nearest
from rota.spec.errors import BadInput
from rota.train.plan.layers import ModelShape
from rota.train.plan.rules import Fault, check

if TYPE_CHECKING:
    from rota.train.plan.hardware import Hardware

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
    """``count`` equal layers in a row: tensor degree, sequence parallel, ZeRO stage 0-3, recompute, offload."""

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
class Cadence:
    """How often state is kept: on disk every ``every_s`` seconds, in memory every ``memory_every`` steps."""

    every_s: float = 60.0
    memory_every: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GangShape:
    """What the scheduler must know of a plan.

    ``ranks_together`` consecutive ranks are one tensor-parallel group and must share a node; ``ranks_adjacent``, with
    context ranks, should; ``servers`` further instances hold shards of a parameter server; ``memory_bytes`` is the
    predicted need of one rank, 0 when unknown.
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
    checkpoint: Cadence = Cadence()
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
        """Inverse of ``to_json``. Raises BadInput that names the field for malformed or unknown content."""
        try:
            raw: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadInput(f"plan: line {error.lineno}, column {error.colno}: {error.msg}") from error
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
    "checkpoint": Cadence,
}


def refuse_unknown(cls: type, raw: Any, where: str) -> dict[str, Any]:
    """The fields of an object of a file. Raises BadInput when it is none, or has one that ``cls`` does not."""
    if not isinstance(raw, Mapping):
        raise BadInput(f"{where}: expected an object, got {type(raw).__name__}")
    pairs, known = dict(cast("Mapping[str, Any]", raw)), [field.name for field in fields(cls)]
    for key in pairs:
        if key not in known:
            raise BadInput(f"{where}.{key}: unknown field", hint=nearest(key, known))
    return pairs


def _refuse_unknown_below(raw: Any) -> None:
    for key, value in refuse_unknown(ParallelPlan, raw, "plan").items():
        if (inner := _NESTED.get(key)) is None:
            continue
        if key not in ("stages", "layers"):
            refuse_unknown(inner, value, f"plan.{key}")
        elif not isinstance(value, list):
            raise BadInput(f"plan.{key}: expected a list, got {type(value).__name__}")
        else:
            for index, item in enumerate(cast("list[Any]", value)):
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
