"""The job that README.md prints is the one in examples/grpo_sums."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SAID = ("workload", "replicas", "mesh")


def test_the_job_of_the_readme_has_the_roles_and_edges_of_the_example() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    shown: dict[str, Any] = yaml.safe_load(block)
    real: dict[str, Any] = yaml.safe_load((ROOT / "examples/grpo_sums/job.yaml").read_text(encoding="utf-8"))
    for name, role in real["roles"].items():
        assert {key: shown["roles"][name].get(key) for key in SAID} == {key: role.get(key) for key in SAID}
        assert shown["roles"][name]["resources"]["cpus"] == role["resources"]["cpus"]
    assert {key: shown[key] for key in ("name", "weights", "env")} == {
        key: real[key] for key in ("name", "weights", "env")
    }
