"""rota_* counters and gauges, computed from events, so that a restart loses none."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

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
class Buckets:
    """A histogram that is filled by replay: counts at or below each bound, and the sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total_s: float = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total_s += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' form: ``le`` and the number of values up to it."""
        found: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts or [0] * (len(self.bounds) + 1)):
            seen += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
        return found


class Metrics(Collector):
    """Counts what passes by (``apply``), reads the rest from the installation when asked (``collect``)."""

    def __init__(self, installation: Installation, *, clock: Clock, version: str) -> None:
        self._installation, self._clock, self._version = installation, clock, version
        self._jobs: Counter[tuple[str, str, str]] = Counter()
        self._preemptions: Counter[tuple[str, str]] = Counter()
        self._replaced: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        self._failovers: Counter[tuple[str, str]] = Counter()
        self._samples: Counter[tuple[str, str]] = Counter()
        self._cuts: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
        self._steps_lost = 0
        self._fenced = 0
        self._decisions: Counter[str] = Counter()
        self._wait: dict[str, Buckets] = defaultdict(lambda: Buckets(WAIT_BUCKETS_S))
        self._completion: dict[str, Buckets] = defaultdict(lambda: Buckets(WAIT_BUCKETS_S))
        self._failover: dict[str, Buckets] = defaultdict(lambda: Buckets(FAILOVER_BUCKETS_S))
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

    def apply(self, record: Record) -> None:
        """Count one record; the installation has taken it in before."""
        if isinstance(record.event, e.PartReplaced):
            self._replaced[record.event.part.partition(" of ")[0]] += 1
        history = self._installation.jobs.get(record.job) if record.job is not None else None
        if history is None:
            return
        match record.event:
            case e.JobAdmitted(attempt=1):
                self._wait[history.queue].observe(record.at - history.submitted_at)
                self._decisions["admit"] += 1
            case e.JobAdmitted():
                self._decisions["admit"] += 1
            case e.JobWaits():
                self._decisions["wait"] += 1
            case e.PreemptAsked(reason=reason):
                self._preemptions[(history.queue, reason)] += 1
                self._decisions["preempt"] += 1
            case e.InstanceStarted(role=role, rank=rank) if (role, rank) in history.instances:
                self._restarts[history.queue] += history.instances[(role, rank)].now.restarts > 0
            case e.FailoverStarted(level=level, reason=reason) if reason not in (Reason.RESIZED, Reason.MIGRATED_DRAIN):
                self._failovers[(level, reason)] += 1
            case e.FailoverEnded(failover=number, seconds=seconds):
                for failure in history.failures:
                    if failure.number == number and failure.attempt == history.ctx.attempt:
                        self._failover[failure.level].observe(seconds)
            case e.Committed():
                self._count_samples(history.id, record.event)
            case e.RolledBack(from_commit=old, to_commit=new):
                self._steps_lost += max(0, old - new)
            case e.FencedWrite(count=count):
                self._fenced += count
            case e.JobEnded(state=state, reason=reason):
                self._cuts = {key: cut for key, cut in self._cuts.items() if key[0] != history.id}
                self._jobs[(history.queue, state, reason)] += 1
                self._completion[history.queue].observe(record.at - history.submitted_at)
            case _:
                pass

    def _count_samples(self, job: str, commit: e.Committed) -> None:
        """Add what happened since the commit before; work that a rollback took back and that is done again counts."""
        for row in stream_rows(commit):
            now = Counter({(state, ""): row[state] for state in ("admitted", "trained", "again")})
            now.update({("dropped", reason): count for reason, count in row["dropped"].items()})
            self._samples += now - self._cuts.get((job, row["name"]), Counter())
            self._cuts[job, row["name"]] = now

    def collect(self) -> Iterator[Metric]:
        """Every family; called by the registry."""
        yield InfoMetricFamily("rota_build", "Version of the service.", {"version": self._version})
        yield from self._counters()
        yield from self._histograms()
        yield from self._queues()
        yield from self._cluster()

    def _counters(self) -> Iterator[Metric]:
        jobs = CounterMetricFamily("rota_jobs", "Jobs that ended.", labels=("queue", "state", "reason"))
        for (queue, state, reason), count in self._jobs.items():
            jobs.add_metric((queue, state, reason), count)
        yield jobs
        preemptions = CounterMetricFamily(
            "rota_preemptions", "Jobs asked for their devices.", labels=("queue", "reason")
        )
        for labels, count in self._preemptions.items():
            preemptions.add_metric(labels, count)
        yield preemptions
        failovers = CounterMetricFamily("rota_failovers", "Recoveries begun.", labels=("level", "reason"))
        for labels, count in self._failovers.items():
            failovers.add_metric(labels, count)
        yield failovers
        restarts = CounterMetricFamily("rota_restarts", "Processes started again.", labels=("queue",))
        for queue, count in self._restarts.items():
            restarts.add_metric((queue,), count)
        yield restarts
        text = "Processes of the installation itself that hung or died and were replaced."
        replaced = CounterMetricFamily("rota_parts_replaced", text, labels=("part",))
        for part, count in self._replaced.items():
            replaced.add_metric((part,), count)
        yield replaced
        decisions = CounterMetricFamily("rota_decisions", "Decisions of the scheduler.", labels=("kind",))
        for kind, count in self._decisions.items():
            decisions.add_metric((kind,), count)
        yield decisions
        samples = CounterMetricFamily("rota_samples", "Items of streams.", labels=("state", "reason"))
        for labels, count in self._samples.items():
            samples.add_metric(labels, count)
        yield samples
        yield CounterMetricFamily("rota_steps_lost", "Commits that were rolled back.", value=self._steps_lost)
        yield CounterMetricFamily("rota_fenced", "Writes of older epochs that were refused.", value=self._fenced)

    def _histograms(self) -> Iterator[Metric]:
        for name, text, label, rows in (
            ("rota_wait_seconds", "From submit to the first admission.", "queue", self._wait),
            ("rota_completion_seconds", "From submit to the end.", "queue", self._completion),
            ("rota_failover_seconds", "Length of recoveries.", "level", self._failover),
        ):
            family = HistogramMetricFamily(name, text, labels=(label,))
            for value, buckets in rows.items():
                family.add_metric((value,), buckets=buckets.cumulative(), sum_value=buckets.total_s)
            yield family

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
        for history in self._installation.live.values():
            for row in stream_rows(history.commit):
                stale.add_metric((history.id, row["name"]), row["age"])
        yield stale
        used = totals["gpus_used"] / totals["gpus"] if totals["gpus"] else 0.0
        yield GaugeMetricFamily("rota_gpu_allocated_ratio", "Devices that jobs hold, of all.", value=used)
        up = GaugeMetricFamily("rota_node_up", "1 while a node answers.", labels=("node",))
        for row in node_list(self._installation)["items"]:
            up.add_metric((row["id"],), 0.0 if row["state"] == "lost" else 1.0)
        yield up
        yield GaugeMetricFamily("rota_log_records", "Records in the event log.", value=self._installation.number)
