"""Run jobs through a real master on a real engine, as the service would: submit, admit, start the master, look.

Ray reads its environment when it is imported, so nothing here imports it before the engine's fixture has run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest
from tests.makers import placement

from rota.job.core.context import JobContext
from rota.job.core.machine import fold, initial
from rota.job.inspect import inspect_workload
from rota.runtime import process
from rota.runtime.environ import Home
from rota.runtime.event_log.interface import INSTALL_SCOPE, Record, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.launcher import Handle
from rota.runtime.probe import probe_process
from rota.runtime.process import ProcessId
from rota.service.control.submission import inspect_workloads
from rota.service.jobfile.reader import read_job
from rota.spec.events import Event, InstanceStarted, JobAdmitted, JobEnded, JobQueued, JobSubmitted, MasterStarted
from rota.spec.ids import Epoch, JobId, RoleName
from rota.spec.job import JobSpec, RoleSpec, WeightsEdge
from rota.spec.resources import Res
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.runtime.ray.launcher import RayLauncher

WORKLOADS = Path(__file__).resolve().parent / "workloads"
deep = pytest.mark.skipif(not os.environ.get("ROTA_DEEP"), reason="ROTA_DEEP is not set")
WAIT_S = 200.0
"""A busy machine imports torch in 20 s; the limits are far from what a quiet one needs."""


@dataclass
class Run:
    """One job under way."""

    job: JobId
    home: Home
    log: SqlLog
    launcher: RayLauncher
    writer: Writer
    spec: JobSpec
    master: Handle | None = None
    attempts: int = field(default=0)
    _records: list[Record] = field(default_factory=list[Record])
    _contexts: list[JobContext] = field(default_factory=list[JobContext])

    @property
    def output(self) -> Path:
        return self.home.job(self.job).output

    def records(self) -> list[Record]:
        """The log of the job so far; a test looks thirty times a second, so only what is new is read."""
        self._records += self.log.read(job=self.job, after=self._records[-1].number if self._records else 0)
        return self._records

    def events(self, *kinds: type) -> list[Any]:
        return [one.event for one in self.records() if not kinds or isinstance(one.event, kinds)]

    def contexts(self) -> list[JobContext]:
        """The context after each record."""
        found = self._contexts or [initial(self.job)]
        for record in self.records()[len(found) - 1 :]:
            found.append(fold(found[-1], record))
        self._contexts = found
        return found

    def context(self) -> JobContext:
        return self.contexts()[-1]

    def append(self, *events: Event) -> None:
        self.log.append(events, writer=self.writer, job=self.job)

    async def start(self) -> None:
        self.append(JobSubmitted(spec=self.spec, workdir=self.spec.workdir or str(WORKLOADS)), JobQueued())
        await self.admit()

    async def admit(self) -> None:
        self.attempts += 1
        grants = placement(self.spec, "here")
        self.append(JobAdmitted(attempt=self.attempts, epoch=Epoch(self.attempts), placement=grants))
        await self.start_master()

    async def start_master(self) -> None:
        from rota.runtime.ray.launcher import MasterStart

        args = {"job": self.job, "db_url": self.home.db_url, "home": str(self.home.root)}
        start = MasterStart(
            job=self.job,
            target="rota.job.master.master:Master",
            args=args,
            env={},
            log_path=str(self.home.job(self.job).logs / "master-0.log"),
            key=b"k" * 32,
        )
        self.master = await self.launcher.start_master(start, timeout_s=WAIT_S)

    async def close(self) -> None:
        """Nothing runs beside the job."""

    async def until(self, what: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
        """Look until ``what`` holds; its value. Raises with the story of the job when the limit is reached."""
        deadline = time.monotonic() + limit_s
        while True:
            found = what()
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s} s\n{self.story()}\n{self.hung()}")
            await asyncio.sleep(0.03)

    async def until_state(self, *states: JobState, limit_s: float = WAIT_S) -> Any:
        return await self.until(lambda: (ctx := self.context()).state in states and ctx, limit_s)

    async def until_committed(self, n: int, limit_s: float = WAIT_S) -> Any:
        return await self.until(lambda: (ctx := self.context()).committed >= n and ctx, limit_s)

    async def end(self, limit_s: float = WAIT_S) -> JobEnded:
        ended = await self.until(lambda: self.events(JobEnded), limit_s)
        return ended[0]

    def hung(self) -> str:
        """Stacks of the master, and of the hosts of this engine that have not said yet who they are: one may hang."""
        started = {one.pid for one in self.events(InstanceStarted)}
        found = list[str]()
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                title = " ".join(one.cmdline())
                raylet = one.parent()
                ours = raylet is not None and str(self.home.root) in " ".join(raylet.cmdline())
                if ours and title.startswith("ray::") and "Host" in title and one.pid not in started:
                    which = process.identify(one.pid)
                    found.append(f"== {title}\n{probe_process(which) if which else ''}")
        return "\n".join(found)[-20_000:]

    def story(self) -> str:
        lines = [f"{one.seq:4} {one.at:.3f} {one.event}"[:600] for one in self.records()]
        logs = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.home.job(self.job).logs.glob("*.log")]
        return "\n".join(lines[2:] + logs)

    def pids(self) -> dict[str, int]:
        """The newest process of each instance."""
        return {f"{one.role}/{one.rank}": one.pid for one in self.events(InstanceStarted)}

    def starts(self, instance: str) -> int:
        return sum(f"{one.role}/{one.rank}" == instance for one in self.events(InstanceStarted))

    def kill(self, instance: str) -> int:
        """Kill its process with SIGKILL; one that is being replaced is waited for."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            started = [one for one in self.events(InstanceStarted) if f"{one.role}/{one.rank}" == instance][-1]
            if process.send_signal(ProcessId(pid=started.pid, start_time=started.start_time), signal.SIGKILL):
                return started.pid
            time.sleep(0.1)
        raise AssertionError(f"{instance} has no process\n{self.story()}")

    def kill_master(self) -> int:
        pid = self.events(MasterStarted)[-1].pid
        found = process.identify(pid)
        assert found is not None and process.send_signal(found, signal.SIGKILL)
        return pid


