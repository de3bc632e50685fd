"""Fork the live state into the simulation: when would a job run?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.cluster.core.asks import JobAsk
from rota.cluster.core.plugins import Profile
from rota.cluster.core.snapshot import JobRow, State
from rota.cluster.sim import SimJob, Simulation
from rota.runtime.clock import Clock
from rota.spec.ids import JobId

HORIZON_S = 30 * 86400.0
PESSIMISM = 2.0
"""How much longer than estimated jobs run in the pessimistic forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Start of a job in seconds of the scheduler's clock: likely, and if jobs run longer; None: not known.

    ``basis`` says what the durations rest on.
    """

    p50: float | None
    p90: float | None
    basis: str

    def to_json(self) -> dict[str, Any]:
        """The ``estimate`` of ``rota explain --json``."""
        return {"p50": self.p50, "p90": self.p90, "basis": self.basis}


def estimated_start(state: State, profile: Profile, job: JobId, now: float, clock: Clock) -> Estimate:
    """When a waiting job would start if nobody else came, by playing the live jobs to that moment on a copy.

    Durations are the declared estimates or time limits; a job without one takes the mean of those that have one. The
    live state is not touched. Raises KeyError for a job that is not known.
    """
    known = [row.ask.est_s for row in state.jobs.values() if row.ask.est_s is not None]
    if not known and state.holding():
        return Estimate(p50=None, p90=None, basis="no job has an estimate or a time limit")
    mean = sum(known) / len(known) if known else 0.0
    basis = f"{len(known)} of {len(state.jobs)} jobs have an estimate or a time limit"
    likely = _start_of(state, profile, job, now, mean, 1.0, clock)
    late = _start_of(state, profile, job, now, mean, PESSIMISM, clock)
    return Estimate(p50=likely, p90=late, basis=basis)


def _start_of(
    state: State, profile: Profile, job: JobId, now: float, mean: float, factor: float, clock: Clock
) -> float | None:
    fork = state.with_cluster(state.nodes, state.queues.rows)
    for node, health in zip(state.nodes, state.node_health):
        fork.node_health[fork.node_row[node.id]] = health
    fork.dev_health[:] = state.dev_health
    for row in range(len(fork.nodes)):
        fork.recount(row)
    jobs = [_sim_job(row, now, mean, factor) for row in (state.jobs[i] for i in sorted(state.jobs))]
    run = Simulation(fork, profile, jobs, clock, until_s=now + HORIZON_S, stop_when_started=job, now=now)
    return run.run().runs[job].first_start_s


def _sim_job(row: JobRow, now: float, mean: float, factor: float) -> SimJob:
    ask: JobAsk = row.ask
    length = (ask.est_s if ask.est_s is not None else mean) * factor
    left = max(0.0, length - (now - row.started_at)) if row.held else length
    return SimJob(ask=ask, submit_s=now, work_s=left)
