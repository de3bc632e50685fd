"""The torchrun contract for unmodified commands: environment, store, children, exit status, first error."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rota.job.health.stacks import of_the_job
from rota.job.instance import tenant
from rota.job.instance.runners import InstanceConfig, Setup, make_context, meet, open_store, ray_folder
from rota.job.rpc.tracing import Collectives
from rota.runtime import cache, environ, image, process
from rota.runtime.data_cache import FETCH_MAX_S, LIMIT, DataFailed, apart, hold
from rota.runtime.output import tail_lines
from rota.runtime.packages import interpreter
from rota.runtime.probe import plain_file, requested_stacks, stacks_of
from rota.spec.errors import BadInput
from rota.spec.ids import NO_EPOCH
from rota.spec.job import RoleSpec
from rota.spec.reasons import Reason
from rota.spec.resources import counted
from rota.spec.torchrun import PYTHON_SWITCHES, plain_words, read_torchrun, shell_operators

SETUP_MAX_S = 1800.0
FETCHES_MAX = 5
"""Fetches of data that others removed before it was in use."""
DISSOLVE_GRACE_S = 5.0
PROGRESS_POLL_S = 0.5
ERROR_TEXT_MAX = 20_000
ERROR_FILE_BYTES_MAX = 1 << 20
WORDS_MAX, WORDS_READ_MAX = 20, 400
"""Lines of stderr in the report of a failed command, and lines of the log in which they are looked for."""
WORDS_TRIES_MAX, WORDS_PAUSE_S = 5, 0.1
_PYTHON_LINE = re.compile(rf"python3?\s+((?:(?:{'|'.join(PYTHON_SWITCHES)})\s+)*)(\S.*)", re.DOTALL)
_PYTHON_OF_IMAGE = '"$(command -v python || command -v python3 || echo python)"'
"""Images of Debian have ``python3`` alone."""


class CommandFailed(Exception):
    """A command ended badly; ``reason`` and ``traceback_text`` go into the event of the loss."""

    def __init__(self, message: str, *, reason: Reason, traceback_text: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.traceback_text = traceback_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMarks:
    """What a rank wrote of itself: optimiser steps, its position in the collectives.

    ``entered`` counts those of the default group (-1: no group), ``inside`` names one under way; ``activity`` counts
    collectives of all groups and imports.
    """

    steps: float = 0.0
    entered: int = -1
    activity: int = 0
    inside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """What one rank runs. ``local`` ranks run in each instance; ``store`` asks for a rendezvous store."""

    argv: tuple[str, ...]
    local: int = 1
    store: bool = False


def parse_command(role: RoleSpec, *, in_image: bool = False) -> RankCommand:
    """The command of a ``run`` role: a torchrun line becomes its ranks, a plain line an argv, the rest goes to a shell.

    Variables and patterns in the script and arguments of a torchrun line are expanded by a shell, in each rank. Python
    scripts run under ``rota.job.instance.bootstrap`` unless ``ROTA_BOOTSTRAP=0`` is in the role's environment, or the
    Python is that of an image. Raises
    BadInput for a torchrun line that cannot be read.
    """
    assert role.run is not None, "only run roles have a command"
    bare = dict(role.env).get("ROTA_BOOTSTRAP") == "0"
    if role.torchrun and not (role.shell and shell_operators(role.run[0])):
        return _torchrun(role, bare=bare, in_image=in_image)
    if not role.shell and not role.run:
        raise BadInput(f"role {role.name!r}: run is empty", hint="give the command, for example run: python train.py")
    if in_image:
        return RankCommand(argv=("/bin/sh", "-c", role.run[0]) if role.shell else role.run, store=role.meshed)
    argv = _shell_line(role.run[0], bare=bare) if role.shell else _words(role.run, bare=bare)
    return RankCommand(argv=argv, store=role.meshed)


def _user_reason(*last: str, other: Reason = Reason.USER_ERROR) -> Reason:
    """OVER_LIMIT when the last line of a failed command is that of a process without a free descriptor."""
    return Reason.OVER_LIMIT if any(os.strerror(errno.EMFILE) in line for line in last) else other


def _shell_line(text: str, *, bare: bool) -> tuple[str, ...]:
    """One Python program starts as in a list, what a shell expands expanded by one; all else is left to the shell."""
    python = _PYTHON_LINE.fullmatch(text.strip())
    if python is None or shell_operators(text):
        return ("/bin/sh", "-c", text)
    if (words := plain_words(text)) is not None:
        return _words(words, bare=bare)
    switches, program = python.groups()
    start = _python(switches.split(), program.split(maxsplit=1)[0].strip("'\""), bare=bare)
    return ("/bin/sh", "-c", f"exec {shlex.join(start)} {program}")


def _words(words: Sequence[str], *, bare: bool) -> tuple[str, ...]:
    """A command without a shell. The Python of another environment, named by its path, has no bootstrap."""
    if words[0] not in ("python", "python3", sys.executable):
        return tuple(words)
    switches = tuple(takewhile(PYTHON_SWITCHES.__contains__, words[1:]))
    program = words[1 + len(switches) :]
    return (*_python(switches, program[0] if program else "", bare=bare), *program)


def _python(switches: Sequence[str], program: str, *, bare: bool) -> tuple[str, ...]:
    """This interpreter, with the bootstrap before a script (``*.py``) or a module (``-m``)."""
    known = not bare and (program.endswith(".py") or program == "-m")
    return (interpreter(), *switches, *(("-m", "rota.job.instance.bootstrap") if known else ()))


def _torchrun(role: RoleSpec, *, bare: bool, in_image: bool) -> RankCommand:
    try:
        line = read_torchrun(role.run or (), shell=role.shell)
    except ValueError as error:
        raise BadInput(f"role {role.name!r}: {error}") from None
    module = ("-m",) if line.module else ()
    started = (*_python((), "-m" if module else line.program, bare=bare), *module) if line.python else ()
    searched = line.python and in_image
    if line.words and not searched:
        return RankCommand(argv=(*started, *line.words), local=line.local, store=True)
    start = " ".join((_PYTHON_OF_IMAGE, *module)) if searched else shlex.join(started)
    text = f"exec {start} {line.text or shlex.join(line.words)}"
    return RankCommand(argv=("/bin/sh", "-c", text), local=line.local, store=True)


def rank_environment(
    config: InstanceConfig, setup: Setup, command: RankCommand, local_rank: int, address: str, files: Path
) -> dict[str, str]:
    """The variables that torchrun sets, where the role has ranks, and Rota's own.

    A script that looks whether ``RANK`` is set sees none when it is the one process of its role. Instances without a
    mesh are worlds of their own: ``RANK`` counts in the world, ``ROLE_RANK`` over the whole role.
    """
    copies = 1 if config.role.meshed else config.role.replicas_min
    copy = 0 if config.role.meshed else config.id.rank
    world = setup.world * command.local
    rank = setup.index * command.local + local_rank
    host, _, port = address.rpartition(":")
    contract = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": command.local,
        "GROUP_RANK": setup.index,
        "GROUP_WORLD_SIZE": setup.world,
        "MASTER_ADDR": host or "127.0.0.1",
        "MASTER_PORT": port or "0",
        "TORCHELASTIC_RESTART_COUNT": setup.restarts,
        "TORCHELASTIC_MAX_RESTARTS": config.role.fail.limit_n,
        "TORCHELASTIC_RUN_ID": config.place.job,
        "TORCHELASTIC_ERROR_FILE": files / f"error-{rank}.json",
    }
    given = (contract if config.role.ranked else {}) | {
        "ROLE_NAME": config.id.role,
        "ROLE_RANK": copy * world + rank,
        "ROLE_WORLD_SIZE": copies * world,
        "OMP_NUM_THREADS": max(1, int(config.role.res.cpus) // command.local),
        "ROTA_EPOCH": setup.epoch,
        "ROTA_ERROR_FILE": files / f"error-{rank}.json",
        "ROTA_PROGRESS_FILE": files / f"progress-{rank}",
        "ROTA_STACKS_FILE": files / f"stacks-{rank}",
    }
    if plan := next((one.plan for one in config.role.plans if one.replicas == setup.world), None):
        given["ROTA_PLAN"] = plan
    if address:
        given["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    there = tenant.variables(config)
    path = f"{Path(interpreter()).parent}:{there.get('PATH', '/usr/bin:/bin')}"
    # What the job file gives wins over the contract, save for the ranks themselves.
    role_env = {name: value for name, value in config.role.env if name in ("OMP_NUM_THREADS", "MASTER_ADDR")}
    found = {**there, "PATH": path, **{name: str(value) for name, value in given.items()}, **role_env}
    return tenant.environment(found, config, given)


class CommandRunner:
    """The body of a ``run`` role: its children are the ranks; they share the process group of this instance.

    A child that dies takes the others with it; the error written first is the one reported.
    """

    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._command = parse_command(config.role, in_image=bool(config.spec.image))
        self._setup: Setup | None = None
        self._store: Any = None
        self._address = ""
        self._files = Path()
        self._children: list[asyncio.subprocess.Process] = []
        self._log_from = 0
        self._place = Collectives()
        self._stopped_at: dict[int, float] = {}

    async def form(self, setup: Setup) -> None:
        """Open the store (rank 0) and learn its address."""
        self._setup, self._store, self._address, self._place = setup, None, "", Collectives()
        self._stopped_at = {}
        ctx = make_context(self._config, setup)
        self._files = ctx.work_dir / f"epoch-{setup.epoch}"
        self._files.mkdir(exist_ok=True)
        if not self._command.store:
            return
        if setup.index == 0:
            # The store lives here and not in a rank, so that it outlives a rank.
            self._store, self._address = await self._config.user.do(open_store)
        if setup.world > 1:
            self._address = await meet(self._config, setup, self._address)

    async def run(self, committed: int) -> None:
        """Start the ranks and wait for all of them. Raises CommandFailed."""
        assert self._setup is not None, "form() comes before run()"
        self._log_from = log_size(self._config)
        with self._config.marks.running("command"):
            for local_rank in range(self._command.local):
                env = rank_environment(self._config, self._setup, self._command, local_rank, self._address, self._files)
                self._children.append(await self._spawn(env))
            follow = asyncio.create_task(self._follow_progress())
            try:
                await self._wait_all()
            finally:
                follow.cancel()
                await asyncio.gather(follow, return_exceptions=True)
                await self._end_children(DISSOLVE_GRACE_S)
        await asyncio.to_thread(shutil.rmtree, ray_folder(self._config), ignore_errors=True)

    async def _spawn(self, env: dict[str, str]) -> asyncio.subprocess.Process:
        try:
            return await _started(*tenant.command(self._config, self._command.argv, self._files), env=env)
        except OSError as error:
            text = (
                f"{self._command.argv[0]!r} cannot be run in {Path.cwd()}: {error.strerror}; put it on PATH or into the"
                " workdir, and make it executable"
            )
            raise CommandFailed(text, reason=Reason.USER_ERROR) from None

    async def _wait_all(self) -> None:
        waits = {asyncio.create_task(child.wait()): rank for rank, child in enumerate(self._children)}
        try:
            pending = set(waits)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if status := task.result():
                        raise await self._failure(waits[task], status)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _failure(self, local_rank: int, status: int) -> CommandFailed:
        assert self._setup is not None
        rank = self._setup.index * self._command.local + local_rank
        # The only rank of a world is the instance, which may have another number in its role.
        alone = self._setup.world * self._command.local == 1
        who = "" if alone else f"rank {rank} "
        if (first := first_error(self._files)) is not None:
            text = first[0].partition(": ")[2] if alone else first[0]
            return CommandFailed(text, reason=_user_reason(text), traceback_text=first[1])
        if status == -signal.SIGKILL:
            return CommandFailed(f"{who}was ended by SIGKILL", reason=Reason.SIGNALLED)
        how = f"was ended by {process.signal_name(-status)}" if status < 0 else f"ended with exit status {status}"
        words = await last_words(self._config, self._log_from)
        return CommandFailed(
            ": ".join((f"{who}{how}", *words[-1:])),
            reason=Reason.SIGNALLED if status < 0 else _user_reason(*words[-1:], other=Reason.EXIT_NONZERO),
            traceback_text="\n".join(words),
        )

    async def _follow_progress(self) -> None:
        """Follow what the bootstrap of each rank writes: optimiser steps and collectives are marks of progress.

        In the collectives of its world an instance is where the last of its ranks is.
        """
        assert self._setup is not None
        self._config.marks.collectives = lambda: self._place
        seen = 0.0
        while True:
            await self._config.clock.sleep(PROGRESS_POLL_S)
            marks = {int(path.name.rpartition("-")[2]): _marks(path) for path in self._files.glob("progress-*")}
            newest = max((one.steps for one in marks.values()), default=0.0)
            self._place = self._collectives(marks)
            if self._config.role.resizes:
                folder = make_context(self._config, self._setup).checkpoint_dir
                self._config.marks.saved(await asyncio.to_thread(_newest_s, folder))
            if newest > seen:
                seen = newest
                self._config.marks.mark(newest, "steps")

    def _collectives(self, marks: Mapping[int, RankMarks]) -> Collectives:
        """The position of the rank that is last; a rank that is stopped is named first, then one that is behind."""
        now_s, stopped = self._config.clock.monotonic_s(), self._stopped_ranks()
        self._stopped_at = {rank: self._stopped_at.get(rank, now_s) for rank in stopped}
        known = {rank: one for rank, one in marks.items() if one.entered >= 0}
        last = min(known.values(), key=lambda one: (one.entered, one.inside), default=RankMarks())
        return Collectives(
            entered=last.entered,
            inside=last.inside,
            activity=sum(one.activity for one in marks.values()),
            held_up="; ".join(f"rank {rank}, process {pid}, is stopped by a signal" for rank, pid in stopped.items())
            or who_is_behind(known),
            stopped_s=max((now_s - at_s for at_s in self._stopped_at.values()), default=0.0),
        )

    def _stopped_ranks(self) -> dict[int, int]:
        """Ranks whose process is stopped by a signal, each with its pid; those of a shell are the processes below."""
        found: dict[int, int] = {}
        for rank, child in enumerate(self._children, self._first_rank):
            one = process.identify(child.pid)
            below = process.descendants(one) if one is not None and self._command.argv[0] == "/bin/sh" else ()
            which = next((each for each in (one, *below) if each is not None and process.is_stopped(each)), None)
            if which is not None:
                found[rank] = which.pid
        return found

    @property
    def _first_rank(self) -> int:
        assert self._setup is not None, "form() comes before run()"
        return self._setup.index * self._command.local

    def stacks(self) -> str:
        """What each rank does: its process in words, the collectives it entered, its stacks. Blocks some seconds.

        Without py-spy a rank that is not a Python script, or that is stopped, has no stacks.
        """
        return "\n\n".join(self._seen(rank, one.pid) for rank, one in enumerate(self._children, self._first_rank))

    def _seen(self, rank: int, pid: int) -> str:
        which, entered = process.identify(pid), _marks(self._files / f"progress-{rank}").entered
        if which is None:
            return f"rank {rank}: process {pid} has ended"
        place = f", {entered} collectives entered" if entered >= 0 else ""
        stacks = of_the_job(stacks_of(which) or requested_stacks(which, self._files / f"stacks-{rank}"))
        return f"rank {rank}: process {pid} {process.state_of(which) or 'has ended'}{place}\n{stacks}"

    async def dissolve(self, grace_s: float) -> None:
        """End the ranks of the present epoch and close its store."""
        await self._end_children(max(grace_s, DISSOLVE_GRACE_S))
        self._store = None

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to every rank, SIGKILL after the grace."""
        await self._end_children(grace_s)

    async def _end_children(self, grace_s: float) -> None:
        children, self._children = self._children, []
        await asyncio.gather(*(_end(child, grace_s) for child in children))


