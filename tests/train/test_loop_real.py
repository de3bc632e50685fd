"""A run that changes its world: same losses as one process that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.train import fit_script

SCRIPT = str(Path(fit_script.__file__))
LIMIT_S = 200


def run(folder: Path, ranks: int, steps: int, **environment: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, SCRIPT, str(folder), str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def losses(folder: Path) -> dict[int, float]:
    """The last loss told for each step: steps after the last checkpoint are done again."""
    return dict(map(json.loads, (folder / "losses").read_text().splitlines()))


@pytest.mark.real
@pytest.mark.timeout(3 * LIMIT_S + 30)
def test_two_ranks_lose_one_and_the_other_goes_on_alone_with_the_same_losses(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", ranks=1, steps=12)
    assert "done 12" in whole.stdout, whole.stderr
    lost = run(tmp_path / "lost", ranks=2, steps=12, DIE_AT="7")
    assert lost.returncode != 0
    assert max(losses(tmp_path / "lost")) < 12
    alone = run(tmp_path / "lost", ranks=1, steps=12)
    assert "done 12" in alone.stdout, alone.stderr
    want, got = losses(tmp_path / "whole"), losses(tmp_path / "lost")
    assert sorted(got) == sorted(want)
    assert max(abs(got[step] - want[step]) for step in want) <= 1e-5
    lines = [json.loads(line) for line in (tmp_path / "lost" / "samples").read_text().splitlines()]
    resumed = min(step for ranks, step, _ in lines if ranks == 1)
    assert 0 < resumed <= 7, "the second world continues from a checkpoint of the first"
    trained = Counter(
        sample for ranks, step, samples in lines if (ranks == 1) == (step >= resumed) for sample in samples
    )
    assert trained == Counter(dict.fromkeys(range(fit_script.SAMPLES), 3)), "three epochs, each sample once in each"


@pytest.mark.real
@pytest.mark.timeout(2 * LIMIT_S + 30)
def test_sigterm_saves_and_ends_and_the_next_run_goes_on(tmp_path: Path) -> None:
    stopped = run(tmp_path, ranks=1, steps=50, STOP_AT="3")
    assert "done 3" in stopped.stdout, stopped.stderr
    resumed = run(tmp_path, ranks=1, steps=5)
    assert "done 5" in resumed.stdout, resumed.stderr
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]
    assert len((tmp_path / "losses").read_text().splitlines()) == 5
