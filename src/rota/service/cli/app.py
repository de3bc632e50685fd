"""rota: the table of verbs; nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import select
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from io import TextIOWrapper
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from rota.service.cli.output import Form, form_of, terminal_for
from rota.service.cli.shell import INTERRUPTED
from rota.spec.errors import BadInput, RotaError, did_you_mean

if TYPE_CHECKING:
    from cyclopts import App

BUG = 1
GROUPS = ("Service", "Jobs", "Why", "Cluster", "Tools")

PLACE = "rota.service.cli.verbs"
VERBS: dict[str, tuple[str, str, str]] = {
    "up": ("Service", "service:up", "Start the service of this machine."),
    "down": ("Service", "service:down", "End the service with everything it started."),
    "join": ("Service", "service:join", "Make this machine a part of another's installation."),
    "leave": ("Service", "service:leave", "End what join started on this machine."),
    "status": ("Service", "service:status", "Show whether the service answers, and the state of its parts."),
    "backup": ("Service", "service:backup", "Write the whole installation into one file."),
    "restore": ("Service", "service:restore", "Fill an empty installation from a backup file."),
    "doctor": ("Service", "service:doctor", "Check this machine, and say what to do."),
    "demo": ("Service", "service:demo", "The main job, killed three times and healed."),
    "login": ("Service", "accounts:login", "Use the service at an address from now on."),
    "logout": ("Service", "accounts:logout", "Forget the service of the last login."),
    "ui": ("Service", "accounts:ui", "Open the page in a browser, or print its address."),
    "run": ("Jobs", "run:run", "Run a job file, or a command."),
    "ps": ("Jobs", "jobs:ps", "List jobs, the newest first."),
    "show": ("Jobs", "jobs:show", "Show one job: every role, instance and attempt."),
    "logs": ("Jobs", "logs:logs", "Show the output of a job."),
    "cp": ("Jobs", "files:cp", "Copy what a job wrote into its output folder."),
    "export": ("Jobs", "files:export", "Write trained weights as Hugging Face has them."),
    "stop": ("Jobs", "jobs:stop", "Ask jobs to end."),
    "pause": ("Jobs", "jobs:pause", "Give the devices of jobs back; keep the jobs."),
    "resume": ("Jobs", "jobs:resume", "Put paused jobs into the queue again."),
    "exec": ("Jobs", "jobs:exec_", "Run a command in the environment of an instance."),
    "scale": ("Jobs", "jobs:scale", "Ask for another number of instances of a role."),
    "set": ("Jobs", "jobs:set_", "Change priority, queue, time limit or labels."),
    "clone": ("Jobs", "run:clone", "Submit a job again, with changes."),
    "sweep": ("Jobs", "sweep:sweep", "Jobs of a sweep: the best, a table, plots."),
    "explain": ("Why", "inspect:explain", "Why a job waits, and what would let it start."),
    "failures": ("Why", "inspect:failures", "What failed first, and what was done about it."),
    "why": ("Why", "inspect:why", "Who waits for whom in a running job."),
    "top": ("Why", "inspect:top", "What every instance of the running jobs does now."),
    "trace": ("Why", "inspect:trace", "Write a trace of a job, and say what bounds it."),
    "graph": ("Why", "inspect:graph", "Roles, edges and sub-graphs of a job or job file."),
    "events": ("Why", "logs:events", "The facts of a job in order."),
    "nodes": ("Cluster", "cluster:nodes", "List nodes, or take one out of use and back."),
    "alerts": ("Cluster", "cluster:alerts", "What needs attention now; mark it as seen."),
    "queues": ("Cluster", "cluster:queues", "Show the tree of queues, or replace it."),
    "report": ("Cluster", "cluster:report", "Who used what."),
    "user": ("Cluster", "accounts:user", "Who you are; let users do things."),
    "token": ("Cluster", "accounts:token", "Print the token in use; make and revoke others."),
    "secret": ("Cluster", "accounts:secret", "Store write-only secrets for jobs."),
    "webhook": ("Cluster", "accounts:webhook", "Send webhooks on job events."),
    "audit": ("Cluster", "accounts:audit", "Who asked for which change."),
    "plan search": ("Tools", "plan:search", "Find the best parallel plan, with a proof."),
    "plan show": ("Tools", "plan:show", "Print a plan."),
    "plan explain": ("Tools", "plan:explain", "What binds, and why not another plan."),
    "plan calibrate": ("Tools", "plan:calibrate", "Measure this machine as a hardware file."),
    "plan validate": ("Tools", "plan:validate", "Compare the cost model with a published table."),
    "init": ("Tools", "start:init", "Write a job file with its code, ready to run."),
    "completion": ("Tools", "start:completion", "The shell's Tab key: show, install, uninstall."),
    "sim run": ("Tools", "sim:run", "Simulate a trace of jobs under a scheduling profile."),
    "sim compare": ("Tools", "sim:compare", "Compare scheduling profiles on a trace."),
    "sim fgd": ("Tools", "sim:fgd", "Fill a cluster with tasks under a placement."),
    "sim cases": ("Tools", "sim:cases", "Replay recorded scheduling cases."),
    "tensors ls": ("Tools", "tensors:ls", "List the named tensors of this machine."),
    "tensors stat": ("Tools", "tensors:stat", "Show one tensor and who holds it."),
    "tensors top": ("Tools", "tensors:top", "The names that take the most bytes."),
    "tensors gc": ("Tools", "tensors:gc", "Sweep what dead processes left."),
    "tensors fsck": ("Tools", "tensors:fsck", "Check registry and shared memory."),
    "tensors doctor": ("Tools", "tensors:doctor", "Check the tensor store, and say what to do."),
    "tensors recover": ("Tools", "tensors:recover", "Build the registry again."),
    "tensors door": ("Tools", "tensors:door", "Serve tensors to other languages."),
}
"""Verb to (group, file and function below ``verbs``, one line of help); two words for a verb below another."""
FAMILIES = {
    "sim": "The scheduler in virtual time: run, compare, fgd, cases.",
    "plan": "Parallel plans: search, show, explain, calibrate, validate.",
    "tensors": "Named tensors: ls, stat, top, gc, fsck, doctor, recover, door.",
}

BASICS = ("init", "run", "ps", "show", "logs", "stop", "explain", "failures", "ui", "status")
"""The verbs of the first screen; ``rota help all`` lists every one."""

ABOUT = """Schedules, runs and heals deep-learning jobs of many roles.

