"""rota run --sweep and rota sweep: the same job once for every point of its parameters, and a table of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from cyclopts import Group, Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags
from rota.service.cli.output import Table, Terminal
from rota.service.cli.shell import INTERRUPTED
from rota.service.cli.verbs.formatting import amount, labels, lasting
from rota.service.cli.verbs.live import Ticker, live_line
from rota.service.user_process import monotonic, sleep
from rota.spec.errors import BadInput, IdempotencyConflict, JobFileError, TimedOut, UnknownName
from rota.spec.resources import counted
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.api import JobText
    from rota.service.client import Client
    from rota.service.jobfile.problems import Problem
    from rota.service.models.jobs import JobRow
    from rota.service.sweeps import Metric, Point, SweepDocument, SweepJob, SweepRow
    from rota.spec.job import JobSpec

LOOK_S = 1.0
"""Between two looks at the jobs of a sweep that is waited for."""
LINES_SEEN = 50
"""Last lines of output with the name of the metric in which its value is looked for."""
PLAIN_ROWS = 40
"""Jobs of a sweep in the table; -o wide has them all."""


@Parameter(name="*", group=Group("Sweep", sort_key=50))
@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """The flags of ``rota run`` that make one job a sweep."""

    sweep: Annotated[list[str] | None, Parameter(help="NAME=a,b or NAME=1..5: a job for every value; repeatable.")] = (
        None
    )
    samples: Annotated[
        int | None, Parameter(help="Number of random points; ranges such as lr=1e-5..1e-1 are then allowed.")
    ] = None
    metric: Annotated[str, Parameter(help="What is compared: NAME (less is better) or NAME:max.")] = ""
    budget: Annotated[
        str, Parameter(help="NAME=1,3,9: successive halving, where the better jobs get the next value.")
    ] = ""


NO_SWEEP = SweepFlags()


class PlannedPoint(TypedDict):
    """A point, and the changes of the job file that it is."""

    point: Point
    sets: list[str]


class SweepPlanDocument(TypedDict):
    """A sweep that was not submitted, as ``--json`` prints it."""

    kind: str
    sweep: str
    items: list[PlannedPoint]
    budgets: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """A sweep that was asked for and checked: its points, and the budgets of its rungs (one empty rung without)."""

    name: str
    body: JobText
    points: tuple[Point, ...]
    metric: Metric | None
    budget: str
    budgets: tuple[float, ...]
    fields: tuple[str, ...]
    commands: Mapping[str, Sequence[str]]
    unread: tuple[str, ...]
    """Variables that the text of the job does not name."""

    def jobs(self, points: Sequence[Point], rung: int) -> list[SweepJob]:
        """The jobs of these points in a rung."""
        from rota.service.sweeps import job_of

        more = {self.budget: amount(self.budgets[rung])} if self.budget else {}
        number = rung if self.budget else None
        return [
            job_of(self.name, {**one, **more}, self.fields, rung=number, metric=self.metric, commands=self.commands)
            for one in points
        ]

    def body_of(self, job: SweepJob) -> JobText:
        """What is submitted for a job."""
        return {**self.body, "sets": [*self.body["sets"], *job.sets]}

    def document(self) -> SweepPlanDocument:
        """``SweepPlan``: the points, and the changes of the job file that each is in the first rung."""
        jobs = zip(self.points, self.jobs(self.points, 0))
        rows: list[PlannedPoint] = [{"point": one, "sets": [*job.sets]} for one, job in jobs]
        return {"kind": "SweepPlan", "sweep": self.name, "items": rows, "budgets": [*self.budgets]}


POINTS = Table(columns={"POINT": lambda row: labels(row["point"]), "SETS": lambda row: " ".join(row["sets"])})
"""The points of a sweep that was not submitted."""


def plan_sweep(given: SweepFlags, body: JobText, spec: JobSpec) -> SweepPlan:
    """The sweep of a job, under its name; every job of the first rung was read. Raises BadInput, JobFileError."""
    from rota.service.jobfile.models import JobPart
    from rota.service.jobfile.reader import read_job
    from rota.service.sweeps import FIXED, Metric, budgets, parse_parameter, points, unread

    if not given.sweep:
        raise BadInput("--samples, --metric and --budget go with --sweep", hint="--sweep lr=1e-4,3e-4")
    if given.samples is not None and given.samples < 1:
        raise BadInput(f"--samples {given.samples}: at least 1")
    if given.budget and not given.metric:
        raise BadInput("--budget compares jobs by a metric", hint="add --metric loss, or --metric accuracy:max")
    budget, numbers = budgets(given.budget) if given.budget else (None, ())
    parameters = [parse_parameter(text) for text in given.sweep]
    if budget is not None and budget.name in [one.name for one in parameters]:
        raise BadInput(f"--budget {budget.name}: it is a parameter of the sweep, too")
    fields = {field.alias or key for key, field in JobPart.model_fields.items()} - set(FIXED)
    free = unread([one.name for one in parameters], fields, body["source"])
    plan = SweepPlan(
        name=spec.name,
        body=body,
        points=points(parameters, given.samples, f"{spec.name} {sorted(given.sweep)}"),
        metric=Metric.parse(given.metric) if given.metric else None,
        budget="" if budget is None else budget.name,
        budgets=numbers,
        fields=tuple(sorted(fields)),
        commands={role.name: role.run for role in spec.roles if role.run and not role.shell},
        unread=(*free, *unread([budget.name] if budget else [], fields, body["source"], "--budget")),
    )
    for point, job in zip(plan.points, plan.jobs(plan.points, 0)):
        with _of_the_point(point):
            read_job(body["source"], filename=body["filename"], sets=plan.body_of(job)["sets"])
    return plan


@contextmanager
def _of_the_point(point: Point) -> Iterator[None]:
    """A mistake in a value of the point is named by the flag that it came by."""
    try:
        yield
    except JobFileError as exc:
        shown = tuple(_by_flag(one, point) for one in exc.problems)
        raise JobFileError(shown, hint=exc.hint, **exc.fields) from None


def _by_flag(problem: Problem, point: Point) -> Problem:
    path, _, value = problem.source.partition("=")
    name = path if path in point else path.removeprefix("env.")
    if not problem.file.startswith("--set") or point.get(name) != value:
        return problem
    return replace(problem, file=f"--sweep {name}={value}", line=0)


def run_sweep(client: Client, terminal: Terminal, plan: SweepPlan, *, wait: bool, timeout_s: float | None) -> int:
    """Submit the jobs of a sweep that are not there yet; wait and show the table, or return once all are durable."""
    from rota.service.sweeps import survivors

    deadline_s = None if timeout_s is None else monotonic() + timeout_s
    points, rungs = plan.points, max(1, len(plan.budgets))
    if plan.unread:
        shown = ", ".join(f"${name}" for name in plan.unread)
        terminal.note(f"each job has {shown} in its environment; nothing in the job file names it")
    try:
        for rung in range(rungs):
            rows = _submitted(client, terminal, plan, points, rung)
            if not wait:
                break
            ended = _until_ended(client, terminal, plan.name, list(rows), deadline_s)
            if rung + 1 == rungs:
                break
            assert plan.metric is not None
            ran = [(rows[job["id"]], _value(client, job, plan.metric)) for job in ended]
            points = survivors(ran, plan.metric, *plan.budgets[rung : rung + 2])
            if not points:
                raise UnknownName(
                    f"no job of rung {rung} of {plan.name} reported {plan.metric.name}",
                    hint="f.commit(loss=...) in a loop, or a line such as 'loss=0.3' in the output",
                )
    except KeyboardInterrupt:
        terminal.note(f"\ndetached from {plan.name}; its jobs keep running.  table: rota sweep {plan.name}")
        if plan.budget:
            terminal.note("the next rung is submitted when the same command is given again")
        return INTERRUPTED
    document = find_sweep(client, plan.name, metric=plan.metric)
    terminal.show(cast("dict[str, object]", document), lambda term: _sweep_page(term, document) if wait else None)
    if not wait:
        terminal.note(f"table: rota sweep {plan.name}   stop: rota stop -l sweep={plan.name}")
        return 0
    return 0 if set(document["states"]) <= {JobState.SUCCEEDED} else 1


def _submitted(
    client: Client, terminal: Terminal, plan: SweepPlan, points: Sequence[Point], rung: int
) -> dict[str, Point]:
    """The id of the job of each point; a job that was submitted before is found by its key."""
    known = {job["id"] for job in _jobs_of(client, plan.name)}
    found: dict[str, Point] = {}
    for point, job in zip(points, plan.jobs(points, rung)):
        try:
            with _of_the_point(point):
                found[client.submit(plan.body_of(job), key=job.key)["id"]] = point
        except IdempotencyConflict:
            raise BadInput(
                f"sweep {plan.name} has jobs of another file, folder, metric or --set", hint="-n NAME begins a new one"
            ) from None
    new = len(found.keys() - known)
    where = f"rung {rung} ({plan.budget}={amount(plan.budgets[rung])}) of {plan.name}" if plan.budget else plan.name
    terminal.note(f"{where}: {counted(new, 'job')} submitted, {len(found) - new} there already")
    return found


def _until_ended(
    client: Client, terminal: Terminal, sweep: str, ids: Sequence[str], deadline_s: float | None
) -> list[JobRow]:
    """The rows of these jobs once all have ended. Raises TimedOut."""
    left = f"{sweep}: waits for {counted(len(ids), 'job')}"
    with Ticker(live_line(terminal), lambda: left):
        while True:
            rows = [job for job in _jobs_of(client, sweep) if job["id"] in ids]
            running = [job for job in rows if not JobState(job["state"]).terminal]
            if not running and len(rows) == len(ids):
                return rows
            states = [job["state"] for job in running]
            named = labels({state: states.count(state) for state in dict.fromkeys(states)})
            left = f"{sweep}: {len(rows) - len(running)} of {len(ids)} ended · {named}"
            if deadline_s is not None and monotonic() > deadline_s:
                raise TimedOut(f"{left}; they continue", hint=f"see: rota sweep {sweep}")
            sleep(LOOK_S)


def _jobs_of(client: Client, sweep: str, user: str = "") -> list[JobRow]:
    """Every job of a sweep of this user, in the order of submission."""
    user = user or client.accounts.whoami()["name"]
    return list(client.all_jobs(all=True, label=[f"sweep={sweep}"], user=user))[::-1]


def _value(client: Client, job: JobRow, metric: Metric) -> float | None:
    """The metric of a job: that of its last commit, else the last one in its output; None where it gave none."""
    from rota.service.sweeps import value_in

    reported = (job["progress"] or {}).get("metrics", {}).get(metric.name)
    if isinstance(reported, int | float):
        return float(reported)
    if job["started_at"] is None:
        return None
    lines = client.log_page(job["id"], grep=metric.name, tail=LINES_SEEN)["items"]
    return value_in((line["text"] for line in lines), metric.name)


def find_sweep(client: Client, sweep: str, *, user: str = "", metric: Metric | None = None) -> SweepDocument:
    """The document of a sweep; by its own metric without ``metric``. Raises UnknownName."""
    from rota.service.sweeps import METRIC, RUNG, Metric, point_of, sweep_document

    jobs = _jobs_of(client, sweep, user)
    if not jobs:
        raise UnknownName(f"no sweep {sweep!r}", hint="see: rota sweep")
    given = next((job["labels"][METRIC] for job in jobs if METRIC in job["labels"]), "")
    metric = metric or (Metric.parse(given) if given else None)

    def row(job: JobRow) -> SweepRow:
        rung = job["labels"].get(RUNG, "")
        return {
            "job": job["id"],
            "state": job["state"],
            "rung": int(rung) if rung.isdecimal() else None,
            "point": point_of(job["labels"]),
            "value": None if metric is None else _value(client, job, metric),
            "run_s": job["run_s"],
        }

    return sweep_document(sweep, [row(job) for job in jobs], metric)


def sweep(
    name: Annotated[str, Parameter(help="Name of a sweep; default: list them.")] = "",
    *,
    metric: Annotated[str, Parameter(help="Compare by this: NAME (less is better) or NAME:max.")] = "",
    user: Annotated[str, Parameter(help="Of this user; default: of the user who asks.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show the jobs of a sweep: the best first, the metric over each parameter; without a name, list the sweeps.

    Examples
    --------
    rota sweep

    rota sweep tune --metric accuracy:max
    """
    from rota.service.sweeps import Metric

    wanted = Metric.parse(metric) if metric else None
    if not name:
        return flags.answer(lambda client: _sweep_list(client, user), SWEEPS)
    return flags.answer(
        lambda client: cast("dict[str, Any]", find_sweep(client, name, user=user, metric=wanted)), _sweep_page
    )


