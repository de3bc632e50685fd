"""rota ps, show, set, stop, pause, resume, scale, exec: list, show and change jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict, get_args

from cyclopts import Parameter

from rota.service.api import JobFilters, JobSort
from rota.service.cli.flags import DEFAULT_FLAGS, JOB, Flags, confirm
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs.formatting import age, ago_s, amount, clock_time, labels, lasting, resources, shortened
from rota.service.client import Client
from rota.service.user_process import monotonic, sleep
from rota.spec.errors import BadInput, Conflict, RotaError, TimedOut, UnknownName, nearest
from rota.spec.resources import counted, format_size
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.models.jobs import JobDocument, StreamRow
    from rota.service.models.reasons import Explanation

SORTS = get_args(JobSort)
JOBS_OF = Annotated[str, Parameter(help="Ids or unique prefixes.")]


def ps(
    *,
    all_: Annotated[bool, Parameter(name=["-a", "--all"], help="Also jobs that have ended.")] = False,
    state: Annotated[list[str] | None, Parameter(help="Only in this state, or in one of A,B; repeatable.")] = None,
    queue: Annotated[str, Parameter(name=["-q", "--queue"], help="Only of this queue and those below it.")] = "",
    user: Annotated[str, Parameter(help="Only of this user.")] = "",
    mine: Annotated[bool, Parameter(help="Only of the user who asks.")] = False,
    label: Annotated[list[str] | None, Parameter(name=["-l", "--label"], help="Only with K=V; repeatable.")] = None,
    since: Annotated[str, Parameter(help="Active jobs, plus jobs that ended within this period (e.g. 7d).")] = "",
    sort: Annotated[str, Parameter(help="submitted, name, state, priority or queue.")] = "submitted",
    columns: Annotated[str, Parameter(help="Columns of the table: a,b; those of -o wide can be named.")] = "",
    limit: Annotated[int, Parameter(help="Maximum number of jobs to list.")] = 200,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """List jobs, the newest first.

    Examples
    --------
    rota ps

    rota ps -a -l team=vision --since 7d --json

    rota ps --mine --sort priority --columns job,state,nodes
    """
    if sort not in SORTS:
        raise BadInput(f"--sort {sort}: unknown", hint=", ".join(SORTS))
    if not 1 <= limit <= 10_000:
        raise BadInput(f"--limit {limit}: from 1 to 10000")
    if mine and user:
        raise BadInput("--mine and --user: one of them")
    terminal = flags.terminal()
    shown = _job_table(columns, wide=terminal.wide)
    filters: JobFilters = {
        "sort": sort,
        "all": all_ or bool(since),
        "state": state,
        "queue": queue,
        "user": user,
        "label": label,
        "since_s": ago_s(since),
    }
    with flags.client() as client:
        if mine:
            filters["user"] = client.accounts.whoami()["name"]
        page = client.jobs(**{**filters, "limit": min(limit, 200)})
        while len(page["items"]) < limit and (cursor := page["next"]):
            more = client.jobs(**{**filters, "limit": min(limit - len(page["items"]), 200), "cursor": cursor})
            page = {**more, "items": page["items"] + more["items"]}
    terminal.show(page, lambda term: shown(term, page))
    return 0


def _why(job: Mapping[str, Any]) -> str:
    shown = [part for part in (job["reason"], job["phase"]) if part]
    return ", ".join(shown if job["state"] in ("QUEUED", "PREEMPTING") else shown[:1])


JOBS = Table(
    columns={
        "JOB": "id",
        "STATE": "state",
        "QUEUE": "queue",
        "PRIO": "priority",
        "READY": lambda job: f"{job['instances_ready']}/{job['instances_total']}",
        "GPUS": lambda job: amount(job["gpus"]),
        "AGE": lambda job: age(job["submitted_at"]),
        "RAN": lambda job: lasting(job["run_s"]) if job["run_s"] else "",
        "WHY": _why,
        "USER": "user",
        "NAME": "name",
        "ATTEMPT": "attempt",
        "FAILOVERS": "failovers",
        "RESTARTS": "restarts",
        "COMMIT": lambda job: (job["progress"] or {}).get("commit"),
        "SUBMITTED": lambda job: clock_time(job["submitted_at"]),
        "STARTED": lambda job: clock_time(job["started_at"]),
        "ENDED": lambda job: clock_time(job["ended_at"]),
        "NODES": lambda job: ",".join(job["nodes"]),
        "LABELS": lambda job: labels(job["labels"]),
    },
    empty="no jobs; 'rota run job.yaml' starts one, 'rota ps -a' shows those that ended",
)
NARROW = 9
"""Number of columns of a table that is not wide."""


def _job_table(given: str, *, wide: bool) -> Table:
    """The table with these columns. Raises BadInput for one that does not exist."""
    names = (
        [name.strip().upper() for name in given.split(",")] if given else [*JOBS.columns][: None if wide else NARROW]
    )
    for name in names:
        if name not in JOBS.columns:
            known = [column.lower() for column in JOBS.columns]
            raise BadInput(f"--columns {name.lower()}: unknown column", hint=nearest(name.lower(), known, "columns"))
    return replace(
        JOBS, columns={name: JOBS.columns[name] for name in names}, extra=() if given else ("RAN", "PRIO", "QUEUE")
    )


def show(
    job: JOB,
    *,
    spec: Annotated[bool, Parameter(help="Show the job as it was understood.")] = False,
    diff: Annotated[bool, Parameter(help="Show what each edit changed in it.")] = False,
    attempt: Annotated[int | None, Parameter(help="Show this attempt: when, where, and what ended it.")] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show one job: every role, instance and attempt.

    Examples
    --------
    rota show hello-1

    rota show hello-1 --attempt 1

    rota show hello-1 --diff
    """
    if spec + diff + (attempt is not None) > 1:
        raise BadInput("--spec, --diff and --attempt: one of them")
    if diff:
        return flags.answer(lambda client: client.spec(job), _edits)
    if attempt is not None:
        return flags.show(lambda: _attempt(flags, job, attempt), _attempt_page)
    if spec:
        return flags.answer(lambda client: client.spec(job), _spec_text)
    return flags.answer(lambda client: client.job(job), _job_page)


