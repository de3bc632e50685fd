"""Memory formulas against published tables and against hand counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.proof.validation import validate

from rota.spec.errors import BadInput
from rota.train.plan.memory import GIB, layers_in_flight, memory
from rota.train.plan.model import (
    Dtype,
    Layer,
    Mesh,
    ModelShape,
    ParallelPlan,
    Stage,
    data_parallel,
    embed_params,
    layer_params,
)

TABLES = json.loads((Path(__file__).parents[2] / "data" / "planner_memory_tables.json").read_text())["tables"]
MIXED = Dtype(param="bf16", reduce="bf16", master="fp32")


def test_the_memory_of_figure_1_is_reproduced_exactly() -> None:
    report = validate(TABLES, "megatron_seqpar_fig1")
    assert len(report["rows"]) == 12
    assert report["max_pct"] < 1e-9


def test_the_shares_of_figure_7_are_within_rounding_of_the_figure() -> None:
    report = validate(TABLES, "megatron_seqpar_fig7")
    assert len(report["rows"]) == 16
    assert report["mean_pct"] < 0.5
    assert report["max_pct"] < 1.5


@pytest.mark.parametrize(
    ("tables", "table_id", "message"),
    [
        (TABLES, "no_such_table", "no_such_table"),
        ([], "megatron_seqpar_fig1", "no rows"),
        ([{"id": "megatron_seqpar_fig1", "rows": [{"model": "9T"}]}], "megatron_seqpar_fig1", "'9T' is unknown"),
        ([{"id": "megatron_seqpar_fig1", "rows": [{"model": "22B"}]}], "megatron_seqpar_fig1", r"rows\[0\].params_opt"),
    ],
)
def test_what_cannot_be_compared_is_named(tables: list[dict[str, object]], table_id: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        validate(tables, table_id)


def test_rows_that_are_not_verified_are_shown_but_not_counted() -> None:
    rows = [{"model": "22B", "params_opt": 1.0, "act_none": 1.0, "act_seqsel": 1.0, "verified": False}]
    report = validate([{"id": "megatron_seqpar_fig1", "rows": rows}], "megatron_seqpar_fig1")
    assert [row["counted"] for row in report["rows"]] == [False] * 3
    assert report["mean_pct"] is None


@pytest.mark.parametrize(("zero", "gb"), [(0, 120.0), (1, 7.5 * (8 + 8 / 64)), (2, 7.5 * 16 / 64), (3, 1.875)])
def test_zero_stages_divide_state_as_published(zero: int, gb: float) -> None:
    """ZeRO (2020), section 3: 7.5e9 parameters with 16 bytes each on 64 ranks; 120 and 1.9 GB are printed there.

    Between them the runtime differs: weights and gradients are fp32, and stage 2 keeps a shard beside the copy.
    """
    model = ModelShape(layers=1, hidden=25000, heads=1, seq=1, vocab=1, tied=True)
    plan = replace(data_parallel(layers=1, dp=64, zero=zero), dtype=MIXED)
    stage = memory(plan, model)[0]
    held = layer_params(model) + embed_params(model) + 2 * model.hidden
    assert (stage.params + stage.grads + stage.optimizer) / held * 7.5 == pytest.approx(gb)


def test_tensor_ranks_hold_their_slice_and_what_cannot_be_split() -> None:
    model = ModelShape(layers=1, hidden=64, heads=8, seq=8, vocab=10)
    whole = 12 * 64**2 + 13 * 64
    assert layer_params(model) == whole
    assert layer_params(model, 8) == (whole - 6 * 64) // 8 + 6 * 64


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"), [("gpipe", 0, 16), ("1f1b", 0, 4), ("1f1b", 3, 1), ("interleaved", 0, 4 + 3 / 2)]
)
def test_stages_hold_as_many_micro_batches_as_their_schedule_needs(schedule: str, stage: int, expected: float) -> None:
    assert layers_in_flight(schedule, stage=stage, p=4, m=16, v=2) == expected  # type: ignore[arg-type]


def test_the_first_stage_of_a_pipeline_needs_most_for_activations_and_the_last_has_the_logits() -> None:
    model = ModelShape(layers=8, hidden=512, heads=8, seq=1024, vocab=32000, tied=False)
    stages = tuple(Stage(layers=(2 * i, 2 * i + 2), embed=i == 0, head=i == 3) for i in range(4))
    plan = ParallelPlan(
        mesh=Mesh(pp=4), stages=stages, layers=(Layer(count=8),), schedule="1f1b", micro_batches=8, dtype=MIXED
    )
    need = memory(plan, model)
    activations = [stage.activations for stage in need]
    assert activations == sorted(activations, reverse=True)
    assert activations[0] == pytest.approx(4 * activations[3])
    assert [stage.logits > 0 for stage in need] == [False, False, False, True]
    assert need[3].logits == pytest.approx(1024 * 32000 * (2 + 4 + 4 + 4))


ON_A_GPU = ModelShape(layers=24, hidden=1024, heads=16, seq=1024, vocab=50304, tied=False, positions=True)
BF16 = Dtype(param="bf16")


@pytest.mark.parametrize(
    ("dtype", "layer", "gib"),
    [
        (Dtype(), Layer(), 24.34),
        (BF16, Layer(), 19.72),
        (BF16, Layer(recompute="selective"), 19.70),
        (BF16, Layer(recompute="full"), 12.39),
        (BF16, Layer(zero=3), 17.93),
        (BF16, Layer(offload="optimizer_cpu"), 16.69),
        (BF16, Layer(zero=3, offload="all_cpu"), 11.87),
    ],
    ids=str,
)
def test_the_memory_that_a_gpu_was_seen_to_need_is_predicted(dtype: Dtype, layer: Layer, gib: float) -> None:
    """One H200, torch 2.11, two micro-batches of 8: ``benchmarks/training_gpu.py``, the peak of torch's allocator."""
    plain = data_parallel(layers=24, dp=1, micro_batch=8, micro_batches=2, zero=layer.zero)
    plan = replace(plain, dtype=dtype, layers=(replace(layer, count=24),), embed=layer, head=layer)
    assert memory(plan, ON_A_GPU)[0].total / GIB == pytest.approx(gib, rel=0.08)


def test_recompute_and_sharding_never_need_more() -> None:
    model = ModelShape(layers=4, hidden=512, heads=8, seq=1024, vocab=32000, attention="plain")
    by_recompute = [
        memory(replace(data_parallel(layers=4, dp=4), layers=(Layer(count=4, recompute=kind),)), model)[0].total
        for kind in ("none", "selective", "full")
    ]
    assert by_recompute == sorted(by_recompute, reverse=True)
    assert len(set(by_recompute)) == 3
