"""The Python of how-to pages without commands runs as it stands there, after what the page leaves to its reader."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.real.jobs import deep

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"


def blocks(page: str) -> list[str]:
    """The blocks of Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)


def run(folder: Path, home: Path, *command: str) -> str:
    """What a command prints in a folder; the service that it started is ended."""
    env = {**os.environ, "ROTA_HOME": str(home), "ROTA_PORT": "0", "PYTHONPATH": str(folder)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    options = {"cwd": folder, "env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        ended = subprocess.run(command, check=False, timeout=240, **options)
    finally:
        subprocess.run(["rota", "down", "--force"], check=False, timeout=120, **options)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def script(folder: Path, *parts: str) -> tuple[str, str]:
    """The command that runs these parts as one program."""
    (folder / "page.py").write_text("\n".join(parts))
    return sys.executable, "page.py"


def test_a_record_goes_through_a_channel(engine_home: Path, tmp_path: Path) -> None:
    train = "def train(tokens, reward): print(tokens.shape, reward)\n"
    ran = script(tmp_path, train, blocks("stream-records-between-processes")[0])
    assert run(tmp_path, engine_home, *ran) == "torch.Size([8, 512]) 0.5\n"


def test_memory_without_a_name_is_read_by_name(engine_home: Path, tmp_path: Path) -> None:
    ran = script(tmp_path, blocks("share-tensors-on-a-gpu")[1], "print(plane.get('secret').sum())\nplane.close()")
    assert "499500" in run(tmp_path, engine_home, *ran)


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_the_same_memory(engine_home: Path, tmp_path: Path) -> None:
    ran = script(tmp_path, blocks("share-tensors-on-a-gpu")[0], "print(w.shape, w.device)")
    assert "torch.Size([4096, 4096]) cuda:0" in run(tmp_path, engine_home, *ran)


@deep
def test_a_server_role_and_its_worker_run_as_the_page_has_them(engine_home: Path, tmp_path: Path) -> None:
    server, worker, _ = blocks("parameter-server")
    imports, _, iteration = worker.partition("\n\n")
    (tmp_path / "sparse.py").write_text(
        f"{server}\n\n{imports}\n"
        + textwrap.dedent("""
        import numpy as np

        class Trainer(Workload):
            def setup(self, ctx):
                self.ctx = ctx

            @op(send=Same, recv=Concat())
            def iterate(self, addresses):
                ctx, ids = self.ctx, np.arange(4)
                gradients = np.ones((4, 24), np.float32)
        """)
        + textwrap.indent(iteration, " " * 8)
        + textwrap.dedent("""
                return [float(np.abs(rows).sum() + np.abs(client.pull("words", ids) - rows).sum())]

        async def loop(flow):
            print("moved", await flow.roles.trainer.iterate(await flow.roles.ps.addresses()))
        """)
    )
    roles = ", ".join(
        f'{name}: {{workload: "sparse:{what}"}}'
        for name, what in (("ps", "Server"), ("trainer", "Trainer"), ("loop", "loop"))
    )
    (tmp_path / "job.yaml").write_text(f"{{name: sparse, roles: {{{roles}}}}}")
    out = run(tmp_path, engine_home, "bash", "-ec", "rota run -w job.yaml; rota logs sparse-1")
    moved = re.search(r"moved \[([\d.]+)\]", out)
    assert moved and float(moved[1]) > 1.0, out


@deep
def test_one_rank_of_a_torchrun_script_hosts_the_server(engine_home: Path, tmp_path: Path) -> None:
    server, worker, hosted = blocks("parameter-server")
    before = "import os, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
    ids = "import numpy as np\nprint(rank, client.pull('words', np.arange(3)).shape, flush=True)\ndist.barrier()\n"
    script(tmp_path, server, worker.partition("\n\n")[0], before, hosted, ids)
    out = run(tmp_path, engine_home, "torchrun", "--nproc-per-node", "2", "--standalone", "page.py")
    assert "0 (3, 24)" in out and "1 (3, 24)" in out, out
