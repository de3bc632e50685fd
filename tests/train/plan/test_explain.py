"""Explanations are true: their numbers are those of the plans they speak of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rota.spec.errors import BadInput
from rota.train.plan.explain import explain, parse_degrees, why_not
from rota.train.plan.hardware import A100_80G_DGX
from rota.train.plan.model import ModelShape
from rota.train.plan.search import search
from rota.train.plan.space import SearchRequest

MODEL = ModelShape(layers=8, hidden=2048, heads=16, seq=2048, vocab=32000, tied=False)
QUESTION = SearchRequest(model=MODEL, hardware=A100_80G_DGX, gpus=4, memory_gib=20, batch=8)
FOUND = search(QUESTION)


def test_an_explanation_has_the_numbers_of_its_plan() -> None:
    best = FOUND.best[0]
    document = explain(best.plan, QUESTION, found=FOUND)
    assert document["plan_id"] == best.plan.id
    assert sum(document["breakdown_s"].values()) == pytest.approx(best.step.total_s)
    assert len(document["stages"]) == best.plan.mesh.pp
    assert max(row["memory_gib"] for row in document["stages"]) * 2**30 == pytest.approx(best.memory_bytes)
    assert f"{best.step.total_s:.3g} s" in document["summary"][1]
    assert [row["plan_id"] for row in document["runner_ups"]] == [one.plan.id for one in FOUND.best[1:]]
    assert document["certificate"]["gap_pct"] == 0.0


def test_a_slower_choice_is_explained_by_the_parts_that_grew() -> None:
    answer = why_not({"pp": 4}, FOUND.best[0], QUESTION)
    assert answer["verdict"] == "slower"
    assert answer["plan"].mesh.pp == 4
    assert answer["iteration_s"] > FOUND.best[0].step.total_s
    assert any("bubble" in sentence for sentence in answer["because"])


def test_a_plan_that_is_not_the_best_is_told_so() -> None:
    answer = why_not({"pp": 1}, search(replace(QUESTION, pins={"pp": 4})).best[0], QUESTION)
    assert answer["verdict"] == "faster"
    assert "shorter" in answer["because"][0]


def test_a_choice_that_does_not_fit_says_what_it_would_need() -> None:
    tight = replace(QUESTION, memory_gib=6)
    answer = why_not({"dp": 4, "zero": 0}, search(tight).best[0], tight)
    assert answer["verdict"] == "does_not_fit"
    assert answer["memory_gib"] > 4
    roomy = replace(tight, memory_gib=answer["memory_gib"] + 2.01, pins={"dp": 4, "zero": 0})
    assert search(roomy, top=1).best


def test_an_impossible_choice_is_illegal() -> None:
    answer = why_not({"tp": 3}, FOUND.best[0], QUESTION)
    assert (answer["verdict"], answer["plan"]) == ("illegal", None)
    assert "heads 16" in answer["because"][0]


def test_degrees_are_read_and_mistakes_named() -> None:
    assert parse_degrees("tp=8, pp=1") == {"tp": 8, "pp": 1}
    with pytest.raises(BadInput, match="NAME=NUMBER"):
        parse_degrees("tp8")
