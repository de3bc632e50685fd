"""rota pause, resume, scale, exec: change a job while it lives, or look inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from rota.service.terminal import Terminal
from rota.service.verbs.flags import DEFAULT_FLAGS, JOB, Flags
from rota.service.verbs.words import ago_s
from rota.spec.errors import BadInput, RotaError
from rota.spec.resources import counted

EXEC_FAILED = 125
"""As of other tools that run a command for somebody: it is theirs, not of the command."""


def pause(
    job: JOB,
    *,
    grace: Annotated[str, Parameter(help="From the notice to the kill; default is the grace of the job.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Give the devices of a job back and keep the job: PAUSED until 'rota resume'. What it committed stays.

    Examples
    --------
    rota pause hello-1

    rota pause hello-1 --grace 2m
    """
    return flags.answer(lambda client: client.pause(job, grace_s=ago_s(grace)), _tell)


def resume(job: JOB, *, flags: Flags = DEFAULT_FLAGS) -> int:
    """Put a paused job into the queue again, with its old queue time; it goes on from its last commit.

    Examples
    --------
    rota resume hello-1
    """
    return flags.answer(lambda client: client.resume(job), _tell)


def scale(
    job: JOB,
    role: Annotated[str, Parameter(help="The role, or ROLE=N.")],
    n: Annotated[int | None, Parameter(help="How many instances.")] = None,
    *,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Ask for another number of instances of a role. More of them start as devices become free.

    Examples
    --------
    rota scale online-1 serve 3

    rota scale online-1 serve=3 --json
    """
    name, equals, number = role.partition("=")
    if equals and n is None and number.isdigit():
        n = int(number)
    if n is None or not name or (equals and not number.isdigit()):
        raise BadInput(f"scale {role}: how many?", hint="rota scale JOB ROLE N, or ROLE=N with N of at least 1")
    if n < 1:
        raise BadInput(f"scale {name}={n}: at least 1", hint="rota pause JOB gives all its devices back")
    terminal = flags.terminal()
    with flags.client() as client:
        document = client.scale(job, name, n)
    now = next(one for one in document["roles"] if one["name"] == name)
    shall = f"{name} shall have {counted(now['replicas'], 'instance')}, {now['ready']} ready"
    told = f"{document['id']} {document['state']}: {shall}"
    terminal.show(document, lambda term: term.line(told))
    return 0


def exec_(
    job: JOB,
    instance: Annotated[str, Parameter(help="ROLE/N, or ROLE for its first instance.")],
    *,
    timeout: Annotated[str, Parameter(name=["-t", "--timeout"], help="It is killed after so long.")] = "60s",
    argv: Annotated[list[str] | None, Parameter(show=False)] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Run a command in the environment and folder of a running instance: its devices, variables and secrets.

    It has no input and no terminal, and ends with all it started within the time. The exit status is its own, or 125.

    Examples
    --------
    rota exec hello-1 trainer/0 -- nvidia-smi

    rota exec hello-1 trainer -t 5m -- sh -c 'py-spy dump --pid $PPID'
    """
    terminal = flags.terminal()
    try:
        if not argv:
            raise BadInput("which command?", hint="rota exec JOB ROLE/N -- COMMAND")
        with flags.client() as client:
            done = client.execute(job, instance, argv, timeout_s=ago_s(timeout) or 60.0)
    except RotaError as error:
        terminal.error(error)
        return EXEC_FAILED
    terminal.show(done, lambda _: print(done["stdout"], end="", file=terminal.out))
    if not terminal.json:
        print(done["stderr"], end="", file=terminal.err)
    if done["cut"]:
        terminal.note("its output was longer; send it into a file, or through tail")
    if done["timed_out"]:
        terminal.note(f"it was killed after {timeout}")
    return EXEC_FAILED if done["timed_out"] else done["exit_status"]


def _tell(term: Terminal, document: Mapping[str, Any]) -> None:
    term.line(f"{document['id']} {document['state']}" + (f": {document['text']}" if document.get("text") else ""))
