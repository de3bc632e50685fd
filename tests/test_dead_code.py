"""Functions that nothing uses, attributes that nothing reads, and functions that are copies of another."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.banned_words import tree_of

vulture = pytest.importorskip("vulture", reason="a tool of the developers: make .venv/.setup-dev")

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "rota"
TESTING = SOURCES / "testing"
"""For the tests of users."""
USERS = [SOURCES, ROOT / "examples", ROOT / "docs"]
"""Who counts as a user of a function; a test alone does not."""

CALLED_BY_NAME = {
    # of a library: Python, asyncio, uvicorn, click, pydantic, torch, Ray, SQLAlchemy, enum
    "_generate_next_value_", "_set_group_name", "allreduce_coalesced", "capture_signals",
    "default_schema", "getBackendName", "group_name",
    "pipe_data_received", "process_exited", "start_api_server", "verify_request", "_repr_html_",
    "abort_transport", "actor_has_tensor_transport", "can_abort_transport", "extract_tensor_transport_metadata",
    "garbage_collect", "get_communicator_metadata", "is_one_sided", "recv_multiple_tensors",
    "send_multiple_tensors", "tensor_transport_backend",
    # of Rota, by the name of an operation, of a class or of an entry point
    "Instance", "Master", "ping", "_close_all", "code_part", "stream_loop", "read_terminal", "write_terminal",
    "rota_load",
    # verbs of the command line, by their module
    "cases", "demo", "exec_", "login", "logout",
    # attributes that a library reads: tarfile, sqlite3, socketserver, uvicorn, enum, numba and CuPy
    "linkname", "isolation_level", "address_family", "should_exit", "_value_", "__cuda_array_interface__",
    # attributes that pydantic reads as fields of a document
    "restored_from", "lost_commits", "promoted",
}  # fmt: skip
PUBLIC = {
    # written in pages for users, who are outside this tree
    "ShardedEmbedding", "nack", "data_parallel", "weights_version", "save_weights",
    "evaluate", "put_many", "wire_bytes",
    # a document that is described and not built here: its writer makes it from a record
    "Notice",
}  # fmt: skip
ROUTES = ["@*.get", "@*.post", "@*.put", "@*.patch", "@*.delete", "@*.head", "@*.command", "@*.api_route", "@*.event"]
KINDS = {"function", "method", "class", "property", "attribute"}
COPY_NODES_MIN = 60
"""Nodes of the syntax tree from which two equal bodies are a copy; about six lines."""


@pytest.fixture(scope="module")
def unused() -> dict[str, str]:
    """Name to its place, for all functions, classes and attributes that no user names."""
    found = vulture.Vulture(ignore_decorators=ROUTES)
    found.scavenge([str(path) for path in USERS])
    mine = [item for item in found.get_unused_code(min_confidence=60) if item.typ in KINDS]
    return {item.name: f"{item.filename}:{item.first_lineno}" for item in mine if _is_checked(item.filename)}


def _is_checked(path: Path) -> bool:
    return SOURCES in path.parents and TESTING not in path.parents


@pytest.mark.slow
def test_every_function_and_class_has_a_user(unused: dict[str, str]) -> None:
    found = {name: place for name, place in unused.items() if name not in CALLED_BY_NAME | PUBLIC}
    assert not found, f"nothing but tests uses these; delete them, or say above who calls them: {found}"


@pytest.mark.slow
def test_the_exceptions_are_needed_and_public_ones_are_on_a_page(unused: dict[str, str]) -> None:
    unneeded = (CALLED_BY_NAME | PUBLIC) - unused.keys()
    assert not unneeded, f"these have a user, or are gone: {sorted(unneeded)}"
    pages = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md") if path.name != "tree.md"
    )
    assert not [name for name in PUBLIC - {"Notice"} if name not in pages]


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def _form(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The body without texts and docstring, its names numbered by their first use; empty for a short one."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    dumped = ast.dump(ast.Module(body, []))
    if dumped.count("(") < COPY_NODES_MIN:
        return ""
    names: dict[str, str] = {}
    dumped = re.sub(r"(id|arg)='(\w+)'", lambda found: names.setdefault(found[2], f"v{len(names)}"), dumped)
    return re.sub(r"""Constant\(value=('[^']*'|"[^"]*")\)""", "text", dumped)


@pytest.mark.slow
def test_no_function_is_a_copy_of_another() -> None:
    places = defaultdict[str, list[str]](list)
    for place, function in _functions():
        places[_form(function)].append(place)
    copies = [same for form, same in places.items() if form and len(same) > 1]
    assert not copies, f"the same body but for names: {copies}"


def test_a_copy_under_other_names_is_found() -> None:
    text = (
        "def {f}({a}, {b}):\n" + "    if {a} > {b} and len({c}[{a}]) != 3:\n        {c}.append(({a}, {b}, 'x'))\n" * 3
    )
    one, two = (
        ast.parse(text.format(**names)).body[0]
        for names in ({"f": "p", "a": "q", "b": "r", "c": "s"}, {"f": "t", "a": "u", "b": "v", "c": "w"})
    )
    other = ast.parse(text.replace("!= 3", "!= 4").format(f="p", a="q", b="r", c="s")).body[0]
    assert isinstance(one, ast.FunctionDef) and isinstance(two, ast.FunctionDef) and isinstance(other, ast.FunctionDef)
    assert _form(one) == _form(two) != _form(other) and _form(one)
