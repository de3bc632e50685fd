"""Small makers of jobs, placements and records: one line an object."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rota.job.core.context import JobContext
from rota.job.core.machine import fold, initial, step
from rota.job.core.placement import requests_of
from rota.runtime.clock import iso
from rota.spec.commands import Command
from rota.spec.dispatch import OpSpec
from rota.spec.events import Event, JobAdmitted, JobQueued, JobSubmitted, Record
from rota.spec.gang import BundleGrant, Grant, Placement
from rota.spec.ids import Epoch, InstanceId, JobId, NodeId, RoleName
from rota.spec.job import Fail, Interface, JobSpec, RoleSpec, RoleStart, started_spec

JOB = JobId("job-1")


def op(name: str, **fields: Any) -> OpSpec:
    return OpSpec(name=name, **fields)


def fail(**fields: Any) -> Fail:
    return Fail(**fields)


def service(name: str, n: int = 1, *ops: OpSpec, state: bool = False, **fields: Any) -> RoleSpec:
    """A role whose instances wait for calls."""
    interface = fields.pop("interface", Interface(kind="class", ops=ops, has_state=state))
    return RoleSpec(
        name=RoleName(name), workload=f"m:{name}", replicas_min=n, replicas_max=n, interface=interface, **fields
    )


def mesh(name: str, n: int = 2, *, state: bool = True, **fields: Any) -> RoleSpec:
    """A stateful role of one process group."""
    return service(name, n, op("update", retry="commit"), state=state, mesh=(("dp", n),), **fields)


def loop(**fields: Any) -> RoleSpec:
    """The loop role."""
    return RoleSpec(name=RoleName("loop"), workload="m:loop", interface=Interface(kind="loop"), **fields)


def command(name: str, n: int = 1, **fields: Any) -> RoleSpec:
    """A role that runs a command and ends."""
    return RoleSpec(name=RoleName(name), run=("true",), replicas_min=n, replicas_max=n, **fields)


def spec(*roles: RoleSpec, **fields: Any) -> JobSpec:
    return JobSpec(name=fields.pop("name", "j"), roles=roles, **fields)


def rl(**fields: Any) -> JobSpec:
    """Actor of two ranks with state, two stateless rewards, a loop."""
    return spec(mesh("actor", 2), service("reward", 2), loop(), **fields)


def placement(job: JobSpec, *hosts: str) -> Placement:
    """The bundles on these nodes in turn."""
    hosts = hosts or ("h0",)
    return Placement(
        gangs=tuple(
            Grant(
                gang=request.gang,
                bundles=tuple(
                    BundleGrant(index=ask.index, node=NodeId(host), host=host, devices=(), res=ask.res)
                    for ask in request.bundles
                    for host in (hosts[ask.index % len(hosts)],)
                ),
            )
            for request in requests_of(job)
        )
    )


def admitted(job: JobSpec, attempt: int = 1, epoch: int = 1, hosts: Sequence[str] = ("h0",)) -> JobAdmitted:
    return JobAdmitted(attempt=attempt, epoch=Epoch(epoch), placement=placement(job, *hosts))


def started(job: JobSpec, role: str, replicas: int, *hosts: str) -> JobAdmitted:
    """An admission with another number of instances of a role than its fewest."""
    starts = (RoleStart(role=RoleName(role), replicas=replicas),)
    return replace(admitted(started_spec(job, starts), hosts=hosts), starts=starts)


def submitted(job: JobSpec) -> tuple[Event, ...]:
    return (JobSubmitted(spec=job), JobQueued())


def at(text: str) -> InstanceId:
    return InstanceId.parse(text)


class Log:
    """Feeds events to the machine one by one, numbering them; keeps the context and the last commands."""

    def __init__(self, job: JobId = JOB) -> None:
        self.ctx: JobContext = initial(job)
        self.records: list[Record] = []
        self.commands: tuple[Command, ...] = ()
        self.begun: frozenset[str] = frozenset()

    def feed(self, *events: Event, after_s: float = 1.0) -> tuple[Command, ...]:
        """Append and step; returns the commands of all of them."""
        out: list[Command] = []
        for event in events:
            number = len(self.records) + 1
            at_s = (self.records[-1].at if self.records else 1000.0) + after_s
            record = Record(number=number, job=self.ctx.job, seq=number, at=at_s, event=event)
            self.records.append(record)
            done = step(self.ctx, (record,), self.begun)
            self.ctx, self.begun = done.ctx, done.begun
            out += done.commands
        self.commands = tuple(out)
        return self.commands


def replay(job: JobId, records: Iterable[Record], snapshot: JobContext | None = None) -> JobContext:
    """The context after all ``records``; those that a snapshot covers are skipped."""
    return functools.reduce(fold, records, snapshot or initial(job))


def ids(commands: Iterable[Command]) -> list[str]:
    """The identifiers of commands, timers left out."""
    return [one.id for one in commands if not one.id.startswith("timer/")]


def format_line(wall_s: float, attempt: int, epoch: int, stream: str, text: str) -> str:
    """One stamped line with its line feed."""
    return f"{iso(wall_s)} {attempt}/{epoch} {stream} {text}\n"
