"""Settings of all tests; its place puts the root of the repository on the path, so that ``tests.makers`` imports."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

gc.set_threshold(50_000, 20, 100)  # a fifth of the time of importing all tests went into passes that found nothing
pytest.register_assert_rewrite("tests.real.tensors.crew")

quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("check", max_examples=50, **quiet)
settings.register_profile("deep", max_examples=1_000, **quiet)
settings.load_profile("deep" if os.environ.get("ROTA_DEEP") == "1" else "check")


if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""Whoever runs the tests in the background of a script ignores Ctrl-C, and so would what the tests start."""

UNIT = tuple(Path(__file__).parent / one for one in ("spec", "cluster", "job/core", "tensors/core", "train/plan"))
"""Folders of tests that work with values alone."""
assert all(folder.is_dir() for folder in UNIT), f"a folder of unit tests was moved: {UNIT}"


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """What a process of the service sets for itself is not left to the next test."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def no_sockets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test that opens a network connection fails."""
    if not any(Path(request.path).is_relative_to(folder) for folder in UNIT):
        return

    def refused(self: socket.socket, address: Any, *_: Any) -> None:
        raise AssertionError(f"a unit test opens a connection to {address}")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refused)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A file of that name is not imported by the fast tests: all of it is real."""
    if item.path.name.endswith("_real.py"):
        item.add_marker(pytest.mark.real)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of processes that take a file each, none is left alone with a long one at the end: those of long limits begin."""
    if not hasattr(config, "workerinput"):
        return
    limits: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0.0), float(limit.args[0]) if limit else 0.0)
    items.sort(key=lambda item: -limits[item.path])


def pytest_collection_finish() -> None:
    """Full passes of the garbage collector leave out what was imported: they took a sixth of the time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many fault cases of the tensor store passed, by the groups of docs/explanation/tensor-faults.md."""
    passed = terminalreporter.getreports("passed")
    groups = Counter(value for report in passed for key, value in report.user_properties if key == "fault group")
    if groups:
        text = ", ".join(f"{group}: {count}" for group, count in sorted(groups.items()))
        terminalreporter.write_line(f"tensor fault cases: {groups.total()} (by group {text})")
