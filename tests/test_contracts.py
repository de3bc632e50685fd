"""Adds one forbidden import at a time to a copy of the tree and expects the contract to break."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BREAKS = [
    ("Parts depend downward only", "rota/spec/ids.py", "import rota.runtime.clock"),
    ("Parts depend downward only", "rota/cluster/core/capacity.py", "import rota.job.workload"),
    ("Parts depend downward only", "rota/job/workload.py", "import rota.adapters.rollout"),
    ("Inside cluster", "rota/cluster/core/capacity.py", "import rota.cluster.policies.basic"),
    ("Inside job", "rota/job/workload.py", "import rota.job.master.master"),
    ("Inside train", "rota/train/plan/model.py", "import rota.train.loop"),
    ("Inside tensors", "rota/tensors/segments.py", "import rota.tensors.api.store"),
    ("Inside runtime", "rota/runtime/packages.py", "import rota.runtime.data_cache"),
    ("Inside runtime", "rota/runtime/process.py", "import rota.runtime.ray.engine"),
    ("Inside service", "rota/service/rest/auth.py", "import rota.service.client"),
    ("Inside service", "rota/service/views/jobs.py", "import rota.service.control.loop"),
    ("Inside service", "rota/service/models/base.py", "import rota.service.jobfile.models"),
    ("The core decides and touches nothing", "rota/cluster/core/capacity.py", "import threading"),
    ("Engines and stores are reached only through runtime", "rota/job/workload.py", "import ray"),
    ("Torch stays out of the control plane", "rota/job/master/master.py", "import torch"),
    ("Scheduling knows nothing of tensors", "rota/cluster/core/capacity.py", "import rota.tensors.api.store"),
    ("The client knows only spec", "rota/service/client.py", "import rota.runtime.clock"),
    ("Verbs speak to the client, to offline.py or to local.py", "rota/service/cli/app.py", "import rota.runtime.clock"),
    (
        "Verbs speak to the client, to offline.py or to local.py",
        "rota/service/cli/verbs/cluster.py",
        "import rota.service.views.cluster",
    ),
    (
        "Verbs speak to the client, to offline.py or to local.py",
        "rota/service/cli/verbs/service.py",
        "import rota.service.process.daemon",
    ),
    ("No cycles between siblings anywhere", "rota/spec/ids.py", "import rota.spec.job"),
]


def test_each_contract_is_broken_once() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    assert {name for name, _, _ in BREAKS} == {one["name"] for one in declared}


def _lint(folder: Path) -> str:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-logo", "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "file", "line"), BREAKS, ids=lambda value: value if " " not in value else None)
def test_a_forbidden_import_is_reported(tmp_path: Path, contract: str, file: str, line: str) -> None:
    shutil.copytree(ROOT / "src" / "rota", tmp_path / "rota", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    target = tmp_path / file
    target.write_text(target.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")

    shown = _lint(tmp_path)

    assert f"{contract} BROKEN" in shown, shown[-2000:]


@pytest.mark.slow
def test_the_tree_as_it_is_keeps_every_contract() -> None:
    shown = _lint(ROOT / "src" / "..")
    assert " 0 broken" in shown, shown[-2000:]
