"""Routes of nodes and their drains, queues, reasons, simulations and the service itself."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from rota.cluster.core.state import State
from rota.cluster.policies import PROFILES, get_profile
from rota.cluster.sim.forecast import outlook
from rota.cluster.sim.sharing import SIMULATED
from rota.service.accounts import UserRole
from rota.service.config import masked_url
from rota.service.control.changes import broken_queues, read_queues
from rota.service.machine_checks import node_findings
from rota.service.models.base import REFUSAL, Sent, document
from rota.service.models.cluster import (
    AlertList,
    ClusterDocument,
    DrainPlan,
    Heat,
    HoldDocument,
    NodeCheck,
    NodeDocument,
    NodeList,
    NodeRow,
    NodeUsage,
    Outlook,
    ProfileList,
    QueueDiff,
    QueueDocument,
    QueueTree,
    ReasonList,
    ReasonRow,
    SettingList,
    StatusDocument,
    TemplateList,
    UsageHistory,
    UsageReport,
)
from rota.service.rest.deps import STORABLE, AppState, Asker, IfMatch, Note, Parts, append_live, is_version, versions_of
from rota.service.templates import about, template_files, template_names
from rota.service.views.alerts import alert_list
from rota.service.views.cluster import (
    cluster_totals,
    heat_document,
    limits_passed,
    node_list,
    queue_changes,
    queue_tree,
    removed_holders,
    tree_difference,
    usage_history,
    usage_report,
)
from rota.service.views.installation import AppliedTree
from rota.service.views.job_history import JobHistory
from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, Conflict, EngineUnavailable, LimitExceeded, VersionMismatch, nearest, unknown
from rota.spec.events import AlertAcknowledged, NodeMarked, PartReplaced, PreemptAsked, QueuesChanged
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue, queue_from_json
from rota.spec.reasons import INFO, Reason
from rota.spec.resources import Health, counted, format_duration
from rota.spec.states import JobState

NODES_MAX = 10_000
OUTLOOK_JOBS_MAX = 3000
QUEUE_FIELDS = [one.name for one in fields(Queue)]
DISK_LOW_BYTES, DISK_FULL_BYTES = 256 * 2**20, 2 * 2**20
"""Free bytes on the disk of the event log below which the status warns, and below which writes may fail."""
HOLD_GRACE_MAX_S, HOLD_S = 600.0, 180.0
NOTICE_S = 600.0
"""Default time that jobs on a drained node have to move."""
RECENT_S = 600.0
"""A part that was replaced within this time is among the warnings."""

router = APIRouter(prefix="/api/v1", tags=["cluster"], responses=REFUSAL)
sim = APIRouter(prefix="/api/v1", tags=["sim"], responses=REFUSAL)

_MARKS: dict[str, Health] = {
    "drain": Health.DRAINED,
    "cordon": Health.CORDONED,
    "undrain": Health.HEALTHY,
    "uncordon": Health.HEALTHY,
}


class MarkBody(BaseModel):
    """Why a node is drained or used again."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(max_length=500)] = ""
    notice_s: Annotated[float, Field(ge=0, le=7 * 86400)] = NOTICE_S
    dry_run: bool = False


class QueuesBody(BaseModel):
    """The whole new queue tree: as values, or as the text of a file, whose mistakes are reported with position."""

    model_config = ConfigDict(extra="forbid")

    queues: Annotated[list[JsonObject], STORABLE] = []
    source: str = ""
    filename: str = "queues.yaml"
    dry_run: bool = False


@router.get("/status")
async def status(app: Parts, caller: Asker) -> Sent[StatusDocument]:
    """The service and its parts, each with its health and, if it is not well, what that means."""
    return await status_document(app)


async def status_document(app: AppState) -> StatusDocument:
    """The Status document."""
    loop, installation = app.loop, app.loop.installation
    try:
        parts = await app.engine.status()
    except EngineUnavailable as error:
        parts = {"gateway": {"state": "down", "text": str(error)}}
    stale = loop.stale_since
    away_s = None if stale is None else round(app.clock.monotonic_s() - stale, 1)
    store = {"state": "up" if stale is None else "away", "records": installation.number, "away_s": away_s}
    return document(
        StatusDocument,
        app,
        app.settings,
        state="ready" if app.ready and stale is None else "degraded" if app.ready else "starting",
        home=str(app.home.root),
        install_epoch=loop.writer.epoch,
        pretend=app.settings.pretend or None,
        parts={"store": store, **parts},
        cluster=cluster_totals(installation),
        stores={name: masked_url(url) for name, url in app.settings.store_urls.items()},
        warnings=_warnings(app),
    )


