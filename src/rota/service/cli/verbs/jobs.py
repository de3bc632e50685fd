"""rota ps, show, set: which jobs there are, one of them in full, and how to change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from rota.service.api import JobFilters, JobSort
from rota.service.cli.output import Terminal
from rota.service.cli.verbs.flags import DEFAULT_FLAGS, JOB, Flags
from rota.service.cli.verbs.formatting import age, ago_s, amount, clock_time, labels, lasting, resources, shortened
from rota.spec.errors import BadInput, nearest

SORTS = get_args(JobSort)


def ps(
    *,
    all_: Annotated[bool, Parameter(name=["-a", "--all"], help="Also jobs that have ended.")] = False,
    state: Annotated[list[str] | None, Parameter(help="Only in this state; repeatable.")] = None,
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
    shown = _columns(columns, wide=terminal.wide)
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
    empty = "no jobs; 'rota run job.yaml' starts one, 'rota ps -a' shows those that ended"
    rows = [[COLUMNS[name](job) for name in shown] for job in page["items"]]
    terminal.show(page, lambda term: term.table([name.upper() for name in shown], rows, empty=empty))
    return 0


def _why(job: Mapping[str, Any]) -> str:
    told = [part for part in (job["reason"], job["phase"]) if part]
    return ", ".join(told if job["state"] in ("QUEUED", "PREEMPTING") else told[:1])


COLUMNS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "job": lambda job: job["id"],
    "state": lambda job: job["state"],
    "queue": lambda job: job["queue"],
    "prio": lambda job: job["priority"],
    "ready": lambda job: f"{job['instances_ready']}/{job['instances_total']}",
    "gpus": lambda job: amount(job["gpus"]),
    "age": lambda job: age(job["submitted_at"]),
    "ran": lambda job: lasting(job["run_s"]) if job["run_s"] else "",
    "why": _why,
    "user": lambda job: job["user"],
    "name": lambda job: job["name"],
    "attempt": lambda job: job["attempt"],
    "failovers": lambda job: job["failovers"],
    "restarts": lambda job: job["restarts"],
    "commit": lambda job: (job["progress"] or {}).get("commit"),
    "submitted": lambda job: clock_time(job["submitted_at"]),
    "started": lambda job: clock_time(job["started_at"]),
    "ended": lambda job: clock_time(job["ended_at"]),
    "nodes": lambda job: ",".join(job["nodes"]),
    "labels": lambda job: labels(job["labels"]),
}
NARROW = 9
"""Number of columns of a table that is not wide."""


def _columns(given: str, *, wide: bool) -> list[str]:
    """Names of the columns to show. Raises BadInput for one that is none."""
    if not given:
        return list(COLUMNS)[: None if wide else NARROW]
    names = [name.strip().lower() for name in given.split(",")]
    for name in names:
        if name not in COLUMNS:
            raise BadInput(f"--columns {name}: no column", hint=nearest(name, COLUMNS, "columns"))
    return names


def show(
    job: JOB,
    *,
    spec: Annotated[bool, Parameter(help="Show the job as it was understood.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show one job: every role, instance and attempt.

    Examples
    --------
    rota show hello-1

    rota show hello-1 --spec --json
    """
    if spec:
        return flags.answer(lambda client: client.spec(job), _spec_text)
    return flags.answer(lambda client: client.job(job), _job_page)


def _spec_text(term: Terminal, document: Mapping[str, Any]) -> None:
    from rota.service.jobfile.models import job_text
    from rota.spec.job import JobSpec

    term.line(job_text(JobSpec.from_json(document["spec"])).rstrip())


def _job_page(term: Terminal, job: Mapping[str, Any]) -> None:
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
            ("ran", lasting(job["run_s"]) if job["run_s"] else ""),
            ("attempts", len(job["attempts"]) if len(job["attempts"]) > 1 else ""),
            ("failures", f"{job['failovers']}, see: rota failures {job['id']}" if job["failovers"] else ""),
            ("commit", f"{progress['commit']} at {clock_time(progress['at'])}" if progress else ""),
            ("metrics", labels(progress.get("metrics") or {})),
            ("labels", labels(job["labels"])),
            ("nodes", shortened(job["nodes"], 8)),
            ("workdir", job.get("workdir")),
            ("output", job.get("output")),
            ("page", job.get("url")),
        ]
    )
    term.line()
    each = {role["name"]: resources(role["resources"]) for role in job["roles"]}
    term.table(
        ["INSTANCE", "STATE", "NODE", "DEVICES", "PID", "EPOCH", "RESTARTS", "EACH", "LAST ERROR"],
        [
            (
                one["instance"],
                one["state"],
                one["node"],
                ",".join(map(str, one["devices"])),
                one["pid"],
                one["epoch"],
                one["restarts"],
                each.get(one["role"], ""),
                f"{one['error']['reason']}: {one['error']['text']}"[:60] if one["error"] else "",
            )
            for one in job["instances"]
        ],
        empty="no instances yet",
    )
    stream_table(term, job["streams"])
    error = job.get("error")
    if error and error.get("traceback"):
        term.line()
        term.line(str(error["traceback"]).rstrip())


def state_text(doc: Mapping[str, Any]) -> str:
    """The state of a Job or Explanation, since when, and what it does inside it."""
    return f"{doc['state']} for {age(doc['since'])}" + (f" ({doc['phase']})" if doc["phase"] else "")


def _master_text(job: Mapping[str, Any]) -> str:
    master = job.get("master")
    if not master or job["state"] in ("QUEUED", "SUCCEEDED", "FAILED", "CANCELLED"):
        return ""
    place = f" on {master['node']}" if master.get("node") else ""
    return f"pid {master['pid']}{place} for {age(master['since'])}, epoch {master['epoch']}"


def stream_table(term: Terminal, rows: Sequence[Mapping[str, Any]]) -> None:
    """What streams have seen up to the last commit; nothing for a job without."""
    if rows:
        term.line()
        columns = ("name", "admitted", "pending", "leased", "queued", "trained", "again", "age")
        term.table(
            ["STREAM", "IN", "PENDING", "LEASED", "QUEUED", "TRAINED", "AGAIN", "AGE", "DROPPED"],
            [(*(row[column] for column in columns), labels(row["dropped"])) for row in rows],
        )


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
    wanted: dict[str, Any] = {}
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
