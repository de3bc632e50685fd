"""The rules of a plan: every fault at once, each with its numbers and the next step."""

from __future__ import annotations

from collections.abc import Iterator

from rota.train.plan.layers import ModelShape
from rota.train.plan.model import Fault, Layer, ParallelPlan

_PS_MODES = ("ps_sync", "ps_async", "ps_ssp")


def check(plan: ParallelPlan, model: ModelShape) -> tuple[Fault, ...]:
    """All faults of ``plan`` for ``model``; empty when it can be applied."""
    return (
        *_positive(plan),
        *_stages(plan, model),
        *_layers(plan, model),
        *_offload(plan),
        *_tensor(plan, model),
        *_sequence(plan, model),
        *_sync(plan),
    )


def _positive(plan: ParallelPlan) -> Iterator[Fault]:
    mesh = plan.mesh
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        size = getattr(mesh, axis)
        if size < 1:
            yield Fault(
                field=f"mesh.{axis}", value=str(size), rule="a degree is at least 1", remedy="use 1 to turn it off"
            )
    for name in ("micro_batch", "micro_batches"):
        size = getattr(plan, name)
        if size < 1:
            yield Fault(field=name, value=str(size), rule="is at least 1", remedy="use 1")
    if mesh.ep > 1 and (mesh.dp_shard * mesh.cp) % mesh.ep:
        yield Fault(
            field="mesh.ep",
            value=str(mesh.ep),
            rule=f"dp_shard {mesh.dp_shard} x cp {mesh.cp} = {mesh.dp_shard * mesh.cp} does not divide by ep {mesh.ep}",
            remedy="choose ep among the divisors",
        )