def _spec_text(term: Terminal, document: Mapping[str, Any]) -> None:
    from rota.service.jobfile.models import job_text
    from rota.spec.job import JobSpec

    term.line(job_text(JobSpec.from_json(document["spec"])).rstrip())


def _edits(term: Terminal, document: Mapping[str, Any]) -> None:
    """Each edit as a unified diff of the job file, the oldest first."""
    from difflib import unified_diff

    from rota.service.jobfile.models import job_text
    from rota.spec.job import JobSpec

    if not document["edits"]:
        term.line(f"{document['job']}: no edits")
    for edit in document["edits"]:
        before, after = (job_text(JobSpec.from_json(edit[side])).splitlines() for side in ("before", "after"))
        term.line(f"edit by {edit['by']} at {clock_time(edit['at'])}")
        for line in [*unified_diff(before, after, n=1, lineterm="")][2:]:
            term.line(line)


def _attempt(flags: Flags, job: str, number: int) -> dict[str, Any]:
    """The attempt with its recoveries; the service refuses a number that the job has not."""
    with flags.client() as client:
        failures = client.failures(job, attempt=number)
        row = next(one for one in client.job(job)["attempts"] if one["attempt"] == number)
    return {"kind": "Attempt", "job": failures["job"], **row, "failures": failures["items"]}


