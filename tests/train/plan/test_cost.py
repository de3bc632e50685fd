"""Predicted time against published end-to-end times, and laws that any cost model must keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from tests.proof.reference_results import even_plan, gpt
from tests.proof.validation import validate

from rota.spec import codec
from rota.spec.errors import BadInput
from rota.train.plan.cost import gemm_s, state_placement, state_time, step_time, transfers_s
from rota.train.plan.hardware import A100_80G_DGX, H200_141G, LevelSpec, hardware_from_json
from rota.train.plan.memory import held_params, memory
from rota.train.plan.model import Dtype, Layer, Mesh, ModelShape, data_parallel

TABLES = json.loads((Path(__file__).parents[2] / "data" / "planner_time_tables.json").read_text())["tables"]
ON_A_GPU = ModelShape(layers=24, hidden=1024, heads=16, seq=1024, vocab=50304, tied=False, positions=True)
MODEL = ModelShape(layers=32, hidden=4096, heads=32, seq=2048, vocab=32000)


def seconds(*, tp: int = 1, pp: int = 1, dp: int = 1, v: int = 1, layer: Layer | None = None) -> float:
    plan = even_plan(
        layers=32, tp=tp, pp=pp, dp=dp, micro_batch=1, global_batch=64, interleave=v, layer=layer or Layer(tp=tp)
    )
    return step_time(plan, MODEL, A100_80G_DGX).total_s


@pytest.mark.parametrize(
    ("table", "rows", "mean_pct", "max_pct"),
    [
        ("megatron_seqpar_table5", 6, 2.5, 6),
        ("megatron_sc21_table1", 6, 6, 12),
        ("megatron_sc21_table2", 12, 7, 11),
    ],
)
def test_published_times_are_met(table: str, rows: int, mean_pct: float, max_pct: float) -> None:
    report = validate(TABLES, table)
    assert len(report["rows"]) == rows
    assert report["mean_pct"] < mean_pct
    assert report["max_pct"] < max_pct


@pytest.mark.parametrize(
    ("width", "dtype", "layer", "seen_ms", "within"),
    [
        (1024, "fp32", Layer(), 844, 0.05),
        (1024, "bf16", Layer(), 139, 0.10),
        (1024, "bf16", Layer(offload="optimizer_cpu"), 1218, 0.12),
        (2048, "bf16", Layer(), 343, 0.20),
        (2048, "bf16", Layer(recompute="full"), 415, 0.15),
    ],
)
def test_steps_of_a_gpu_are_met_by_its_description(
    width: int, dtype: Literal["bf16", "fp32"], layer: Layer, seen_ms: float, within: float
) -> None:
    """One H200, torch 2.11: medians of ``benchmarks/training_gpu.py``; two micro-batches of 8192 tokens."""
    model = replace(ON_A_GPU, hidden=width, heads=width // 64, seq=width)
    plain = data_parallel(layers=24, dp=1, micro_batch=8192 // width, micro_batches=2)
    plan = replace(plain, dtype=Dtype(param=dtype), layers=(replace(layer, count=24),), embed=layer, head=layer)
    assert step_time(plan, model, H200_141G).total_s * 1e3 == pytest.approx(seen_ms, rel=within)


def test_the_parts_of_a_step_add_up_and_none_is_negative() -> None:
    plan = even_plan(
        layers=32, tp=2, pp=4, dp=2, micro_batch=1, global_batch=32, interleave=2, layer=Layer(tp=2, recompute="full")
    )
    step = step_time(plan, MODEL, A100_80G_DGX)
    assert sum(step.breakdown_s.values()) == pytest.approx(step.total_s)
    assert min(step.breakdown_s.values()) >= 0


def test_recompute_costs_time_and_interleaving_saves_bubble() -> None:
    assert seconds() < seconds(layer=Layer(recompute="selective")) < seconds(layer=Layer(recompute="full"))
    assert seconds(pp=8, v=4) < seconds(pp=8, v=2) < seconds(pp=8)


def test_more_devices_are_never_slower_while_the_work_divides() -> None:
    assert seconds(dp=1) > seconds(dp=2) > seconds(dp=4)
    assert seconds(tp=1) > seconds(tp=2) > seconds(tp=4) > seconds(tp=8)


def test_a_faster_link_or_device_never_gives_a_slower_step() -> None:
    plan = even_plan(layers=32, tp=8, pp=2, dp=4, micro_batch=1, global_batch=64, interleave=1, layer=Layer(tp=8))
    base = step_time(plan, MODEL, A100_80G_DGX).total_s
    links = tuple(replace(level, gb_s=level.gb_s * 2) for level in A100_80G_DGX.levels)
    device = replace(A100_80G_DGX.device, memory_gb_s=4000)
    assert step_time(plan, MODEL, replace(A100_80G_DGX, levels=links)).total_s < base
    assert step_time(plan, MODEL, replace(A100_80G_DGX, device=device)).total_s < base


def test_large_products_run_nearer_to_the_peak_than_small_ones() -> None:
    device = A100_80G_DGX.device
    small, large = gemm_s(device, "bf16", 512, 512, 512), gemm_s(device, "bf16", 8192, 8192, 8192)
    assert 2 * 8192**3 / large / 312e12 > 0.7
    assert 2 * 512**3 / small / 312e12 < 0.3


def test_a_hardware_file_survives_reading_and_its_mistakes_are_named() -> None:
    raw = codec.to_json_value(A100_80G_DGX)
    assert hardware_from_json(raw) == A100_80G_DGX
    for edit, message in (
        ({"devise": {}}, "hardware.devise: unknown field"),
        ({"device": {"memory_gib": 80}}, "peak_tflops are required"),
        ({"device": {**raw["device"], "memori": 1}}, "hardware.device.memori"),
        ({"levels": []}, "at least one level"),
        ({"name": 3}, "expected str"),
    ):
        with pytest.raises(BadInput, match=message):
            hardware_from_json({**raw, **edit})


def test_a_pipeline_pays_the_slow_link_where_two_stages_lie_in_different_nodes() -> None:
    """Eight stages of four ranks over nodes of eight: every second hop leaves a node, and so does the way back."""
    hops = transfers_s(gpt(8, 1024, 8), Mesh(pp=8, dp_replicate=4), 1, A100_80G_DGX, "bf16")
    inside, across = hops[0], hops[1]
    assert across > 5 * inside
    assert hops == [inside, across] * 4


def test_layers_gathered_one_by_one_pay_the_latency_of_each() -> None:
    """ZeRO 3 over 16 ranks: two gathers and a scatter of 8 layers and the ends, 15 messages each."""
    far = LevelSpec(name="cluster", gb_s=1e9, latency_us=100)
    hardware = replace(A100_80G_DGX, levels=(far,))
    plan = even_plan(layers=8, tp=1, pp=1, dp=16, micro_batch=1, global_batch=16, interleave=1, layer=Layer(zero=3))
    kept = state_time(state_placement(plan), hardware, held_params(plan, gpt(8, 1024, 8)), 8)
    assert kept.exposed_s(hardware, 0.0) == pytest.approx(3 * 9 * 15 * 1e-4, rel=1e-3)
    ahead = replace(hardware, overlap=replace(hardware.overlap, gather=1.0))
    assert kept.exposed_s(ahead, 100.0) == pytest.approx(9 * 15 * 1e-4, rel=1e-3), "the scatter is left"
    assert kept.exposed_s(ahead, 0.01) == pytest.approx(3 * 9 * 15 * 1e-4 - 0.01, rel=1e-3), "little to hide behind"


def test_context_ranks_share_the_tokens_and_pay_what_their_ring_cannot_hide() -> None:
    """A fast ring hides behind attention; over a slow link the passing of keys and values is told as ``cp``."""
    model = replace(gpt(8, 1024, 8, seq=32768), attention="flash")
    plan = even_plan(layers=8, tp=1, pp=1, dp=1, micro_batch=1, global_batch=1, interleave=1, layer=Layer())
    split = replace(plan, mesh=Mesh(cp=8))
    alone, ring = (step_time(one, model, A100_80G_DGX).breakdown_s for one in (plan, split))
    assert alone["compute"] / 8 <= ring["compute"] < 1.3 * alone["compute"] / 8, "smaller products, less of the peak"
    assert (alone["cp"], ring["cp"]) == (0, 0)
    slow = replace(A100_80G_DGX, levels=(LevelSpec(name="far", gb_s=0.1),))
    keys_s = 2 * 32768 / 8 * 1024 * 2 / 0.1e9
    assert step_time(split, model, slow).breakdown_s["cp"] == pytest.approx(8 * (7 + 2 * 8) * keys_s, rel=0.05)
    assert memory(split, model)[0].activations == memory(plan, model)[0].activations / 8
