"""What verbs do without a service: plan a job, draw its graph, run the scheduler in virtual time, search plans."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from rota.spec.codec import API

if TYPE_CHECKING:
    from typing import Unpack

    from rota.cluster.live import Scheduler
    from rota.cluster.sim.runs import CompareDocument, FillDocument, ReplayDocument, SimDocument
    from rota.service.api import JobBody
    from rota.service.client import Client
    from rota.service.control.submission import Submission
    from rota.service.models.cluster import PlanReport
    from rota.service.models.jobs import GraphDocument, JobDocument, JobRow
    from rota.spec.check import Finding
    from rota.spec.events import Record
    from rota.spec.job import JobSpec
    from rota.spec.resources import Node

    class SimRun(SimDocument):
        """The document of ``rota sim run``."""

        api: str
        kind: str

    class SimReplay(ReplayDocument):
        """The document of ``rota sim run --log``."""

        api: str
        kind: str
        log: str

    class SimCompare(CompareDocument):
        """The document of ``rota sim compare``."""

        api: str
        kind: str

    class SimFill(FillDocument):
        """The document of ``rota sim fgd``."""

        api: str
        kind: str


class RunOptions(TypedDict, total=False):
    """What ``run_sim`` takes beside the files and the profile."""

    scale: float
    seed: int
    out_jobs: Path | None
    all_jobs: bool
    plots: Path | None


class CompareOptions(TypedDict, total=False):
    """What ``compare`` takes beside the files and the profiles."""

    scale: float
    seed: int
    tolerance_s: float
    plots: Path | None


class SimCosts(TypedDict, total=False):
    """The ``Overheads`` that flags set."""

    start_s: float
    checkpoint_s: float
    restore_s: float
    sharing_speed: float


class ReplayedCase(TypedDict):
    """One recorded case; ``why`` it failed."""

    id: str
    ok: bool
    why: str | None


class SimCases(TypedDict):
    """The document of ``rota sim cases``."""

    api: str
    kind: str
    passed: int
    failed: int
    cases: list[ReplayedCase]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoLoop:
    """The part of the service's loop that planning needs: a scheduler that knows the nodes, and no job."""

    scheduler: Scheduler
    unusable: tuple[dict[str, str], ...] = ()


def plan_job(body: JobBody, *, pretend: str = "") -> PlanReport:
    """The ``PlanReport`` of a submission on this machine alone, or on a pretend cluster ``RACKSxNODESxDEVICES``.

    Starts nothing but the child process that looks at the workloads. Raises what submitting would raise.
    """
    from rota.runtime.clock import SystemClock
    from rota.runtime.environ import Home
    from rota.runtime.random import SystemRandom
    from rota.service.config import load_settings
    from rota.service.control.intake import Intake

    loop: Any = _NoLoop(scheduler=_scheduler(_nodes(pretend)))
    stores = load_settings().store_urls
    intake = Intake(loop, home=Home.find(), clock=SystemClock(), random_source=SystemRandom(), stores=stores)
    return cast("PlanReport", {"api": "rota/v1", **asyncio.run(intake.plan(_submission(body), caller=None))})


def missing_names(client: Client, spec: JobSpec, *, named: bool) -> list[Finding]:
    """What a submission would refuse of the queue, the earlier jobs and the secrets that a job names.

    Each is asked for by itself, so that one that is refused hides none of the others; a service that does not answer
    is not asked again. Raises what it was refused if its address was ``named`` and nothing else is wrong.
    """
    from rota.spec.errors import NotReachable, RotaError

    found: list[Finding] = []
    refused: RotaError | None = None
    for ask in (_missing_queue, _missing_jobs, _missing_secrets):
        try:
            for one in ask(client, spec):
                found.append(one)  # noqa: PERF402 - those before an error count
        except RotaError as error:
            refused = refused or error
            if isinstance(error, NotReachable):
                break
    if refused is not None and named and not found:
        raise refused
    return found


def _missing_queue(client: Client, spec: JobSpec) -> Iterator[Finding]:
    if fault := queue_fault(client, spec.queue):
        yield fault


