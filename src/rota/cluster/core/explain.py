"""Explanation of a waiting job: what binds it, and which single changes would start it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict

from rota.cluster.core.admission import RequestChange, Tally, amount, sick_nodes, smaller, tally
from rota.cluster.core.capacity import GPU
from rota.cluster.core.cycle import tried
from rota.cluster.core.guarded import without_refused
from rota.cluster.core.jobs import JobAsk, LiveJob, Shape, Wait
from rota.cluster.core.profile import Admit, Preempt, Profile, WaitOn
from rota.cluster.core.queue_order import place_in_order
from rota.cluster.core.state import State
from rota.spec.ids import JobId, NodeId
from rota.spec.reasons import INFO, Reason
from rota.spec.resources import Health, counted

CHANGES_MAX = 8
"""Changes listed at most; each costs a few trial passes."""


class StartOffer(TypedDict):
    """A single change that would start a job now, and what it costs."""

    change: RequestChange
    text: str
    cost: str
    victims: NotRequired[list[str]]
    """Jobs that would be stopped for it."""


class PreemptedJob(TypedDict):
    """A job that would be stopped, and the device-seconds of work that are lost with it."""

    job: JobId
    lost_gpu_s: float


class WaitDocument(TypedDict):
    """A reason with its sentence and numbers."""

    code: str
    text: str
    fields: dict[str, object]


class TallyDocument(TypedDict):
    """Nodes that are left after one more constraint."""

    constraint: str
    nodes_left: int


class AheadDocument(TypedDict):
    """Jobs of the same queue that are tried earlier, and the devices that they ask for."""

    jobs: int
    gpus: int


class ExplanationDocument(TypedDict):
    """JSON document of an explanation."""

    job: JobId
    state: str
    starts_now: bool
    why: WaitDocument | None
    tally: list[TallyDocument]
    ahead: AheadDocument
    would_start_now_with: list[StartOffer]
    victims_if_preempted: list[PreemptedJob]
    estimate: None
    since: float
    decisions: list[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerExplanation:
    """The answer to "why does this job not run": everything in it was tried on the state, nothing is guessed."""

    job: JobId
    state: str
    starts_now: bool
    why: Wait | None
    tally: tuple[Tally, ...] = ()
    ahead_jobs: int = 0
    ahead_gpus: int = 0
    would_start_now_with: tuple[StartOffer, ...] = ()
    victims_if_preempted: tuple[PreemptedJob, ...] = ()
    since: float = 0.0

    def to_json(self) -> ExplanationDocument:
        """The JSON document of ``rota explain``, without an estimate and decisions, which others have."""
        why = self.why
        return {
            "job": self.job,
            "state": self.state,
            "starts_now": self.starts_now,
            "why": None
            if why is None
            else {"code": str(why.reason), "text": why.text or INFO[why.reason].text, "fields": why.fields},
            "tally": [{"constraint": t.constraint, "nodes_left": t.nodes_left} for t in self.tally],
            "ahead": {"jobs": self.ahead_jobs, "gpus": self.ahead_gpus},
            "would_start_now_with": list(self.would_start_now_with),
            "victims_if_preempted": list(self.victims_if_preempted),
            "estimate": None,
            "since": self.since,
            "decisions": [],
        }


def explain(state: State, profile: Profile, job: JobId, now: float) -> SchedulerExplanation:
    """Explain a live job. Raises KeyError for a job that the state does not know."""
    row = state.jobs[job]
    if row.phase != "queued" or row.has_reason(Reason.INTERNAL):
        return SchedulerExplanation(job=job, state=row.phase, starts_now=False, why=row.wait, since=now)
    return explain_ask(state, profile, row.ask, now)


def explain_ask(state: State, profile: Profile, ask: JobAsk, now: float) -> SchedulerExplanation:
    """Explain a waiting job, or one that was not submitted: it is put into the trial state as if it were."""
    with state.without_memory(), without_refused(state):  # of others a trial knows that they do not fit, not why
        wait, preempts = _tried(state, profile, ask, now)
        changes = () if wait is None else _changes(state, profile, ask, wait, now)
    ahead_jobs, ahead_gpus = _ahead(state, profile, ask, now)
    return SchedulerExplanation(
        job=ask.id,
        state="queued",
        starts_now=wait is None,
        why=wait,
        tally=tuple(tally(state, ask.shape)),
        ahead_jobs=ahead_jobs,
        ahead_gpus=ahead_gpus,
        would_start_now_with=changes,
        victims_if_preempted=preempts,
        since=ask.queued_at,
    )


def _tried(state: State, profile: Profile, ask: JobAsk, now: float) -> tuple[Wait | None, tuple[PreemptedJob, ...]]:
    """The verdict of an unbounded pass on a job (None = it starts), and whom the pass would stop for it."""
    with state.txn() as txn:
        # Without a reason yet, the job gets the verdict of its line even when an equal job is before it.
        state.put(txn, LiveJob(ask=ask))
        unbounded = replace(profile, candidates_max=1_000_000, victim_sets_max=1_000_000, vain_max=1_000_000)
        decisions, learned = tried(state, unbounded, now, until=ask.id)
    state.memory.take_in(learned)  # that of the explanation: its next pass knows who does not fit
    if any(isinstance(d, Admit) and d.job == ask.id for d in decisions):
        return None, ()
    wait = next((d.wait for d in decisions if isinstance(d, WaitOn) and d.job == ask.id), None)
    preempts = tuple(
        PreemptedJob(job=d.job, lost_gpu_s=d.lost_gpu_s)
        for d in decisions
        if isinstance(d, Preempt) and d.for_job == ask.id
    )
    return wait or Wait(reason=Reason.INFEASIBLE_NOW), preempts


def _ahead(state: State, profile: Profile, ask: JobAsk, now: float) -> tuple[int, int]:
    """How many jobs of the same queue the order tries before this one, and how many devices they ask for.

    A line is in the order of the policy already, unless that ranks each job by itself.
    """

    def place(entry: tuple[float, JobId]) -> tuple[object, ...]:
        return place_in_order(state, profile, state.jobs[entry[1]], now)

    jobs = gpus = 0
    with state.txn() as txn:
        state.put(txn, LiveJob(ask=ask))
        mine = place((ask.queued_at, ask.id))
        for key, line in state.lines.items():
            if key.queue == ask.queue:
                by_job = profile.order.by_job
                before = sum(place(one) < mine for one in line) if by_job else bisect_left(line, mine, key=place)
                jobs, gpus = jobs + before, gpus + before * key.shape.gpus
    return jobs, gpus


def _changes(state: State, profile: Profile, ask: JobAsk, wait: Wait, now: float) -> tuple[StartOffer, ...]:
    """Single changes after which a full pass starts the job; each was tried."""
    if wait.reason is Reason.DEPENDENCY:
        return ()

    def starts(shape: Shape) -> bool:
        return _tried(state, profile, replace(ask, shape=shape, choices=()), now)[0] is None

    found: list[StartOffer] = []
    if wait.reason not in (Reason.NOT_BEFORE, Reason.COOL_DOWN, Reason.QUEUE_CLOSED):
        found += _by_priority(state, profile, ask, now)
    if wait.reason not in (Reason.NOT_BEFORE, Reason.COOL_DOWN):
        found += _by_queue(state, profile, ask, now)
    if wait.reason in (Reason.NOT_BEFORE,) and _tried(state, profile, replace(ask, not_before=0.0), now)[0] is None:
        found.append({"change": {"set": "not_before", "value": None}, "text": "without its start time", "cost": "none"})
    if wait.reason in (Reason.BAD_CELLS, Reason.NODES_DRAINED):
        found += _by_node(state, profile, ask, now)
    if wait.reason in (Reason.QUOTA_LIMIT, Reason.USER_LIMIT):
        found += _by_limit(state, profile, ask, wait, now)
    given_up = replace(ask, preemptible=True, priority=min(ask.priority, 99))
    if not ask.preemptible and _tried(state, profile, given_up, now)[0] is None:
        never = ask.priority >= 100
        change = RequestChange(set="priority", value=99)
        if not never:
            change = RequestChange(set="labels.rota.preemptible", value="true")
        found.append({"change": change, "text": "as work that may be preempted", "cost": "it may be stopped"})
    for variant in smaller(ask.shape, _bounded(starts)):
        found.append({"change": variant.change, "text": variant.text, "cost": _cost(ask.shape, variant.shape)})
        if len(found) >= CHANGES_MAX:
            break
    return tuple(found)


def _bounded(test: Callable[[Shape], bool]) -> Callable[[Shape], bool]:
    """Remember answers: bisections over different roles ask for the same shapes."""
    known: dict[Shape, bool] = {}

    def answer(shape: Shape) -> bool:
        if shape not in known:
            known[shape] = test(shape)
        return known[shape]

    return answer


def _by_priority(state: State, profile: Profile, ask: JobAsk, now: float) -> list[StartOffer]:
    """The lowest higher priority that starts the job now, or has others give way for it."""
    ahead = {row.ask.priority for row in state.waiting_jobs()}
    ahead |= {priority for (queue, priority), jobs in state.running.items() if jobs and queue == ask.queue}
    for priority in sorted(one + 1 for one in ahead if one >= ask.priority)[:CHANGES_MAX]:
        wait, stopped = _tried(state, profile, replace(ask, priority=priority), now)
        if wait is None or stopped:
            names = ", ".join(str(one["job"]) for one in stopped)
            return [
                {
                    "change": {"set": "priority", "value": priority},
                    "text": f"priority {priority} instead of {ask.priority}",
                    "cost": f"preempts {names} first" if stopped else "jobs of lower priority wait longer",
                    "victims": [str(one["job"]) for one in stopped],
                }
            ]
    return []


def _by_queue(state: State, profile: Profile, ask: JobAsk, now: float) -> list[StartOffer]:
    """Another queue in which the job starts now, if there is one; those with most of their guarantee left first."""
    tree = state.queues
    others = [row for row, queue in enumerate(tree.rows) if tree.leaf[row] and queue.path != ask.queue]
    others.sort(key=lambda row: int(state.used[row, GPU] - tree.guaranteed[row, GPU]))
    for path in (tree.rows[row].path for row in others[:CHANGES_MAX]):
        if _tried(state, profile, replace(ask, queue=path), now)[0] is None:
            change = RequestChange(set="queue", value=path)
            return [{"change": change, "text": f"queue {path} instead of {ask.queue}", "cost": f"the share of {path}"}]
    return []


def _by_node(state: State, profile: Profile, ask: JobAsk, now: float) -> list[StartOffer]:
    """Single nodes that take no new work and would let the job start if they did."""
    found: list[StartOffer] = []
    for node, health in list(sick_nodes(state).items())[:CHANGES_MAX]:
        with state.txn() as txn:
            state.mark(txn, NodeId(node), Health.HEALTHY)
            wait, stopped = _tried(state, profile, ask, now)
        if wait is None or stopped:
            names = [str(one["job"]) for one in stopped]
            offer = StartOffer(
                change=RequestChange(set=f"nodes.{node}", value="undrain"),
                text=f"node {node} in use again; it is {health}",
                cost=f"preempts {', '.join(names)} first" if names else "none",
            )
            found.append({**offer, "victims": names} if names else offer)
    return found


def _by_limit(state: State, profile: Profile, ask: JobAsk, wait: Wait, now: float) -> list[StartOffer]:
    """The limit that binds, of a queue or of a user in it, raised to what the job needs, if that alone starts it."""
    which = "limit" if wait.reason is Reason.QUOTA_LIMIT else "user_limit"
    tree, path, dim = state.queues, str(wait.fields["queue"]), str(wait.fields["dim"])
    wanted = int(wait.number("used") + wait.number("asked"))
    with state.txn() as txn:
        txn.set(getattr(tree, which), (tree.row[path], tree.dims.index(dim)), wanted)
        state.memory.gave(txn, None)
        starts = _tried(state, profile, ask, now)[0] is None
    if not starts:
        return []
    name = {"gpu": "gpus", "cpu": "cpus", "mem": "memory"}.get(dim.partition(":")[0], dim)
    value = wanted if name == "memory" else wanted / 1000
    return [
        {
            "change": {"set": f"queues.{path}.{which}.{name}", "value": value},
            "text": f"a {which.replace('_', ' ')} of {amount(dim, wanted)} for queue {path} instead of "
            f"{amount(dim, int(wait.number('limit')))}",
            "cost": f"queue {path} may use that much more",
        }
    ]


def _cost(before: Shape, after: Shape) -> str:
    gpus = before.gpus - after.gpus
    return f"{counted(gpus, 'GPU')} fewer" if gpus else "none"
