"""The pages of docs/, typed word by word into a shell; what a page asks a person to wait for is filled in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real.jobs import deep
from tests.runtime.wheels import make_wheel, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

TESTS = Path(__file__).resolve().parents[1]
PAGES = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
LIMIT_S = 600
FILES = re.compile(r"[Aa]s\s+`([\w.-]+)`[^`]*?:\n\n```(?:yaml|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
WAITING = """
until_said() { for _ in $(seq 600); do "${@:2}" 2>/dev/null | grep -q -- "$1" && return; sleep 0.2; done; false; }
pid_of() { rota show "$1" --json | python -c "import json, sys; print(json.load(sys.stdin)['instances'][0]['pid'])"; }
"""


def typed(page: str, folder: Path, home: Path, *fills: tuple[str, str]) -> str:
    """Save the files of a page, type its commands into one shell, and give back all that was printed."""
    text = (PAGES / page).read_text(encoding="utf-8")
    for name, content in FILES.findall(text):
        (folder / name).write_text(content)
    script = "".join(SHELL.findall(text))
    for line, instead in fills:
        assert line in script, line
        script = script.replace(line, instead)
    env = {
        **os.environ,
        "ROTA_HOME": str(home),
        "ROTA_PORT": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    shell = subprocess.Popen(
        ["bash", "-e", "-c", WAITING + script], cwd=folder, env=env, start_new_session=True, **piped
    )
    late = False
    try:
        out, err = shell.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)  # the command that it waits for, too
        (out, err), late = shell.communicate(), True
    finally:
        subprocess.run(["rota", "down", "--force"], cwd=folder, env=env, capture_output=True)
    assert shell.returncode == 0, f"{f'not done after {LIMIT_S} s' if late else ''}\n{out}\n{err[-3000:]}"
    return out


Fills = tuple[tuple[str, str], ...]
UP = "rota up"
PRETEND = f"{UP} --pretend"
SHORT: dict[str, tuple[Fills, tuple[str, ...]]] = {
    "add-a-policy": (
        (
            ("rota sim", "printf 'job_id,submit_s,duration_s,gpus,vc\\na,0,60,8,red\\n' > TRACE.csv\nrota sim"),
            ("rota sim", "printf 'vc,nodes\\nred,1\\n' > VCS.csv\nrota sim"),
            ("default,NAME", "default,srtf"),  # the smallest one that is there
            (f"{UP} --profile NAME", f"{UP} --pretend 1x1x1 --profile srtf\nrota status"),
        ),
        ("srtf", "1x1x1"),
    ),
    "compare-schedulers": (
        (
            (
                "rota sim run --log ~/.local/state/rota/rota.db",
                f"{PRETEND} 1x2x4\nrota run -d --gpus 2 -- true\nrota sim run --log $ROTA_HOME/rota.db",
            ),
        ),
        ("LATER GUARANTEED", "bestfit", "1 of 1 decision the same"),
    ),
    "elastic-jobs": (
        (("rota nodes drain r0n1 --notice 10m", f"{PRETEND} 1x2x4\nrota nodes drain r0n1 --notice 10m"),),
        ("drained",),
    ),
    "operate": (
        (("rota backup", f"{PRETEND} 1x1x1\nrota backup"), ("ROTA_HOME=/srv/rota", "ROTA_HOME=$PWD/restored")),
        ("rota.tar.gz", "restored"),
    ),
    "users-and-secrets": (
        (
            ("rota queues apply", f"{PRETEND} 2x2x8\nrota queues apply"),
            ("rota secret set", "echo not-to-be-read > key.txt\nrota secret set"),
        ),
        ("research", "ann", "API_KEY"),
    ),
}
"""How-to pages that start no process of a job: what is filled in, and words that must be printed."""
SAVED = """cat > reward.py <<'END'
import time
from rota import Workload, op
class Reward(Workload):
    def setup(self, ctx): ...
    @op
    def score(self): time.sleep(1000)