A first job: rota init ddp && rota run ddp/job.yaml"""
MORE = "All verbs: rota help all. Help on a verb: rota help VERB."


def make_app(chosen: str = "", *, every: bool = False) -> App:
    """The command line as cyclopts knows it. ``chosen`` is loaded, with its examples; the others only listed.

    Its help lists the ``BASICS``; ``every`` verb in groups where that is asked for.
    """
    from cyclopts import App, Group, Parameter

    from rota.service.config import rota_version

    app = App(
        name="rota",
        help=ABOUT,
        help_epilogue="" if every else MORE,
        version=rota_version,
        default_parameter=Parameter(negative="", show_default=False),
        help_format="plaintext",
    )
    shown = VERBS if every else BASICS
    basic = Group("Verbs", sort_key=0)
    groups = {name: Group(name, sort_key=index) if every else basic for index, name in enumerate(GROUPS)}
    parents = {name: App(name=name, help=text, group=groups["Tools"], show=every) for name, text in FAMILIES.items()}
    for parent in parents.values():
        app.command(parent)
    for index, (verb, (group, target, words)) in enumerate(VERBS.items()):
        family, _, last = verb.rpartition(" ")
        owner = parents.get(family, app)
        place = {} if family else {"group": groups[group], "show": verb in shown}
        where: dict[str, Any] = {"name": last, "sort_key": index if every or family else _rank(verb)} | place
        if verb == chosen:
            owner.command(verb_function(verb), **where, **_help_page(verb))
        else:
            owner.command(f"{PLACE}.{target}", **where, help=words)
    return app


def _rank(verb: str) -> int:
    return BASICS.index(verb) if verb in BASICS else len(BASICS)


def _help_page(verb: str) -> dict[str, str]:
    """What the docstring of a verb says, its examples apart."""
    about, _, examples = (inspect.getdoc(verb_function(verb)) or "").partition("Examples\n--------\n")
    paragraphs = [" ".join(part.split()) for part in about.split("\n\n")]
    return {"help": "\n\n".join(paragraphs), "help_epilogue": f"Examples:\n\n{examples}"}


def verb_function(verb: str) -> Callable[..., int]:
    """The function behind a verb, imported now."""
    module, _, name = VERBS[verb][1].partition(":")
    return getattr(importlib.import_module(f"{PLACE}.{module}"), name)


@cache
def _common() -> dict[str, int]:
    """Flags of every verb, which may also stand before it, and how many words each takes."""
    from rota.service.cli.flags import Flags

    found: dict[str, int] = {}
    for name, hint in get_type_hints(Flags, include_extras=True).items():
        kind, parameter = get_args(hint)
        found |= dict.fromkeys(parameter.name or (f"--{name.replace('_', '-')}",), 0 if kind is bool else 1)
    return found


def ordered(words: Sequence[str]) -> list[str]:
    """Flags of every verb behind it, and what follows ``--`` as the words of a command: ``--argv=WORD`` each.

    A lone ``-`` is a file, which the parser of options would not take as one.
    """
    head, tail = list(words), list[str]()
    if "--" in head:
        cut = head.index("--")
        head, tail = head[:cut], head[cut + 1 :]
    moved: list[str] = []
    verb: list[str] = []
    while head:
        more = _common().get(head[0].partition("=")[0])
        if more is not None:
            more = 0 if "=" in head[0] else more
            moved += head[: more + 1]
            del head[: more + 1]
        elif not verb or (verb[0] in FAMILIES and len(verb) == 1):
            verb.append(head.pop(0))
        else:
            break
    head = ["--file=-" if word == "-" else word for word in head]
    return verb + head + moved + [f"--argv={word}" for word in tail]


def form_wanted(words: Sequence[str]) -> Form:
    """The form of the answer, a mistake included."""
    before = list(words)[: words.index("--")] if "--" in words else list(words)
    if "--json" in before:
        return "json"
    asked = [last for first, last in pairwise(before) if first in ("-o", "--output")]
    asked += [word.partition("=")[2] for word in before if word.startswith("--output=")]
    for word in asked:
        if form := form_of(word):
            return form
    return "table"


def call(words: Sequence[str]) -> int:
    """Run the command ``words``; its exit status. Errors are printed, never raised."""
    from cyclopts import CycloptsError

    terminal = terminal_for(form=form_wanted(words), quiet=False, no_color="--no-color" in words)
    try:
        " ".join(words).encode()
    except UnicodeEncodeError as exc:
        terminal.error(BadInput(f"not UTF-8: {exc.object[max(0, exc.start - 20) : exc.end]!r}"))
        return BadInput.exit
    given, every = _asked_for_help(ordered(words))
    if given and not given[0].startswith("-") and given[0] not in VERBS and given[0] not in FAMILIES:
        terminal.error(BadInput(f"unknown verb {given[0]!r}", hint=_meant(given[0])))
        return BadInput.exit
    try:
        command_line = make_app(_chosen(given), every=every)
        done = command_line(given, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as exc:
        terminal.error(BadInput(_plain(exc), hint=_hint(words)))
        return BadInput.exit
    except RotaError as exc:
        terminal.error(exc)
        return exc.exit
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as exc:
        from rota.service.jobfile.problems import cannot_use

        terminal.error(cannot_use(exc))
        return BadInput.exit
    except Exception as exc:  # noqa: BLE001 - the edge of the process: a bug is one line, its traceback a file
        terminal.error(
            RotaError(f"internal error: {type(exc).__name__}: {exc}", hint=f"traceback: {_traceback_file()}")
        )
        return BUG
    return done if isinstance(done, int) else 0


def _asked_for_help(given: list[str]) -> tuple[list[str], bool]:
    """``help VERB`` and ``version`` as the flags that mean them; and whether every verb is to be listed."""
    match given:
        case ["version"]:
            return ["--version"], False
        case ["help", *words]:
            every = words == ["all"]
            return [*([] if every else words), "--help"], every
        case _:
            return given, False


def _meant(word: str) -> str:
    """What to type in place of an unknown verb."""
    from rota.service.cli.habits import HABITS

    near = did_you_mean(word, {*VERBS, *FAMILIES, *HABITS})
    known = word if word in HABITS else near.partition("'")[2].partition("'")[0]
    return f"use: {HABITS[known]}" if known in HABITS else near or "see: rota help all"


def _traceback_file() -> str:
    """Write the traceback of the exception under way to a file; its path."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="rota-bug-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(traceback.format_exc())
    return file.name


