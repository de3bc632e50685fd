"""Facts that happened, in the order of the log: appended, never changed.

An event belongs to one job (``JobEvent``) or to the cluster (``ClusterEvent``). Names are in the past tense. Epochs say
which start of an instance, loop or master an event speaks of; who applies an event drops those of older epochs. In the
log an event is ``{"kind": <class name>, ...fields}``; a new field needs a default, so that old logs replay for ever.

Who appends: ``S`` the service with its scheduler, ``M`` the master of the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rota.spec import codec
from rota.spec.codec import JsonObject
from rota.spec.gang import BundleGrant, GangRequest, Placement
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.job import JobSpec, RoleStart
from rota.spec.reasons import Reason
from rota.spec.resources import Health, Node
from rota.spec.states import JobState, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """A fact about one job; the log record names the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEvent(JobEvent):
    """A fact about one instance under ``epoch``."""

    role: RoleName
    rank: int
    epoch: Epoch

    @property
    def instance(self) -> InstanceId:
        """Whom it speaks of."""
        return InstanceId(self.role, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """A fact about nodes, queues or the installation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The commit of an ended job that a new one begins with; its epochs follow those of that job.

    ``path`` is the folder of the checkpoint among those of the new job, ``cursor`` that of the commit.
    """

    job: JobId
    commit: int
    path: str
    epoch: Epoch
    cursor: JsonObject = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(JobEvent):
    """A job is durable: SUBMITTED. ``source`` is the text of the job file; ``uid`` a ULID that is never used again."""

    spec: JobSpec
    user: str = "local"
    source: str = ""
    filename: str = ""
    workdir: str = ""
    idempotency_key: str = ""
    uid: str = ""
    continues: Continued | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueued(JobEvent):
    """Accepted by the scheduler: QUEUED. ``spec`` is set when inspecting the workloads completed it.

    ``from_commit`` is the saved commit that a paused job continues from in place of its last one; 0 is the start.
    """

    spec: JobSpec | None = None
    from_commit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWaits(JobEvent):
    """The scheduler tried and could not start the job; appended only when the reason changes."""

    reason: Reason
    text: str = ""
    fields: JsonObject = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdmitted(JobEvent):
    """The job has devices: ADMITTED. ``attempt`` counts from 1; ``epoch`` is the job epoch of this admission."""

    attempt: int
    epoch: Epoch
    placement: Placement
    starts: tuple[RoleStart, ...] = ()
    """Roles that do not start with their fewest instances on any device: what was chosen among their sizes."""
    why: JsonObject = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(JobEvent):
    """A request to end the job. ``reason`` decides the final state; ``grace_s`` bounds the polite part."""

    reason: Reason = Reason.STOPPED_BY_USER
    by: str = "local"
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptAsked(JobEvent):
    """The scheduler wants the devices back: PREEMPTING; afterwards QUEUED with the original queue time.

    With ``gang`` it wants that one only, beyond what the job needs: the job continues with fewer members, if it can.
    """

    reason: Reason
    grace_s: float = 30.0
    for_job: str = ""
    gang: GangId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChanged(JobEvent):
    """Fields that may change after submit did: ``changes`` maps a dotted path to its new value."""

    changes: JsonObject
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAsked(JobEvent):
    """A request for another number of instances of a role; kept over attempts until the next one."""

    role: RoleName
    n: int
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveAsked(JobEvent):
    """The scheduler wants what the job has on a node to be elsewhere at ``due_at`` (wall time); None: no more.

    ``text`` is why, in the words of who drained the node.
    """

    node: NodeId
    due_at: float | None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangGranted(JobEvent):
    """The answer to a GangAsked: where its bundles are, one for each asked."""

    gang: GangId
    bundles: tuple[BundleGrant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GangWaits(JobEvent):
    """A GangAsked cannot be granted now; it stays asked for. Appended when the reason changes, or a node comes back.

    ``back`` are nodes that the GangAsked avoids and that are there again, with the places that the job holds on them.
    """

    gang: GangId
    reason: Reason
    text: str = ""
    back: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterStarted(JobEvent):
    """A master took this job under a new master epoch; of two masters one loses this append and exits."""

    master_epoch: Epoch
    pid: int
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reattached(JobEvent):
    """What is alive, as (role, rank, epoch); the rest is lost, with its node if ``hosts`` are given without it."""

    master_epoch: Epoch
    alive: tuple[tuple[RoleName, int, Epoch], ...] = ()
    gangs: tuple[tuple[GangId, Epoch], ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GangReserved(JobEvent):
    """The reservation of a gang exists in the engine."""

    gang: GangId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class GangReserveFailed(JobEvent):
    """The engine did not give the reservation within its limit."""

    gang: GangId
    epoch: Epoch
    reason: Reason
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangReleased(JobEvent):
    """The reservation of a gang is gone, or what was asked for by GangAsked is wanted no more.

    ``gone``: no instance has a place in it, so its devices are free; else it is made again at the same place.
    """

    gang: GangId
    epoch: Epoch
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GangAsked(JobEvent):
    """More devices are wanted, but not on nodes of ``avoid`` or ``apart``. Answers: GangGranted, GangWaits.

    Its members leave those of ``avoid`` (``lost``: they are gone, or not fit); on those of ``apart`` are others of the
    job. ``lost_nodes`` are those of ``avoid`` that the engine lost; None in older logs: there all of them count so.
    """

    request: GangRequest
    avoid: tuple[NodeId, ...] = ()
    apart: tuple[NodeId, ...] = ()
    lost: bool = False
    lost_nodes: tuple[NodeId, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStarted(InstanceEvent):
    """A process exists for this instance; it is not set up yet. ``epoch`` is that of the instance.

    ``address`` is where instances on other machines call it, ``host:port``; empty when its node works by itself.
    """

    node: NodeId
    pid: int
    start_time: float = 0.0
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReady(InstanceEvent):
    """The instance is set up under ``epoch`` with the state of commit ``restored``."""

    restored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEnded(InstanceEvent):
    """A finite instance (loop, command, function) returned with success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost(InstanceEvent):
    """The instance failed: its process died, or its code raised. ``alive`` = the process still lives (code raised)."""

    reason: Reason
    text: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: int | None = None
    alive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStopped(InstanceEvent):
    """A process that was asked to stop is known to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStalled(InstanceEvent):
    """No progress for ``idle_s``. ``text``: who others wait for, or the cycle of those who wait (reason HANG)."""

    idle_s: float
    stacks: str = ""
    reason: Reason = Reason.NO_PROGRESS
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChecked(JobEvent):
    """A suspected node was checked by a member that lives there; without an answer it is not fit."""

    node: NodeId
    fit: bool
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverStarted(JobEvent):
    """A recovery begins. ``scope`` lists (role, rank, new epoch) of every instance it touches.

    ``restore`` is the commit that stateful members go back to. From this append on, writes of the older epochs are
    fenced. ``moved_from`` and ``move_reason`` are set by an escalation or downgrade. The world continues without
    those in ``leave`` (role, rank) and with those in ``join``: a change of size is a recovery without a loss.
    """

    failover: int
    level: Level
    scope: tuple[tuple[RoleName, int, Epoch], ...]
    restore: int
    reason: Reason
    role: RoleName
    rank: int
    text: str = ""
    traceback: str = ""
    moved_from: Level | None = None
    move_reason: Reason | None = None
    leave: tuple[tuple[RoleName, int], ...] = ()
    join: tuple[tuple[RoleName, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverEnded(JobEvent):
    """Every instance of the scope is ready again."""

    failover: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(JobEvent):
    """The stateful roles went back from commit ``from_commit`` (uncommitted work after it) to ``to_commit``."""

    from_commit: int
    to_commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(JobEvent):
    """The loop made commit ``n`` durable. ``versions`` maps a weights edge to the version published with it."""

    n: int
    loop_epoch: Epoch
    versions: dict[str, int] = field(default_factory=dict[str, int])
    metrics: JsonObject = field(default_factory=JsonObject)
    cursor: JsonObject = field(default_factory=JsonObject)
    waited: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds since the commit before in which the loop waited for calls of each role, in a job with a split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(JobEvent):
    """A durable checkpoint of commit ``n`` is complete at ``path``; ``cursor`` is that of the commit."""

    n: int
    path: str
    seconds: float = 0.0
    cursor: JsonObject = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCopied(JobEvent):
    """Which state of commit ``n`` lies in the memory of another machine, too: (role, rank, host, epoch) of each.

    None: no machine has taken it, and ``text`` says why. ``cursor`` is that of the commit.
    """

    n: int
    loop_epoch: Epoch
    copies: tuple[tuple[RoleName, int, str, Epoch], ...] = ()
    text: str = ""
    seconds: float = 0.0
    cursor: JsonObject = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedWrite(JobEvent):
    """Writes of an older epoch were refused (at most one such event a minute for a scope)."""

    scope: str
    epoch: Epoch
    fence: Epoch
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(JobEvent):
    """A timer that the job machine asked for; ``doing`` is what each that is late was last heard at."""

    timer: str
    doing: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequeued(JobEvent):
    """The attempt is over, the job QUEUED again: preempted, or a retry of the whole job, which alone ``counts``."""

    attempt: int
    reason: Reason
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DowntimePassed(JobEvent):
    """Neither service nor engine ran from ``since`` (wall time) until now, so no process of the job did (S).

    It kept its place, and this time counts for none of its limits.
    """

    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStarted(JobEvent):
    """The job holds no devices any more, and its output is being copied to its URL before it ends (S)."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadEnded(JobEvent):
    """The output folder of a job was copied to its URL, or ``error`` says why not and where its files stay (S).

    ``notes`` name what is not under its own path there: links, and files that several machines have.
    """

    url: str
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(JobEvent):
    """The one terminal event of a job (M; S for a job that never had a master)."""

    state: JobState
    reason: Reason
    text: str = ""
    role: RoleName | None = None
    rank: int | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStarted(ClusterEvent):
    """A service process took the installation under a new install epoch."""

    install_epoch: Epoch
    pid: int
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(ClusterEvent):
    """A node can be used from now on; again with other values when its inventory changed."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(ClusterEvent):
    """A node stopped answering; ``removed``: it answers or not, the installation has other nodes from now on."""

    node: NodeId
    text: str = ""
    removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMarked(ClusterEvent):
    """The fitness of a node, or of some of its devices, changed (probe, admin, failover).

    ``notice_s`` of a drained one: the time the jobs on it have to move; without it they stay to their end.
    """

    node: NodeId
    health: Health
    devices: tuple[int, ...] = ()
    by: str = ""
    text: str = ""
    notice_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesChanged(ClusterEvent):
    """The queue tree was replaced; ``queues`` is the whole new tree as JSON values of ``spec.queue.Queue``."""

    queues: tuple[JsonObject, ...]
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertAcknowledged(ClusterEvent):
    """A user has seen an alert; ``alert`` is its id, which names one occurrence."""

    alert: str
    by: str = "local"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStateVolatile(ClusterEvent):
    """The engine runs without durable state: if its control store dies, jobs restart from their last commit."""

    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost(ClusterEvent):
    """The engine was lost and started anew."""

    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReplaced(ClusterEvent):
    """A process of the installation itself hung or died and is replaced: a raylet, the gateway, the master of a job."""

    part: str
    pid: int = 0
    text: str = ""
    found_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountEvent(ClusterEvent):
    """A fact about users, their tokens and secrets, or webhooks; shown to admins alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserChanged(AccountEvent):
    """What a user may do: a role on each of some queues and all below them (``""`` is the root). No grant: removed."""

    name: str
    grants: tuple[tuple[str, str], ...]
    """Pairs of queue path and role: viewer, user, queue-admin, admin."""
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMade(AccountEvent):
    """A token of a user exists. Only its SHA-256 is kept; ``role`` and ``queue`` narrow what its user may do."""

    id: str
    user: str
    digest: str
    name: str = ""
    role: str = "admin"
    queue: str = ""
    expires_at: float | None = None
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRevoked(AccountEvent):
    """A token is invalid from now on."""

    id: str
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretChanged(AccountEvent):
    """A user's secret was set or removed; its value is in no event."""

    owner: str
    name: str
    removed: bool = False
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSet(AccountEvent):
    """A webhook sends notices to ``url``: of the kinds ``on`` (none: all), of jobs of ``queue`` (none: of all)."""

    id: str
    url: str
    on: tuple[str, ...] = ()
    queue: str = ""
    by: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRemoved(AccountEvent):
    """A webhook was deleted."""

    id: str
    by: str = "local"


Event = JobEvent | ClusterEvent


_ROOTS = (JobEvent, InstanceEvent, ClusterEvent, AccountEvent)
KINDS: dict[str, type[JobEvent] | type[ClusterEvent]] = {
    name: cls
    for name, cls in globals().items()
    if isinstance(cls, type) and issubclass(cls, _ROOTS) and cls not in _ROOTS
}
"""Every event by its kind."""


def event_to_json(event: Event) -> JsonObject:
    """``{"kind": ..., ...}``, the form of the log, of the API and of notices."""
    return {"kind": type(event).__name__, **codec.to_json_value(event)}


def event_from_json(raw: JsonObject) -> Event:
    """Inverse of ``event_to_json``; fields that are unknown here are ignored. Raises ValueError for an unknown kind."""
    cls = KINDS.get(kind := raw.get("kind", ""))
    if cls is None:
        raise ValueError(f"unknown event kind {kind!r}")
    return codec.from_json_value(cls, {key: value for key, value in raw.items() if key != "kind"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the log: a total order (``number``), the order inside the job (``seq``), wall time for people."""

    number: int
    job: JobId | None
    seq: int
    at: float
    event: Event