async def loop(flow): await flow.roles.reward.score()
END
printf '{name: ppo, time_limit: 9m, roles: {reward: {workload: "reward:Reward"}, loop: {workload: "reward:loop"}}}' \\
  > ppo.yaml
"""
ACTORS = """rota up --pretend 1x1x4
printf 'queues:\\n  - {path: default}\\n  - {path: research}\\n' > queues.yaml
rota queues apply queues.yaml
printf '{name: train, roles: {main: {run: "sleep 600"}, actor: {run: "sleep 600", replicas: 3}}}' > train.yaml
rota run -d train.yaml
until_said RUNNING rota show train-1
"""
LONG: dict[str, tuple[Fills, tuple[str, ...]]] = {
    "add-a-workload": (
        (("rota run job.yaml\n", "rota run job.yaml\nuntil_said SUCCEEDED rota ps -a\n"),),
        ("restarts scorer (2 instances)", "[0.5, 0.1]"),
    ),
    "jobs-after-jobs": (
        (("rota explain clean-1\n", "rota explain clean-1\nuntil_said SUCCEEDED rota show clean-1\nrota ps -a\n"),),
        ("DEPENDENCY", "train-1", "SUCCEEDED"),
    ),
    "sweeps": ((), ("lr", "best", "halved", "closer-1")),
    "find-a-hang": (
        (
            ("rota why ppo-3\n", f"{SAVED}rota run -d ppo.yaml\nuntil_said suspect: rota why ppo-1\nrota why ppo-1\n"),
            ("rota trace ppo-3 out.json\n", "rota trace ppo-1 out.json\n"),
        ),
        (
            "suspect: reward/0 made no progress",
            "in score; loop/0 waits for it",
            'reward.py", line',
            "written  out.json",
        ),
    ),
    "share-tensors-with-other-languages": (
        (
            (
                "rota tensors door &",
                "rota tensors door > door.txt 2>&1 &\nuntil_said Ctrl-C cat door.txt\ncat door.txt\n#",
            ),
            ("examples/tensor_client", str(TESTS.parent / "examples" / "tensor_client")),
            ("SOCKET", "$(grep -o '/[^ ]*sock' door.txt | head -1)"),
            ("delete x\n", "delete x\nkill %1\nwait %1 || true\n"),
        ),
        ("[3., 4., 5.]])", "0 1 2 3 4 5"),
    ),
    "work-in-a-shell": (
        (
            ("rota exec -it train-1\n", f"{ACTORS}echo 'echo beside $ROTA_INSTANCE' | rota exec -it train-1\n"),
            ("python -m pdb -p 1234", "python -c 'print(6 * 7)'"),
            ("-e HF_HOME=/data/hf\n", "-e HF_HOME=/data/hf <<< 'echo models in $HF_HOME; exit'\n"),
            ("-q research -- ipython\n", "-q research -- python <<< 'print(7 * 11)'\n"),
        ),
        ("beside main/0", "42", "models in /data/hf", "77"),
    ),
}
"""Those that run jobs or programs beside them."""


@pytest.mark.parametrize("page", SHORT)
def test_a_how_to_page_is_typed_as_it_is(page: str, engine_home: Path, tmp_path: Path) -> None:
    fills, words = SHORT[page]
    out = typed(f"../how-to/{page}.md", tmp_path, engine_home, *fills)
    assert [word for word in words if word not in out] == [], out


@deep
@pytest.mark.parametrize("page", LONG)
def test_a_how_to_page_with_jobs_is_typed_as_it_is(page: str, engine_home: Path, tmp_path: Path) -> None:
    fills, words = LONG[page]
    out = typed(f"../how-to/{page}.md", tmp_path, engine_home, *fills)
    assert [word for word in words if word not in out] == [], out


def test_every_page_with_commands_is_typed_by_a_test() -> None:
    told = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    left = [
        path.name
        for path in (*PAGES.glob("*.md"), *(PAGES.parent / "how-to").glob("*.md"))
        if SHELL.search(path.read_text(encoding="utf-8")) and not ({path.stem} & {*SHORT, *LONG} or path.name in told)
    ]
    assert left == []


@deep
def test_the_first_job(engine_home: Path, tmp_path: Path) -> None:
    # elsewhere than on a terminal 'run' returns at once
    fill = ("rota run hello.yaml\n", "rota run hello.yaml\nuntil_said SUCCEEDED rota ps -a\n")
    out = typed("first-job.md", tmp_path, engine_home, fill)
    assert "main/1 | hello from rank 1" in out and "JobEnded state=SUCCEEDED" in out, out
    assert out.splitlines()[-1].startswith("down: service")


@deep
def test_submit_from_python(engine_home: Path, tmp_path: Path) -> None:
    out = typed("../how-to/submit-from-python.md", tmp_path, engine_home)
    assert "SUCCEEDED" in out and "'total': 285}" in out and "\n285\n" in out and "squares/1 square [" in out, out
    assert "squares-1" in out.splitlines()[-1]


@deep
def test_why_it_waits(engine_home: Path, tmp_path: Path) -> None:
    runs = "rota run train.yaml -d\n"
    out = typed(
        "why-it-waits.md",
        tmp_path,
        engine_home,
        ("export ROTA_HOME=$(mktemp -d)\n", ""),  # the home of this test is looked after
        (runs, f"{runs}until_said RUNNING rota ps\n"),
        ("rota ps\nrota explain eval-1\n", "until_said NO_FREE_DEVICES rota ps\nrota explain eval-1\n"),
        ("rota ps                  # until both are gone\n", "until_said 'no jobs' rota ps\n"),
        ("rota stop pretrain-3\n", "rota run too-big.yaml || [ $? = 4 ]\nrota stop pretrain-3\n"),
        ("rota ps\nrota down\n", "until_said RUNNING rota show eval-3\nrota down\n"),
    )
    assert "why       NO_FREE_DEVICES" in out and "why       TOPOLOGY" in out
    assert "would start now with:" in out
    assert out.count("estimate  p10 ") >= 2  # of the first job the forecast may not be there yet


@deep
def test_the_first_failure(engine_home: Path, tmp_path: Path) -> None:
    healed = "until_said worker/0 rota failures counting-1\nuntil_said RUNNING rota show counting-1\n"
    out = typed(
        "first-failure.md",
        tmp_path,
        engine_home,
        ("rota show counting-1\nkill", "until_said RUNNING rota show counting-1\nkill"),
        ("PID_OF_WORKER_0\n", f"$(pid_of counting-1)\n{healed}"),
        ("--type MasterStarted\n", "--type MasterStarted\nrota down\n"),
    )
    line = next(line for line in out.splitlines() if re.match(r"\s*1 .* worker/0 ", line))
    assert "SIGNALLED" in line and "open" not in line
    assert "MasterStarted" in out


@deep
@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a queue a user of its own")
def test_environments_and_limits(engine_home: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "webcolors", "24.1", code="def name_to_hex(name): return {'teal': '#008080'}[name]\n")
    for name in ("tabulate", "pyfiglet"):
        make_wheel(wheels, name, "1.1")
    env = ", ".join(f'{name}: "{value}"' for name, value in settings(wheels).items())  # in place of an index
    out = typed(
        "../how-to/environments-and-limits.md",
        tmp_path,
        engine_home,
        ("rota run job.yaml\n", f"sed -i '1a env: {{{env}}}' job.yaml\nrota run job.yaml\n"),
        ("rota run job.yaml\n", "rota run job.yaml\nuntil_said SUCCEEDED rota ps -a\nrota logs colours-1\n"),
        ("rota run bounded.yaml\n", "rota run bounded.yaml\nuntil_said FAILED rota ps -a\n"),
        ("rota queues apply", "sed -i 's/run_as: vision/run_as: nobody/' queues.yaml\nrota queues apply"),
    )
    assert [out.count(f"main/{rank} | #008080") for rank in range(4)] == [1] * 4, out
    assert re.search(r"OOM_KILLED: ended for its limits: it used [\d.]+MiB of memory; the limit is 256MiB", out), out
    assert "vision" in out and "speech" in out, out
