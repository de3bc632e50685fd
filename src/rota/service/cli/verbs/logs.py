"""rota logs and events: output and facts of a job, now or as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, JOB, Flags
from rota.service.cli.output import Terminal
from rota.service.cli.verbs.formatting import clock_time, since_s
from rota.spec.errors import BadInput, UnknownName
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.client import Client
    from rota.service.models.jobs import EventRecord, LogLine

COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)
_NOT_SHOWN = frozenset({"kind", "number", "job", "seq", "at", "api", "source", "uid", "idempotency_key"})

_DRAINED = "(the node is drained: the job moves at a commit before that, or waits in its queue then)"
_STAYS = "(the node is in use again: the job stays)"
_TIMERS = {
    "time-limit": "its time limit is over",
    "diagnose": "the losses so far are judged",
    "healed": "it ran long enough to count as healed",
    "drain": "the notice of the drained node is over",
    "move": "the time to save before it leaves the drained node is over",
    "backoff": "the pause before the restart is over",
    "node": "the wait for another node is over",
    "asks": "the wait for more devices is over",
    "start": "the start took too long",
    "grace": "the time to save before its end is over",
}
"""What a timer of each kind means when it fires."""


def logs(
    job: JOB,
    instance: Annotated[str, Parameter(help="ROLE or ROLE/N; default: all, merged by time.")] = "",
    *,
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], help="Follow until the job ends.")] = False,
    since: Annotated[str, Parameter(help="Timestamp or age, e.g. 10m.")] = "",
    until: Annotated[str, Parameter(help="Timestamp or age.")] = "",
    tail: Annotated[int | None, Parameter(name=["-n", "--tail"], help="Only the last N lines.")] = None,
    grep: Annotated[str, Parameter(help="Only lines that hold this text.")] = "",
    stream: Annotated[str, Parameter(help="out or err.")] = "",
    attempt: Annotated[int | None, Parameter(help="Only of this attempt.")] = None,
    no_prefix: Annotated[bool, Parameter(help="Only the text of each line.")] = False,
    timestamps: Annotated[bool, Parameter(help="With the local time of each line.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show the output of a job.

    Examples
    --------
    rota logs hello-1 trainer/0 --tail 20

    rota logs -f hello-1 --grep loss
    """
    if stream not in ("", "out", "err"):
        raise BadInput(f"--stream {stream}: out or err")
    if tail is not None and tail < 0:
        raise BadInput(f"--tail {tail}: below 0")
    terminal = flags.terminal()
    filters = {
        "instance": instance,
        "since": since_s(since),
        "until": since_s(until),
        "tail": tail,
        "grep": grep,
        "stream": stream,
        "attempt": attempt,
    }
    with flags.client() as client:
        if "/" in job:
            job, filters["instance"] = _job_and_instance(client, job, instance)
        if follow:
            _print_wait_reason(client, terminal, job)
        lines = client.logs(job, follow=follow, notice=terminal.note, **filters)
        if terminal.json and not follow:
            pages = list(client.log_pages(job, **filters))
            terminal.show({**pages[-1], "items": [line for page in pages for line in page["items"]]}, lambda _: None)
            return 0
        shown = False
        for line in lines:
            shown = True
            at = f"{clock_time(line['ts'])} " if timestamps else ""
            terminal.show_line(line, at + log_text(line, terminal, prefix=not no_prefix))
        if not shown:
            terminal.note(_why_nothing(client.job(job), any(client.logs(job, tail=1))))
        elif follow:
            _hint_failure(client, terminal, job)
    return 0


def _job_and_instance(client: Client, given: str, instance: str) -> tuple[str, str]:
    """``JOB/ROLE/N``, as exec has it, in two. Raises BadInput where more follows or no job is in front."""
    job, _, part = given.partition("/")
    if instance:
        raise BadInput(f"{given} {instance} names two instances", hint=f"rota logs {job} {part}")
    try:
        return client.job(job)["id"], part
    except UnknownName as exc:
        raise UnknownName(f"{exc.message}; the job comes first", hint=f"rota logs JOB {given}") from None


