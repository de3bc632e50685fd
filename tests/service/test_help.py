"""The first screen of help, and verbs that users of other tools type by habit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standing import Standing
from test_cli import own_home, rota, with_cli

from rota.service.cli import app
from rota.service.cli.habits import HABITS

assert own_home  # the fixture of every test here, too

TYPED = """squeue launch retry wait open help version sbatch apply attach ssh drain kubectl docker slurm ray scancel
sinfo sacct scontrol srun salloc qsub qstat qdel submit create delete describe get ls list jobs kill cancel restart
tail watch monitor whoami config dashboard cordon taint uncordon edit suspend validate torchrun port-forward
inspect history start"""


@pytest.mark.parametrize("word", TYPED.split())
def test_a_verb_typed_by_habit_names_what_to_type_here(word: str) -> None:
    done = rota(word)
    if word in ("help", "version"):
        assert (done.status, done.err) == (0, "") and ("Usage: rota" in done.out or done.out.strip())
        return
    assert done.status == 2 and re.search(r"\n +use: (no ports|rota [a-z]+)", done.err), done.err


def test_every_verb_that_a_hint_names_is_one_that_there_is() -> None:
    named = {verb for text in HABITS.values() for verb in re.findall(r"rota ([a-z]+)", text)}
    assert named <= set(app.VERBS), named - set(app.VERBS)
    assert not HABITS.keys() & {*app.VERBS, *app.FAMILIES}, "a verb is no habit"


def test_the_first_screen_has_ten_verbs_and_a_first_job_that_can_be_typed_as_it_is() -> None:
    first, every = rota("--help").out, rota("help", "all").out
    listed = [verb for verb in app.VERBS if re.search(rf"^│ {verb} ", first, re.MULTILINE)]
    assert sorted(listed) == sorted(app.BASICS) and len(listed) == 10
    assert len(first.splitlines()) <= 24, "it fits a terminal"
    top = {verb.partition(" ")[0] for verb in app.VERBS}
    assert [verb for verb in top if not re.search(rf"^│ {verb} ", every, re.MULTILINE)] == []
    assert "Examples" in rota("help", "ps").out
    typed = re.search(r"rota (init \w+) && rota (run \S+)", " ".join(first.split()))
    assert typed is not None
    assert rota(*typed[1].split()).status == 0
    checked = rota(*typed[2].split(), "--check")
    assert (checked.status, "is valid" in checked.out) == (0, True), checked.err
    assert typed[0] in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["join"], "join needs an ADDRESS\n      see: rota join --help"),
        (["sim", "run", "--profile", "fifo", "/x"], "no further argument: /x\n      see: rota sim run --help"),
        (
            ["run", "sh", "train.py"],
            "further argument: train.py\n      write a command after '--': rota run -- sh train.py",
        ),
        (["run", "--gpus", "1", "sh", "-x"], "write a command after '--': rota run --gpus 1 -- sh -x"),
        (["run", "--gpus=1", "sh", "-x"], "write a command after '--': rota run --gpus=1 -- sh -x"),
        (["run", "job.yaml", "-n", "test", "--gpuz", "1"], "see: rota run --help"),
        (["run", "job.yaml", "test", "test"], "see: rota run --help"),
        (["run", "-n", "test", "--gpuz", "1"], "see: rota run --help"),
        (["show", "trainer/0"], "no job 'trainer/0': an id has no '/'\n      the job comes first, then ROLE/N"),
        (["nodes", "suspect", "r0n0"], "rota nodes suspect r0n0: not understood\n      use: rota nodes drain NODE ..."),
        (["nodes", "bad", "r0n0"], "rota nodes bad r0n0: not understood\n      use: rota nodes drain NODE ..."),
        (["user", "list"], "rota user list: not understood\n      use: rota user ls"),
        (["nodes", "resume", "n1"], "use: rota nodes undrain NODE"),
        (["nodes", "ls"], "use: rota nodes\n"),
        (["secret", "get", "KEY"], "a secret cannot be read back\n      rota secret ls"),
        (["secret", "put"], "use: rota secret set NAME"),
        (["token", "delete"], "use: rota token rm ID"),
        (["webhook", "create"], "use: rota webhook add URL"),
        (["queues", "update"], "use: rota queues apply FILE"),
        (["alerts", "acknowledge"], "use: rota alerts ack ID"),
        (["nodes", "frob", "n1"], "there is: rota nodes, rota nodes show NODE"),
        (["sim", "compare", "--profiles"], "see: rota sim compare --help"),
    ],
)
def test_a_mistyped_command_names_what_was_meant_or_the_help_of_its_own_verb(typed: list[str], says: str) -> None:
    done = rota(*typed)
    assert done.status == 2 and says in done.err, done.err


@pytest.mark.slow
def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv=['rota','help','all'];\n"
        "from rota.service.cli import app\n"
        "try:\n app.main()\nexcept SystemExit: pass\n"
        "heavy={'torch','ray','fastapi','sqlalchemy','httpx','numpy','pydantic','ruamel.yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout.index("Service") < done.stdout.index("Jobs") < done.stdout.index("Tools")


def test_verbose_prints_each_request_and_no_more_on_stdout(tmp_path: Path) -> None:
    async def test(_: Standing, ask: Callable[..., Any]) -> None:
        quiet, loud = await ask("ps", "--json"), await ask("ps", "-v", "--json")
        assert "/api/v1/jobs" not in quiet.err and re.search(r"GET http\S+/api/v1/jobs\S* .*200 OK", loud.err), loud.err
        assert quiet.document == loud.document

    with_cli(tmp_path / "service", test)
