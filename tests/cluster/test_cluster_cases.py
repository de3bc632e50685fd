"""Recorded cases of other schedulers come out as they did there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.proof.cases import CaseError, run_cases

DATA = Path(__file__).resolve().parent.parent / "data" / "cluster"


@pytest.mark.parametrize("name", ["hived.json", "policies.json"])
def test_every_recorded_case_passes(name: str) -> None:
    document = run_cases(DATA / name)
    assert [(c["id"], c["why"]) for c in document["cases"] if not c["ok"]] == []
    assert document["passed"] > 0


@pytest.mark.slow
def test_fair_share_actions_come_out_as_recorded_but_for_the_differences_that_are_documented() -> None:
    document = run_cases(DATA / "kai.json")
    causes = (DATA.parents[2] / "docs" / "reference" / "kai-differences.md").read_text(encoding="utf-8")
    failed = [c["id"].rpartition("-")[2] for c in document["cases"] if not c["ok"]]
    assert [number for number in failed if f"-{number}`" not in causes] == []
    assert document["passed"] == 117


def test_a_wrong_expectation_fails_its_case_and_says_both_values(tmp_path: Path) -> None:
    raw = json.loads((DATA / "policies.json").read_text())
    case = next(c for c in raw["cases"] if c["id"] == "drf-01-worked")
    case["expect"]["tasks"]["A"] = 4
    (tmp_path / "c.json").write_text(json.dumps({"cases": [case]}))
    assert run_cases(tmp_path / "c.json")["cases"][0]["why"] == "tasks of A: expected 4, got 3"


def test_a_wrong_placement_fails_its_case(tmp_path: Path) -> None:
    raw = json.loads((DATA / "hived.json").read_text())
    raw["cases"] = [c for c in raw["cases"] if c["id"] == "hived-01-normal"]
    raw["cases"][0]["steps"][0]["expect"]["gpus"] = [5]
    (tmp_path / "c.json").write_text(json.dumps(raw))
    document = run_cases(tmp_path / "c.json")
    assert document["failed"] == 1
    assert "expected [5], got [0]" in document["cases"][0]["why"]


def test_an_unknown_word_fails_only_its_case(tmp_path: Path) -> None:
    raw = {"cases": [{"id": "x", "kind": "sorcery", "given": {}, "expect": {}}]}
    (tmp_path / "c.json").write_text(json.dumps(raw))
    assert run_cases(tmp_path / "c.json")["cases"] == [{"id": "x", "ok": False, "why": "unsupported: kind 'sorcery'"}]


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("[1]")
    with pytest.raises(CaseError):
        run_cases(tmp_path / "c.json")
