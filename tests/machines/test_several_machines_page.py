"""The page on several machines, typed word by word into the shells of two machines that share nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.machines.bed import Machine, bed
from tests.machines.site import long

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "several-machines.md"
LIMIT_S = 300.0
SHELL = re.compile(r"^( *)```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
JOB = re.compile(r"^( *)```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
TRAIN = """
import os, pathlib, socket
import torch.distributed as dist

dist.init_process_group("gloo")
folder = pathlib.Path(os.environ["ROTA_OUTPUT_DIR"]) / "results"
folder.mkdir()
(folder / f"rank{dist.get_rank()}.txt").write_text(socket.gethostname())
dist.barrier()
print("rank", dist.get_rank(), "on", socket.gethostname(), flush=True)
dist.destroy_process_group()
"""


def plain(indent: str, block: str) -> str:
    return "".join(line.removeprefix(indent) for line in block.splitlines(keepends=True))


def typed(machine: Machine, script: str) -> str:
    env = {"ROTA_HOME": f"/tmp/home-of-{machine.name}", "RAY_USAGE_STATS_ENABLED": "0"}
    env["PATH"] = f"{Path(sys.executable).parent}:{machine.environ['PATH']}"
    place = "mkdir -p /tmp/code && cd /tmp/code\n"
    return machine.run("bash", "-e", "-c", place + script, env=env, timeout_s=LIMIT_S)


@long
def test_every_command_of_the_page_does_what_it_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    up, join, work, drain, leave, check = (plain(*found) for found in SHELL.findall(text))
    ((indent, job),) = JOB.findall(text)
    with bed(2, subnet=85) as (head, other):
        try:
            said = typed(head, up.replace("10.0.0.5", head.address))
            (token,) = re.findall(r"rota_[\w-]+", said)
            assert "ROTA_TOKEN=rota_... rota join 10.0.0.5" in join
            typed(other, join.replace("rota_...", token).replace("10.0.0.5", head.address))
            head.path("/tmp/code/wide.yaml").write_text(plain(indent, job))
            head.path("/tmp/code/train.py").write_text(TRAIN)
            said = typed(head, work)
            assert all(re.search(rf"{one.name} +healthy", said) for one in (head, other)), said
            assert sorted(re.findall(r"rank \d on (\w+)", said)) == ["m0", "m1"], said
            results = head.path("/tmp/code/results")
            assert sorted(one.read_text() for one in results.iterdir()) == ["m0", "m1"]
            assert other.path("/tmp/home-of-m1/jobs/wide-1/code/train.py").read_text() == TRAIN
            assert "m1" in typed(head, check)
            assert "m1" in typed(head, drain)
            typed(other, leave)
            assert other.processes() == {} and other.left_in_memory() == []
        finally:
            typed(head, "rota down --force || true")
        assert head.left_in_memory() == []
