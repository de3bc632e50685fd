"""rota_* counters and gauges, computed from events, so that a restart loses none."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rota.runtime.clock import Clock
from rota.service.views.cluster import cluster_totals, node_list, queue_tree, waiting_in
from rota.service.views.installation import Installation
from rota.service.views.jobs import stream_rows
from rota.spec import events as e
from rota.spec.events import Record
from rota.spec.reasons import Reason
from rota.spec.states import InstanceState, JobState

WAIT_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
FAILOVER_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(slots=True)
class Observed:
    """A histogram by one label: the number of values in each bucket, the last one without a bound, and their sum."""

    bounds: tuple[float, ...]
    counts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    sums: dict[str, float] = field(default_factory=dict[str, float])

    def observe(self, label: str, value: float) -> None:
        """Count one value."""
        counts = self.counts.setdefault(label, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self.sums[label] = self.sums.get(label, 0.0) + value

    def family(self, name: str, text: str, label: str) -> HistogramMetricFamily:
        """In the form of Prometheus: each bucket with all that is below its bound."""
        found = HistogramMetricFamily(name, text, labels=(label,))
        bounds = [floatToGoString(bound) for bound in (*self.bounds, inf)]
        for value, counts in self.counts.items():
            found.add_metric((value,), list(zip(bounds, accumulate(counts))), self.sums[value])
        return found


@dataclass(slots=True)
class Counts:
    """What the records counted; changed by ``apply`` alone."""

    jobs: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])
    preemptions: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    replaced: Counter[str] = field(default_factory=Counter[str])
    restarts: Counter[str] = field(default_factory=Counter[str])
    failovers: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    samples: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    cuts: dict[tuple[str, str], Counter[tuple[str, str]]] = field(
        default_factory=dict[tuple[str, str], Counter[tuple[str, str]]]
    )
    steps_lost: int = 0
    fenced: int = 0
    decisions: Counter[str] = field(default_factory=Counter[str])
    wait: Observed = field(default_factory=lambda: Observed(WAIT_BUCKETS_S))
    completion: Observed = field(default_factory=lambda: Observed(WAIT_BUCKETS_S))
    failover: Observed = field(default_factory=lambda: Observed(FAILOVER_BUCKETS_S))

    def apply(self, record: Record, installation: Installation) -> None:
        """Count one record; the installation has taken it in before."""
        if isinstance(record.event, e.PartReplaced):
            self.replaced[record.event.part.partition(" of ")[0]] += 1
        job = installation.jobs.get(record.job) if record.job is not None else None
        if job is None:
            return
        for one in job.healed_with(record):
            if one.number is not None and one.joined_by is None and one.ended_at is not None:
                self.failover.observe(one.level, one.ended_at - one.decided_at)
        match record.event:
            case e.JobAdmitted(attempt=1):
                self.wait.observe(job.queue, record.at - job.submitted_at)
                self.decisions["admit"] += 1
            case e.JobAdmitted():
                self.decisions["admit"] += 1
            case e.JobWaits():
                self.decisions["wait"] += 1
            case e.PreemptAsked(reason=reason):
                self.preemptions[(job.queue, reason)] += 1
                self.decisions["preempt"] += 1
            case e.InstanceStarted(role=role, rank=rank) if (role, rank) in job.instances:
                self.restarts[job.queue] += job.instances[(role, rank)].now.restarts > 0
            case e.FailoverStarted(level=level, reason=reason) if reason not in (Reason.RESIZED, Reason.MIGRATED_DRAIN):
                self.failovers[(level, reason)] += 1
            case e.Committed():
                self._count_samples(job.id, record.event)
            case e.RolledBack(from_commit=old, to_commit=new):
                self.steps_lost += max(0, old - new)
            case e.FencedWrite(count=count):
                self.fenced += count
            case e.JobEnded(state=state, reason=reason):
                self.cuts = {key: cut for key, cut in self.cuts.items() if key[0] != job.id}
                self.jobs[(job.queue, state, reason)] += 1
                self.completion.observe(job.queue, record.at - job.submitted_at)
            case _:
                pass

    def _count_samples(self, job: str, commit: e.Committed) -> None:
        """Add what happened since the commit before; work that a rollback took back and that is done again counts."""
        for row in stream_rows(commit):
            now = Counter({(state, ""): row[state] for state in ("admitted", "trained", "again")})
            now.update({("dropped", reason): count for reason, count in row["dropped"].items()})
            self.samples += now - self.cuts.get((job, row["name"]), Counter())
            self.cuts[job, row["name"]] = now


class Metrics(Collector):
    """Every family: what the records counted, and what the installation says when it is asked."""

    def __init__(self, installation: Installation, counts: Counts, *, clock: Clock, version: str) -> None:
        self._installation, self._clock, self._version = installation, clock, version
        self.counts = counts
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.http = Histogram(
            "rota_http_request_seconds",
            "Time to answer a request, without streams.",
            ("method", "route", "status"),
            registry=self._registry,
        )

        self._store = Histogram(
            "rota_store_op_seconds", "Time of a read or append of the event log.", ("op",), registry=self._registry
        )
        self._decide = Histogram(
            "rota_decision_seconds", "Time of one round of the scheduler.", registry=self._registry
        )
        self.sse_clients, self.loop_age, self.store_stale, self.slips = (
            Gauge(name, text, registry=self._registry)
            for name, text in (
                ("rota_sse_clients", "Streams of events and logs that are open."),
                ("rota_loop_age_seconds", "Since the last round of the service's loop."),
                ("rota_store_stale_seconds", "Time for which the store has not answered; 0 when it does."),
                ("rota_scheduler_slips", "Bugs of the scheduler that its last round met; rota status shows them."),
            )
        )

    def families(self) -> list[Metric]:
        """Every family, the time of requests among them."""
        return list(self._registry.collect())

    def timed(self, what: str, seconds: float) -> None:
        """A ``read`` or ``append`` of the log, or a ``decide`` of the scheduler, is over."""
        (self._decide if what == "decide" else self._store.labels(what)).observe(seconds)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family; called by the registry."""
        yield InfoMetricFamily("rota_build", "Version of the service.", {"version": self._version})
        yield from self._counters()
        yield from self._histograms()
        yield from self._queues()
        yield from self._cluster()

    def _counters(self) -> Iterator[Metric]:
        replaced = "Processes of the installation itself that hung or died and were replaced."
        rows: tuple[tuple[str, str, tuple[str, ...], Mapping[Any, int]], ...] = (
            ("rota_jobs", "Jobs that ended.", ("queue", "state", "reason"), self.counts.jobs),
            ("rota_preemptions", "Jobs asked for their devices.", ("queue", "reason"), self.counts.preemptions),
            ("rota_failovers", "Recoveries begun.", ("level", "reason"), self.counts.failovers),
            ("rota_restarts", "Processes started again.", ("queue",), self.counts.restarts),
            ("rota_parts_replaced", replaced, ("part",), self.counts.replaced),
            ("rota_decisions", "Decisions of the scheduler.", ("kind",), self.counts.decisions),
            ("rota_samples", "Items of streams.", ("state", "reason"), self.counts.samples),
        )
        for name, text, labels, counts in rows:
            family = CounterMetricFamily(name, text, labels=labels)
            for key, count in counts.items():
                family.add_metric(key if isinstance(key, tuple) else (key,), count)
            yield family
        yield CounterMetricFamily("rota_steps_lost", "Commits that were rolled back.", value=self.counts.steps_lost)
        yield CounterMetricFamily("rota_fenced", "Writes of older epochs that were refused.", value=self.counts.fenced)

    def _histograms(self) -> Iterator[Metric]:
        counts = self.counts
        yield counts.wait.family("rota_wait_seconds", "From submit to the first admission.", "queue")
        yield counts.completion.family("rota_completion_seconds", "From submit to the end.", "queue")
        yield counts.failover.family("rota_failover_seconds", "Length of recoveries that healed.", "level")

    def _queues(self) -> Iterator[Metric]:
        now = self._clock.wall_s()
        rows = queue_tree(self._installation)["items"]
        for name, text, key in (
            ("rota_queue_pending_jobs", "Jobs that wait.", "pending_jobs"),
            ("rota_queue_pending_gpus", "Devices that waiting jobs ask for.", "pending_gpus"),
            ("rota_queue_used", "Devices in use.", "used_gpus"),
            ("rota_queue_guaranteed", "Devices promised.", "guaranteed_gpus"),
            ("rota_queue_limit", "Most devices allowed.", "limit_gpus"),
            ("rota_queue_borrowed", "Devices in use beyond the promise.", "borrowed_gpus"),
        ):
            family = GaugeMetricFamily(name, text, labels=("queue",))
            for row in rows:
                if row[key] is not None:
                    family.add_metric((row["path"],), row[key])
            yield family
        text = "Since the longest waiting job of the queue or below began to wait; a preempted one began again then."
        oldest = GaugeMetricFamily("rota_oldest_pending_seconds", text, labels=("queue",))
        for row in rows:
            began = min((s.since for s in waiting_in(self._installation, row["path"])), default=now)
            oldest.add_metric((row["path"],), now - began)
        yield oldest

    def _cluster(self) -> Iterator[Metric]:
        totals = cluster_totals(self._installation)
        states = GaugeMetricFamily("rota_jobs_state", "Jobs by state.", labels=("state",))
        for state in JobState:
            states.add_metric((state.value,), totals["jobs"].get(state.value, 0))
        yield states
        ready = sum(
            one.state is InstanceState.READY for s in self._installation.live.values() for one in s.instances.values()
        )
        yield GaugeMetricFamily("rota_instances_ready", "Instances that are ready for work.", value=ready)
        stale = GaugeMetricFamily(
            "rota_stale_versions", "Oldest item of the last commit, in model versions.", labels=("job", "stream")
        )
        for job in self._installation.live.values():
            for row in stream_rows(job.commit):
                stale.add_metric((job.id, row["name"]), row["age"])
        yield stale
        used = totals["gpus_used"] / totals["gpus"] if totals["gpus"] else 0.0
        yield GaugeMetricFamily("rota_gpu_allocated_ratio", "Devices that jobs hold, of all.", value=used)
        up = GaugeMetricFamily("rota_node_up", "1 while a node answers.", labels=("node",))
        for row in node_list(self._installation)["items"]:
            up.add_metric((row["id"],), 0.0 if row["state"] in ("lost", "removed") else 1.0)
        yield up
        yield GaugeMetricFamily("rota_log_records", "Records in the event log.", value=self._installation.number)
