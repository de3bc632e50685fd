"""rota tensors against a real registry and real shared memory."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rota.tensors
from rota.runtime import environ, process
from rota.runtime.redis import server as redis_server
from rota.service.cli import app


@pytest.fixture
def plane(engine_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ROTA_HOME", str(engine_home))
    monkeypatch.delenv("ROTA_REDIS_URL", raising=False)
    made = rota.tensors.connect(namespace="shown")
    yield made
    made.close()
    rota.tensors.down(engine_home)


def ask(*words: str, status: int = 0) -> dict[str, Any]:
    """The document of one verb; its exit status must be the given one."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        done = app.call([*words, "-n", "shown", "--json"])
    assert done == status, err.getvalue()
    return json.loads(out.getvalue())


def test_what_is_published_is_listed_measured_checked_and_kept_whole(plane: Any) -> None:
    plane.put("weights/a", np.arange(1000, dtype=np.float32))
    plane.put("weights/b", np.zeros(10, dtype=np.int64))

    items = ask("tensors", "ls", "weights/")["items"]
    assert [(one["name"], one["dtype"], one["shape"], one["bytes"]) for one in items] == [
        ("weights/a", "f32", [1000], 4032),  # with the head of the segment
        ("weights/b", "i64", [10], 128),
    ]
    held = plane.get("weights/a")
    shown = ask("tensors", "stat", "weights/a")
    assert (shown["kind"], len(shown["versions"])) == ("Tensor", 1)
    assert ask("tensors", "top", "1")["items"][0]["name"] == "weights/a"
    assert ask("tensors", "fsck")["violations"] == []
    assert {one["level"] for one in ask("tensors", "doctor")["checks"]} <= {"ok", "warn"}
    assert ask("tensors", "gc", "--dry-run")["dry_run"] is True
    assert ask("tensors", "recover")["names"] == 2
    assert float(held[999]) == 999.0
    assert "did you mean 'weights/" in ask("tensors", "stat", "weights/c", status=2)["hint"]


def test_gc_with_all_gives_back_what_every_namespace_has_free(plane: Any) -> None:
    out, planes = io.StringIO(), [plane, rota.tensors.connect(namespace="beside")]
    for each in planes:
        each.put("w", np.zeros(100_000))
        each.delete("w")
        assert each.stats()["free_bytes"] > 800_000
    with redirect_stdout(out):
        assert app.call(["tensors", "gc", "--all", "--json"]) == 0
    assert json.loads(out.getvalue())["trimmed_bytes"] > 1_600_000
    assert [each.stats()["file_bytes"] for each in planes] == [0, 0]
    planes[1].close()
    with redirect_stderr(out):
        assert app.call(["tensors", "gc", "--all", "-n", "shown"]) == 2
    assert "--all and --namespace shown: give one of them" in out.getvalue()


def test_what_a_dead_registry_left_is_listed_and_may_be_had_back(
    engine_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_HOME", str(engine_home))
    monkeypatch.delenv("ROTA_REDIS_URL", raising=False)
    code = "import os, rota.tensors as t; t.connect(namespace='shown', keep=True).put('w', [1, 2]); os._exit(0)"
    for verb, field in (("ls", "items"), ("recover", "names"), ("fsck", "checked"), ("top", "items")):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        server = redis_server.find_running(environ.Home.of(engine_home))
        assert server is not None
        process.send_signal(server.process, signal.SIGKILL)
        assert not process.wait_gone((server.process,), 5)
        assert ask("tensors", verb)[field]
        rota.tensors.connect(namespace="shown").close()
        rota.tensors.down(engine_home)
    assert ask("tensors", "top")["items"] == []


def test_a_recovery_on_trial_says_what_would_come_back_and_changes_nothing(plane: Any) -> None:
    plane.put("w", np.ones(3))
    view, epoch = plane.get("w", as_="numpy"), plane.stats()["registry_epoch"]
    tried = ask("tensors", "recover", "--dry-run")
    assert (tried["names"], tried["leases"], plane.stats()["registry_epoch"]) == (1, 1, epoch)
    done = ask("tensors", "recover")
    assert {key: done[key] for key in ("epoch", "names", "leases")} == {"epoch": epoch + 1, "names": 1, "leases": 1}
    assert view.tolist() == [1, 1, 1]
