"""The generated pages are in step with the code and know every verb, flag, field and exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
from generate import PAGES, PARTS, TYPES, exceptions, page_of_errors, page_with_parts
from interfaces import EXITS, page_of_commands, page_of_exits, page_of_job_file
from typescript import types_of

from rota.cluster.sim.traces import TraceError
from rota.service.cli.app import VERBS, verb_function
from rota.service.cli.completion import flags_of
from rota.service.http import BY_CODE
from rota.service.jobfile.models import FailPart, JobPart, ResourcesPart, RolePart
from rota.tensors.errors import NotFound, StaleEpoch
from rota.train.ps.client import ServerLost
from rota.train.ps.table import TableFull

ROOT = Path(__file__).resolve().parents[2]


def test_every_verb_and_flag_is_on_the_page() -> None:
    page = page_of_commands()
    for verb in VERBS:
        section = page.partition(f"### rota {verb}")[2].partition("\n### ")[0]
        assert "```" in section, verb
        for flag in flags_of(verb_function(verb)):
            assert f"`{flag}`" in section or f"`{flag}`" in page.partition("## Service")[0], f"{verb} {flag}"


def test_every_field_is_on_the_page() -> None:
    page = page_of_job_file()
    for part in (JobPart, RolePart, FailPart, ResourcesPart):
        for name, (_, field) in part.by_name().items():
            assert f"| `{name}` |" in page
            assert field.description


def test_every_exit_status_has_a_line() -> None:
    page = page_of_exits()
    assert {cls.exit for cls in BY_CODE.values()} <= {status for status, _ in EXITS}
    assert "| 4 | " in page and "`INFEASIBLE`" in page


def test_every_error_of_every_package_is_below_a_leaf_of_the_tree_with_its_codes_on_the_page() -> None:
    found, page = exceptions(), page_of_errors()
    assert not [one for one in found.values() if "RotaError" in one.bases]
    for cls in (ServerLost, TableFull, StaleEpoch, NotFound, TraceError):  # as classes have them
        row = found[cls.__name__].row(found)
        assert f"| {cls.exit} | {cls.http} | `{cls.code}` |" in row and row in page


@pytest.mark.parametrize("path", PAGES)
def test_the_pages_in_the_tree_are_those_of_the_code(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path](), "run 'make docs'"


@pytest.mark.parametrize("name", PARTS)
def test_tables_within_a_page_are_those_of_the_code(name: str) -> None:
    text = (ROOT / name).read_text()
    assert all(f"<!-- {mark} -->" in text for mark in PARTS[name])
    assert page_with_parts(name) == text, "run 'make docs'"


def test_the_types_of_the_ui_are_those_of_the_api() -> None:
    assert TYPES.read_text() == types_of(TYPES.parent.parent), "run 'make docs' and 'make ui'"