def role(name: str, workload: str, n: int = 1, **fields: Any) -> RoleSpec:
    """A role of ``n`` instances of a workload of ``tests/real/workloads``."""
    if str(WORKLOADS) not in sys.path:
        sys.path.insert(0, str(WORKLOADS))
    return RoleSpec(
        name=RoleName(name),
        workload=workload,
        replicas_min=n,
        replicas_max=n,
        res=Res(cpus=0.5),
        interface=inspect_workload(workload, {}),
        **fields,
    )


def example(file: Path, **fields: Any) -> JobSpec:
    """The spec of a job file of the examples, inspected as the service does it; ``fields`` replace its own."""
    spec = dataclasses.replace(read_job(file.read_text(), filename=file.name), workdir=str(file.parent), **fields)
    found = asyncio.run(inspect_workloads(spec, str(file.parent)))
    assert isinstance(found, JobSpec), found
    return found


def job(*roles: RoleSpec, weights: tuple[WeightsEdge, ...] = (), **env: str) -> JobSpec:
    return JobSpec(name="real", roles=roles, weights=weights, env=tuple(env.items()), grace_s=5.0)


AnyRun = TypeVar("AnyRun", bound=Run)


def run_job(
    engine,
    spec: JobSpec,
    body: Callable[[AnyRun], Awaitable[None]],
    limit_s: float = 560.0,
    make: Callable[..., AnyRun] = Run,
) -> None:
    """Run ``body`` over a started job; nothing of the job may be left in the engine afterwards."""

    async def main() -> None:
        job = JobId(f"t{os.getpid()}x{time.monotonic_ns() % 10**9}")
        home = Home.of(engine.home).make()
        home.job(job).make()
        log = SqlLog(home.db_url, migrate=True)
        launcher = engine.launcher()
        run = make(
            job=job,
            home=home,
            log=log,
            launcher=launcher,
            writer=Writer(scope=INSTALL_SCOPE, epoch=log.take_epoch(INSTALL_SCOPE)),
            spec=spec,
        )
        try:
            await run.start()
            await asyncio.wait_for(body(run), limit_s)
            if run.events(JobEnded):
                assert (await launcher.find(job)).instances == ()
                assert (await launcher.find(job)).reservations == ()
        finally:
            await sweep(run)
            await run.close()
            await launcher.close()
            log.close()

    asyncio.run(main())


async def sweep(run: Run) -> None:
    """End what is left of a job, the master first so that it starts nothing anew."""
    if run.master is not None:
        await run.launcher.stop(run.master, grace_s=0)
    found = await run.launcher.find(run.job)
    for handle in found.instances:
        await run.launcher.stop(handle, grace_s=0)
    for reservation in found.reservations:
        await run.launcher.release(reservation)