def queue_fault(client: Client, path: str) -> Finding | None:
    """What a submission to this queue would be refused for; None where it would not."""
    from rota.service.control.submission import closed_fault
    from rota.spec.check import Finding
    from rota.spec.errors import nearest

    rows = {one["path"]: one for one in client.queues()["items"]}
    leaves = sorted(rows.keys() - {one["parent"] for one in rows.values()})
    if path not in leaves:
        hint = nearest(path, leaves, "queues")
        return Finding(path=("queue",), message=f"no queue {path!r} takes jobs", hint=hint, code="UNKNOWN_QUEUE")
    above = (one for one in rows.values() if f"{path}/".startswith(f"{one['path']}/"))
    return closed_fault((one["path"], one["state"]) for one in above)


def _missing_jobs(client: Client, spec: JobSpec) -> Iterator[Finding]:
    from rota.service.control.submission import dependency_fault
    from rota.spec.errors import BadInput
    from rota.spec.states import JobState

    user = client.accounts.whoami()["name"] if spec.after else ""
    for index, one in enumerate(spec.after):
        rows: Sequence[JobRow | JobDocument] = client.jobs(all=True, user=user, name=one.job, limit=1)["items"]
        try:
            if (exact := client.job(one.job))["id"] == one.job:
                rows = [exact]
        except BadInput:  # no id, or a prefix of several: a submission takes the newest of this name
            pass
        job = (rows[0]["id"], JobState(rows[0]["state"]), rows[0]["reason"]) if rows else None
        names = lambda: {row["name"] for row in client.jobs(all=True, user=user)["items"]}  # noqa: E731 - asked for where needed
        if fault := dependency_fault(index, one, job, names):
            yield fault


def _missing_secrets(client: Client, spec: JobSpec) -> Iterator[Finding]:
    from rota.service.control.submission import secret_faults

    if spec.secrets:
        yield from secret_faults(spec.secrets, [one["name"] for one in client.accounts.secrets()["items"]])


def check_job(spec: JobSpec, body: JobBody, missing: Sequence[Finding] = (), *, local: bool = True) -> str:
    """Look at a job that was read: its folder, and in a child process its workloads; what could not be looked at.

    ``local`` is False for a service on another machine, which may have a folder that is not here. Raises JobFileError
    with every mistake, also those that are known to be ``missing``.
    """
    from rota.service.control.submission import check_workdir, with_interfaces, workdir_of
    from rota.service.jobfile.reader import placed
    from rota.spec.check import image_refused
    from rota.spec.errors import JobFileError

    given = _submission(body)
    wrong = placed(missing, given.source, filename=given.filename, sets=given.sets)
    if not given.ignore_image:
        wrong += placed(image_refused(spec), given.source, filename=given.filename, sets=given.sets)
    folder = workdir_of(spec, given)
    unseen = not local and bool(folder) and not Path(folder).is_dir()
    try:
        if not unseen:
            check_workdir(spec, given, "this machine")
            asyncio.run(with_interfaces(spec, given))
    except JobFileError as error:
        raise JobFileError((*wrong, *error.problems), hint=error.hint, **error.fields) from None
    if wrong:
        raise JobFileError(wrong)
    return f"{folder} is not here: its workloads are checked by the service when it is submitted" if unseen else ""


def _submission(body: JobBody) -> Submission:
    from rota.service.control.submission import Submission

    return Submission(**{**body, "sets": tuple(body.get("sets", ()))})


def graph_of_file(path: Path) -> GraphDocument:
    """The ``Graph`` document of a job file; of workloads that cannot be imported it has the ``problem``."""
    from rota.service.api import read_file
    from rota.service.control.submission import Refused, inspect_workloads
    from rota.service.jobfile.reader import read_job
    from rota.service.views.graph import graph_document

    spec = read_job(read_file(path), filename=str(path))
    folder = path.absolute().parent / (spec.workdir or "")
    completed = asyncio.run(inspect_workloads(spec, str(folder)))
    if isinstance(completed, Refused):
        return cast("GraphDocument", {**graph_document(spec), "problem": completed.text})
    return graph_document(completed)


def _nodes(pretend: str) -> tuple[Node, ...]:
    from rota.runtime.node import LOCAL_HOST, local_node
    from rota.spec.errors import BadInput
    from rota.spec.resources import pretend_nodes

    if not pretend:
        return (local_node(),)
    try:
        return pretend_nodes(pretend, host=LOCAL_HOST)
    except ValueError as exc:
        raise BadInput(f"--pretend: {exc}") from None


