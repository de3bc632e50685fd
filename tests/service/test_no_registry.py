"""rota tensors on a machine where nothing is shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rota.service.cli import app
from rota.tensors import inspect


@pytest.mark.parametrize("verb", ["doctor", "fsck", "ls", "top", "gc", "recover"])
def test_a_machine_without_a_registry_is_in_order(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROTA_HOME", str(tmp_path))
    monkeypatch.setenv("ROTA_SHM_DIR", "/dev/shm/rota-none-yet")
    monkeypatch.delenv("ROTA_REDIS_URL", raising=False)
    if verb == "doctor":  # small shared memory is a failure of this machine, with or without a registry
        monkeypatch.setattr(inspect, "_SHM_BYTES_MIN", 0)
    assert app.call(["tensors", verb]) == 0
    said = {"doctor": "none runs here: nothing is shared", "ls": "no tensors", "top": "no tensors"}
    assert said.get(verb, "no tensor registry runs here") in capsys.readouterr().out
    assert app.call(["tensors", verb, "--json"]) == 0
    assert "Tensor" in json.loads(capsys.readouterr().out)["kind"]
    assert not Path("/dev/shm/rota-none-yet").exists() and not [*tmp_path.glob("registry*")]
