"""Published tables as plans: what each row measured, and what the cost model predicts for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rota.spec.errors import BadInput
from rota.train.plan.cost import StepTime, step_time
from rota.train.plan.hardware import A100_80G_DGX, Hardware
from rota.train.plan.memory import GIB, activation_bytes_per_layer, layers_in_flight
from rota.train.plan.model import Dtype, Layer, Mesh, ModelShape, ParallelPlan, Recompute, Stage

Row = Mapping[str, Any]
Predicted = Mapping[str, float]

SEQ, VOCAB = 2048, 51200
"""Sequence length and vocabulary where a row is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A published model with the parallel setting it was measured under."""

    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    interleave: int
    micro_batch: int

    @property
    def model(self) -> ModelShape:
        """The model, with the sequence length and vocabulary of the paper."""
        return gpt(self.layers, self.hidden, self.heads)


def gpt(layers: int, hidden: int, heads: int, seq: int = SEQ) -> ModelShape:
    """A GPT as Megatron-LM trains it: attention that writes its scores."""
    return ModelShape(layers=layers, hidden=hidden, heads=heads, seq=seq, vocab=VOCAB, attention="plain")


SHAPES: dict[str, Shape] = {
    "22B": Shape(layers=48, hidden=6144, heads=64, tp=8, pp=1, interleave=1, micro_batch=4),
    "175B": Shape(layers=96, hidden=12288, heads=96, tp=8, pp=8, interleave=3, micro_batch=1),
    "530B": Shape(layers=105, hidden=20480, heads=128, tp=8, pp=35, interleave=3, micro_batch=1),
    "1T": Shape(layers=128, hidden=25600, heads=160, tp=8, pp=64, interleave=1, micro_batch=1),
}
"""Korthikanti et al. (2022), Table 3."""

PARAMS_OPT_BYTES = 18
"""Bytes a parameter in Fig. 1: bf16 parameter and fp32 main gradient, fp32 master and two moments (2 + 4 + 12)."""


def number(row: Row, name: str) -> int:
    """A whole number of a row. Raises BadInput that names the field."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise BadInput(f"{name}: {value!r} in a row, expected a whole number of at least 1")
    return int(value)


