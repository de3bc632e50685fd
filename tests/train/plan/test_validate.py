"""Measured steps against the cost model: errors, picks, and multipliers fitted to a few points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.proof.reference_results import TIME_TABLES, even_plan
from tests.proof.validation import Calibration, fit_multipliers, validate

from rota.spec.errors import BadInput
from rota.train.plan.cost import step_time
from rota.train.plan.hardware import A100_80G_DGX
from rota.train.plan.model import Layer, ModelShape

TABLES = json.loads((Path(__file__).parents[2] / "data" / "planner_measured_steps.json").read_text())["tables"]
SINGLE, MULTI = "vtrain_ground_truth_single", "vtrain_ground_truth_multi"


@pytest.mark.parametrize("table", [SINGLE, MULTI])
def test_measured_steps_are_met_better_than_the_peers_say_of_themselves(table: str) -> None:
    report = validate(TABLES, table)
    assert report["mean_pct"] < min(peer["mean_pct"] for peer in report["peers"].values())


def test_the_configuration_picked_on_one_node_costs_less_than_the_peers_pick() -> None:
    regret = validate(TABLES, SINGLE)["regret"]
    assert regret["groups"] == 14
    assert 0 <= regret["mean_pct"] < TIME_TABLES[SINGLE].peers["Calculon"]["regret_mean_pct"]


def test_multipliers_are_fitted_without_the_group_they_are_used_for_and_told_with_their_spread() -> None:
    report = validate(TABLES, MULTI, calibration=Calibration(points=20, seed=1))
    fitted = report["calibration"]
    assert fitted["fits"] == 4
    assert report["mean_pct"] < 9
    for name, found in fitted["multipliers"].items():
        assert 0 <= found["low"] <= found["mean"] <= found["high"], name
    assert validate(TABLES, MULTI, calibration=Calibration(points=20, seed=1)) == report


def test_the_fit_finds_what_made_the_points_and_leaves_alone_what_they_do_not_show() -> None:
    parts = [{"compute": 1.0 + i % 7, "tp": 0.5 * (i % 5), "ps": 0.0} for i in range(200)]
    measured = [1.3 * part["compute"] + 0.6 * part["tp"] for part in parts]
    measured[::20] = [3 * one for one in measured[::20]]
    found = fit_multipliers(parts, measured)
    assert found["compute"] == pytest.approx(1.3, rel=0.02)
    assert found["tp"] == pytest.approx(0.6, rel=0.06)
    assert found["ps"] == pytest.approx(1.0)


def test_a_small_layer_takes_as_long_as_its_host_needs_to_dispatch_it() -> None:
    model = ModelShape(layers=8, hidden=512, heads=8, seq=128, vocab=1000)
    plan = even_plan(
        layers=8, tp=1, pp=1, dp=1, micro_batch=1, global_batch=4, interleave=1, layer=Layer(recompute="full")
    )
    step = step_time(plan, model, A100_80G_DGX)
    assert step.breakdown_s["host"] > step.breakdown_s["compute"]
    quick = replace(A100_80G_DGX, device=replace(A100_80G_DGX.device, dispatch_us=0.0))
    assert step_time(plan, model, quick).breakdown_s["host"] == 0
    assert sum(step.breakdown_s.values()) == pytest.approx(step.total_s)


def test_a_group_across_nodes_uses_the_adapters_of_all_its_members() -> None:
    links = A100_80G_DGX
    assert links.link_of(8).gb_s == 230
    assert links.link_of(2, stride=8).gb_s == 22
    assert links.link_of(16, stride=4).gb_s == 2 * 22
    assert links.link_of(64).gb_s == 8 * 22
    wide = replace(links, levels=(links.levels[0], replace(links.levels[1], gb_s=100)))
    assert wide.link_of(64).gb_s == 230  # no faster than inside a node


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tp": None}, r"rows\[0\].tp: None"),
        ({"global_batch": 7}, r"rows\[0\].global_batch: 7 does not divide"),
        ({"iteration_ms": "fast"}, r"rows\[0\].iteration_ms: 'fast'"),
    ],
)
def test_a_row_that_lacks_something_is_named(row: dict[str, Any], message: str) -> None:
    table = next(one for one in TABLES if one["id"] == SINGLE)
    whole = dict(zip(table["columns"], table["rows"][0], strict=True))
    with pytest.raises(BadInput, match=message):
        validate([{"id": SINGLE, "rows": [{**whole, **row}]}], SINGLE)


def test_more_points_than_other_groups_have_are_refused() -> None:
    with pytest.raises(BadInput, match="calibrate: 500 points"):
        validate(TABLES, MULTI, calibration=Calibration(points=500))
