"""The elastic example without a cluster: under torchrun it learns, and a killed run gives the same curve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="ROTA_DEEP is not set"),
]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "sft_stdlib" / "train.py"
STEPS = 60


def torchrun(folder: Path, *, pause_at: int = 0) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    run = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    )
    words = ("--steps", str(STEPS), "--save-every", "20", "--bytes", "2000000", "--pause-at", str(pause_at))
    env = {**os.environ, "ROTA_OUTPUT_DIR": str(folder), "ROTA_CHECKPOINT_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    # torchrun 2.13 keeps one store over its restarts, where a rank may read the address of a peer that is gone
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "stderr").open("wb") as told:
        return subprocess.Popen((*run, str(SCRIPT), *words), env=env, stderr=told)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_it_learns_and_a_killed_rank_changes_no_loss_of_the_curve(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert torchrun(whole).wait(120) == 0, (whole / "stderr").read_text()
    run = torchrun(killed, pause_at=50)
    deadline = time.monotonic() + 100
    while not (killed / "paused-1").exists():
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.02)
    rank = psutil.Process(run.pid).children()[1]
    rank.send_signal(signal.SIGKILL)
    (killed / "go").touch()
    assert run.wait(120) == 0, (killed / "stderr").read_text()
    assert result(killed)["resumed_at"] == 40, "the second start went on from the checkpoint"
    assert result(killed)["curve"] == result(whole)["curve"], "bit for bit"
    assert result(whole)["share"] <= 0.75
