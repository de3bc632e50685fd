"""Installation as its log has it: jobs, the id of a new one, nodes, queues, engine; the read side of the service."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rota.runtime.clock import iso
from rota.service.views.job_history import JobHistory, begin_history
from rota.spec import events as e
from rota.spec.errors import BadInput, UnknownName, did_you_mean
from rota.spec.events import Record
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import DEFAULT_QUEUE, Queue, queue_from_json
from rota.spec.resources import Device, Health, Node

REPLACED_MAX = 100
"""Replaced parts that are remembered, the newest."""
TREES_MAX = 20
"""Trees of queues that are remembered, the newest, to say what came between."""
ACKNOWLEDGED_MAX = 10_000
"""Acknowledged alerts that are remembered, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node with the last thing that was said of its fitness. ``lost`` nodes stopped answering, or were ``removed``.

    ``joined`` is the node as it joined, before any mark.
    """

    node: Node
    joined: Node
    joined_at: float
    lost: bool = False
    removed: bool = False
    marked_at: float = 0.0
    marked_by: str = ""
    text: str = ""
    leave_by: float | None = None
    """When the jobs on a drained node must have left it, in Unix seconds; None: they stay to their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Who has seen an alert, when, and the note left."""

    by: str
    at_text: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedTree:
    """A tree of queues, its ``version`` counted from 1, who applied it and when (empty of the first)."""

    queues: tuple[Queue, ...]
    version: int = 1
    by: str = ""
    at: float | None = None


@dataclass(slots=True)
class Installation:
    """Everything the log says; changed by ``apply`` alone, from one thread."""

    jobs: dict[JobId, JobHistory] = field(default_factory=dict)
    live: dict[JobId, JobHistory] = field(default_factory=dict)
    nodes: dict[NodeId, NodeStatus] = field(default_factory=dict)
    trees: deque[AppliedTree] = field(
        default_factory=lambda: deque([AppliedTree(queues=(Queue(path=DEFAULT_QUEUE),))], maxlen=TREES_MAX)
    )
    keys: dict[tuple[str, str], JobId] = field(default_factory=dict)
    """By user and key: two users may choose the same one."""
    names: dict[str, int] = field(default_factory=dict)
    number: int = 0
    service: e.ServiceStarted | None = None
    engine_volatile: e.EngineStateVolatile | None = None
    replaced: deque[e.PartReplaced] = field(default_factory=lambda: deque(maxlen=REPLACED_MAX))
    acknowledged: dict[str, Acknowledgement] = field(default_factory=dict)
    """By the id of the alert."""
    webhooks: dict[str, tuple[e.WebhookSet, int]] = field(default_factory=dict)
    """By id, with the number of the record that made each."""

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The queues of now."""
        return self.trees[-1].queues

    def apply(self, record: Record) -> None:
        """Apply one record, in order; a repeated one changes nothing."""
        if record.number <= self.number:
            return
        self.number = record.number
        if record.job is None:
            self._cluster(record.number, record.at, record.event)
        elif isinstance(record.event, e.JobSubmitted):
            self._submitted(record)
        elif (job := self.jobs.get(record.job)) is not None:
            job.apply(record)
            if job.ended is not None:
                self.live.pop(record.job, None)

    def _submitted(self, record: Record) -> None:
        job = begin_history(record)
        self.jobs[job.id] = self.live[job.id] = job
        self.names[job.spec.name] = self.names.get(job.spec.name, 0) + 1
        if job.submitted.idempotency_key:
            self.keys[job.submitted.user, job.submitted.idempotency_key] = job.id

    def _cluster(self, number: int, at: float, event: e.Event) -> None:
        match event:
            case e.ServiceStarted():
                self.service, self.engine_volatile = event, None
            case e.NodeJoined(node=node):
                self.nodes[node.id] = NodeStatus(node=node, joined=node, joined_at=at)
            case e.NodeLost() if event.node in self.nodes:
                gone = replace(self.nodes[event.node], lost=True, removed=event.removed)
                self.nodes[event.node] = replace(gone, marked_at=at, text=event.text)
            case e.NodeMarked() if event.node in self.nodes:
                self.nodes[event.node] = _marked(self.nodes[event.node], event, at)
            case e.QueuesChanged(queues=queues, by=by):
                version, tree = self.trees[-1].version + 1, tuple(queue_from_json(raw) for raw in queues)
                self.trees.append(AppliedTree(queues=tree, version=version, by=by, at=at))
            case e.EngineStateVolatile():
                self.engine_volatile = event
            case e.PartReplaced():
                self.replaced.append(event)
            case e.WebhookSet(id=one):
                self.webhooks[one] = (event, number)
            case e.WebhookRemoved(id=one):
                self.webhooks.pop(one, None)
            case e.AlertAcknowledged(alert=alert, by=by, text=text):
                self.acknowledged.pop(alert, None)
                self.acknowledged[alert] = Acknowledgement(by=by, at_text=iso(at), text=text)
                if len(self.acknowledged) > ACKNOWLEDGED_MAX:
                    del self.acknowledged[next(iter(self.acknowledged))]
            case _:
                pass

    def next_id(self, name: str) -> JobId:
        """The id of the next job of that name."""
        n = self.names.get(name, 0) + 1
        while JobId(f"{name}-{n}") in self.jobs:
            n += 1
        return JobId(f"{name}-{n}")

    def find(self, given: str, seen: Callable[[JobHistory], bool] = lambda _: True) -> JobHistory:
        """The job of an id, a uid, a name or a prefix of an id, among those that may be ``seen``.

        Of several that fit, those of exactly that name go first, then those that have not ended.

        Raises UnknownName or BadInput (several fit); neither names a job that may not be seen.
        """
        if (job := self.jobs.get(JobId(given))) is not None and seen(job):
            return job
        fits = [
            one for one in self.jobs.values() if (one.id.startswith(given) or one.submitted.uid == given) and seen(one)
        ]
        named = [one for one in fits if one.id.rpartition("-")[0] == given]
        live = [one for one in named or fits if one.ended is None]
        for some in (fits, named, live):
            if len(some) == 1:
                return some[0]
        if fits:
            shown = ", ".join(one.id for one in fits[:5]) + ", ..." * (len(fits) > 5)
            raise BadInput(f"{given!r} fits {len(fits)} jobs: {shown}", hint="give more of the id")
        near = did_you_mean(given, (one.id for one in self.jobs.values() if seen(one)))
        raise UnknownName(f"no job {given!r}", hint=near or "see: rota ps")

    def usable_nodes(self) -> Iterable[Node]:
        """Nodes that are there, whatever their fitness."""
        return (status.node for status in self.nodes.values() if not status.lost)


def _marked(status: NodeStatus, event: e.NodeMarked, at: float) -> NodeStatus:
    node, leave_by = status.node, status.leave_by
    if event.devices:
        devices = tuple(_with_health(d, event.health) if d.index in event.devices else d for d in node.devices)
        node = replace(node, devices=devices)
    else:
        node = node.with_health(event.health)
        leave_by = at + event.notice_s if event.health is Health.DRAINED and event.notice_s is not None else None
    return replace(
        status,
        node=node,
        marked_at=at,
        marked_by=event.by,
        text=event.text,
        leave_by=leave_by,
    )


def _with_health(device: Device, health: Health) -> Device:
    return replace(device, health=health)