async def _started(*argv: str, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    """A child process. Who is cancelled while it is being started ends it with all below it. Raises OSError.

    asyncio itself would then kill the child alone, which may have started others by then.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*argv, env=env))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _end(await starting, 0.0)
        raise


async def _end(child: asyncio.subprocess.Process, grace_s: float) -> int:
    """End a child and all below it; returns its status, as of one that had ended by itself."""
    if child.returncode is None and (found := process.identify(child.pid)):
        await asyncio.to_thread(process.stop_tree, found, grace_s=grace_s, in_turn=True)
    return await child.wait()


def first_error(files: Path) -> tuple[str, str] | None:
    """Message and traceback of the error file that was written first, in the form of torchelastic."""
    found: list[tuple[float, str, str]] = []
    for path in files.glob("error-*.json"):
        try:
            with plain_file(path) as file:
                raw = json.loads(file.read(ERROR_FILE_BYTES_MAX))
        except (OSError, ValueError):
            continue
        if not isinstance(raw, dict):
            continue
        message = raw.get("message", raw)
        extra: Mapping[str, Any] = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        text = str(message.get("message", message) if isinstance(message, dict) else message)
        rank = path.stem.removeprefix("error-")
        trace = str(extra.get("py_callstack", ""))[-ERROR_TEXT_MAX:]
        found.append((float(extra.get("timestamp", 0) or 0), f"rank {rank}: {text[:ERROR_TEXT_MAX]}", trace))
    first = min(found, default=None)
    return None if first is None else (first[1], first[2])


def _newest_s(folder: Path) -> float:
    """When something in the checkpoint folder was last written; 0 when it is empty."""
    try:
        return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=0.0)
    except OSError:
        return 0.0


def _marks(path: Path) -> RankMarks:
    try:
        with plain_file(path) as file:
            steps, entered, activity, inside = file.read(ERROR_FILE_BYTES_MAX).decode().split(" ")
        return RankMarks(steps=float(steps), entered=int(entered), activity=int(activity), inside=inside)
    except (OSError, ValueError):
        return RankMarks()


def who_is_behind(ranks: Mapping[int, RankMarks]) -> str:
    """Which ranks of one instance the others wait for, in words; empty while all are at the same place."""
    most = max(ranks.items(), key=lambda item: item[1].entered, default=None)
    if most is None:
        return ""
    rank, furthest = most
    if behind := [(one, each.entered) for one, each in ranks.items() if each.entered < furthest.entered]:
        counts = ", ".join(f"rank {one} has entered {counted(n, 'collective')}" for one, n in sorted(behind))
        return f"{counts}, rank {rank} {furthest.entered}"
    inside = sorted(one for one, each in ranks.items() if each.inside)
    outside = sorted(set(ranks) - set(inside))
    if not inside or not outside:
        return ""
    return f"rank {', '.join(map(str, outside))} is not in {ranks[inside[0]].inside}, rank {inside[0]} is"


def log_size(config: InstanceConfig) -> int:
    """Bytes in the log of an instance: what it writes from now on is after them."""
    log = Path(config.place.log_path(config.id))
    return log.stat().st_size if log.exists() else 0


async def last_words(config: InstanceConfig, since: int) -> list[str]:
    """The last lines on stderr in the log after ``since``. They come by a process beside this one: it gets a moment."""
    log, words = Path(config.place.log_path(config.id)), list[str]()
    for _ in range(WORDS_TRIES_MAX):
        before = words
        await config.clock.sleep(WORDS_PAUSE_S)
        lines = await asyncio.to_thread(tail_lines, log, WORDS_READ_MAX)
        words = [one.text for one in lines if one.offset >= since and one.stream == "err"][-WORDS_MAX:]
        if words and words == before:
            break
    return words


def setup_environment(config: InstanceConfig, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Variables of a command beside the ranks, with ``more``."""
    found = {**tenant.variables(config), **more}
    return tenant.environment(found, config, more)


async def fetch_data(config: InstanceConfig) -> int | None:
    """The data that the job names by URL, as the folder ``ROTA_DATA_DIR`` of this machine.

    A descriptor that keeps it there, None without such data. Raises CommandFailed.
    """
    if (url := config.spec.data_url) is None:
        return None
    for _ in range(FETCHES_MAX):
        try:
            with config.marks.quiet("its data, which is fetched", FETCH_MAX_S):
                folder = await apart("fetch", config.place.home, url)
        except DataFailed as error:
            text = f"data: {error}"
            raise CommandFailed(text, reason=Reason.DATA_UNREACHABLE, traceback_text=error.output) from None
        with contextlib.suppress(FileNotFoundError):  # removed for other data meanwhile
            held = hold(Path(folder))
            environ.export("ROTA_DATA_DIR", folder)
            return held
    text = (
        f"data: {url} was removed for other data {FETCHES_MAX} times before it was used; raise {LIMIT} of the service"
    )
    raise CommandFailed(text, reason=Reason.DATA_UNREACHABLE)


async def unpack_image(config: InstanceConfig) -> None:
    """Have the image of the job on this machine, as the folder ``ROTA_IMAGE_DIR``. Raises CommandFailed."""
    if config.spec.image is None or environ.get(image.FOLDER):
        return
    since, argv = log_size(config), ("-m", "rota.runtime.image", config.place.home, config.spec.image)
    with config.marks.quiet("its image, which is pulled and unpacked", image.PULL_MAX_S):
        child = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
        try:
            out, _ = await child.communicate()
        finally:
            status = await _end(child, 0.0)
    if status:
        words = await last_words(config, since)
        text = f"image {config.spec.image}: {words[-1] if words else f'status {status}'}"
        raise CommandFailed(text, reason=Reason.IMAGE_PULL_FAILED, traceback_text="\n".join(words))
    cache.hold(Path(out.decode()).with_suffix(".lock"))  # for as long as this process lives
    environ.export(image.FOLDER, out.decode())


async def run_setup(config: InstanceConfig) -> None:
    """Run the ``setup`` command of the role once in this instance's folder. Raises CommandFailed."""
    if config.role.setup is None:
        return
    work = make_context(config, Setup(epoch=NO_EPOCH, world=1, restore=0)).work_dir
    done = work / f".setup-{hashlib.sha256(config.role.setup.encode()).hexdigest()[:16]}"
    if done.exists():
        return
    since = log_size(config)
    with config.marks.quiet("its setup command", SETUP_MAX_S):  # it has its own limit, and may wait for a network
        child = await _started(
            *tenant.command(config, ("/bin/sh", "-c", config.role.setup)), env=setup_environment(config)
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with config.clock.timeout(SETUP_MAX_S):
                    await child.wait()
        finally:  # at its limit, or when a new epoch begins, which runs it again: what it started must not outlive it
            status = await _end(child, 0.0)
    if status != 0:
        text = f"setup ended with status {status}: {config.role.setup}"
        words = await last_words(config, since)
        raise CommandFailed(text, reason=Reason.ENV_SETUP_FAILED, traceback_text="\n".join(words))
    os.close(os.open(done, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # never through a link that it left there
