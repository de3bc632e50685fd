"""Every answer of the REST API and every output of the CLI is, byte for byte, what is stored in ``snapshots/``.

A change that is meant: ``python -m tests.service.snapshots --write``, then look at the difference.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fastapi.datastructures import DefaultPlaceholder
from tests.service.described import routes_of
from tests.service.snapshots import files
from tests.service.snapshots.rest import names_of

from rota.service.cli.app import VERBS
from rota.service.rest.app import application
from rota.spec.states import JobState

WRITE = "if this is meant: python -m tests.service.snapshots --write"


@pytest.mark.slow
def test_every_rest_answer_is_as_stored(tmp_path: Path) -> None:
    differing = files.compare("rest", asyncio.run(files.of_rest(tmp_path / "home")))
    assert not differing, "\n".join([*differing, WRITE])


@pytest.mark.slow
def test_what_every_verb_prints_is_as_stored(tmp_path: Path) -> None:
    differing = files.compare("cli", asyncio.run(files.of_cli(tmp_path / "home")))
    assert not differing, "\n".join([*differing, WRITE])


def test_every_verb_has_a_stored_document_and_a_stored_plain_output() -> None:
    documents = {name: json.loads(text)["commands"] for name, text in files.stored("cli").items()}
    unstored = [verb for verb in VERBS if verb.replace(" ", "-") not in documents]
    assert unstored == ["tensors door"], "it serves until it is interrupted: test_bridge.py"
    for verb, rows in documents.items():
        kinds = {type(row["out"]) for row in rows if row["out"]}
        assert verb in ("mistakes", "exec") or kinds == {dict, list}, verb
    assert not [row["command"] for rows in documents.values() for row in rows if "internal error" in str(row)]


def test_every_route_has_a_stored_answer_that_succeeds() -> None:
    documents = [json.loads(text) for text in files.stored("rest").values()]
    succeeds = {one["route"] for one in documents if any(answer["status"] < 400 for answer in one["answers"])}
    assert [name for name in names_of(application()) if name not in succeeds | {"GET /assets/{name}"}] == []


def test_the_stored_answers_cover_every_state_of_a_job_and_every_kind_of_refusal() -> None:
    documents = [json.loads(text) for text in files.stored("rest").values()]
    answers = [answer for one in documents for answer in one["answers"]]
    states = {one["body"].get("state") for one in answers if isinstance(one["body"], dict)}
    assert {state.value for state in JobState} <= states
    assert {one["status"] for one in answers} >= {200, 201, 202, 204, 401, 403, 404, 405, 409, 412, 422}


def test_every_route_declares_what_it_answers_with() -> None:
    """``standing`` and the snapshots hold every answer against it."""
    silent = [
        route.path
        for route in routes_of(application())
        if route.response_model is None and isinstance(route.response_class, DefaultPlaceholder)
    ]
    assert silent == []
    described = application().openapi()["paths"]
    schemas = [
        content["schema"]
        for methods in described.values()
        for one in methods.values()
        for status, answer in one["responses"].items()
        if status.startswith("2")
        for kind, content in answer.get("content", {}).items()
        if kind == "application/json"
    ]
    assert len(schemas) > 50 and all("$ref" in schema for schema in schemas)


def test_every_route_declares_the_document_of_its_refusals() -> None:
    """The client of the tests holds every refusal against it."""
    described = application().openapi()
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    answers = [one["responses"] for methods in described["paths"].values() for one in methods.values()]
    assert all(one["default"]["content"] == problem and "422" not in one for one in answers)
    assert described["components"]["schemas"].keys() >= {"ProblemDocument", "Place"}
