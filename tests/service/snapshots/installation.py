"""One installation that is the same at every run: fixed clock, seeded identifiers, jobs in every state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from tests.makers import format_line, loop, mesh, op, service
from tests.service.described import check
from tests.service.standing import PlayedEngine, Standing, empty_database

from rota.job.core.progress import Span
from rota.job.core.survival import CUT
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.output import log_name
from rota.runtime.random import SeededRandom
from rota.service.config import load_settings
from rota.service.control import forecasts
from rota.service.control import loop as service_loop
from rota.service.control.submission import Refused, inspect_workloads
from rota.service.process import assembly
from rota.service.rest.app import make_app
from rota.service.rest.routes import cluster
from rota.spec import codec
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    FailoverEnded,
    FailoverStarted,
    GangReleased,
    GangReserved,
    InstanceEnded,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobEnded,
    JobEvent,
    JobRequeued,
    MasterStarted,
    PartReplaced,
    PreemptAsked,
    Reattached,
)
from rota.spec.ids import Epoch, InstanceId, JobId, NodeId, RoleName
from rota.spec.job import Edge, Interface, JobSpec, StreamSpec, WeightsEdge
from rota.spec.reasons import Reason
from rota.spec.resources import Res
from rota.spec.states import JobState, Level
from rota.testing.memory import VirtualClock

LIMIT_S = 20.0
START_S = 1_700_000_000.0
STEP_S = 10.0
"""Between two steps of the scenario."""
QUIET_TURNS = 2
"""Turns of the service loop without a record after which nothing follows from what was done."""
NEVER_INSPECTED = "slow"
"""The name of the job whose workloads are inspected for as long as the installation is open."""
URL = "http://127.0.0.1:7700"

QUEUES: list[dict[str, Any]] = [
    {"path": "research", "guaranteed": {"cpus": 0, "gpus": 10}},
    {
        "path": "research/rl",
        "guaranteed": {"cpus": 0, "gpus": 4},
        "limit": {"cpus": 16, "gpus": 12},
        "user_limit": {"cpus": 0, "gpus": 10},
    },
    {"path": "research/vision", "guaranteed": {"cpus": 0, "gpus": 6}, "weight": 2},
    {"path": "prod", "guaranteed": {"cpus": 0, "gpus": 6}},
    {"path": "default"},
]
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 7, in main\n    step(batch)\n'
FAULT = "ValueError: the batch is empty"
CRASH = "labels: {team: vision}\nsecrets: [HF_TOKEN]\n"
FIRST, SECOND = Epoch(1), Epoch(2)
MAIN = RoleName("main")


def job_file(name: str, *, queue: str = "default", gpus: int = 1, more: str = "", replicas: str = "1") -> str:
    """A job of one command."""
    return (
        f"name: {name}\nqueue: {queue}\n{more}"
        f"roles:\n  main: {{run: [python, x.py], replicas: {replicas}, resources: {{gpus: {gpus}}}}}\n"
    )


LOADS = Interface(kind="class", ops=(op("work"),), loads_weights=True)


def learning(name: str) -> JobSpec:
    """Actor of two ranks with state, two rollouts, one reward, a loop; with edges, a stream and weights."""
    return JobSpec(
        name=name,
        queue="research/rl",
        priority=60,
        time_limit_s=7200.0,
        labels=(("team", "rl"),),
        roles=(
            mesh("actor", 2, res=Res(cpus=2, gpus=1)),
            service("rollout", 2, res=Res(cpus=1, gpus=1), interface=LOADS),
            service("reward", 1, op("work")),
            loop(),
        ),
        edges=(Edge(source="rollout.work", target="reward.work"), Edge(source="reward.work", target="actor.update")),
        streams=(StreamSpec(name="samples", cap=32),),
        weights=(WeightsEdge(source=RoleName("actor"), target=RoleName("rollout")),),
    )


def _serving(name: str) -> JobSpec:
    """One instance that may become three, and a loop."""
    serve = replace(service("serve", 1, op("work"), res=Res(gpus=1)), replicas_max=3)
    return JobSpec(name=name, queue="research/vision", roles=(serve, loop()))


MEMBERS = ("actor/0", "actor/1", "rollout/0", "rollout/1", "reward/0", "loop/0")

BEAT: dict[str, Any] = {
    "epoch": 1,
    "progress_n": 41,
    "progress_unit": "items",
    "idle_s": 0.25,
    "age_s": 1.5,
    "busy": ["work"],
    "quiet": "",
    "waits": [{"target": "reward/0"}],
    "step_s": 0.125,
    "cpus": 0.75,
    "rss_bytes": 123_456_789,
    "weights": [["actor-rollout", "held", 4, 1, 2.5]],
    "calls": [["call", "reward", "work", 41, 1, 3.25, 40_960]],
}
WAIT = {"source": "loop/0", "target": "rollout/0", "kind": "call", "what": "work", "age_s": 75.0}
WAITS: dict[str, Any] = {
    "vertices": [
        {
            "name": "rollout/0",
            "limit_s": 600.0,
            "still_s": 75.0,
            "silent_s": 0.5,
            "excuse": "",
            "doing": "work",
            "stuck": False,
            "state": "READY",
        }
    ],
    "slow": [{"instance": "rollout/1", "factor": 2.5}],
    "dropped": ["reward/0"],
    "waits": [WAIT],
    "culprits": [
        {
            "members": ["rollout/0"],
            "deadlock": False,
            "text": "rollout/0 made no progress for 75 s in work; loop/0 waits for it",
            "cycle": [WAIT],
            "waiters": ["loop/0"],
        }
    ],
    "suspects": [],
    "stacks": {"rollout/0": 'File "learn.py", line 9, in work'},
}


class _Engine(PlayedEngine):
    """The engine of the scenario: the two learning jobs answer when they are asked, the others are silent."""

    async def beats(self, job: JobId) -> dict[str, dict[str, Any]]:
        return {"rollout/0": BEAT, "rollout/1": BEAT | {"epoch": 9}} if job == "learn-1" else {}

    async def why(self, job: JobId) -> dict[str, Any]:
        return WAITS if job == "learn-1" else {}


@dataclass
class Installed(Standing):
    """The installation with what the scenario needs: time that it moves itself, and knowledge of what goes on."""

    time: VirtualClock
    home: Path
    served: Any
    """The application, for transports of its own."""
    counts: dict[str, int] = field(default_factory=lambda: {"read": 0, "append": 0, "decide": 0})
    tokens: dict[str, str] = field(default_factory=dict[str, str])
    """Tokens of the users that the scenario makes."""

    def note(self, what: str, _: float) -> None:
        """Count what the service loop says that it did."""
        self.counts[what] += 1

    async def settle(self) -> None:
        """Wait until the service loop has done all that follows from what was written."""
        async with asyncio.timeout(LIMIT_S):
            quiet = 0
            while quiet < QUIET_TURNS:
                before = dict(self.counts)
                while self.counts["read"] == before["read"]:
                    await asyncio.sleep(0.001)
                names = {task.get_name() for task in asyncio.all_tasks()} - {f"inspect/{NEVER_INSPECTED}-1"}
                busy = any(name.startswith(("inspect/", "master/")) for name in names)
                moved = self.counts["append"] != before["append"] or self.log.last_number() != self.number
                quiet = 0 if busy or moved else quiet + 1

    @property
    def number(self) -> int:
        """The last record that the service has taken in."""
        return self.app.loop.installation.number

    async def after(self, *events: JobEvent, job: str) -> None:
        """What the master of a job writes, a step later."""
        self.time.advance(STEP_S)
        self.as_master(job, *events)
        await self.settle()

    async def ask(self, method: str, path: str, body: Any = None, *, user: str = "") -> httpx.Response:
        """One request, a step after the last; of a user if named. It must succeed."""
        self.time.advance(STEP_S)
        headers = {"Authorization": f"Bearer {self.tokens[user]}"} if user else {}
        answer = await self.http.request(method, f"/api/v1{path}", json=body, headers=headers)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        await self.settle()
        return answer

    async def submitted(self, source: str | JobSpec, *, user: str = "", state: JobState = JobState.ADMITTED) -> str:
        """Submit a job and check the state that it comes to; its id."""
        given = {"spec": source.to_json()} if isinstance(source, JobSpec) else {"source": source}
        job = (await self.ask("POST", "/jobs", {**given, "workdir": "/"}, user=user)).json()["id"]
        found = self.app.loop.installation.jobs[job]
        assert found.state is state, f"{job} is {found.state}: {found.ended or found.waits}"
        return job

    async def begin(self, job: str, *members: str, pid: int, ready: bool = True) -> None:
        """What a master writes until the instances are started, and ready unless said otherwise."""
        story = self.app.loop.installation.jobs[JobId(job)]
        ids = [InstanceId.parse(one) for one in members]
        epochs = {one: story.ctx.instances[one].epoch for one in ids}
        nodes = {one: story.ctx.bundle(one)[1].node for one in ids}
        await self.after(
            MasterStarted(master_epoch=FIRST, pid=pid - 1, node=nodes[ids[0]]),
            Reattached(master_epoch=FIRST),
            *(GangReserved(gang=gang.id, epoch=gang.epoch) for gang in story.ctx.gangs),
            *(
                InstanceStarted(role=one.role, rank=one.rank, epoch=epochs[one], node=nodes[one], pid=pid + i)
                for i, one in enumerate(ids)
            ),
            job=job,
        )
        if ready:
            await self.after(*(InstanceReady(role=one.role, rank=one.rank, epoch=epochs[one]) for one in ids), job=job)


async def _inspected(spec: JobSpec, workdir: str, built: dict[RoleName, str]) -> JobSpec | Refused:
    """As the service does it, save for the job that is to be seen meanwhile."""
    if spec.name == NEVER_INSPECTED:
        await asyncio.Event().wait()
    return await inspect_workloads(spec, workdir, built)


@asynccontextmanager
async def installed(home: Path) -> AsyncIterator[Installed]:
    """The installation with everything in it; nothing of it depends on the machine or on the time."""
    time = VirtualClock(wall_start_s=START_S)
    with ExitStack() as changed:
        for owner, name, value in (
            (assembly, "SystemClock", lambda: time),
            (assembly, "SystemRandom", lambda: SeededRandom(7)),
            (service_loop, "inspect_workloads", _inspected),
            (forecasts, "SOON_S", 3600.0),
            (forecasts, "NEW_S", LIMIT_S),
            (forecasts, "PATIENCE_S", LIMIT_S),
            (cluster, "DISK_LOW_BYTES", 0),
        ):
            changed.enter_context(patch.object(owner, name, value))
        flags = {"home": str(home), "pretend": "2x2x4", "db_url": "", "poll_s": 0.001}
        settings = replace(load_settings(flags, environ={}), listen="10.0.0.5")
        home.mkdir(exist_ok=True)
        (home / "rota.db").write_bytes(empty_database())
        log = SqlLog(assembly.db_url(settings), clock=time, migrate=True)
        engine = _Engine()
        app = assembly.assemble(settings, log, engine=engine)
        served = make_app(app)
        transport = httpx.ASGITransport(app=served, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {app.home.token.read_text().strip()}"}
        hooks = {"response": [check]}
        async with httpx.AsyncClient(
            transport=transport, base_url=URL, headers=headers, timeout=LIMIT_S, event_hooks=hooks
        ) as http:
            it = Installed(app=app, log=log, engine=engine, http=http, time=time, home=home, served=served)
            app.loop.timed = it.note
            await app.loop.replay()
            app.forecasts.begin()
            turning = asyncio.create_task(app.loop.run())
            try:
                await app.loop.append(assembly.node_changes(app, assembly.wanted_nodes(settings)))
                app.ready = True
                await fill(it)
                yield it
            finally:
                app.forecasts.close()
                await app.loop.stop()
                await turning
                log.close()


async def fill(it: Installed) -> None:
    """The whole scenario, in order."""
    await _accounts(it)
    await _learning(it)
    await _ended(it)
    await _under_way(it)
    await _waiting(it)
    await _cluster(it)


async def _accounts(it: Installed) -> None:
    """The tree of queues, three users with tokens, secrets, a webhook."""
    await it.ask("PUT", "/queues", {"queues": QUEUES})
    for name, grants in (
        ("ann", [{"queue": "", "role": "user"}]),
        ("bob", [{"queue": "research", "role": "queue-admin"}, {"queue": "prod", "role": "viewer"}]),
        ("eve", [{"queue": "prod", "role": "viewer"}]),
    ):
        await it.ask("PUT", f"/users/{name}", {"grants": grants})
        made = await it.ask("POST", "/tokens", {"user": name, "name": f"laptop of {name}", "ttl_s": 86400.0})
        it.tokens[name] = made.json()["token"]
    await it.ask("PUT", "/secrets/HF_TOKEN", {"value": "it is not shown"}, user="ann")
    await it.ask("PUT", "/secrets/WANDB_KEY", {"value": "nor is this"})
    url = "http://rota:hidden@93.184.216.34:8080/hook"
    await it.ask("POST", "/webhooks", {"url": url, "on": ["failed", "healed"], "queue": "research"})


async def _learning(it: Installed) -> None:
    """A job of many roles that lost a member and healed; a second one whose recovery is under way."""
    await it.submitted(learning("learn"))
    await it.begin("learn-1", *MEMBERS, pid=4000)
    await it.after(*(_commit(n) for n in range(1, 4)), job="learn-1")
    await it.after(CheckpointSaved(n=2, path="/data/learn/2", seconds=1.5), job="learn-1")
    await _lose_rollout(it, "learn-1", failover=1)
    await it.after(
        InstanceStopped(role=RoleName("rollout"), rank=1, epoch=FIRST),
        InstanceStarted(role=RoleName("rollout"), rank=1, epoch=SECOND, node=_node_of(it, "learn-1"), pid=4100),
        job="learn-1",
    )
    await it.after(
        InstanceReady(role=RoleName("rollout"), rank=1, epoch=SECOND, restored=3),
        FailoverEnded(failover=1, seconds=20.0),
        job="learn-1",
    )
    await it.after(_commit(4), job="learn-1")
    logs = it.app.home.job(JobId("learn-1")).logs
    for i, (role, rank) in enumerate((("rollout", 0), ("loop", 0))):
        lines = [
            format_line(START_S + 60 + 2 * n + i, 1, 1, "err" if n == 2 else "out", f"{role} step {n}")
            for n in range(4)
        ]
        (logs / log_name(role, rank)).write_text("".join(lines))
    (it.app.home.job(JobId("learn-1")).output / "report.json").write_text('{"loss": 0.1}')
    _write_spans(it)
    await it.submitted(learning("heal"))
    await it.begin("heal-1", *MEMBERS, pid=4200)
    await it.after(_commit(1), job="heal-1")
    await _lose_rollout(it, "heal-1", failover=1)


def _commit(n: int) -> Committed:
    cut = {
        "admitted": 8 * n,
        "pending": 1,
        "running": 2,
        "queued": 1,
        "trained": 8 * n - 5,
        "dropped": {"stale": 1},
        "again": 0,
        "age": 2,
    }
    metrics = {"loss": 2.5 / n, "step": n}
    cursor = {CUT: {"streams": {"samples": cut}}}
    return Committed(n=n, loop_epoch=FIRST, metrics=metrics, cursor=cursor, versions={"actor-rollout": n})


def _node_of(it: Installed, job: str) -> NodeId:
    story = it.app.loop.installation.jobs[JobId(job)]
    return story.ctx.bundle(InstanceId(RoleName("rollout"), 1))[1].node


async def _lose_rollout(it: Installed, job: str, *, failover: int) -> None:
    """Its second rollout is killed, and a recovery begins."""
    role, text = RoleName("rollout"), "the process ended by SIGKILL"
    lost = InstanceLost(role=role, rank=1, epoch=FIRST, reason=Reason.SIGNALLED, text=text, signal=9)
    await it.after(lost, job=job)
    restore = it.app.loop.installation.jobs[JobId(job)].ctx.committed
    await it.after(
        FailoverStarted(
            failover=failover,
            level=Level.PROCESS,
            scope=((role, 1, SECOND),),
            restore=restore,
            reason=Reason.SIGNALLED,
            role=role,
            rank=1,
            text=text,
        ),
        job=job,
    )


def _write_spans(it: Installed) -> None:
    """What two instances ran and waited for, as their processes write it down."""
    folder = it.app.home.job(JobId("learn-1")).spans
    folder.mkdir(parents=True, exist_ok=True)
    since = START_S + 300
    given = {
        "loop-0": [
            Span(kind="call", name="work", at_s=since, s=8.0, target="rollout/0", call="c1"),
            Span(kind="commit", name="1", at_s=since + 9, s=1.0, target="master"),
        ],
        "rollout-0": [Span(kind="run", name="work", at_s=since + 1, s=6.0, call="c1")],
    }
    for name, spans in given.items():
        lines = [json.dumps(codec.to_json_value(span)) for span in spans]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


async def _ended(it: Installed) -> None:
    """Jobs that succeeded, failed by their code and were cancelled."""
    await it.submitted(job_file("done"), user="ann")
    await it.begin("done-1", "main/0", pid=5000)
    await it.after(InstanceEnded(role=MAIN, rank=0, epoch=FIRST), job="done-1")
    await _end(it, "done-1", JobEnded(state=JobState.SUCCEEDED, reason=Reason.COMPLETED))
    await it.submitted(
        job_file("crash", queue="research/vision", more="labels: {team: vision}\nsecrets: [HF_TOKEN]\n"), user="ann"
    )
    await it.begin("crash-1", "main/0", pid=5100)
    lost = InstanceLost(
        role=MAIN, rank=0, epoch=FIRST, reason=Reason.USER_ERROR, text=FAULT, traceback=TRACEBACK + FAULT, exit_code=1
    )
    await it.after(lost, job="crash-1")
    failed = JobEnded(
        state=JobState.FAILED, reason=Reason.USER_ERROR, text=FAULT, role=MAIN, rank=0, traceback=TRACEBACK + FAULT
    )
    await _end(it, "crash-1", failed)
    await it.submitted(job_file("cancel"))
    await it.ask("POST", "/jobs/cancel-1:stop", {"grace_s": 5.0, "reason": "not needed"})
    await _end(
        it, "cancel-1", JobEnded(state=JobState.CANCELLED, reason=Reason.STOPPED_BY_USER, text="stopped by local")
    )


async def _end(it: Installed, job: str, ended: JobEnded) -> None:
    """The processes and reservations are gone, then the job has ended."""
    story = it.app.loop.installation.jobs[JobId(job)]
    released = [GangReleased(gang=gang.id, epoch=gang.epoch, gone=True) for gang in story.ctx.gangs]
    stopped = [
        InstanceStopped(role=one.id.role, rank=one.id.rank, epoch=one.epoch)
        for one in story.ctx.instances.values()
        if one.process is not None
    ]
    await it.after(*stopped, *released, ended, job=job)


async def _under_way(it: Installed) -> None:
    """A job in each of the other states that hold devices, and one that was paused."""
    await it.submitted(job_file("admit", queue="prod"))
    await it.submitted(job_file("check", queue="prod"))
    await it.after(*_mastered(it, "check-1", pid=6000), job="check-1")
    await it.submitted(job_file("begin", queue="prod"))
    await it.begin("begin-1", "main/0", pid=6100, ready=False)
    await it.submitted(job_file("halt", queue="prod"))
    await it.begin("halt-1", "main/0", pid=6200)
    await it.ask("POST", "/jobs/halt-1:stop", {"grace_s": 60.0})
    await it.submitted(_serving("grow"))
    await it.begin("grow-1", "serve/0", "loop/0", pid=6300)
    await it.ask("POST", "/jobs/grow-1:scale", {"role": "serve", "n": 2})
    serve, text = RoleName("serve"), "serve has 2 instances from now on"
    grown = FailoverStarted(
        failover=1,
        level=Level.ROLE,
        scope=((serve, 0, SECOND),),
        restore=0,
        reason=Reason.RESIZED,
        role=serve,
        rank=0,
        text=text,
    )
    await it.after(grown, job="grow-1")
    await it.submitted(job_file("pause", queue="research/vision"), user="ann")
    await it.begin("pause-1", "main/0", pid=6400)
    await it.ask("POST", "/jobs/pause-1:pause", {"grace_s": 20.0}, user="ann")
    await _requeue(it, "pause-1", Reason.PAUSED)
    await it.submitted(job_file("yield", queue="research/vision"))
    await it.begin("yield-1", "main/0", pid=6500)


def _mastered(it: Installed, job: str, *, pid: int) -> list[JobEvent]:
    """A master came up and reserved the devices."""
    gangs = it.app.loop.installation.jobs[JobId(job)].ctx.gangs
    return [
        MasterStarted(master_epoch=FIRST, pid=pid),
        Reattached(master_epoch=FIRST),
        *(GangReserved(gang=gang.id, epoch=gang.epoch) for gang in gangs),
    ]


async def _requeue(it: Installed, job: str, reason: Reason) -> None:
    """Its processes and reservations are gone, and the attempt is over."""
    ctx = it.app.loop.installation.jobs[JobId(job)].ctx
    await it.after(
        *(InstanceStopped(role=one.id.role, rank=one.id.rank, epoch=one.epoch) for one in ctx.instances.values()),
        *(GangReleased(gang=gang.id, epoch=gang.epoch) for gang in ctx.gangs),
        JobRequeued(attempt=ctx.attempt, reason=reason, counts=False),
        job=job,
    )


async def _waiting(it: Installed) -> None:
    """A job whose workloads are inspected, one that waits, one that it makes room for it, edits."""
    await it.submitted(job_file(NEVER_INSPECTED), state=JobState.SUBMITTED)
    more = "priority: 70\ntime_limit: 1h\n"
    await it.submitted(job_file("big", queue="research/vision", gpus=4, more=more, replicas="3"), state=JobState.QUEUED)
    await it.submitted(job_file("tail", queue="research/vision", gpus=4), user="ann", state=JobState.QUEUED)
    await it.ask("PATCH", "/jobs/big-1", {"changes": {"priority": 75, "labels.team": "vision"}})
    story = it.app.loop.installation.jobs[JobId("yield-1")]
    asked = PreemptAsked(reason=Reason.PREEMPTED_PRIORITY, for_job="big-1")
    it.time.advance(STEP_S)
    await it.app.loop.append([asked], job=story.id, expected_seq=story.seq)
    await it.settle()


async def _cluster(it: Installed) -> None:
    """A drained and a cordoned node, one that left, a part that was replaced."""
    await it.ask("POST", "/nodes/r1n1:drain", {"reason": "fan 3 is slow", "notice_s": 300.0})
    await it.ask("POST", "/nodes/r1n0:cordon", {"reason": "it is looked at"})
    it.time.advance(STEP_S)
    replaced = PartReplaced(part="gateway", pid=77, text="the gateway did not answer for 30 s", found_at=START_S + 1)
    await it.app.loop.append([replaced])
    await it.settle()