def _scheduler(nodes: tuple[Node, ...]) -> Scheduler:
    from rota.cluster.live import Scheduler
    from rota.cluster.policies import get_profile
    from rota.job.core.placement import requests_of
    from rota.spec.events import NodeJoined, Record

    scheduler = Scheduler(get_profile("fifo"), requests_of)
    for number, node in enumerate(nodes, 1):
        scheduler.apply(Record(number=number, job=None, seq=number, at=0.0, event=NodeJoined(node=node)))
    return scheduler


def sim_run(trace: Path, vcs: Path, profile: str, *, costs: SimCosts, **given: Unpack[RunOptions]) -> SimRun:
    """``SimRun``: a trace played under a profile, as ``run_sim`` takes it. Raises TraceError and UnknownName."""
    from rota.cluster.sim.runs import run_sim
    from rota.cluster.sim.simulate import Overheads

    return {"api": API, "kind": "SimRun", **run_sim(trace, vcs, profile, overheads=Overheads(**costs), **given)}


def sim_replay(log: Path, profile: str) -> SimReplay:
    """``SimReplay``: the decisions of a recorded event log, made again and compared.

    ``log`` is the database of an installation, or a JSON document with ``records``. Raises BadInput and UnknownName.
    """
    from rota.cluster.policies import get_profile
    from rota.cluster.sim.runs import replayed
    from rota.job.core.placement import requests_of

    given = replayed(_records(log), get_profile(profile), requests_of)
    return {"api": API, "kind": "SimReplay", "log": log.name, **given}


def _records(log: Path) -> Iterator[Record]:
    from rota.runtime.event_log.sql import SqlLog
    from rota.spec.errors import BadInput
    from rota.spec.events import Record, event_from_json
    from rota.spec.ids import JobId

    if not log.is_file():
        raise BadInput(
            f"--log {log}: no such file",
            hint="the log of an installation is rota.db in its home; rota status shows that",
        )
    if log.suffix == ".csv":
        raise BadInput(f"--log {log}: a log is rota.db or JSON", hint=f"a trace: --trace {log} --vcs TENANTS.csv")
    if log.suffix != ".json":
        with log.open("rb") as file:
            if not file.read(16).startswith(b"SQLite format 3"):
                raise BadInput(
                    f"--log {log}: not a log", hint="give rota.db of an installation, or its records as JSON"
                )
        stored = SqlLog(f"sqlite:///{log.absolute()}")
        try:
            number = 0
            while page := stored.read(after=number):
                yield from page
                number = page[-1].number
        finally:
            stored.close()
        return
    try:
        rows = json.loads(log.read_text(encoding="utf-8"))["records"]
        for raw in rows:
            event = event_from_json(raw["event"])
            job = JobId(raw["job"]) if raw["job"] else None
            yield Record(number=raw["number"], job=job, seq=raw["seq"], at=raw["at"], event=event)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--log {log}: not a recorded log: {error!r}") from error


def sim_compare(trace: Path, vcs: Path, profiles: list[str], **given: Unpack[CompareOptions]) -> SimCompare:
    """``SimCompare``: the same trace under several profiles, the first being the baseline."""
    from rota.cluster.sim.runs import compare

    return {"api": API, "kind": "SimCompare", **compare(trace, vcs, profiles, **given)}


def sim_cases(file: Path, profile: str) -> SimCases:
    """``SimCases``: recorded cases replayed. Raises CaseError for a file of no known form, and as ``load_proof``."""
    from rota.service.plans import load_proof

    found = load_proof("cases", "readers of recorded cases").run_cases(file, profile)
    return cast("SimCases", {"api": API, "kind": "SimCases", **found})


def sim_fgd(nodes: Path, pods: Path, policy: str, *, seed: int) -> SimFill:
    """``SimFill``: a cluster filled with tasks under a placement. Raises TraceError and UnknownName."""
    from rota.cluster.sim.runs import fill
    from rota.runtime.clock import SystemClock

    return {"api": API, "kind": "SimFill", **fill(nodes, pods, policy, seed, SystemClock())}


def export_checkpoint(folder: Path, target: Path) -> int:
    """Write the newest good checkpoint of a folder as transformers has it; its step. Raises as that of rota.train."""
    # Loads torch, which nothing of the service does.
    return importlib.import_module("rota.train.weights").export_checkpoint(folder, target)
