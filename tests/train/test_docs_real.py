"""What the how-to shows to a user of torchrun alone runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-with-a-plan.md"


def blocks(kind: str) -> list[str]:
    """The text of every block of one kind on the page, in order."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A line as a user types it, with the scripts of this environment on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_script_of_the_how_to_trains_under_torchrun_with_the_planners_plan(tmp_path: Path) -> None:
    script, command = blocks("python")[0], blocks("bash")[0]
    (tmp_path / "train.py").write_text(script)
    ended = run(command.replace("torchrun", "torchrun --standalone"), tmp_path)
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"], ended.stderr
    assert float(rows[-1][1]) < float(rows[0][1])
    assert {row[2] for row in rows} == {str(16 * 64)}


@pytest.mark.real
@pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="starts a process for each command; ROTA_DEEP=1 runs it")
@pytest.mark.timeout(600)
def test_every_other_command_of_the_how_to_runs_as_it_stands_there(tmp_path: Path) -> None:
    """The plan that one finds is explained by the next; the tables of the repository are where the page says."""
    (tmp_path / "tests").symlink_to(PAGE.parents[2] / "tests")
    [model], [job] = blocks("json"), blocks("yaml")
    (tmp_path / "model.json").write_text(model)
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "pretrain.py").write_text(blocks("python")[0])
    lines = [line for block in blocks("bash")[1:] for line in block.splitlines()]
    asked = re.findall(r"`(rota run [^`]*)`", PAGE.read_text(encoding="utf-8"))
    told = {line: run(line, tmp_path, ROTA_HOME=str(tmp_path / "home")) for line in [*lines, *asked]}
    assert len(told) == 5
    assert [(line, one.stderr) for line, one in told.items() if one.returncode] == []
    assert json.loads((tmp_path / "found.json").read_text())["certificate"]["gap_pct"] == 0
    assert "a step is" in told[lines[1]].stdout
    assert "Gap to the bound 0 %" in told[asked[0]].stdout