def _attempt_page(term: Terminal, row: Mapping[str, Any]) -> None:
    times = [(name, clock_time(row[f"{name}_at"])) for name in ("admitted", "started", "ended")]
    why = labels({name: value for name, value in row["why"].items() if not isinstance(value, dict | list)})
    made_room = f"{row['reason']} for {row['for_job']}" if row["for_job"] else row["reason"]
    made_room = f"{row['reason']}: {row['text']}" if row.get("text") else made_room
    term.pairs([("job", row["job"]), ("attempt", row["attempt"]), *times, ("ended by", made_room)])
    term.pairs([("nodes", shortened(row["nodes"], 8)), ("placed there", why)])
    for one in row["failures"]:
        took = f" after {lasting(one['seconds'])}" if one["seconds"] is not None else ""
        healed = f"healed{took}" if one["healed"] else f"restarted{took}, not healed yet" if took else "not healed"
        term.line(f"{clock_time(one['seen_at'])}  {one['instance']} {one['reason']}: {one['text']}; {healed}")


def _job_page(term: Terminal, job: JobDocument) -> None:
    progress = job.get("progress") or {}
    term.pairs(
        [
            ("job", job["id"]),
            ("state", state_text(job)),
            ("why", f"{job['reason']}: {job['text']}" if job.get("reason") else ""),
            ("queue", f"{job['queue']}, priority {job['priority']}"),
            ("master", _master_text(job)),
            ("user", job["user"]),
            ("submitted", clock_time(job["submitted_at"])),
            ("restored", f"{clock_time(job['restored_at'])}, from a back-up" if job.get("restored_at") else ""),
            ("ran", lasting(job["run_s"]) if job["run_s"] else ""),
            ("attempts", len(job["attempts"]) if len(job["attempts"]) > 1 else ""),
            ("recoveries", f"{job['failovers']}, see: rota failures {job['id']}" if job["failovers"] else ""),
            ("commit", f"{progress['commit']} at {clock_time(progress['at'])}" if progress else ""),
            ("resume from", shortened([str(n) for n in progress["commits"]], 8) if progress else ""),
            ("metrics", labels(progress.get("metrics") or {})),
            ("labels", labels(job["labels"])),
            ("nodes", shortened(job["nodes"], 8)),
            ("workdir", job.get("workdir")),
            ("output", job.get("output")),
            ("checkpoints", job.get("checkpoints")),
            ("uploaded", _upload_text(job)),
            ("page", job.get("url")),
        ]
    )
    term.line()
    each = {role["name"]: resources(role["resources"]) for role in job["roles"]}
    INSTANCES.print(term, [one | {"each": each.get(one["role"], "")} for one in job["instances"]])
    stream_table(term, job["streams"])
    error = job.get("error")
    if error and error.get("traceback"):
        term.line()
        term.line(str(error["traceback"]).rstrip())


def state_text(doc: JobDocument | Explanation) -> str:
    """The state of a Job or Explanation, since when, and what it does inside it."""
    return f"{doc['state']} for {age(doc['since'])}" + (f" ({doc['phase']})" if doc["phase"] else "")


def _upload_text(job: JobDocument) -> str:
    """What is at the URL of the output; empty of a job without one, and before it ends."""
    found = job.get("upload")
    if not found:
        return ""
    if found["error"]:
        return f"no: {found['error']}"
    what = f"{counted(found['files'], 'file')}, {format_size(found['bytes'])}, to {found['url']}"
    return "; ".join((what, *found["notes"]))


def _master_text(job: Mapping[str, Any]) -> str:
    master = job.get("master")
    if not master or job["state"] in ("QUEUED", "SUCCEEDED", "FAILED", "CANCELLED"):
        return ""
    place = f" on {master['node']}" if master.get("node") else ""
    return f"pid {master['pid']}{place} for {age(master['since'])}, epoch {master['epoch']}"


INSTANCES = Table(
    columns={
        "INSTANCE": "instance",
        "STATE": "state",
        "NODE": "node",
        "DEVICES": lambda one: ",".join(map(str, one["devices"])),
        "PID": "pid",
        "EPOCH": "epoch",
        "RESTARTS": "restarts",
        "EACH": "each",
        "LAST ERROR": lambda one: f"{one['error']['reason']}: {one['error']['text']}"[:60] if one["error"] else "",
    },
    empty="no instances yet",
    extra=("EPOCH", "PID", "RESTARTS", "EACH"),
)
STREAMS = Table(
    columns={
        "STREAM": "name",
        "IN": "admitted",
        "PENDING": "pending",
        "LEASED": "leased",
        "QUEUED": "queued",
        "TRAINED": "trained",
        "AGAIN": "again",
        "AGE": "age",
        "DROPPED": lambda row: labels(row["dropped"]),
    }
)