def _print_wait_reason(client: Client, terminal: Terminal, job: str) -> None:
    """Following a job that waits would be silent until it starts: why it waits, once."""
    document = client.job(job)
    if document["state"] in (JobState.QUEUED, JobState.PAUSED):
        why = f": {document['reason']}: {document['text']}" if document["reason"] else ""
        terminal.note(f"{document['id']} is {document['state']}{why}")
        terminal.note(f"its output follows once it runs; see: rota explain {document['id']}")


def _why_nothing(document: Mapping[str, Any], written: bool) -> str:
    """Why a job has no output, and where to look instead."""
    job, state = document["id"], JobState(document["state"])
    if written:
        return f"{job}: no line passes these filters; rota logs {job} shows all"
    if state.terminal:
        see = "" if state is JobState.SUCCEEDED else f"; see: rota failures {job}"
        return f"{job} {state} without output: {document['text'] or document['reason']}{see}"
    if not document["attempt"]:
        return f"{job} is {state} and has not started: rota explain {job}"
    return f"{job} is {state} and has written nothing yet; rota logs -f {job} waits for it"


def _hint_failure(client: Client, terminal: Terminal, job: str) -> None:
    """Logs that end without a word would hide how the job ended."""
    document = client.job(job)
    if JobState(document["state"]).terminal:
        terminal.note(f"{document['id']} {document['state']}: {document.get('text') or ''}")


def log_text(line: LogLine, terminal: Terminal, *, prefix: bool = True) -> str:
    """``role/rank | text``, the prefix in a colour of its own."""
    if not prefix:
        return str(line["text"])
    mark = f"{line['instance']} |"
    if terminal.colour:
        mark = f"\x1b[{COLOURS[sum(map(ord, line['instance'])) % len(COLOURS)]}m{mark}\x1b[0m"
    return f"{mark} {line['text']}"


def events(
    job: Annotated[str, Parameter(help="Id or a unique prefix of one; default: all jobs and the installation.")] = "",
    *,
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], help="Follow until the job ends.")] = False,
    type_: Annotated[str, Parameter(name="--type", help="Only events of this kind, for example InstanceLost.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show the facts of a job in order; without a job those of nodes, queues, users and every job.

    Examples
    --------
    rota events hello-1

    rota events -f hello-1 --type Committed
    """
    terminal = flags.terminal()
    with flags.client() as client:
        if terminal.json and not follow:
            pages = list(client.event_pages(job, type=type_))
            items = [item for page in pages for item in page["items"]]
            terminal.show({**pages[-1], "items": items}, lambda _: None)
            return 0
        for event in client.events(job, follow=follow, type=type_):
            terminal.show_line(event, event_text(event) if job else f"{event['job'] or '-'} {event_text(event)}")
    return 0


def event_text(event: EventRecord) -> str:
    """``12:00:01 InstanceReady role=actor rank=0`` on one line; specs and placements only with ``--json``."""
    shown: list[str] = []
    for name, value in event.items():
        deep = isinstance(value, dict) and any(isinstance(part, dict | list) for part in value.values())
        if name not in _NOT_SHOWN and value not in (None, "", [], {}) and not deep:
            at = clock_time(value) if name.endswith("_at") and isinstance(value, float) else ""
            value = value.partition("/")[0] if name == "timer" and isinstance(value, str) else value
            text = at or " ".join(_plain(value).split())
            shown.append(f"{name}={text if len(text) <= 60 else text[:57] + '...'}")
    if event["kind"] == "TimerFired" and (meaning := _TIMERS.get(str(event.get("timer")).partition("/")[0])):
        shown.append(f"({meaning})")
    if event["kind"] == "MoveAsked":
        shown.append(_DRAINED if event.get("due_at") else _STAYS)
    return f"{clock_time(event['at'])} {event['kind']} {' '.join(shown)}".rstrip()


def _plain(value: object, joint: str = ",") -> str:
    """A value of an event without the punctuation of Python: ``a,b``, ``k=v,...``; a list in a list is ``a:b``."""
    if isinstance(value, Mapping):
        return joint.join(f"{name}={_plain(part, ':')}" for name, part in value.items() if part not in (None, "", []))
    if isinstance(value, list | tuple):
        return joint.join(_plain(part, ":") for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
