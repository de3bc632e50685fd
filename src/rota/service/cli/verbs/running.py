"""rota stop, pause, resume, scale, exec: change jobs while they live, or look inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rota.service.cli.verbs.flags import DEFAULT_FLAGS, JOB, Flags, confirm
from rota.service.cli.verbs.formatting import ago_s, shortened
from rota.service.client import Client
from rota.spec.errors import BadInput, RotaError, UnknownName
from rota.spec.resources import counted

if TYPE_CHECKING:
    from rota.service.models.jobs import JobDocument

EXEC_FAILED = 125
"""As of other tools that run a command for somebody: it is theirs, not of the command."""


JOBS = Annotated[str, Parameter(help="Ids or unique beginnings.")]


def stop(
    *job: JOBS,
    label: Annotated[list[str] | None, Parameter(name=["-l", "--label"], help="All live jobs with K=V.")] = None,
    now: Annotated[bool, Parameter(help="Without grace.")] = False,
    grace: Annotated[str, Parameter(help="From the notice to the kill; default 30s.")] = "",
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], help="Do not ask.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Ask jobs to end.

    Examples
    --------
    rota stop hello-1

    rota stop -l sweep=7 --yes
    """
    grace_s = 0.0 if now else ago_s(grace)
    ids = list(job)
    if label:
        with flags.client() as client:
            fits = [one["id"] for one in client.all_jobs(label=label)]
        if not fits:
            raise UnknownName(f"no live job has {', '.join(label)}", hint="see: rota ps -l K=V")
        ids += fits
        confirm(f"stop {counted(len(ids), 'job')} ({shortened(ids)})?", yes=yes)
    return _each("stop", ids, lambda client, one: client.stop(one, grace_s=grace_s), flags, also=", or -l K=V")


def pause(
    *job: JOBS,
    grace: Annotated[str, Parameter(help="From the notice to the kill; default is the grace of the job.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Give the devices of jobs back and keep the jobs: PAUSED until 'rota resume'. What they committed stays.

    Examples
    --------
    rota pause hello-1

    rota pause hello-1 hello-2 --grace 2m
    """
    grace_s = ago_s(grace)
    return _each("pause", job, lambda client, one: client.pause(one, grace_s=grace_s), flags)


def resume(*job: JOBS, flags: Flags = DEFAULT_FLAGS) -> int:
    """Put paused jobs into the queue again, with their old queue time; they continue from their last commit.

    Examples
    --------
    rota resume hello-1
    """
    return _each("resume", job, lambda client, one: client.resume(one), flags)


def _each(
    action: str, ids: Sequence[str], ask: Callable[[Client, str], JobDocument], flags: Flags, *, also: str = ""
) -> int:
    """Ask one thing of every job, a row each; when one refuses, the others are still asked. The worst exit status."""
    if not ids:
        raise BadInput("which job?", hint=f"rota {action} JOB{also}; 'rota ps' lists them")
    items: list[dict[str, Any]] = []
    worst = 0
    with flags.client() as client:
        for one in ids:
            try:
                found = ask(client, one)
            except RotaError as exc:
                if len(ids) == 1:
                    raise
                worst = max(worst, exc.exit)
                items.append({"job": one, "done": False, "code": exc.code, "text": exc.message})
            else:
                items.append({"job": found["id"], "done": True, "state": found["state"], "text": found["text"]})
    answer = {"kind": "ActionList", "action": action, "items": items}
    rows = [f"{one['job']} {one.get('state') or f'refused to {action}'}" for one in items]
    told = [row + (f": {one['text']}" if one["text"] else "") for row, one in zip(rows, items, strict=True)]
    flags.terminal().show(answer, lambda term: term.line("\n".join(told)))
    return worst


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
    timeout: Annotated[str, Parameter(name=["-t", "--timeout"], help="Kill it after this time.")] = "60s",
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
    return EXEC_FAILED if done["exit_status"] is None else done["exit_status"]