def _chosen(given: Sequence[str]) -> str:
    """The verb that ``given`` asks for, or nothing."""
    return next((verb for verb in (" ".join(given[:2]), *given[:1]) if verb in VERBS), "")


def _plain(exc: Any) -> str:
    from cyclopts import MissingArgumentError, UnusedCliTokensError

    verb = " ".join(exc.command_chain or ())
    argument = exc.argument if isinstance(exc, MissingArgumentError) else None
    if argument is not None and argument.field_info.is_positional and not argument.tokens:
        name = argument.name.lstrip("-").upper()
        return f"{verb} needs {'an' if name[0] in 'AEIOU' else 'a'} {name}"
    if isinstance(exc, UnusedCliTokensError) and exc.unused_tokens:
        return f"{verb} takes no further argument: {' '.join(exc.unused_tokens)}"
    said = re.sub(r'unable to convert ("[^"]*") into float', r"\1 is not a number", " ".join(str(exc).split()))
    return re.sub(r'unable to convert ("[^"]*") into int', r"\1 is not a whole number", said)


def _hint(words: Sequence[str]) -> str:
    named = list(dropwhile(lambda word: word not in VERBS and word not in FAMILIES, words))
    verb = _chosen(named) or " ".join(named[:1])
    places = (at for at, word in enumerate(named) if at and not word.startswith("-"))
    program = next((at for at in places if "=" in named[at - 1] or not named[at - 1].startswith("-")), 0)
    if verb == "run" and program and _is_program(named[program]) and "--" not in named:
        return f"write a command after '--': rota {shlex.join([*named[:program], '--', *named[program:]])}"
    return f"see: rota {verb} --help" if verb else "see: rota --help"


def _is_program(word: str) -> bool:
    return not Path(word).exists() and shutil.which(word) is not None


def _leave(number: int, _: Any) -> None:
    """Go through every ``finally``: a demonstration that is stopped ends what it started."""
    sys.exit(128 + number)


def _had_its_fill(*_: Any) -> None:
    """The reader of stdout is gone: exit in order. Without a reader of stderr, or of a connection, continue."""
    poller = select.poll()
    for fd in (1, 2):
        poller.register(fd, 0)
    if gone := [fd for fd, what in poller.poll(0) if what & select.POLLERR]:
        for fd in gone:  # Python flushes at its end: without a reader that would print an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        if 1 in gone:
            sys.exit(0)


def main() -> None:
    """Entry point of the command ``rota``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale of 7 bits shows what it can
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGPIPE, _had_its_fill)  # 'rota logs -f JOB | head'
    for one in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is signal.SIG_DFL:  # nohup stays nohup
            signal.signal(one, _leave)
    sys.exit(call(sys.argv[1:]))
