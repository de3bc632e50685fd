"""rota pause, resume, scale: change a job while it lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from rota.service.terminal import Terminal
from rota.service.verbs.flags import DEFAULT_FLAGS, Flags
from rota.service.verbs.words import ago_s
from rota.spec.errors import BadInput

JOB = Annotated[str, Parameter(help="Id or a unique beginning of one.")]


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
    terminal = flags.terminal()
    with flags.client() as client:
        document = client.pause(job, grace_s=ago_s(grace))
    terminal.show(document, lambda term: _tell(term, document))
    return 0


def resume(job: JOB, *, flags: Flags = DEFAULT_FLAGS) -> int:
    """Put a paused job into the queue again, with its old queue time; it goes on from its last commit.

    Examples
    --------
    rota resume hello-1
    """
    terminal = flags.terminal()
    with flags.client() as client:
        document = client.resume(job)
    terminal.show(document, lambda term: _tell(term, document))
    return 0


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
    terminal = flags.terminal()
    with flags.client() as client:
        document = client.scale(job, name, n)
    terminal.show(document, lambda term: _tell(term, document))
    return 0


def _tell(term: Terminal, document: Mapping[str, Any]) -> None:
    term.line(f"{document['id']} {document['state']}" + (f": {document['text']}" if document.get("text") else ""))