def _stages(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    expected = 0
    for index, stage in enumerate(sorted(plan.stages, key=lambda stage: stage.layers)):
        first, last = stage.layers
        if first != expected or last < first:
            yield Fault(
                field=f"stages[{index}].layers",
                value=f"[{first}, {last})",
                rule=f"stages cover every layer once in order, so this one begins at {expected}",
                remedy="close the gap or the overlap",
            )
        expected = max(expected, last)
    if expected != model.layers:
        yield Fault(
            field="stages",
            value=f"end at layer {expected}",
            rule=f"the model has {model.layers} layers",
            remedy="extend or shorten the last stage",
        )
    pp = plan.mesh.pp
    if pp < 1 or len(plan.stages) % pp or (plan.schedule not in ("interleaved", "zbv") and len(plan.stages) != pp):
        yield Fault(
            field="stages",
            value=f"{len(plan.stages)} stages",
            rule=f"pp is {pp}: one stage a pipeline rank, or a multiple of it when interleaved",
            remedy="cut the model into as many stages as pp",
        )
    if pp > 1 and plan.schedule == "none":
        yield Fault(field="schedule", value="none", rule=f"pp is {pp}", remedy="use gpipe, 1f1b or interleaved")
    if plan.schedule == "interleaved" and pp >= 1 and plan.micro_batches % pp:
        yield Fault(
            field="micro_batches",
            value=str(plan.micro_batches),
            rule=f"interleaved needs micro_batches {plan.micro_batches} % pp {pp} == 0",
            remedy=f"use a multiple of {pp}",
        )


def _layers(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    counted = sum(layer.count for layer in plan.layers)
    if counted != model.layers:
        yield Fault(
            field="layers",
            value=f"{counted} layers",
            rule=f"the counts of the runs add up to {counted}, the model has {model.layers} layers",
            remedy="mend the counts",
        )
    for index, layer in enumerate(plan.layers):
        if layer.zero not in (0, 1, 2, 3):
            yield Fault(
                field=f"layers[{index}].zero", value=str(layer.zero), rule="ZeRO has stages 0 to 3", remedy="0..3"
            )
        if layer.zero >= 2 and plan.mesh.dp_shard == 1 and plan.mesh.dp_replicate > 1:
            yield Fault(
                field=f"layers[{index}].zero",
                value=str(layer.zero),
                rule="stages 2 and 3 shard over dp_shard, which is 1",
                remedy="move the data-parallel degree from dp_replicate to dp_shard",
            )


def _offload(plan: ParallelPlan) -> Iterator[Fault]:
    """State is stepped on the host as whole weights or as shards of ZeRO; weights in files are not there yet."""
    named: list[tuple[str, Layer]] = [(f"layers[{index}]", layer) for index, layer in enumerate(plan.layers)]
    for name, kind in (*named, ("embed", plan.embed), ("head", plan.head)):
        rule = remedy = ""
        if kind.offload == "all_nvme":
            rule, remedy = "weights in files are not there yet", "use optimizer_nvme or all_cpu"
        elif kind.offload == "all_cpu" and kind.zero < 2:
            rule, remedy = f"needs ZeRO 2 or 3; got zero {kind.zero}", "use optimizer_cpu, or zero 2 or 3"
        elif kind.offload == "optimizer_cpu" and (kind.zero >= 2 or kind.tp > 1 or plan.mesh.ep > 1):
            rule = f"needs zero 0 or 1 and tp = ep = 1; got zero {kind.zero}, tp {kind.tp}, ep {plan.mesh.ep}"
            remedy = "use all_cpu with zero 2 or 3"
        if rule:
            yield Fault(field=f"{name}.offload", value=kind.offload, rule=rule, remedy=remedy)


def _tensor(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    tp = plan.mesh.tp
    if tp < 1:
        return
    for name, size in (("heads", model.heads), ("kv_heads", model.key_heads), ("ffn", model.inner)):
        if size % tp:
            yield Fault(
                field="mesh.tp",
                value=str(tp),
                rule=f"{name} {size} does not divide by tp {tp}",
                remedy=f"choose tp among the divisors of {size}",
            )
    for index, layer in enumerate(plan.layers):
        if layer.tp not in (1, tp):
            yield Fault(
                field=f"layers[{index}].tp",
                value=str(layer.tp),
                rule=f"a stage has one tensor degree, and the mesh has tp {tp}",
                remedy=f"use {tp}, or 1 to replicate the layer",
            )
        if layer.sp and layer.tp == 1:
            yield Fault(
                field=f"layers[{index}].sp",
                value="true",
                rule="sequence parallelism splits over the tensor axis, which is 1 here",
                remedy="set tp, or turn sp off",
            )


def _sequence(plan: ParallelPlan, model: ModelShape) -> Iterator[Fault]:
    cp = plan.mesh.cp
    if cp > 1 and plan.cp_kind == "ring" and model.seq % (2 * cp):
        yield Fault(
            field="mesh.cp",
            value=str(cp),
            rule=f"ring attention needs seq {model.seq} % (2 x cp {cp}) == 0",
            remedy="choose another cp or sequence length",
        )
    if cp > 1 and plan.cp_kind == "ulysses" and model.heads % (plan.mesh.tp * cp):
        yield Fault(
            field="mesh.cp",
            value=str(cp),
            rule=f"ulysses needs heads {model.heads} % (tp {plan.mesh.tp} x cp {cp}) == 0",
            remedy="choose another cp, or cp_kind ring",
        )


def _sync(plan: ParallelPlan) -> Iterator[Fault]:
    sync, mesh = plan.sync, plan.mesh
    zero = max((layer.zero for layer in plan.layers), default=0)
    if sync.mode in (*_PS_MODES, "local_sgd") and (mesh.pp, mesh.tp, mesh.cp, zero) != (1, 1, 1, 0):
        yield Fault(
            field="sync.mode",
            value=sync.mode,
            rule=f"{sync.mode} needs pp = tp = cp = 1 and zero 0; got pp {mesh.pp}, tp {mesh.tp}, cp {mesh.cp}, "
            f"zero {zero}",
            remedy="use mode allreduce, or turn the other axes off",
        )
    if sync.mode in _PS_MODES and sync.servers < 1:
        yield Fault(
            field="sync.servers", value=str(sync.servers), rule=f"{sync.mode} needs a server", remedy="use 1 or more"
        )
    if sync.compression not in ("none", "fp16", "bf16") and zero > 1:
        yield Fault(
            field="sync.compression",
            value=sync.compression,
            rule=f"compression other than fp16 and bf16 needs zero 0 or 1; got {zero}",
            remedy="use fp16, or a lower ZeRO stage",
        )
    if sync.mode == "local_sgd" and sync.H < 1:
        yield Fault(
            field="sync.H", value=str(sync.H), rule="local SGD takes at least 1 local step", remedy="use 1 or more"
        )