def _replaced_text(one: PartReplaced, now: float) -> str:
    return f"{one.text}; it was replaced {max(0.0, now - one.found_at):.0f} s ago"


class HoldBody(BaseModel):
    """The longest that a job may take to save and end."""

    model_config = ConfigDict(extra="forbid")

    grace_s: Annotated[float, Field(ge=0, le=HOLD_GRACE_MAX_S)] = 30.0


@router.post("/service:hold", status_code=202)
async def hold(app: Parts, caller: Asker, body: HoldBody | None = None) -> Sent[HoldDocument]:
    """Get ready to be taken down: jobs that run stop after saving and are queued again, and none starts; for admins.

    ``jobs`` counts those that have not ended, by state. Without an end of the service it is over after some minutes.
    """
    caller.need(UserRole.ADMIN)
    app.loop.hold(HOLD_S)
    live = tuple(app.loop.installation.live.values())
    asked = PreemptAsked(reason=Reason.SERVICE_DOWN, grace_s=(body or HoldBody()).grace_s)
    for job in live:
        if job.state.holds_devices and job.state not in (JobState.STOPPING, JobState.PREEMPTING):
            grace_s = min(asked.grace_s, job.spec.grace_s)
            with suppress(Conflict):  # it ended meanwhile
                await append_live(app, job, replace(asked, grace_s=grace_s))
    counts = Counter(job.state.value for job in live if job.ended is None)
    return document(HoldDocument, jobs=counts, seconds=HOLD_S)


def _warnings(app: AppState) -> list[str]:
    now = app.clock.wall_s()
    found = [f"no job starts: {app.loop.undecided}"] if app.loop.undecided else []
    found += [f"the scheduler contradicts itself: {text}" for text in app.loop.broken]
    found += [
        f"{node} was removed from the installation: {', '.join(jobs)} must leave it and continue elsewhere"
        for node, jobs in removed_holders(app.loop.installation)
    ]
    if (back := app.restored) is not None and (count := sum(map(back.has, app.loop.installation.live.values()))):
        found.append(
            f"{counted(count, 'job')} of {back.file}, restored {format_duration(now - back.at)} ago, not ended yet: if"
            " the installation of the back-up still runs, end it, or they run twice"
        )
    since = now - RECENT_S
    with suppress(OSError):  # what an earlier ``up`` had is not here
        since = max(since, app.home.last_up.stat().st_mtime)
    found += [_replaced_text(one, now) for one in app.loop.installation.replaced if one.found_at > since]
    if (name := app.loop.scheduler.profile.name) in SIMULATED:
        found.append(f"profile {name}: {SIMULATED[name].warning}")
    if app.loop.installation.engine_volatile is not None:
        found.append("engine state is not durable: if Ray's GCS dies, running jobs restart from their last checkpoint")
    if app.settings.host not in ("127.0.0.1", "localhost", "::1"):
        found.append("the service listens beyond this machine; who submits a job runs code as this user")
    with suppress(OSError):
        fault = app.home.standby_fault.read_text(encoding="utf-8")
        found.append(f"{fault}: a restart of the service takes longer; see {app.home.service_log}")
    return found + _disk_warnings(app)


def _disk_warnings(app: AppState) -> list[str]:
    """The disk of the event log, when it is full or soon will be."""
    home = app.home
    file = home.root if app.settings.db_url else home.db
    try:
        free = shutil.disk_usage(home.root).free
    except OSError as error:
        return [f"{home.root}: {error.strerror}"]
    if free >= DISK_LOW_BYTES:
        return []
    what = f"{free / 2**20:.1f} MiB are free on the disk of {file}"
    full = "a change that does not fit is refused with 503" if free < DISK_FULL_BYTES else "soon nothing can be written"
    return [f"{what}: {full}; free space there"]


