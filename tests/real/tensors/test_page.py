"""The code of the how-to page of sharing tensors runs as it stands there, in one process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "share-tensors-between-processes.md"
SHOW = 'print(seen.tolist(), step.step, step["w"].sum().item(), link.name)'


def test_the_page_shares_a_tensor_a_step_and_a_reference(tmp_path: Path) -> None:
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    env = {**os.environ, "ROTA_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code + SHOW], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.splitlines() == ["[0.0, 1.0, 2.0, 3.0, 4.0, 5.0] 7 4.0 features"], ended.stderr