def _shape(row: Row) -> Shape:
    name = row.get("model")
    if name not in SHAPES:
        raise BadInput(f"model: {name!r} is unknown", hint=f"one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _activations(shape: Shape, layer: Layer) -> float:
    """Bytes of the first stage at its peak over all its layers."""
    schedule = "interleaved" if shape.interleave > 1 else "1f1b"
    in_flight = layers_in_flight(schedule, stage=0, p=shape.pp, m=10**6, v=shape.interleave)
    per_layer = activation_bytes_per_layer(shape.model, layer, shape.micro_batch)
    return per_layer * in_flight * shape.layers / shape.pp


def fig1(row: Row) -> Predicted:
    """GiB a device: parameters with optimizer, activations without and with sequence parallel + selective recompute."""
    shape = _shape(row)
    params_opt = PARAMS_OPT_BYTES * 12 * shape.layers * shape.hidden**2 / (shape.tp * shape.pp)
    selective = Layer(tp=shape.tp, sp=True, recompute="selective")
    return {
        "params_opt": params_opt / GIB,
        "act_none": _activations(shape, Layer(tp=shape.tp)) / GIB,
        "act_seqsel": _activations(shape, selective) / GIB,
    }


def fig7(row: Row) -> Predicted:
    """Activation memory in percent of plain tensor parallelism."""
    shape = _shape(row)
    tp = shape.tp
    base = _activations(shape, Layer(tp=tp))
    kinds = {
        "seq": Layer(tp=tp, sp=True),
        "sel": Layer(tp=tp, recompute="selective"),
        "seqsel": Layer(tp=tp, sp=True, recompute="selective"),
        "full": Layer(tp=tp, recompute="full"),
    }
    return {name: 100 * _activations(shape, layer) / base for name, layer in kinds.items()}


RECOMPUTE: dict[str, Recompute] = {"full": "full", "attn_only": "selective", "selective": "selective", "none": "none"}


def even_plan(
    *, layers: int, tp: int, pp: int, dp: int, micro_batch: int, global_batch: int, interleave: int, layer: Layer
) -> ParallelPlan:
    """Equal layers cut evenly into ``pp * interleave`` chunks, mixed precision with fp32 main gradients."""
    pieces = pp * interleave
    cuts = [round(i * layers / pieces) for i in range(pieces + 1)]
    stages = tuple(
        Stage(layers=(cuts[i], cuts[i + 1]), chunk=i // pp, embed=i == 0, head=i == pieces - 1) for i in range(pieces)
    )
    micro_batches, rest = divmod(global_batch, dp * micro_batch)
    if rest:
        raise BadInput(f"global_batch: {global_batch} does not divide by dp {dp} x micro_batch {micro_batch}")
    return ParallelPlan(
        mesh=Mesh(pp=pp, dp_replicate=1 if layer.zero > 1 else dp, dp_shard=dp if layer.zero > 1 else 1, tp=tp),
        stages=stages,
        layers=(replace(layer, count=layers),),
        embed=replace(layer, count=1, recompute="none"),
        head=replace(layer, count=1, recompute="none"),
        schedule="none" if pp == 1 else "interleaved" if interleave > 1 else "1f1b",
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        dtype=Dtype(param="bf16", reduce="fp32", master="fp32"),
    )


def table5(row: Row, hardware: Hardware) -> StepTime:
    """One iteration of Korthikanti et al., Table 5."""
    if row.get("recompute") not in RECOMPUTE:
        raise BadInput(f"recompute: {row.get('recompute')!r} in a row", hint=f"one of {', '.join(RECOMPUTE)}")
    tp, sp = number(row, "tp"), bool(row.get("sequence_parallel"))
    layer = Layer(tp=tp, sp=sp, recompute=RECOMPUTE[row["recompute"]])
    return step_time(_plan_of(row, layer, number(row, "interleave")), _model_of(row), hardware)


def _plan_of(row: Row, layer: Layer, interleave: int) -> ParallelPlan:
    sizes = {name: number(row, name) for name in ("layers", "tp", "pp", "dp", "micro_batch", "global_batch")}
    return even_plan(**sizes, interleave=interleave, layer=layer)


def _model_of(row: Row) -> ModelShape:
    return gpt(number(row, "layers"), number(row, "hidden"), number(row, "heads"), number(row, "seq"))


def _fastest(model: ModelShape, tp: int, pp: int, dp: int, batch: int, hardware: Hardware) -> StepTime:
    """The best micro-batch and interleaving that divide evenly, for rows that do not say which were used."""
    plans = list(_settings(model.layers, tp, pp, dp, batch))
    if not plans:
        raise BadInput(f"global_batch: {batch} does not divide over {dp} replicas with a micro-batch of 1, 2, 4 or 8")
    return min((step_time(plan, model, hardware) for plan in plans), key=lambda step: step.total_s)


def _settings(layers: int, tp: int, pp: int, dp: int, batch: int) -> Iterator[ParallelPlan]:
    for micro_batch, interleave in itertools.product((1, 2, 4, 8), range(1, 7)):
        micro_batches, rest = divmod(batch, dp * micro_batch)
        if rest or layers % (pp * interleave) or (interleave > 1 and (pp == 1 or micro_batches % pp)):
            continue
        yield even_plan(
            layers=layers,
            tp=tp,
            pp=pp,
            dp=dp,
            micro_batch=micro_batch,
            global_batch=batch,
            interleave=interleave,
            layer=Layer(tp=tp, recompute="full"),
        )


def sc21_table1(row: Row, hardware: Hardware) -> StepTime:
    """Narayanan et al., SC21, Table 1: full recompute; micro-batch and interleaving are not in the table."""
    tp, pp = number(row, "tp"), number(row, "pp")
    model = gpt(number(row, "layers"), number(row, "hidden"), number(row, "heads"))
    return _fastest(model, tp, pp, number(row, "gpus") // (tp * pp), number(row, "global_batch"), hardware)


SC21_SHAPES = {174.6: (SHAPES["175B"], 96), 529.6: (SHAPES["530B"], 280)}
"""Billions of parameters in SC21, Table 2, to the model and the ranks that share one copy of it under PTD-P."""


def _sc21_shape(row: Row) -> tuple[Shape, int]:
    found = SC21_SHAPES.get(row.get("params_B", 0))
    if found is None:
        known = ", ".join(str(size) for size in SC21_SHAPES)
        raise BadInput(f"params_B: {row.get('params_B')!r} is unknown", hint=f"one of {known}")
    return found


def sc21_table2(row: Row, hardware: Hardware) -> StepTime:
    """SC21, Table 2: ZeRO stage 3 alone against tensor and pipeline parallel together.

    The ZeRO rows are DeepSpeed's of 2021. Their steps at 768 and 1536 devices take the same 67 s: what is sent binds,
    and 8 bytes a parameter in 67 s are what one adapter carries. With twice the arithmetic, at 384 devices, a step
    takes 15 s longer, though all of it is shorter than what is sent: only half of that hides behind it. So their
    network is flat, one adapter a device, parameters are gathered ahead of their use, and gradients overlap nothing.
    """
    shape, _ = _sc21_shape(row)
    gpus, batch, ranks = number(row, "gpus"), number(row, "global_batch"), number(row, "model_parallel")
    if ranks > 1:
        return _fastest(shape.model, shape.tp, ranks // shape.tp, gpus // ranks, batch, hardware)
    plan = even_plan(
        layers=shape.layers,
        tp=1,
        pp=1,
        dp=gpus,
        micro_batch=number(row, "micro_batch"),
        global_batch=batch,
        interleave=1,
        layer=Layer(zero=3, recompute="full"),
    )
    flat = replace(hardware, levels=hardware.levels[-1:], overlap=replace(hardware.overlap, dp=0.0, gather=1.0))
    return step_time(plan, shape.model, flat)


def tflops(row: Row, seconds: float) -> float:
    """Model TFLOP/s a device of an iteration that recomputes all (SC21, equation 3); its own inverse."""
    if "layers" in row:
        layers, hidden = number(row, "layers"), number(row, "hidden")
    else:
        layers, hidden = _sc21_shape(row)[0].layers, _sc21_shape(row)[0].hidden
    shares = 1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden)
    flops = 96 * number(row, "global_batch") * SEQ * layers * hidden**2 * shares
    return flops / seconds / number(row, "gpus") / 1e12


A100_VTRAIN = replace(
    A100_80G_DGX,
    name="a100-800gb-node",
    provenance=A100_80G_DGX.provenance + "; 800 Gb/s of adapters a node of 8 devices, of which rings reach 80 %",
    levels=(A100_80G_DGX.levels[0], replace(A100_80G_DGX.levels[1], gb_s=10.0)),
)


def vtrain(row: Row, hardware: Hardware) -> StepTime:
    """One iteration of Megatron-DeepSpeed as Bang et al., vTrain (2024) measured it: full recompute, 1F1B, fp16 with
    gradients reduced in fp16."""
    plan = _plan_of(row, Layer(tp=number(row, "tp"), recompute="full"), interleave=1)
    return step_time(replace(plan, dtype=Dtype(param="fp16", reduce="fp16", master="fp32")), _model_of(row), hardware)


def milliseconds(row: Row, seconds: float) -> float:
    """Seconds as milliseconds."""
    del row
    return 1000 * seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """A table of measured steps: its quantity, the step of a row, and seconds as that quantity.

    ``value`` is either linear in the seconds or their inverse (``rate``). ``peers`` are the errors and regrets in
    percent that other cost models have on the whole of the table.
    """

    quantity: str
    step: Callable[[Row, Hardware], StepTime]
    value: Callable[[Row, float], float]
    rate: bool = False
    hardware: Hardware = A100_80G_DGX
    peers: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    def seconds(self, row: Row, value: float) -> float:
        """Inverse of ``value``."""
        one = self.value(row, 1.0)
        return one / value if self.rate else value / one


MEMORY_TABLES: dict[str, Callable[[Row], Predicted]] = {"megatron_seqpar_fig1": fig1, "megatron_seqpar_fig7": fig7}
TIME_TABLES: dict[str, TimeTable] = {
    "megatron_seqpar_table5": TimeTable(
        quantity="iteration_s",
        step=table5,
        value=lambda row, seconds: seconds,
        peers={"Calculon": {"mean_pct": 3.65, "max_pct": 8.87}},
    ),
    "megatron_sc21_table1": TimeTable(quantity="tflops_per_gpu", step=sc21_table1, value=tflops, rate=True),
    "megatron_sc21_table2": TimeTable(quantity="tflops_per_gpu", step=sc21_table2, value=tflops, rate=True),
    "vtrain_ground_truth_single": TimeTable(
        quantity="iteration_ms",
        step=vtrain,
        value=milliseconds,
        hardware=A100_VTRAIN,
        peers={
            "vTrain": {"mean_pct": 8.37},
            "Calculon": {"mean_pct": 38.95, "max_pct": 86.58, "regret_mean_pct": 10.18, "regret_max_pct": 53.47},
        },
    ),
    "vtrain_ground_truth_multi": TimeTable(
        quantity="iteration_ms",
        step=vtrain,
        value=milliseconds,
        hardware=A100_VTRAIN,
        peers={
            "vTrain": {"mean_pct": 14.73},
            "Calculon": {"mean_pct": 15.33, "max_pct": 70.22, "regret_mean_pct": 1.27, "regret_max_pct": 4.46},
        },
    ),
}
