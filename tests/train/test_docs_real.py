"""What the how-to shows to a user of torchrun alone runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-with-a-plan.md"


@pytest.mark.real
@pytest.mark.timeout(150)
def test_the_script_of_the_how_to_trains_under_torchrun_with_the_planners_plan(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = next(text for kind, text in blocks if kind == "python")
    command = next(text for kind, text in blocks if kind == "bash").split()
    assert command[0] == "torchrun"
    (tmp_path / command[-1]).write_text(script)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command[1:]],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"], ended.stderr
    assert float(rows[-1][1]) < float(rows[0][1])
    assert {row[2] for row in rows} == {str(16 * 64)}
