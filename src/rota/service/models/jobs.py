"""Jobs: rows of lists, one job in full, its spec, placement, graph, attempts, output and events."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypeAliasType, TypedDict

from rota.service.models.base import Closed, Fields, Headed, Member, Moment, Resources, Timed
from rota.spec.codec import JsonObject

JobStateName = TypeAliasType(
    "JobStateName",
    Literal[
        "SUBMITTED",
        "QUEUED",
        "ADMITTED",
        "CHECKING",
        "STARTING",
        "RUNNING",
        "RECOVERING",
        "RESIZING",
        "PREEMPTING",
        "PAUSED",
        "STOPPING",
        "SUCCEEDED",
        "FAILED",
        "CANCELLED",
    ],
)


class Progress(Closed):
    """The last commit of a job, with the metrics that its loop gave; ``commits`` are those that it can resume from."""

    commit: int
    commits: list[int]
    at: Moment | None
    metrics: Fields


class JobRow(Closed):
    """One row of a list of jobs. ``suspected`` says why a running job may hang, with the instance that holds it up."""

    id: str
    uid: str
    name: str
    user: str
    queue: str
    priority: int
    state: JobStateName
    phase: str
    reason: str | None
    text: str
    since: Moment
    submitted_at: Moment
    queued_at: Moment | None
    started_at: Moment | None
    ended_at: Moment | None
    run_s: float
    attempt: int
    failovers: int
    restarts: int
    instances_total: int
    instances_ready: int
    gpus: float
    nodes: list[str]
    labels: dict[str, str]
    progress: Progress | None
    suspected: str


class JobList(Headed):
    """A page of jobs; ``next`` is the cursor of the following one."""

    kind: Literal["JobList"]
    items: list[JobRow]
    next: str | None


class SizedPlanRow(Closed):
    """The parallel plan of a role for one number of instances; ``step_s`` predicted, 0 unknown."""

    replicas: int
    why: str
    step_s: float


class RoleRow(Closed):
    """One role of a job: ``replicas`` are wanted now, ``ready`` are there."""

    name: str
    workload: str | None
    run: list[str] | None
    replicas: int
    ready: int
    restarts: int
    resources: Resources
    restart: str
    loop: bool
    plans: list[SizedPlanRow]


class WeightsRow(Closed):
    """What an instance holds of a weights edge: ``behind`` in versions, ``behind_s`` in seconds."""

    edge: str
    state: str
    held: int | None
    behind: int | None
    behind_s: float | None


class ProgressReport(Closed):
    """What an instance last reported to its master."""

    n: int
    unit: str
    idle_s: float
    beat_age_s: float
    busy: list[str]
    quiet: str
    waits_for: list[str]
    step_s: float
    cpus: float
    rss_bytes: int
    weights: list[WeightsRow]


class LossFields(Timed):
    """How an instance was lost, and when that was reported."""

    reason: str
    text: str
    traceback: str
    exit_code: int | None
    signal: int | None
    epoch: int


class InstanceRow(Member):
    """One instance: ``error`` is the last loss, ``progress`` the last report to the master.

    ``ports``: where the page opens each of its ports, by name.
    """

    role: str
    rank: int
    state: str
    since: Moment | None
    node: str
    pid: int | None
    epoch: int
    standby: bool
    restarts: int
    devices: list[int]
    restored: int
    progress: ProgressReport | None
    ports: dict[str, str]
    error: LossFields | None


class StreamRow(Closed):
    """The ledger of a stream: ``admitted = pending + leased + queued + trained + dropped``."""

    name: str
    admitted: int
    pending: int
    leased: int
    queued: int
    trained: int
    dropped: dict[str, int]
    again: int
    age: int


class MasterRow(Closed):
    """The master of a job."""

    pid: int
    epoch: int
    node: str
    since: Moment | None


class AttemptRow(Closed):
    """One admission of a job to devices and what ended it."""

    attempt: int
    epoch: int
    admitted_at: Moment | None
    started_at: Moment | None
    ended_at: Moment | None
    reason: str | None
    for_job: str
    text: str
    nodes: list[str]
    why: Fields


class JobError(Closed):
    """Why a job failed, and whose failure ended it."""

    reason: str
    fault: str
    text: str
    role: str | None
    rank: int | None
    instance: str
    traceback: str


class ChangeRow(Timed):
    """An edit of a job."""

    by: str
    changes: Fields


class UploadFields(TypedDict):
    """A copy of the output folder at its URL; ``error`` says why there is none, ``notes`` what is not as it was."""

    url: str
    files: int
    bytes: int
    seconds: float
    error: str
    notes: list[str]


class JobDocument(JobRow):
    """One job with every instance; ``output`` is the folder of what it leaves, ``url`` its page.

    ``output_url`` is where that folder is copied when the job ends, empty for nowhere; ``upload`` how that went.
    ``restored_at`` is when it came from a back-up in which it had not ended, None where it did not.
    """

    api: Literal["rota/v1"]
    kind: Literal["Job"]
    roles: list[RoleRow]
    instances: list[InstanceRow]
    streams: list[StreamRow]
    master: MasterRow | None
    attempts: list[AttemptRow]
    error: JobError | None
    changes: list[ChangeRow]
    workdir: str
    filename: str
    version: int
    seq: int
    events: int
    output: str
    output_url: str
    checkpoints: str
    upload: UploadFields | None
    restored_at: Moment | None
    url: str


class AttemptList(Headed):
    """Every attempt of a job."""

    kind: Literal["AttemptList"]
    job: str
    items: list[AttemptRow]
    next: None


class EditRow(Timed):
    """An edit with the spec before and after it."""

    by: str
    before: JsonObject
    after: JsonObject


class JobSpecDocument(Headed):
    """A job as it was given and as it was understood."""

    kind: Literal["JobSpec"]
    job: str
    source: str
    filename: str
    digest: str
    spec: JsonObject
    edits: list[EditRow]


class BundleRow(Closed):
    """Devices of a node that one bundle of a gang has."""

    index: int
    node: str
    host: str
    devices: list[int]
    res: Resources


class PlacementRow(Member, BundleRow):
    """Devices of a node that one instance has."""


class PlacementDocument(Headed):
    """Which devices each instance has, in the present or last attempt."""

    kind: Literal["Placement"]
    job: str
    attempt: int
    why: Fields | None
    items: list[PlacementRow]
    next: None


class GraphRole(Closed):
    """A role in the graph; ``states`` has one entry an instance."""

    name: str
    replicas: int
    replicas_max: int
    loop: bool
    stateful: bool
    restart: str
    mesh: dict[str, int]
    blast_radius: str
    states: list[str]


class EdgeRow(Closed):
    """An edge as it was declared."""

    source: str
    target: str
    kind: str


class GraphStream(Closed):
    """A stream, with its ledger at the last commit."""

    name: str
    cap: int
    source: str | None
    seen: StreamRow | None


class ObservedEdge(Closed):
    """Who really called whom since the processes began: ``bytes`` both ways, about."""

    source: str
    target: str
    kind: str
    what: str
    n: int
    failed: int
    waited_s: float
    bytes: int


class GraphDocument(Headed):
    """Roles, edges and sub-graphs; ``job`` is null for a job file that was not submitted."""

    kind: Literal["Graph"]
    job: str | None
    name: str
    roles: list[GraphRole]
    edges: list[EdgeRow]
    streams: list[GraphStream]
    subgraphs: list[list[str]]
    units: list[list[str]]
    order: list[str]
    observed: list[ObservedEdge]


class ExecDocument(Headed):
    """What a command beside an instance printed; ``cut``: it printed more than is shown."""

    kind: Literal["Exec"]
    job: str
    instance: str
    exit_status: int | None
    stdout: str
    stderr: str
    cut: bool
    timed_out: bool


class TerminalDocument(Headed):
    """A terminal beside an instance, by the id under which its output is followed and its input sent."""

    kind: Literal["Terminal"]
    job: str
    instance: str
    terminal: str


class TerminalInputDocument(Headed):
    """How many bytes of input a terminal has taken in all; ``over``: its program takes no more."""

    kind: Literal["TerminalInput"]
    job: str
    terminal: str
    taken: int
    over: bool


class LogLine(Closed):
    """One line that an instance printed; ``ts`` is null for what came without a time.

    ``node`` is the machine that keeps the line, empty for that of the service; ``offset`` counts in its file there.
    """

    kind: Literal["LogLine"]
    instance: str
    node: str
    attempt: int
    epoch: int
    offset: int
    ts: Moment | None
    stream: str
    text: str


class LogPage(Headed):
    """A page of log lines; ``next`` is the cursor of the following one.

    ``notices`` say which machines do not answer, and what was known of the lines that lie there.
    """

    kind: Literal["LogPage"]
    job: str
    items: list[LogLine]
    next: str
    ended: bool
    notices: list[str]


class FileRow(Closed):
    """A file or folder that a job wrote. ``node`` is its machine, empty for that of the service.

    ``path`` begins at the output folder. ``kind`` ``other`` is a link or a socket, which is never followed. Of a path
    that several machines have, rows with one ``mark`` are the same file.
    """

    path: str
    node: str
    kind: Literal["file", "folder", "other"]
    bytes: int
    mark: str


class FileList(Headed):
    """What lies in the output folder of a job; ``notices`` say which machines do not answer."""

    kind: Literal["FileList"]
    job: str
    path: str
    items: list[FileRow]
    notices: list[str]


class EventRecord(TypedDict):
    """One event: these fields, and those of its kind for whoever may read the job."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues] - how pydantic takes it

    number: int
    job: str | None
    seq: int
    at: Moment
    kind: str