@router.get("/nodes")
async def nodes(
    app: Parts,
    caller: Asker,
    limit: Annotated[int, Query(ge=1, le=NODES_MAX)] = NODES_MAX,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Sent[NodeList]:
    """Nodes with their devices and who holds them, by id; ``next`` is the cursor of the following page."""
    found = app.redacted(caller, node_list(app.loop.installation))
    rest = sorted((one for one in found["items"] if one["id"] > cursor), key=lambda one: one["id"])
    return {**found, "items": rest[:limit], "next": rest[limit - 1]["id"] if len(rest) > limit else None}


@router.get("/cluster")
async def cluster(app: Parts, caller: Asker) -> Sent[ClusterDocument]:
    """How many nodes, devices and jobs there are, by state."""
    return document(ClusterDocument, cluster_totals(app.loop.installation))


@router.get("/cluster/heat")
async def heat(app: Parts, caller: Asker) -> Sent[Heat]:
    """Who holds each device, in a compact form: nodes name jobs by their index in ``jobs``."""
    return app.redacted(caller, heat_document(app.loop.installation))


@router.get("/cluster/history")
async def history(
    app: Parts,
    caller: Asker,
    since_s: Annotated[float, Query(gt=0, le=1e10)] = 86400.0,
    points: Annotated[int, Query(ge=1, le=1000)] = 96,
) -> Sent[UsageHistory]:
    """Devices held, jobs that ran and jobs that waited, as means of ``points`` equal steps of the last ``since_s``."""
    now, installation = app.clock.wall_s(), app.loop.installation
    gpus = cluster_totals(installation)["gpus"]
    return usage_history(installation.jobs.values(), gpus, since=now - since_s, now=now, points=points)


@router.get("/nodes/{node}")
async def node(node: str, app: Parts, caller: Asker) -> Sent[NodeDocument]:
    """One node."""
    return app.redacted(caller, document(NodeDocument, _one_node(app, node)))


@router.get("/nodes/{node}/usage")
async def node_usage(node: str, app: Parts, caller: Asker) -> Sent[NodeUsage]:
    """What the machine of a node does, measured there: cores, memory, network, disks, devices, processes of jobs."""
    caller.need(UserRole.VIEWER)
    found = await app.engine.usage(_one_node(app, node)["host"])
    return document(NodeUsage, found, node=node)


@router.post("/nodes:check")
async def check_nodes(app: Parts, caller: Asker) -> Sent[NodeCheck]:
    """Check the machines and each pair of them: name, clock, ports, bandwidth (half a second a pair), versions.

    One check at a time; for admins.
    """
    caller.need(UserRole.ADMIN)
    async with app.check_lock:
        facts = await app.engine.check_machines()
    items = node_findings(facts)
    mark = "ok" if not items else items[0]["mark"]
    return document(NodeCheck, facts, mark=mark, items=items)


@router.post("/nodes/{node}:{action}", status_code=202)
async def mark_node(
    node: str,
    action: Literal["drain", "cordon", "undrain", "uncordon"],
    app: Parts,
    caller: Asker,
    note: Note,
    body: MarkBody | None = None,
) -> Sent[DrainPlan]:
    """Take a node out of use for new work or back in; jobs on it stay when it is cordoned, move when it is drained."""
    caller.need(UserRole.ADMIN)
    given = body or MarkBody()
    if given.dry_run:
        note(dry_run=True)
    before = _one_node(app, node)
    effect, notice_s = "keeps running; new work goes elsewhere", None
    if action in ("undrain", "uncordon"):
        effect = "stays; new work may come here again"
    if action == "drain":
        effect, notice_s = f"moves within {format_duration(given.notice_s)}, else waits in its queue", given.notice_s
    note_text = ""
    if action == "cordon" and before["state"] in ("draining", "drained"):
        note_text = f"it was {before['state']}: that is withdrawn, and jobs that have not left it stay"
    at_stake = _at_stake(app, before["jobs"]) if action == "drain" else {}
    if not given.dry_run:
        event = NodeMarked(
            node=NodeId(node), health=_MARKS[action], by=caller.user, text=given.reason, notice_s=notice_s
        )
        await app.loop.append([event])
    return document(
        DrainPlan,
        node=node,
        action=action,
        dry_run=given.dry_run,
        jobs=[{"job": job, "effect": effect + at_stake.get(job, "")} for job in before["jobs"]],
        state=_one_node(app, node)["state"],
        note=note_text,
    )


def _at_stake(app: AppState, jobs: Iterable[str]) -> dict[str, str]:
    """What each job loses unless it commits before it moves, in words."""
    found = [app.loop.installation.jobs[JobId(one)] for one in jobs]
    texts = {one.id: one.at_stake(one.ctx, app.clock.wall_s()) for one in found}
    return {job: f"; loses {text} unless it commits before" for job, text in texts.items() if text}


def _one_node(app: AppState, node: str) -> NodeRow:
    items = node_list(app.loop.installation)["items"]
    found = next((one for one in items if one["id"] == node), None)
    if found is None:
        raise unknown(f"no node {node!r}", node, [one["id"] for one in items], "nodes")
    return found


@router.get("/queues")
async def queues(app: Parts, caller: Asker, response: Response) -> Sent[QueueTree]:
    """The queue tree: guarantee, use and waiting jobs of each queue.

    ``ETag`` is its version; ``PUT`` with it as ``If-Match`` refuses to undo what another applied since.
    """
    tree = queue_tree(app.loop.installation)
    response.headers["ETag"] = f'"{tree["version"]}"'
    return tree


@router.get("/queues/{path:path}")
async def queue(path: str, app: Parts, caller: Asker) -> Sent[QueueDocument]:
    """One queue."""
    items = {one["path"]: one for one in queue_tree(app.loop.installation)["items"]}
    if path not in items:
        raise unknown(f"no queue {path!r}", path, items, "queues")
    return document(QueueDocument, items[path])


@router.put("/queues")
async def apply_queues(
    body: QueuesBody,
    app: Parts,
    caller: Asker,
    note: Note,
    if_match: IfMatch = "",
) -> Sent[QueueDiff]:
    """Replace the queue tree. A queue with live jobs cannot be removed. A limit may be set below what is in use.

    ``over`` names those limits: nothing is stopped, and nothing new starts there until less is in use.

    A queue-admin may change what is below the own queue, and no more than that.
    """
    async with app.tree_lock:  # what is answered is of the tree that was replaced, also where two come at once
        given, then = _given_tree(app, body)
        trees = app.loop.installation.trees
        now = trees[-1]
        _check_tree(trees, if_match)
        old, new = ({queue.path: queue for queue in queues} for queues in (now.queues, given))
        changed = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
        for path in changed:
            parent = path.rpartition("/")[0]
            caller.need(UserRole.QUEUE_ADMIN if parent else UserRole.ADMIN, parent)
        if body.dry_run:
            note(dry_run=True)
        used = sorted({job.queue for job in app.loop.installation.live.values()} - new.keys())
        if used:
            raise BadInput(f"queue {used[0]!r} has jobs that have not ended", hint="keep it, or stop or move its jobs")
        note(change=tree_difference(now.queues, given))
        if changed and not body.dry_run:  # the same tree makes no version
            event = QueuesChanged(queues=tuple(codec.to_json_value(queue) for queue in given), by=caller.user)
            await app.loop.append([event])
    return document(
        QueueDiff,
        now,
        fields=queue_changes(old.values(), given),
        dry_run=body.dry_run,
        added=[path for path in changed if path not in old],
        removed=[path for path in changed if path not in new],
        changed=[path for path in changed if path in old and path in new],
        over=limits_passed(then),
    )


def _check_tree(trees: Sequence[AppliedTree], if_match: str) -> None:
    """Raises VersionMismatch, with what changed and by whom, where another tree was applied since the named one."""
    now = trees[-1]
    if is_version(now.version, if_match):
        return
    known = next((one for one in trees if is_version(one.version, if_match)), None)
    since = "" if known is None else f"; since then: {tree_difference(known.queues, now.queues)}"
    by = f", applied by {now.by}" if now.by else ""
    raise VersionMismatch(
        f"the queues have version {now.version}{by}, not {' or '.join(versions_of(if_match))}{since}",
        hint=f"look: rota queues apply FILE --dry-run; to apply it in place of that: --if-version {now.version}",
        version=now.version,
    )


def _given_tree(app: AppState, body: QueuesBody) -> tuple[tuple[Queue, ...], State]:
    """The tree, and the state under it, if the scheduler can work with it: once in the log it would be there for ever.

    Raises JobFileError with the place of every mistake in a text, BadInput for values.
    """
    nodes = tuple(app.loop.installation.usable_nodes())
    if body.source:
        given = read_queues(body.source, filename=body.filename, nodes=nodes)
    else:
        for i, key in ((i, key) for i, raw in enumerate(body.queues) for key in raw if key not in QUEUE_FIELDS):
            raise BadInput(f"queues[{i}].{key}: unknown field", hint=nearest(key, QUEUE_FIELDS, "fields"))
        try:
            given = tuple(queue_from_json(raw) for raw in body.queues)
        except (TypeError, ValueError) as error:
            raise BadInput(f"queues: {error}", hint="each is {path, guaranteed, limit, weight, ...}") from error
        for broken in broken_queues(given, nodes):
            raise BadInput(f"queues[{broken.index}].{broken.field}: {broken.message}", hint=broken.hint)
    if not given:
        raise BadInput("a tree without queues", hint="keep at least 'default'")
    try:
        return given, app.loop.scheduler.state.with_cluster(nodes, given)
    except (KeyError, ValueError, AssertionError) as error:
        raise BadInput(f"queues: the scheduler refuses this tree: {error}") from error


class AcknowledgeBody(BaseModel):
    """Which alert was seen, and a note for the others."""

    model_config = ConfigDict(extra="forbid")

    alert: Annotated[str, Field(min_length=1, max_length=500), STORABLE]
    note: Annotated[str, Field(max_length=500), STORABLE] = ""


@router.get("/alerts")
async def alerts(app: Parts, caller: Asker) -> Sent[AlertList]:
    """What needs attention now: suspected hangs, recoveries, lost nodes, starving queues, low limits, a full disk."""
    installation, beyond = app.loop.installation, app.loop.scheduler.state.limits_below()
    found = alert_list(
        installation,
        now=app.clock.wall_s(),
        suspicions=app.suspicions,
        beyond=beyond,
        queues=queue_tree(installation)["items"],
        disk=_disk_warnings(app),
        jobs=[one for one in installation.jobs.values() if _may_alert(app, one, beyond) and caller.reads(one)],
    )
    return app.redacted(caller, found)


def _may_alert(app: AppState, job: JobHistory, beyond: Collection[JobId]) -> bool:
    return bool(job.failures) or job.id in app.suspicions or job.id in beyond


@router.post("/alerts:acknowledge")
async def acknowledge(body: AcknowledgeBody, app: Parts, caller: Asker) -> Sent[AlertList]:
    """Note that an alert was seen: by the owner of its job, else by an admin. The remaining alerts come back."""
    items = {one["id"]: one for one in (await alerts(app, caller))["items"]}
    if body.alert not in items:
        raise unknown(f"no alert {body.alert!r}", body.alert, items, "alerts")
    job = items[body.alert]["job"]
    if job is None:
        caller.need(UserRole.ADMIN)
    else:
        app.steered(caller, job)
    await app.loop.append([AlertAcknowledged(alert=body.alert, by=caller.user, text=body.note)])
    return await alerts(app, caller)


@router.get("/report")
async def report(
    app: Parts,
    caller: Asker,
    by: str = "user",
    since_s: Annotated[float, Query(gt=0, le=1e10)] = 30 * 86400.0,
) -> Sent[UsageReport]:
    """Who used what in the last ``since_s`` seconds, by user, queue, job or gpu_type; of the jobs that one may see."""
    now, installation = app.clock.wall_s(), app.loop.installation
    seen = (job for job in installation.jobs.values() if caller.sees(job))
    nodes = (job.node for job in installation.nodes.values())
    return usage_report(seen, nodes, by=by, since=now - since_s, now=now)


@router.get("/settings")
async def settings(app: Parts, caller: Asker) -> Sent[SettingList]:
    """The settings that the service runs with, and where each came from; for admins. No password is shown."""
    caller.need(UserRole.ADMIN)
    return document(SettingList, app.settings.document())


@router.get("/reasons")
async def reasons(caller: Asker) -> Sent[ReasonList]:
    """Every reason with its family, its fault and its sentence."""
    items = [document(ReasonRow, info, code=reason) for reason, info in INFO.items()]
    return document(ReasonList, items=items)


class OutlookBody(BaseModel):
    """The profiles to simulate; the others are compared with the first."""

    model_config = ConfigDict(extra="forbid")

    profiles: Annotated[list[str], Field(min_length=1, max_length=4)]


@sim.get("/sim/profiles")
async def profiles(caller: Asker) -> Sent[ProfileList]:
    """Every scheduling profile with the sentence of its policy."""
    items = [{"name": name, "text": _sentence(name)} for name in PROFILES]
    return document(ProfileList, items=items)


def _sentence(name: str) -> str:
    make = PROFILES[name]
    return inspect.getdoc(make) or inspect.getdoc(sys.modules[make.__module__]) or ""


@sim.post("/sim/outlook")
async def play(body: OutlookBody, app: Parts, caller: Asker) -> Sent[Outlook]:
    """When the present jobs would start and end under each profile, in virtual time on copies of the state."""
    for name in body.profiles:
        get_profile(name)
    state = app.loop.scheduler.state
    if len(state.jobs) > OUTLOOK_JOBS_MAX:
        raise LimitExceeded(
            f"{len(state.jobs)} jobs wait or run; the limit of a simulation is {OUTLOOK_JOBS_MAX}",
            hint="simulate a part of them from a trace: rota sim compare --trace FILE",
        )
    async with app.outlook_lock:
        forks = {name: state.copy() for name in dict.fromkeys(body.profiles)}
        found = await asyncio.to_thread(outlook, forks, app.clock.wall_s(), app.clock)
    return app.redacted(caller, document(Outlook, found))


@sim.get("/templates")
async def templates(caller: Asker) -> Sent[TemplateList]:
    """The jobs to begin with: what each shows, and its files."""
    items = [{"name": name, "text": about(name), "files": template_files(name)} for name in template_names()]
    return document(TemplateList, items=items)