def stream_table(term: Terminal, rows: Sequence[StreamRow]) -> None:
    """What streams have seen up to the last commit; nothing for a job without."""
    if rows:
        term.line()
        STREAMS.print(term, rows)


SETTABLE = ("priority", "queue", "time_limit", "grace", "retry", "labels.NAME")


def set_(
    job: JOB,
    *changes: Annotated[str, Parameter(help="priority=80, queue=prod, time_limit=2h, grace=30s, retry=3, labels.k=v.")],
    if_version: Annotated[int | None, Parameter(help="Only if 'version' of rota show --json is still this.")] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Change priority, queue, time limit, grace, retries or labels of a job that has not ended.

    Examples
    --------
    rota set hello-1 priority=80
    """
    if not changes:
        raise BadInput("missing change", hint="rota set JOB priority=80")
    wanted: dict[str, object] = {}
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals:
            raise BadInput(f"{change!r} is not FIELD=VALUE")
        if path in ("time_limit", "grace"):
            wanted[f"{path}_s"] = ago_s(value)
        elif path in ("priority", "retry"):
            if not value.lstrip("-").isdigit():
                raise BadInput(f"{change}: a whole number from {'-1 to 100' if path == 'priority' else '0 to 1000'}")
            wanted[path] = int(value)
        elif path == "queue" or path.startswith("labels."):
            wanted[path] = value
        else:
            meant = nearest(path, SETTABLE, "these can")
            raise BadInput(f"{path!r} cannot change after submit", hint=meant)
    return flags.answer(lambda client: client.change(job, wanted, if_version=if_version), _job_page)


SCALE_LOOK_S = 0.5
EXEC_FAILED = 125
"""As in docker and ssh-like tools: the failure is of Rota, not of the command."""


def stop(
    *job: JOBS_OF,
    label: Annotated[list[str] | None, Parameter(name=["-l", "--label"], help="All live jobs with K=V.")] = None,
    now: Annotated[bool, Parameter(help="Without grace.")] = False,
    grace: Annotated[str, Parameter(help="From the notice to the kill; default 30s.")] = "",
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], help="Do not prompt.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Ask jobs to end. What they saved to a checkpoint folder stays; 'rota pause' keeps the other commits, too.

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
    *job: JOBS_OF,
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


def resume(
    *job: JOBS_OF,
    from_: Annotated[
        int | None,
        Parameter(name="--from", help="Continue from this commit, 0 for the start; of an ended job as a new job."),
    ] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Put paused jobs into the queue again, with their old queue time; they continue from their last commit.

    With --from they continue from an earlier commit that is saved ('rota show JOB' lists them) and give up later ones.

    Examples
    --------
    rota resume hello-1

    rota resume ppo-3 --from 40
    """
    return _each("resume", job, lambda client, one: client.resume(one, from_commit=from_), flags)


class ActionRow(TypedDict):
    """What became of an action on one job: its new ``state``, or the ``code`` of a refusal."""

    job: str
    done: bool
    state: NotRequired[str]
    code: NotRequired[str]
    text: str


def _each(
    action: str, ids: Sequence[str], ask: Callable[[Client, str], JobDocument], flags: Flags, *, also: str = ""
) -> int:
    """Ask one thing of every job, a row each; when one refuses, the others are still asked. The worst exit status."""
    if not ids:
        raise BadInput("missing JOB", hint=f"rota {action} JOB{also}; 'rota ps' lists them")
    items: list[ActionRow] = []
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
    shown = [row + (f": {one['text']}" if one["text"] else "") for row, one in zip(rows, items, strict=True)]
    flags.terminal().show(answer, lambda term: term.line("\n".join(shown)))
    return worst


def scale(
    job: JOB,
    role: Annotated[str, Parameter(help="The role, or ROLE=N.")],
    n: Annotated[int | None, Parameter(help="How many instances.")] = None,
    *,
    wait: Annotated[bool, Parameter(name=["-w", "--wait"], help="Wait until they are ready.")] = False,
    timeout: Annotated[str, Parameter(help="With --wait: give up after this long (exit 5).")] = "",
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
        raise BadInput(f"scale {role}: missing N", hint="rota scale JOB ROLE N, or ROLE=N with N of at least 1")
    if n < 1:
        raise BadInput(f"scale {name}={n}: at least 1", hint="rota pause JOB gives all its devices back")
    terminal = flags.terminal()
    with flags.client() as client:
        document = client.scale(job, name, n)
        if wait:
            document = _scaled(client, document["id"], name, n, ago_s(timeout))
    now = next(one for one in document["roles"] if one["name"] == name)
    shown = f"{document['id']} {document['state']}: scaling {name}: {now['ready']} -> {now['replicas']}"
    terminal.show(document, lambda term: term.line(shown))
    return 0


def _scaled(client: Client, job: str, role: str, n: int, timeout_s: float | None) -> JobDocument:
    """The job once the role has ``n`` instances and all are ready. Raises TimedOut, or Conflict when it ends before."""
    until_s = None if timeout_s is None else monotonic() + timeout_s
    while True:
        document = client.job(job)
        row = next(one for one in document["roles"] if one["name"] == role)
        if (row["replicas"], row["ready"], document["state"]) == (n, n, JobState.RUNNING):
            return document
        text = f"{job} is {document['state']}; {role}: {row['ready']} of {n} ready"
        if JobState(document["state"]).terminal:
            raise Conflict(text)
        if until_s is not None and monotonic() >= until_s:
            raise TimedOut(text, hint=f"it continues; see: rota show {job}")
        sleep(SCALE_LOOK_S)


def exec_(
    job: JOB,
    instance: Annotated[str, Parameter(help="ROLE/N or ROLE; default: the first. JOB/ROLE/N is the same.")] = "",
    *,
    tty: Annotated[bool, Parameter(name=["-it", "--tty"], help="On a terminal, attached to this one.")] = False,
    timeout: Annotated[str, Parameter(name=["-t", "--timeout"], help="Kill it after this time (60s).")] = "",
    argv: Annotated[list[str] | None, Parameter(show=False)] = None,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Run a command in the environment and folder of a running instance: its devices, variables and secrets.

    It has no input and no terminal, and ends with all it started within the time. The exit status is its own, or 125.

    With -it the command has a terminal, with no time limit, and without a command it is a shell: keys, Ctrl-C too, and
    the size of the window go to the program, until it ends; Ctrl-D ends a shell. Input that is not a terminal is typed.

    Examples
    --------
    rota exec -it hello-1

    rota exec hello-1 trainer/0 -- nvidia-smi

    rota exec hello-1 trainer -t 5m -- sh -c 'py-spy dump --pid $PPID'
    """
    terminal = flags.terminal()
    try:
        job, slash, within = job.partition("/")
        if slash and instance:
            raise BadInput(f"{job}/{within} names an instance, and {instance} another")
        instance = within or instance
        if tty:
            _refuse_with_tty(timeout, terminal)
            from rota.service.cli.verbs.terminal import attach

            return attach(flags, job, instance, argv or ())
        if not argv:
            hint = "rota exec JOB ROLE/N -- COMMAND, or rota exec -it JOB for a shell"
            raise BadInput("missing COMMAND", hint=hint)
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
        terminal.note(f"it was killed after {timeout or '60s'}")
    return EXEC_FAILED if done["timed_out"] or done["exit_status"] is None else done["exit_status"]


def _refuse_with_tty(timeout: str, terminal: Terminal) -> None:
    """Raises BadInput for flags that mean nothing with a terminal."""
    if timeout:
        raise BadInput(f"--timeout {timeout} goes with a command without -it", hint="a terminal ends with its program")
    if terminal.json:
        raise BadInput("--json goes with a command without -it", hint="a terminal has no document")