class EventList(Headed):
    """A page of events; ``last`` is the number of the last record that was looked at."""

    kind: Literal["EventList"]
    job: str | None
    items: list[EventRecord]
    next: int | None
    last: int


class TraceEvent(TypedDict, total=False):
    """An event of the Trace Event format; times in microseconds."""

    ph: str
    name: str
    cat: str
    id: int
    bp: str
    pid: int
    tid: int
    ts: int
    dur: int
    args: dict[str, str]


class TraceSummary(Closed):
    """What bound the job, as shares of the time."""

    steps: int
    seconds: float
    bound_by: dict[str, float]
    idle: dict[str, float]


class TraceDocument(Headed):
    """One trace of a job for Perfetto and chrome://tracing."""

    kind: Literal["Trace"]
    job: str
    displayTimeUnit: Literal["ms"]
    traceEvents: list[TraceEvent]
    summary: TraceSummary


class Notice(Headed):
    """What a webhook is sent; the fields of the job only where the notice is about one."""

    kind: Literal["Notice"]
    event: str
    number: int
    at: Moment
    job: str | None
    node: str | None
    reason: str | None
    text: str
    name: NotRequired[str]
    user: NotRequired[str]
    queue: NotRequired[str]
    state: NotRequired[JobStateName]
    url: NotRequired[str]
