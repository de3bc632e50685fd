"""Hold the cost model against published tables: predicted beside published, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rota.spec.errors import BadInput
from rota.train.plan.cost import step_time
from rota.train.plan.hardware import A100_80G_DGX
from rota.train.plan.layers import ModelShape
from rota.train.plan.memory import GIB, activation_bytes_per_layer, layers_in_flight
from rota.train.plan.model import Dtype, Layer, Mesh, ParallelPlan, Recompute, Stage


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
        return ModelShape(
            layers=self.layers, hidden=self.hidden, heads=self.heads, seq=2048, vocab=51200, attention="plain"
        )


SHAPES: dict[str, Shape] = {
    "22B": Shape(layers=48, hidden=6144, heads=64, tp=8, pp=1, interleave=1, micro_batch=4),
    "175B": Shape(layers=96, hidden=12288, heads=96, tp=8, pp=8, interleave=3, micro_batch=1),
    "530B": Shape(layers=105, hidden=20480, heads=128, tp=8, pp=35, interleave=3, micro_batch=1),
    "1T": Shape(layers=128, hidden=25600, heads=160, tp=8, pp=64, interleave=1, micro_batch=1),
}
"""Korthikanti et al. (2022), Table 3."""

PARAMS_OPT_BYTES = 18
"""Bytes a parameter in Fig. 1: bf16 parameter and fp32 main gradient, fp32 master and two moments (2 + 4 + 12)."""

Row = Mapping[str, Any]
Predicted = Mapping[str, float]


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


def predict_fig1(row: Row) -> Predicted:
    """GiB a device: parameters with optimizer, activations without and with sequence parallel + selective recompute."""
    shape = _shape(row)
    params_opt = PARAMS_OPT_BYTES * 12 * shape.layers * shape.hidden**2 / (shape.tp * shape.pp)
    selective = Layer(tp=shape.tp, sp=True, recompute="selective")
    return {
        "params_opt": params_opt / GIB,
        "act_none": _activations(shape, Layer(tp=shape.tp)) / GIB,
        "act_seqsel": _activations(shape, selective) / GIB,
    }


def predict_fig7(row: Row) -> Predicted:
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
    schedule = "none" if pp == 1 else "interleaved" if interleave > 1 else "1f1b"
    return ParallelPlan(
        mesh=Mesh(pp=pp, dp_replicate=dp, tp=tp),
        stages=stages,
        layers=(replace(layer, count=layers),),
        embed=Layer(tp=tp),
        head=Layer(tp=tp),
        schedule=schedule,
        micro_batch=micro_batch,
        micro_batches=global_batch // (dp * micro_batch),
        dtype=Dtype(param="bf16", reduce="fp32", master="fp32"),
    )


def predict_table5(row: Row) -> Predicted:
    """Seconds of one iteration (Korthikanti et al., Table 5)."""
    tp = int(row["tp"])
    layer = Layer(tp=tp, sp=bool(row["sequence_parallel"]), recompute=RECOMPUTE[row["recompute"]])
    model = ModelShape(
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        seq=int(row["seq"]),
        vocab=51200,
        attention="plain",
    )
    plan = even_plan(
        layers=model.layers,
        tp=tp,
        pp=int(row["pp"]),
        dp=int(row["dp"]),
        micro_batch=int(row["micro_batch"]),
        global_batch=int(row["global_batch"]),
        interleave=int(row["interleave"]),
        layer=layer,
    )
    return {"iteration_s": step_time(plan, model, A100_80G_DGX).total_s}


def _settings(layers: int, tp: int, pp: int, dp: int, batch: int) -> Iterator[ParallelPlan]:
    """Micro-batch sizes and interleavings that divide evenly: the table does not say which were used."""
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


def predict_sc21_table1(row: Row) -> Predicted:
    """Model TFLOP/s a device (Narayanan et al., SC21, Table 1): best micro-batch and interleaving, full recompute."""
    seq, vocab = 2048, 51200
    layers, h, tp, pp = int(row["layers"]), int(row["hidden"]), int(row["tp"]), int(row["pp"])
    batch, gpus = int(row["global_batch"]), int(row["gpus"])
    dp = gpus // (tp * pp)
    model = ModelShape(layers=layers, hidden=h, heads=int(row["heads"]), seq=seq, vocab=vocab, attention="plain")
    best_s = min(step_time(plan, model, A100_80G_DGX).total_s for plan in _settings(layers, tp, pp, dp, batch))
    flops = 96 * batch * seq * layers * h**2 * (1 + seq / (6 * h) + vocab / (16 * layers * h))
    return {"tflops_per_gpu": flops / best_s / gpus / 1e12}


PREDICTORS: dict[str, Callable[[Row], Predicted]] = {
    "megatron_seqpar_fig1": predict_fig1,
    "megatron_seqpar_fig7": predict_fig7,
    "megatron_seqpar_table5": predict_table5,
    "megatron_sc21_table1": predict_sc21_table1,
}


def validate(tables: Sequence[Mapping[str, Any]], table_id: str) -> dict[str, Any]:
    """Predict every row of a table; signed errors in percent, in input order.

    Rows marked ``verified: false`` are shown but not counted. Raises BadInput for an unknown table, a table without
    rows, or a row that lacks a field; the message names the known ones.
    """
    predictor = PREDICTORS.get(table_id)
    if predictor is None:
        raise BadInput(f"table: {table_id!r} is unknown", hint=f"known: {', '.join(sorted(PREDICTORS))}")
    table = next((one for one in tables if one.get("id") == table_id), None)
    if table is None or not table.get("rows"):
        raise BadInput(f"table: no rows of {table_id!r} in this file")
    rows = [out for index, row in enumerate(_dicts(table)) for out in _rows(index, row, predictor)]
    counted = [abs(row["error_pct"]) for row in rows if row["counted"]]
    return {
        "api": "rota/v1",
        "kind": "PlanValidation",
        "table": table_id,
        "rows": rows,
        "mean_pct": sum(counted) / len(counted) if counted else None,
        "max_pct": max(counted, default=None),
        "by_quantity": _by_quantity(rows),
        "regret": None,
        "hardware": None,
        "calibration": None,
    }


def _dicts(table: Mapping[str, Any]) -> list[Row]:
    columns = table.get("columns")
    return [dict(zip(columns, row, strict=True)) if columns else row for row in table["rows"]]


def _rows(index: int, row: Row, predictor: Callable[[Row], Predicted]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for quantity, predicted in predictor(row).items():
        published = row.get(quantity)
        if not isinstance(published, int | float):
            raise BadInput(f"rows[{index}].{quantity}: missing, so there is nothing to compare with")
        made.append(
            {
                "row": index,
                "quantity": quantity,
                "published": published,
                "predicted": predicted,
                "error_pct": 100 * (predicted - published) / published,
                "counted": bool(row.get("verified", True)),
            }
        )
    return made


def _by_quantity(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["counted"]:
            found.setdefault(row["quantity"], []).append(abs(row["error_pct"]))
    return {name: {"mean_pct": sum(errors) / len(errors), "max_pct": max(errors)} for name, errors in found.items()}