def _sweep_list(client: Client, user: str) -> dict[str, Any]:
    from rota.service.sweeps import SWEEP

    found: dict[str, list[str]] = {}
    for job in client.all_jobs(all=True, user=user or client.accounts.whoami()["name"]):
        if named := job["labels"].get(SWEEP):
            found.setdefault(named, []).append(job["state"])
    items = [
        {"sweep": named, "jobs": len(states), "states": {state: states.count(state) for state in sorted(set(states))}}
        for named, states in found.items()
    ]
    return {"kind": "SweepList", "items": items}


SWEEPS = Table(
    columns={"SWEEP": "sweep", "JOBS": "jobs", "STATES": lambda row: labels(row["states"])},
    empty="no sweeps; 'rota run --sweep lr=1e-4,3e-4 job.yaml' makes one",
)


def _sweep_page(term: Terminal, document: Mapping[str, Any]) -> None:
    """The table with a column for each parameter, the best job, and the plots."""
    from rota.service.sweeps import plot

    columns: dict[str, Any] = {"JOB": "job", "STATE": "state", "RUNG": "rung"}
    for name in document["parameters"]:
        columns[name] = lambda row, name=name: row["point"].get(name)
    if document["metric"]:
        columns[document["metric"]] = lambda row: amount(row["value"])
    columns["RAN"] = lambda row: lasting(row["run_s"]) if row["run_s"] else ""
    table = replace(Table(columns=columns), sparse=("RUNG",))
    shown = document["items"] if term.wide else document["items"][:PLAIN_ROWS]
    table.print(term, shown)
    if len(shown) < len(document["items"]):
        term.line(f"{len(document['items']) - len(shown)} more: -o wide")
    term.line()
    term.line(f"{document['sweep']}: {counted(len(document['items']), 'job')}: {labels(document['states'])}")
    best = document["best"]
    if best is not None:
        term.line(f"best: {best['job']}  {labels(best['point'])}  {document['metric']}={amount(best['value'])}")
    elif document["metric"] and "SUCCEEDED" in document["states"]:
        term.line(f"no job reported {document['metric']!r}; --metric NAME compares by another name")
    for name in document["parameters"]:
        for line in plot(cast("SweepDocument", document), name):
            term.line(line)
