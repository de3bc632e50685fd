"""A plan survives its JSON form, has a stable id, and every rule names its numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.spec.errors import BadInput
from rota.train.plan.hardware import A100_80G_DGX
from rota.train.plan.model import (
    Dtype,
    Layer,
    Mesh,
    ModelShape,
    ParallelPlan,
    Stage,
    Sync,
    data_parallel,
    embed_params,
    head_params,
    layer_params,
)

MODEL = ModelShape(layers=4, hidden=64, heads=8, seq=128, vocab=1000)

meshes = st.builds(Mesh, **{axis: st.integers(1, 8) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")})
layers = st.builds(
    Layer,
    count=st.integers(1, 64),
    tp=st.integers(1, 8),
    sp=st.booleans(),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from(["none", "optimizer_cpu"]),
)
plans = st.builds(
    ParallelPlan,
    mesh=meshes,
    stages=st.lists(st.builds(Stage, layers=st.tuples(st.integers(0, 9), st.integers(0, 9))), max_size=4).map(tuple),
    layers=st.lists(layers, max_size=3).map(tuple),
    schedule=st.sampled_from(["none", "gpipe", "1f1b", "interleaved"]),
    micro_batches=st.integers(1, 64),
    sync=st.builds(Sync, mode=st.sampled_from(["allreduce", "ps_ssp"]), s=st.integers(0, 4)),
    dtype=st.builds(Dtype, param=st.sampled_from(["bf16", "fp32"])),
    prediction=st.none() | st.just({"memory_gib": 1.5}),
)


@given(plans)
def test_a_plan_survives_its_json_form_with_equal_bytes(plan: ParallelPlan) -> None:
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert ParallelPlan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_the_document_of_a_search_is_read_as_its_plan() -> None:
    plan = data_parallel(layers=4, dp=2)
    document = {"api": "rota/v1", "kind": "PlanSearch", "plan": json.loads(plan.to_json()), "helps": []}
    assert ParallelPlan.from_json(json.dumps(document)) == plan
    with pytest.raises(BadInput, match="plan: the search found none"):
        ParallelPlan.from_json(json.dumps({**document, "plan": None}))


@given(plans)
def test_the_id_leaves_prediction_and_certificate_out_and_nothing_else(plan: ParallelPlan) -> None:
    assert replace(plan, prediction={"memory_gib": 9.0}, certificate={"gap_pct": 0}).id == plan.id
    assert replace(plan, micro_batches=plan.micro_batches + 1).id != plan.id


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"mesj": {}}, "plan.mesj: unknown field"),
        ({"mesh": {"tpp": 2}}, "plan.mesh.tpp: unknown field"),
        ({"layers": [{"zerro": 3}]}, r"plan.layers\[0\].zerro: unknown field"),
        ({"layers": {}}, "expected a list"),
        ({"mesh": {"tp": "two"}}, "expected int"),
        ({"rota_plan": 99}, "99 is not 1"),
    ],
)
def test_a_plan_that_cannot_be_read_names_the_field(edit: dict[str, object], message: str) -> None:
    raw = {**json.loads(data_parallel(layers=4, dp=2).to_json()), **edit}
    with pytest.raises(BadInput, match=message):
        ParallelPlan.from_json(json.dumps(raw))
    with pytest.raises(BadInput, match="line 1"):
        ParallelPlan.from_json("{")


GOOD = data_parallel(layers=4, dp=2, micro_batches=4)
PIPELINED = replace(
    GOOD,
    mesh=Mesh(pp=2, dp_replicate=2),
    schedule="1f1b",
    stages=(Stage(layers=(0, 2), embed=True), Stage(layers=(2, 4), head=True)),
)


SHARDED = data_parallel(layers=4, dp=2, zero=3)


@pytest.mark.parametrize(
    "plan",
    [
        GOOD,
        PIPELINED,
        SHARDED,
        replace(PIPELINED, layers=(Layer(count=4, zero=1, offload="optimizer_cpu"),)),
        replace(SHARDED, layers=(Layer(count=4, zero=3, offload="all_cpu"),)),
        replace(SHARDED, layers=(Layer(count=4, zero=3, offload="optimizer_nvme"),)),
    ],
)
def test_a_plan_that_can_be_applied_has_no_fault(plan: ParallelPlan) -> None:
    assert plan.check(MODEL) == ()


@pytest.mark.parametrize(
    ("plan", "field", "number"),
    [
        (replace(GOOD, mesh=Mesh(tp=3)), "mesh.tp", "heads 8"),
        (replace(GOOD, mesh=Mesh(tp=0)), "mesh.tp", "at least 1"),
        (replace(GOOD, mesh=Mesh(dp_shard=2, ep=3)), "mesh.ep", "= 2"),
        (replace(GOOD, mesh=Mesh(cp=3)), "mesh.cp", "seq 128"),
        (replace(GOOD, mesh=Mesh(cp=3), cp_kind="ulysses"), "mesh.cp", "heads 8"),
        (replace(GOOD, micro_batch=0), "micro_batch", "at least 1"),
        (replace(GOOD, stages=(Stage(layers=(0, 3)),)), "stages", "4 layers"),
        (replace(GOOD, stages=(Stage(layers=(1, 4)),)), "stages[0].layers", "begins at 0"),
        (replace(PIPELINED, mesh=Mesh(pp=4)), "stages", "pp is 4"),
        (replace(PIPELINED, schedule="none"), "schedule", "pp is 2"),
        (replace(PIPELINED, schedule="interleaved", micro_batches=3), "micro_batches", "3 % pp 2"),
        (replace(GOOD, layers=(Layer(count=3),)), "layers", "add up to 3"),
        (replace(GOOD, layers=(Layer(count=4, zero=4),)), "layers[0].zero", "0 to 3"),
        (replace(GOOD, layers=(Layer(count=4, zero=3),)), "layers[0].zero", "dp_shard"),
        (replace(GOOD, layers=(Layer(count=4, tp=2),)), "layers[0].tp", "tp 1"),
        (replace(GOOD, layers=(Layer(count=4, sp=True),)), "layers[0].sp", "tensor axis"),
        (replace(GOOD, layers=(Layer(count=4, offload="all_nvme"),)), "layers[0].offload", "not there yet"),
        (replace(GOOD, layers=(Layer(count=4, offload="all_cpu"),)), "layers[0].offload", "got zero 0"),
        (replace(GOOD, layers=(Layer(count=4, zero=3, offload="optimizer_cpu"),)), "layers[0].offload", "got zero 3"),
        (replace(GOOD, embed=Layer(tp=2, offload="optimizer_cpu")), "embed.offload", "tp 2"),
        (replace(GOOD, mesh=Mesh(dp_shard=2, ep=2), head=Layer(offload="optimizer_cpu")), "head.offload", "ep 2"),
        (replace(PIPELINED, sync=Sync(mode="ps_sync", servers=1)), "sync.mode", "pp 2"),
        (replace(data_parallel(layers=4, dp=2, zero=1), sync=Sync(mode="local_sgd", H=2)), "sync.mode", "zero 1"),
        (replace(GOOD, mesh=Mesh(cp=2), sync=Sync(mode="local_sgd", H=2)), "sync.mode", "cp 2"),
        (replace(GOOD, sync=Sync(mode="ps_sync")), "sync.servers", "needs a server"),
        (replace(data_parallel(layers=4, dp=2, zero=3), sync=Sync(compression="int8")), "sync.compression", "got 3"),
        (replace(GOOD, sync=Sync(mode="local_sgd", H=0)), "sync.H", "at least 1"),
        (replace(GOOD, sync=Sync(mode="local_sgd", compression="topk")), "sync", "mode local_sgd, compression topk"),
        (replace(GOOD, sync=Sync(hierarchical=True, compression="int8")), "sync", "compression int8, hierarchical"),
        (replace(GOOD, sync=Sync(mode="ps_sync", servers=1, backup=2)), "sync.backup", "the 2 of"),
        (replace(GOOD, sync=Sync(backup=1)), "sync.backup", "mode allreduce"),
        (replace(GOOD, sync=Sync(mode="ps_ssp", servers=1, s=-1)), "sync.s", "0 or more"),
        (replace(GOOD, embed=Layer(zero=1), sync=Sync(mode="ps_async", servers=1)), "sync.mode", "zero 1"),
        (replace(GOOD, dtype=Dtype(param="fp16", master="fp16")), "dtype.master", "1/2048"),
        (replace(GOOD, dtype=Dtype(param="fp16"), sync=Sync(mode="local_sgd")), "dtype", "mode local_sgd"),
        (replace(PIPELINED, stages=PIPELINED.stages[::-1]), "stages[0].layers", "begins at 0"),
        (replace(PIPELINED, stages=(Stage(layers=(0, 2)), PIPELINED.stages[1])), "stages[0]", "the embedding"),
        (replace(PIPELINED, micro_batches=1), "micro_batches", "got 1 for pp 2"),
        (replace(PIPELINED, schedule="zbv"), "stages", "two when zbv"),
        (replace(GOOD, layers=(Layer(count=5), Layer(count=-1))), "layers[1].count", "at least 1"),
        (replace(GOOD, embed=Layer(zero=3)), "embed.zero", "dp_shard"),
        (replace(GOOD, head=Layer(tp=2)), "head.tp", "tp 1"),
        (replace(GOOD, mesh=Mesh(dp_shard=2, ep=2)), "mesh.ep", "0 experts"),
        (replace(GOOD, mesh=Mesh(tp=8), layers=(Layer(count=4, tp=8, sp=True),)), "layers[0].sp", "seq 129"),
    ],
)
def test_each_broken_rule_names_field_and_number(plan: ParallelPlan, field: str, number: str) -> None:
    faults = plan.check(replace(MODEL, seq=129) if "seq 129" in number else MODEL)
    assert any(fault.field == field and number in fault.rule and fault.remedy for fault in faults), faults


def test_tensor_ranks_beyond_the_innermost_level_are_a_fault_of_that_hardware() -> None:
    wide = replace(GOOD, mesh=Mesh(tp=16), layers=(Layer(count=4, tp=16),))
    large = replace(MODEL, heads=16)
    assert wide.check(large) == ()
    assert [fault.rule for fault in wide.check(large, A100_80G_DGX)] == [
        "tensor ranks talk in every layer, and a node of a100-80g-dgx has 8 devices"
    ]


def test_the_gang_of_a_plan_is_its_world_with_close_tensor_ranks() -> None:
    plan = replace(GOOD, mesh=Mesh(pp=2, dp_shard=4, tp=8), prediction={"memory_gib": 70.0})
    shape = plan.gang()
    assert (shape.world, shape.ranks_adjacent, shape.memory_bytes) == (64, 8, 70 * 2**30)
    assert shape.ranks_together == plan.mesh.tp


def test_parameters_are_counted_one_by_one() -> None:
    gpt2 = ModelShape(layers=12, hidden=768, heads=12, seq=1024, vocab=50257, positions=True)
    tied = gpt2.vocab * gpt2.hidden
    assert embed_params(gpt2) + 12 * layer_params(gpt2) + head_params(gpt2) - tied == 124_439_808
