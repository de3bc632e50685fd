"""What a raylet starts: a worker without Ray's setup script unless an environment is asked for, and an idle agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rota.runtime import process
from rota.runtime.ray import raylet_child

PRINTS = "import sys\nprint(sys.argv)\n"
LIMIT_S = 30.0


def test_a_worker_is_started_directly_unless_it_needs_an_environment(tmp_path: Path) -> None:
    worker, environment = str(tmp_path / "default_worker.py"), '--serialized-runtime-env-context={"env_vars": {}}'
    for name in ("default_worker.py", "setup_worker.py"):
        (tmp_path / name).write_text(PRINTS)

    def started(*words: str) -> str:
        command = (sys.executable, raylet_child.__file__, *words)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.strip()

    assert started(worker, "--node-id=a b", "--language=PYTHON") == str([worker, "--node-id=a b"])
    words = ("-s", worker, "--language=PYTHON", environment)
    assert started(*words) == str([str(tmp_path / "setup_worker.py"), *words])


def test_the_idle_process_ends_with_its_parent() -> None:
    starts = (
        "import os, subprocess, sys; os.environ['RAY_RAYLET_PID'] = str(os.getpid());"
        "print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"
    )
    child = (sys.executable, "-I", "-S", raylet_child.__file__, raylet_child.AGENT, "--of-the-raylet")
    parent = subprocess.Popen(
        (sys.executable, "-c", starts, *child), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    idle = process.identify(int(parent.stdout.readline()))
    assert idle is not None
    assert process.wait_gone((idle,), 0.3) == (idle,), "it waits while its parent lives"
    parent.kill()
    assert process.wait_gone((idle,), LIMIT_S) == ()
    parent.communicate()


def test_the_idle_process_ends_where_its_raylet_was_gone_before_it_looked() -> None:
    command = (sys.executable, "-I", "-S", raylet_child.__file__, raylet_child.AGENT)
    with subprocess.Popen(("true",)) as gone:
        pass
    for raylet in (os.getppid(), gone.pid):  # one that is not its parent has been followed by another process
        ended = subprocess.run(command, env={"RAY_RAYLET_PID": str(raylet)}, check=False, timeout=LIMIT_S)
        assert ended.returncode == 0, raylet
