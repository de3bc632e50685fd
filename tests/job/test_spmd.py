"""How a command is read, and which error of its ranks is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.makers import at, format_line

from rota.job.health.heartbeat import Heartbeat, ProgressMarks
from rota.job.instance import spmd
from rota.job.instance.bootstrap import write_error
from rota.job.instance.instance import failure_of
from rota.job.instance.runners import Setup
from rota.job.instance.spmd import (
    CommandFailed,
    CommandRunner,
    RankMarks,
    first_error,
    parse_command,
    run_setup,
    who_is_behind,
)
from rota.job.rpc.tracing import Collectives
from rota.runtime import process
from rota.runtime.clock import SystemClock
from rota.runtime.probe import requested_stacks
from rota.spec.check import check
from rota.spec.errors import BadInput
from rota.spec.ids import Epoch, InstanceId, RoleName
from rota.spec.job import JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.testing.memory import VirtualClock

BOOT = (sys.executable, "-m", "rota.job.instance.bootstrap")
BEAT = Heartbeat(role=RoleName("main"), rank=0, epoch=Epoch(1), started_epoch=Epoch(1), pid=1)


def role(run: str | tuple[str, ...], **fields: object) -> RoleSpec:
    shell = isinstance(run, str)
    return RoleSpec(name=RoleName("main"), run=(run,) if isinstance(run, str) else run, shell=shell, **fields)  # type: ignore[arg-type]


def wait_for(what: Callable[[], Any], limit_s: float = 20.0) -> Any:
    until_s = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < until_s, f"not within {limit_s} s"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("text", "argv", "local"),
    [
        ("torchrun --nproc-per-node 2 t.py --lr 1e-3", (*BOOT, "t.py", "--lr", "1e-3"), 2),
        ("torchrun --nproc_per_node=4 --standalone t.py", (*BOOT, "t.py"), 4),
        ("torchrun --nnodes 1 --rdzv-backend c10d -m pkg.train -x", (*BOOT, "-m", "pkg.train", "-x"), 1),
        ("torchrun --no-python ./run --a", ("./run", "--a"), 1),
        ("torchrun t.py --name 'a b'", (*BOOT, "t.py", "--name", "a b"), 1),
        ("torchrun --nproc-per-node=\"2\" --rdzv-id 'my run' t.py -x", (*BOOT, "t.py", "-x"), 2),
        ("torchrun --nproc-per-node 2 -- t.py -x", (*BOOT, "t.py", "-x"), 2),
        ("torchrun '$X y.py'", (*BOOT, "$X y.py"), 1),
        ('torchrun "$X/my dir/t.py"', ("/bin/sh", "-c", f'exec {" ".join(BOOT)} "$X/my dir/t.py"'), 1),
        ("python train.py --x 1", (*BOOT, "train.py", "--x", "1"), 1),
        ("python train.py --lr=1e-3 --name 'a b'", (*BOOT, "train.py", "--lr=1e-3", "--name", "a b"), 1),
        ("python3 -u train.py", (sys.executable, "-u", *BOOT[1:], "train.py"), 1),
        ("python -m pkg.train -x", (*BOOT, "-m", "pkg.train", "-x"), 1),
        ("python -c 'print(1)'", (sys.executable, "-c", "print(1)"), 1),
        (
            'python -u "$X/t.py" --n $N',
            ("/bin/sh", "-c", f'exec {sys.executable} -u {" ".join(BOOT[1:])} "$X/t.py" --n $N'),
            1,
        ),
        ("python train.py && python -m pkg", ("/bin/sh", "-c", "python train.py && python -m pkg"), 1),
        ("python train.py > out.txt", ("/bin/sh", "-c", "python train.py > out.txt"), 1),
        ("exit 3", ("/bin/sh", "-c", "exit 3"), 1),
    ],
)
def test_a_line_becomes_the_command_of_each_rank(text: str, argv: tuple[str, ...], local: int) -> None:
    found = parse_command(role(text))
    assert (found.argv, found.local) == (argv, local)


def test_a_list_is_taken_as_it_is_and_needs_no_shell() -> None:
    assert parse_command(role(("echo", "a b"))).argv == ("echo", "a b")


def test_the_bare_command_is_run_when_the_bootstrap_is_switched_off() -> None:
    assert parse_command(role("python t.py", env=(("ROTA_BOOTSTRAP", "0"),))).argv == (sys.executable, "t.py")


def test_the_python_of_another_environment_runs_its_own_packages() -> None:
    assert parse_command(role(("/opt/venv/bin/python", "t.py"))).argv == ("/opt/venv/bin/python", "t.py")
    assert parse_command(role((sys.executable, "t.py"))).argv[:2] == (sys.executable, "-m")


def test_a_world_asks_for_a_store_and_copies_of_a_plain_command_do_not() -> None:
    assert parse_command(role("python t.py", replicas_min=2, replicas_max=2, mesh=(("dp", 2),))).store
    assert not parse_command(role("python t.py", replicas_min=2, replicas_max=2)).store
    assert role("torchrun t.py", replicas_min=2, replicas_max=2).meshed, "all ranks of a torchrun line are one world"
    assert parse_command(role("torchrun t.py")).store
    assert not parse_command(role("python t.py")).store


@pytest.mark.parametrize(
    "options",
    [
        "--nproc-per-node two t.py",
        "--nproc-per-node 2",
        "--nnodes",
        "--nproc-per-node '2 t.py",
        "--virtual-local-rank t.py data.csv",
    ],
)
def test_a_torchrun_line_that_cannot_be_read_is_refused(options: str) -> None:
    with pytest.raises(BadInput, match="role 'main'"):
        parse_command(role(f"torchrun {options}"))


def test_variables_in_a_torchrun_line_are_expanded_in_each_rank_and_quotes_keep_their_meaning(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import sys; print(sys.argv[1:])")
    line = "torchrun --nproc-per-node 2 \\\n  $WHERE/show.py --lr ${LR:-1} \"a & $RANK\" '$RANK | x' \n"
    found = parse_command(role(line, replicas_min=2, replicas_max=2))
    assert (found.local, found.store) == (2, True)
    env = {**os.environ, "WHERE": str(tmp_path), "LR": "1e-3", "RANK": "3"}
    shown = subprocess.run(found.argv, env=env, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == str(["--lr", "1e-3", "a & 3", "$RANK | x"]), shown.stderr
    assert "rota.job.instance.bootstrap" in " ".join(found.argv)


def test_torch_distributed_run_is_a_torchrun_line() -> None:
    found = parse_command(role(("python", "-m", "torch.distributed.run", "--nproc-per-node", "3", "t.py", "-x")))
    assert (found.argv, found.local, found.store) == ((*BOOT, "t.py", "-x"), 3, True)
    assert role("python3 -m torch.distributed.run t.py", replicas_min=2, replicas_max=2).meshed


@pytest.mark.parametrize(
    ("line", "n", "text"),
    [
        ("torchrun t.py | tee log", 2, "with '|' a shell starts it in each of 2 instances: 2 worlds, not one"),
        ("torchrun t.py > log; echo done", 2, "2 worlds, not one"),
        ("torchrun t.py\ntorchrun u.py", 3, "3 worlds, not one"),
        ("torchrun t.py &", 1, "'&' puts torchrun into the background"),
        ("cd src && torchrun t.py", 2, "a shell in each of 2 instances starts torchrun: 2 worlds, not one"),
        ("A=1 python -m torch.distributed.run t.py", 2, "2 worlds, not one"),
        ("torchrun --nproc-per-node $N t.py", 1, "not '$N': options are read before a shell sees them"),
        ("torchrun --nproc-per-node 2", 1, "torchrun needs a script"),
    ],
)
def test_a_torchrun_line_that_would_not_be_one_world_is_refused_before_anything_starts(
    line: str, n: int, text: str
) -> None:
    job = JobSpec(name="j", roles=(role(line, replicas_min=n, replicas_max=n),))
    (found,) = check(job)
    assert (found.path, text in found.message) == (("roles", "main", "run"), True), found
    assert found.hint


@pytest.mark.parametrize(
    ("line", "n"),
    [
        ("torchrun t.py > out.txt 2>&1 && echo done", 1),
        ("cd src && torchrun t.py", 1),
        ("torchrun t.py --text 'a & b | c'", 2),
        ("echo torchrun; python t.py &", 2),
    ],
)
def test_a_line_that_a_shell_reads_rightly_is_left_to_it(line: str, n: int) -> None:
    assert check(JobSpec(name="j", roles=(role(line, replicas_min=n, replicas_max=n),))) == ()


NO_USER = JobSpec(name="j", roles=())


@pytest.mark.parametrize(
    ("line", "fields", "ranked"),
    [
        ("python t.py", {}, False),
        ("./tool --x", {}, False),
        ("torchrun t.py", {}, True),
        ("python t.py", {"mesh": (("dp", 1),)}, True),
        ("python t.py", {"replicas_min": 2, "replicas_max": 2}, True),
    ],
)
def test_only_what_has_ranks_gets_the_variables_of_torchrun(
    line: str, fields: dict[str, Any], ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    seat: Any = SimpleNamespace(
        role=role(line, **fields),
        id=InstanceId(RoleName("main"), 0),
        place=SimpleNamespace(home="/h", job="j-1"),
        spec=NO_USER,
    )
    given = Setup(epoch=Epoch(1), world=1, restore=0)
    env = spmd.rank_environment(seat, given, parse_command(seat.role), 0, "", Path("/w"))
    contract = {name for name in env if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert len(contract) == (5 if ranked else 0), contract
    assert any(name.startswith("TORCHELASTIC_") for name in env) == ranked
    assert (env["ROTA_EPOCH"], env["ROLE_RANK"], env["ROTA_ERROR_FILE"]) == ("1", "0", "/w/error-0.json")


def test_the_error_written_first_is_told_and_not_its_consequences(tmp_path: Path) -> None:
    try:
        raise ValueError("the cause")
    except ValueError as error:
        write_error(tmp_path / "error-1.json", error)
    late = {"message": {"message": "RuntimeError: connection closed", "extraInfo": {"timestamp": "9999999999"}}}
    (tmp_path / "error-0.json").write_text(json.dumps(late))
    (tmp_path / "error-2.json").write_text("{")
    found = first_error(tmp_path)
    assert found is not None
    assert found[0] == "rank 1: ValueError: the cause"
    assert "test_spmd.py" in found[1]


def test_a_rank_writes_its_stacks_when_asked_and_one_that_does_not_listen_is_left_alone(tmp_path: Path) -> None:
    script, stacks = tmp_path / "stuck.py", tmp_path / "stacks-0"
    script.write_text("import time\ndef stuck_here():\n    time.sleep(60)\nstuck_here()\n")
    env = {**os.environ, "ROTA_STACKS_FILE": str(stacks)}
    rank = subprocess.Popen([sys.executable, "-m", "rota.job.instance.bootstrap", str(script)], env=env)
    deaf = subprocess.Popen(["sleep", "60"])
    try:
        which, other = process.identify(rank.pid), process.identify(deaf.pid)
        assert which is not None and other is not None
        until_s = time.monotonic() + 20.0
        while "stuck_here" not in (found := requested_stacks(which, stacks)) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert "stuck_here" in found
        assert requested_stacks(other, tmp_path / "stacks-1") == ""
        assert (rank.poll(), deaf.poll()) == (None, None), "nobody dies of being asked"
    finally:
        for child in (rank, deaf):
            child.kill()
            child.wait()


def test_a_module_runs_as_python_runs_it_and_its_error_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "there.py").write_text("WORD = 'said'\n")
    code = "import sys; from pkg.there import WORD; print(__name__, sys.argv[1:], WORD); raise ValueError(WORD)"
    (tmp_path / "pkg" / "train.py").write_text(code)
    env = {**os.environ, "ROTA_ERROR_FILE": str(tmp_path / "error-0.json")}
    argv = parse_command(role("python -m pkg.train --lr 1")).argv
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("__main__ ['--lr', '1'] said\n", 1), done.stderr
    found = first_error(tmp_path)
    assert found is not None and found[0] == "rank 0: ValueError: said"


@pytest.mark.parametrize("program", [("late.py",), ("-m", "late")])
def test_a_thread_that_outlives_its_script_still_has_the_names_of_main(
    tmp_path: Path, program: tuple[str, ...]
) -> None:
    (tmp_path / "late.py").write_text(
        "import pickle, threading\n"
        "class Here: pass\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    print(pickle.loads(pickle.dumps(Here())).__class__)\n"
        "threading.Thread(target=late).start()\n"
    )
    done = subprocess.run((*BOOT, *program), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "<class '__main__.Here'>\n", done.stderr


def test_an_instance_is_in_the_collectives_where_the_last_of_its_ranks_is(tmp_path: Path) -> None:
    for rank, text in enumerate(("7 40 61 all_reduce", "7 39 60 ", "0 -1 0 ", "")):
        (tmp_path / f"progress-{rank}").write_text(text)
    seat: Any = SimpleNamespace(
        role=role("torchrun --nproc-per-node 4 t.py"), clock=SystemClock(), marks=None, spec=NO_USER
    )
    seat.marks = ProgressMarks(seat.clock)
    body = CommandRunner(seat)
    body._setup, body._files = Setup(epoch=Epoch(1), world=1, restore=0), tmp_path

    async def follow() -> None:
        following = asyncio.create_task(body._follow_progress())
        while not seat.marks.read(BEAT).progress_n:
            await asyncio.sleep(0.01)
        following.cancel()

    asyncio.run(asyncio.wait_for(follow(), timeout=20))
    told = seat.marks.read(BEAT)
    assert (told.progress_n, told.collectives, told.inside) == (7.0, 39, "")
    assert told.held_up == "rank 1 has entered 39 collectives, rank 0 40"


def test_the_ranks_of_one_instance_that_the_others_wait_for_are_named() -> None:
    at = RankMarks(entered=5)
    assert who_is_behind({}) == who_is_behind({2: at, 3: at}) == ""
    assert who_is_behind({2: replace(at, entered=4), 3: at}) == "rank 2 has entered 4 collectives, rank 3 5"
    assert who_is_behind({2: replace(at, inside="barrier"), 3: at}) == "rank 3 is not in barrier, rank 2 is"


@pytest.mark.parametrize("line", ["torchrun --nproc-per-node 1 t.py", "cd /tmp && python t.py"])
def test_a_rank_that_is_stopped_by_a_signal_is_reported_with_its_time(line: str) -> None:
    clock = VirtualClock()
    body = CommandRunner(SimpleNamespace(role=role(line), clock=clock, spec=NO_USER))  # type: ignore[arg-type]
    body._setup = Setup(epoch=Epoch(1), world=2, restore=0, index=1)
    shell = body._command.argv[0] == "/bin/sh"
    child = subprocess.Popen(["/bin/sh", "-c", "sleep 60; true"] if shell else ["sleep", "60"])
    body._children = [child]  # type: ignore[assignment]
    top = psutil.Process(child.pid)
    try:
        assert not body._collectives({}).held_up
        below = wait_for(lambda: top.children()) if shell else [top]
        below[0].suspend()
        wait_for(lambda: below[0].status() == "stopped")
        assert body._collectives({}).held_up == f"rank 1, process {below[0].pid}, is stopped by a signal"
        clock.advance(4.0)
        assert body._collectives({}).stopped_s == 4.0
        below[0].resume()
        wait_for(lambda: below[0].status() != "stopped")
        assert body._collectives({}) == Collectives()
    finally:
        for one in (*top.children(), top):
            one.kill()
        child.wait()


def test_each_rank_is_told_with_its_state_and_its_collectives_one_that_is_stopped_too(tmp_path: Path) -> None:
    (tmp_path / "progress-1").write_text("3 12 12 barrier")
    body = CommandRunner(SimpleNamespace(role=role("torchrun --nproc-per-node 2 t.py"), spec=NO_USER))  # type: ignore[arg-type]
    body._setup, body._files = Setup(epoch=Epoch(1), world=1, restore=0), tmp_path
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    body._children = children  # type: ignore[assignment]
    try:
        children[0].kill()
        children[0].wait()
        children[1].send_signal(signal.SIGSTOP)
        assert os.waitid(os.P_PID, children[1].pid, os.WSTOPPED | os.WNOWAIT)
        ended, stopped = body.stacks().split("\n\n")
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert ended == f"rank 0: process {children[0].pid} has ended"
    assert stopped.strip() == f"rank 1: process {children[1].pid} is stopped by a signal, 12 collectives entered"


def test_a_command_that_fails_is_told_with_its_exit_status_and_last_words(tmp_path: Path) -> None:
    log = tmp_path / "main-0.log"
    log.write_text(format_line(1.0, 1, 1, "stderr", "of the run before"))
    seat: Any = SimpleNamespace(
        role=role("./tool"),
        clock=SystemClock(),
        spec=NO_USER,
        id="main/0",
        place=SimpleNamespace(log_path=lambda _: str(log)),
    )
    body = CommandRunner(seat)
    body._setup, body._log_from = Setup(epoch=Epoch(1), world=1, restore=0), log.stat().st_size
    with log.open("a") as file:
        lines = (("stdout", "step 7"), ("stderr", "opening /data"), ("stderr", "tool: no such file /data"))
        file.writelines(format_line(2.0, 1, 1, *line) for line in lines)
    failed = asyncio.run(body._failure(0, 3))
    assert str(failed) == "ended with exit status 3: tool: no such file /data", "its only rank is the instance"
    body._setup = Setup(epoch=Epoch(1), world=2, restore=0, index=1)
    assert str(asyncio.run(body._failure(0, 3))).startswith("rank 1 ended with exit status 3: ")
    found = failure_of(failed, at("main/0"), Epoch(1))
    assert found.reason is Reason.EXIT_NONZERO
    assert found.traceback == "opening /data\ntool: no such file /data"
    silent = failure_of(
        CommandFailed("rank 0 ended with exit status 3", reason=Reason.EXIT_NONZERO), at("main/0"), Epoch(1)
    )
    assert (silent.text, silent.traceback) == ("rank 0 ended with exit status 3", "")


def seat_with(setup: str, home: Path) -> Any:
    place = SimpleNamespace(home=str(home), job="j-1", log_path=lambda _: str(home / "main-0.log"))
    clock = SystemClock()
    return SimpleNamespace(
        role=role("true", setup=setup), place=place, id=InstanceId(RoleName("main"), 0), devices=(), clock=clock,
        spec=NO_USER,
        marks=ProgressMarks(clock),
    )  # fmt: skip


def test_a_setup_command_has_its_own_limit_and_its_last_words_are_told(tmp_path: Path) -> None:
    gate, log = tmp_path / "gate", tmp_path / "main-0.log"
    os.mkfifo(gate)
    line = format_line(1.0, 1, 1, "stderr", "no such wheel").strip()
    seat = seat_with(f"read x < {gate}; echo '{line}' >> {log}; exit 3", tmp_path)

    async def main() -> None:
        setup = asyncio.create_task(run_setup(seat))
        with await asyncio.to_thread(gate.open, "w") as file:  # opens when the command reads
            assert seat.marks.read(BEAT).quiet == "its setup command"
            file.write("go\n")
        await setup

    with pytest.raises(CommandFailed, match="setup ended with status 3") as caught:
        asyncio.run(main())
    assert caught.value.traceback_text == "no such wheel"


def test_a_command_that_is_stopped_lets_what_its_shell_runs_save(tmp_path: Path) -> None:
    code = "import pathlib, signal, sys; signal.signal(15, lambda *_: (pathlib.Path('saved').touch(), sys.exit()))"
    (tmp_path / "save.py").write_text(f"{code}\nprint('ready', flush=True)\nsignal.pause()\n")

    async def main() -> None:
        pipe, shell = asyncio.subprocess.PIPE, f"cd {tmp_path} && {sys.executable} save.py; true"
        child = await asyncio.create_subprocess_exec("/bin/sh", "-c", shell, stdout=pipe)
        assert child.stdout is not None and await child.stdout.readline() == b"ready\n"
        body = CommandRunner(SimpleNamespace(role=role(shell), clock=SystemClock(), spec=NO_USER))  # type: ignore[arg-type]
        body._children = [child]
        await body.stop(60.0)

    asyncio.run(main())
    assert (tmp_path / "saved").exists()


def test_a_setup_command_that_is_cancelled_ends_with_all_it_started(tmp_path: Path) -> None:
    gate, begun, ended = (tmp_path / name for name in ("gate", "begun", "ended"))
    os.mkfifo(begun)
    os.mkfifo(gate)
    seat = seat_with(f"sh -c 'echo > {begun}; read x < {gate}; echo x >> {ended}'; true", tmp_path)

    async def main() -> None:
        first = asyncio.create_task(run_setup(seat))
        await asyncio.to_thread(begun.read_text)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(OSError, match="No such device"):  # nobody reads the gate any more
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        again = asyncio.create_task(run_setup(seat))
        await asyncio.to_thread(begun.read_text)
        await asyncio.to_thread(gate.write_text, "go\ngo\n")
        await again

    asyncio.run(asyncio.wait_for(main(), 60))
    assert ended.read_text() == "x\n"


def test_a_setup_command_that_is_cancelled_while_it_starts_ends_with_all_it_started(tmp_path: Path) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    os.mkfifo(begun)
    os.mkfifo(gate)
    seat = seat_with(f"sh -c 'echo > {begun}; read x < {gate}'; true", tmp_path)
    before = len(psutil.Process().children())

    async def main() -> None:
        first = asyncio.create_task(run_setup(seat))
        while len(psutil.Process().children()) == before:
            await asyncio.sleep(0)
        begun.read_text()  # in the event loop: it runs, and nothing here knows of it yet
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        with pytest.raises(OSError, match="No such device"):  # what it started is gone, too
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_setup_command_at_its_limit_ends_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "SETUP_MAX_S", 0.1)
    monkeypatch.setattr(spmd, "WORDS_PAUSE_S", 0.0)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    holder = os.open(gate, os.O_RDWR)  # so that the command can open it, and waits for a line
    with pytest.raises(CommandFailed, match="setup ended with status -9"):
        asyncio.run(run_setup(seat_with(f"sh -c 'read x < {gate}'; true", tmp_path)))
    os.close(holder)
    with pytest.raises(OSError, match="No such device"):  # nobody reads it any more
        os.open(gate, os.O_WRONLY | os.O_NONBLOCK)


def test_a_command_that_cannot_be_run_is_told_with_its_name_and_the_remedy() -> None:
    body = CommandRunner(SimpleNamespace(role=role(("./nosuchtool", "--x")), spec=NO_USER))  # type: ignore[arg-type]
    with pytest.raises(
        CommandFailed, match=r"'\./nosuchtool' cannot be run in .*No such file.*put it on PATH"
    ) as caught:
        asyncio.run(body._spawn({}))
    assert failure_of(caught.value, at("main/0"), Epoch(1)).traceback == "", "no frames of Rota"


def test_a_command_that_gives_up_its_epoch_has_the_grace_it_is_given_to_save(tmp_path: Path) -> None:
    saved, script = tmp_path / "saved", tmp_path / "slow.sh"
    script.write_text(
        f"trap 'sleep 1; touch {saved}; exit 0' TERM\ntouch {tmp_path}/up\nwhile :; do sleep 0.05; done\n"
    )
    seat: Any = SimpleNamespace(role=role(("/bin/sh", str(script))), clock=SystemClock(), marks=None, spec=NO_USER)
    seat.marks = ProgressMarks(seat.clock)

    async def main(grace_s: float) -> bool:
        body = CommandRunner(seat)
        body._children = [await spmd._started("/bin/sh", str(script))]
        while not (tmp_path / "up").exists():
            await asyncio.sleep(0.02)
        await body.dissolve(grace_s)
        return saved.exists()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd, "DISSOLVE_GRACE_S", 0.1)
        assert not asyncio.run(main(0.0))
        (tmp_path / "up").unlink()
        assert asyncio.run(main(30.0))


@pytest.mark.parametrize("line", ["torchrun t.py 'a b'", "torchrun -m t 'a b' $X"])
def test_a_torchrun_line_in_an_image_without_python_starts_its_python3(line: str, tmp_path: Path) -> None:
    (program := tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    program.chmod(0o755)
    argv = parse_command(role(line), in_image=True).argv
    found = subprocess.run(argv, env={"PATH": str(tmp_path), "X": "c"}, capture_output=True, text=True, check=True)
    assert found.stdout == ("-m|t|a b|c|" if "-m" in line else "t.py|a b|")
    program.unlink()
    assert subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, check=False).returncode == 127
