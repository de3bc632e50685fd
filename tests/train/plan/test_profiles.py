"""Hardware files of other planners: what is read, what the search makes of it, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rota.spec.errors import BadInput
from rota.train.plan.importers import from_galvatron, hardware_from_any
from rota.train.plan.model import ModelShape
from rota.train.plan.search import search
from rota.train.plan.space import SearchRequest

SEVEN_B = ModelShape(layers=32, hidden=4096, heads=32, seq=2048, vocab=32000, ffn=11008, gated=True, tied=False)
MS_A_SAMPLE = (4.396, 4.295, 4.165, 4.124, 4.015, 4.034, 3.976, 3.937, 3.959, 3.940, 3.942, 3.918)
"""Forward pass of one layer of Llama 2 7B, batch 1 to 12: PKU-DAIR/Hetu-Galvatron, models/gpt/configs (Apache-2.0)."""
GALVATRON: dict[str, dict[str, Any]] = {
    "computation_profiling_bf16_llama2-7b_all.json": {
        f"layertype_0_bsz{batch}_seq2048": ms for batch, ms in enumerate(MS_A_SAMPLE, 1)
    },
    "memory_profiling_bf16_llama2-7b_all.json": {
        "layertype_0_sp": {"2048": {"tp_activation_per_bsz_dict": {"1": 514.5635, "checkpoint": 32.0}}}
    },
    "allreduce_bandwidth_1nodes_8gpus_per_node.json": {
        "allreduce_size_8_consec_1": 154.203, "allreduce_size_4_consec_1": 159.119, "allreduce_size_2_consec_1": 138.156
    },
    "overlap_coefficient.json": {"overlap_coe": 1.125552573612729},
}  # fmt: skip
GALVATRON_SAMPLES_A_S = 14.7323
"""What its own search finds on these tables: 8 devices of 36 GB, batch 16."""
CALCULON: dict[str, Any] = {
    "matrix": {"float16": {"tflops": 312, "gflops_efficiency": [[128, 0.9], [9, 0.7], [0, 0.1]]}},
    "mem1": {"GiB": 80, "GBps": 2039, "MB_efficiency": [[100, 0.9], [0, 0.4]]},
    "networks": [
        {"bandwidth": 300, "efficiency": 0.65, "size": 8, "latency": 0.00001},
        {"bandwidth": 25, "efficiency": 0.9, "size": 65536, "latency": 0.00002},
    ],
}


@pytest.mark.slow
def test_a_better_plan_is_proven_on_the_tables_that_galvatron_ships() -> None:
    hardware, model = from_galvatron(GALVATRON, SEVEN_B)
    found = search(SearchRequest(model=model, hardware=hardware, gpus=8, memory_gib=36, batch=16), top=1)
    assert 16 / found.best[0].step.total_s > GALVATRON_SAMPLES_A_S
    assert found.certificate.gap_pct == 0
    assert found.best[0].memory_bytes <= 34 * 2**30


def test_a_layer_takes_as_long_as_galvatron_measured() -> None:
    hardware, model = from_galvatron(GALVATRON, SEVEN_B)
    assert model.kept_mib == pytest.approx(514.5635)
    assert hardware.link_of(8).gb_s == pytest.approx(154.203)
    assert hardware.overlap.dp == pytest.approx(0.874, abs=1e-3)
    fastest, slowest = hardware.device.gemm_efficiency[-1][1], hardware.device.gemm_efficiency[0][1]
    assert fastest / slowest == pytest.approx(4.396 / 3.918)


def test_a_calculon_system_is_read() -> None:
    hardware = hardware_from_any(CALCULON)
    assert hardware.device.efficiency(9e9) == pytest.approx(0.7)
    assert hardware.device.peak_tflops["bf16"] == 312
    assert hardware.link_of(8).gb_s == pytest.approx(195)
    assert hardware.link_of(2, stride=8).gb_s == pytest.approx(22.5)


def test_what_is_missing_in_a_profile_is_named() -> None:
    for files, message in (
        ({}, "all-reduce bandwidths of one node"),
        ({name: one for name, one in GALVATRON.items() if "computation" not in name}, "layer times at seq 2048"),
    ):
        with pytest.raises(BadInput, match=message):
            from_galvatron(files, SEVEN_B)
    for wrong, said in (
        ({name: one for name, one in CALCULON.items() if name != "networks"}, "has no 'networks' (needed are"),
        ({**CALCULON, "networks": [{"size": "x"}]}, "has a value of another form: invalid literal for int() with"),
    ):
        with pytest.raises(BadInput, match=re.escape(f"hardware: the Calculon system {said}")):
            hardware_from_any(wrong)
    with pytest.raises(BadInput, match="expected an object, got list"):
        hardware_from_any([])
