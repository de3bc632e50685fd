"""rota_* counters and gauges, computed from events, so that a restart loses none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

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


HISTOGRAMS = (
    ("rota_wait_seconds", "From submit to the first admission.", "queue", WAIT_BUCKETS_S),
    ("rota_completion_seconds", "From submit to the end.", "queue", WAIT_BUCKETS_S),
    ("rota_failover_seconds", "Length of recoveries.", "level", FAILOVER_BUCKETS_S),
)


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
        self._wait, self._completion, self._failover = (
            Histogram(name, text, (label,), buckets=buckets, registry=None) for name, text, label, buckets in HISTOGRAMS
        )
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
        job = self._installation.jobs.get(record.job) if record.job is not None else None
        if job is None:
            return
        match record.event:
            case e.JobAdmitted(attempt=1):
                self._wait.labels(job.queue).observe(record.at - job.submitted_at)
                self._decisions["admit"] += 1
            case e.JobAdmitted():
                self._decisions["admit"] += 1
            case e.JobWaits():
                self._decisions["wait"] += 1
            case e.PreemptAsked(reason=reason):
                self._preemptions[(job.queue, reason)] += 1
                self._decisions["preempt"] += 1
            case e.InstanceStarted(role=role, rank=rank) if (role, rank) in job.instances:
                self._restarts[job.queue] += job.instances[(role, rank)].now.restarts > 0
            case e.FailoverStarted(level=level, reason=reason) if reason not in (Reason.RESIZED, Reason.MIGRATED_DRAIN):
                self._failovers[(level, reason)] += 1
            case e.FailoverEnded(failover=number, seconds=seconds):
                for failure in job.failures:
                    if failure.number == number and failure.attempt == job.ctx.attempt:
                        self._failover.labels(failure.level).observe(seconds)
            case e.Committed():
                self._count_samples(job.id, record.event)
            case e.RolledBack(from_commit=old, to_commit=new):
                self._steps_lost += max(0, old - new)
            case e.FencedWrite(count=count):
                self._fenced += count
            case e.JobEnded(state=state, reason=reason):
                self._cuts = {key: cut for key, cut in self._cuts.items() if key[0] != job.id}
                self._jobs[(job.queue, state, reason)] += 1
                self._completion.labels(job.queue).observe(record.at - job.submitted_at)
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
        replaced = "Processes of the installation itself that hung or died and were replaced."
        rows: tuple[tuple[str, str, tuple[str, ...], Mapping[Any, int]], ...] = (
            ("rota_jobs", "Jobs that ended.", ("queue", "state", "reason"), self._jobs),
            ("rota_preemptions", "Jobs asked for their devices.", ("queue", "reason"), self._preemptions),
            ("rota_failovers", "Recoveries begun.", ("level", "reason"), self._failovers),
            ("rota_restarts", "Processes started again.", ("queue",), self._restarts),
            ("rota_parts_replaced", replaced, ("part",), self._replaced),
            ("rota_decisions", "Decisions of the scheduler.", ("kind",), self._decisions),
            ("rota_samples", "Items of streams.", ("state", "reason"), self._samples),
        )
        for name, text, labels, counts in rows:
            family = CounterMetricFamily(name, text, labels=labels)
            for key, count in counts.items():
                family.add_metric(key if isinstance(key, tuple) else (key,), count)
            yield family
        yield CounterMetricFamily("rota_steps_lost", "Commits that were rolled back.", value=self._steps_lost)
        yield CounterMetricFamily("rota_fenced", "Writes of older epochs that were refused.", value=self._fenced)

    def _histograms(self) -> Iterator[Metric]:
        """Without the time of their making: it would be that of the last start, which replays them."""
        for histogram, (name, text, label, _) in zip((self._wait, self._completion, self._failover), HISTOGRAMS):
            family = HistogramMetricFamily(name, text, labels=(label,))
            samples = [sample for one in histogram.collect() for sample in one.samples]
            family.samples = [one for one in samples if not one.name.endswith("_created")]
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
        for job in self._installation.live.values():
            for row in stream_rows(job.commit):
                stale.add_metric((job.id, row["name"]), row["age"])
        yield stale
        used = totals["gpus_used"] / totals["gpus"] if totals["gpus"] else 0.0
        yield GaugeMetricFamily("rota_gpu_allocated_ratio", "Devices that jobs hold, of all.", value=used)
        up = GaugeMetricFamily("rota_node_up", "1 while a node answers.", labels=("node",))
        for row in node_list(self._installation)["items"]:
            up.add_metric((row["id"],), 0.0 if row["state"] == "lost" else 1.0)
        yield up
        yield GaugeMetricFamily("rota_log_records", "Records in the event log.", value=self._installation.number)
