"""A service with a day's work in it, on a port of this machine: jobs that run, wait, failed and healed.

The log, the scheduler and every door are real; what masters would write is written by hand, so that pages have much to
show within a second.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.makers import format_line
from tests.service.standing import Standing, listening, standing

from rota.runtime.output import log_name
from rota.spec.events import (
    Committed,
    FailoverEnded,
    FailoverStarted,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobEnded,
)
from rota.spec.ids import Epoch, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level

CODE = """
from rota import Workload, op

class Role(Workload):
    @op
    async def work(self, batch):
        return batch

class Actor(Role):
    @op.state
    def state(self):
        return {}

class Rollout(Role):
    @op.weights
    def load(self, version, tensors):
        pass

async def loop(flow):
    pass
"""
LEARN = """
name: learn
queue: research/rl
time_limit: 2h
labels: {team: rl}
roles:
  actor: {workload: "learn:Actor", replicas: 2, resources: {gpus: 2}}
  rollout: {workload: "learn:Rollout", replicas: 6, resources: {gpus: 1}}
  reward: {workload: "learn:Role", replicas: 2}
  loop: {workload: "learn:loop"}
edges: [rollout.work -> reward.work, reward.work -> actor.work]
weights: [{from: actor, to: rollout}]
"""
BIG = """
name: big
queue: research/rl
priority: 60
time_limit: 1h
roles:
  trainer: {run: [python, t.py], replicas: 2, resources: {gpus: 8}}
"""
SMALL = """
name: {name}
queue: {queue}
time_limit: {limit}
roles:
  main: {{run: [python, x.py], resources: {{gpus: {gpus}}}}}
"""
QUEUES = [
    {"path": "research", "guaranteed": {"cpus": 0, "gpus": 20}},
    {"path": "research/rl", "guaranteed": {"cpus": 0, "gpus": 8}, "limit": {"cpus": 0, "gpus": 24}},
    {"path": "research/vision", "guaranteed": {"cpus": 0, "gpus": 12}},
    {"path": "prod", "guaranteed": {"cpus": 0, "gpus": 12}, "limit": {"cpus": 0, "gpus": 28}},
    {"path": "default"},
]


@dataclass
class Seeded:
    """Where it answers; ``code`` makes a new address that opens the UI with a session."""

    url: str
    service: Standing
    loop: asyncio.AbstractEventLoop

    def door(self) -> str:
        return f"{self.url}/login?code={self.ask('POST', '/api/v1/login/code')['code']}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request with the token, from the thread of the test."""
        asking = self.service.http.request(method, path, json=body)
        answer = asyncio.run_coroutine_threadsafe(asking, self.loop).result(20)
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def seeded(home: Path, *, pretend: str = "2x2x8") -> Iterator[Seeded]:
    """Start it in a thread of its own, with an event loop of its own; it is gone at the end."""
    ready, leave = threading.Event(), asyncio.Event()
    box: list[Seeded] = []
    broken: list[BaseException] = []

    async def main() -> None:
        async with standing(home, pretend=pretend) as service, listening(service) as http:
            await fill(service)
            box.append(Seeded(url=str(http.base_url), service=service, loop=asyncio.get_running_loop()))
            ready.set()
            await leave.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            broken.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="seeded")
    thread.start()
    ready.wait(180)
    try:
        if not box:
            raise RuntimeError("the service did not start") from (broken[0] if broken else None)
        yield box[0]
    finally:
        if box:
            box[0].loop.call_soon_threadsafe(leave.set)
        thread.join(30)
    assert not broken, broken


async def fill(service: Standing) -> None:
    """Queues, a job of four roles that lost an instance and healed, jobs that run, wait and failed, a drained node."""
    answer = await service.http.put("/api/v1/queues", json={"queues": QUEUES})
    assert answer.status_code == 200, answer.text
    code = service.app.home.root / "code"
    code.mkdir(exist_ok=True)
    (code / "learn.py").write_text(CODE)
    await service.submit(LEARN, workdir=str(code))
    await service.until("learn-1", JobState.ADMITTED)
    await play_learning(service)
    for name, queue, gpus, limit in (
        ("vision", "research/vision", 8, "3h"),
        ("serve", "prod", 4, "20m"),
        ("eval", "prod", 2, "10m"),
    ):
        await service.submit(SMALL.format(name=name, queue=queue, gpus=gpus, limit=limit))
        await service.until(f"{name}-1", JobState.ADMITTED)
        await service.play_start(f"{name}-1", "main/0", pid=5001)
    await fail_single(service, "eval-1")
    await service.submit(BIG)
    await service.until("big-1", JobState.QUEUED)
    await service.submit(SMALL.format(name="tune", queue="research/rl", gpus=4, limit="30m"))
    answer = await service.http.patch("/api/v1/jobs/big-1", json={"changes": {"priority": 70, "time_limit_s": 5400}})
    assert answer.status_code == 200, answer.text
    await service.http.post("/api/v1/nodes/r1n1:cordon", json={"reason": "fan 3 is slow"})


async def play_learning(service: Standing) -> None:
    """What the master of ``learn-1`` would write: all start, commits, rollout/3 dies and comes back."""
    roles = {"actor": 2, "rollout": 6, "reward": 2, "loop": 1}
    members = [(RoleName(role), rank) for role, n in roles.items() for rank in range(n)]
    await service.play_start("learn-1", *(f"{role}/{rank}" for role, rank in members), pid=4000)
    placed = (await service.get("/jobs/learn-1/placement"))["items"]
    role, rank = RoleName("rollout"), 3
    node = NodeId(next(one["node"] for one in placed if one["instance"] == f"{role}/{rank}"))
    text = "the process ended by SIGKILL"

    def commit(n: int) -> Committed:
        return Committed(n=n, loop_epoch=Epoch(1), metrics={"reward": 1 - 0.9**n, "loss": 2.5 * 0.85**n, "lag": n % 3})

    steps = [
        *([commit(n)] for n in range(1, 6)),
        [InstanceLost(role=role, rank=rank, epoch=Epoch(1), reason=Reason.SIGNALLED, text=text, signal=9)],
        [
            FailoverStarted(
                failover=1,
                level=Level.PROCESS,
                scope=((role, rank, Epoch(2)),),
                restore=5,
                reason=Reason.SIGNALLED,
                role=role,
                rank=rank,
                text=text,
            )
        ],
        [
            InstanceStopped(role=role, rank=rank, epoch=Epoch(1)),
            InstanceStarted(role=role, rank=rank, epoch=Epoch(2), node=node, pid=4100),
        ],
        [InstanceReady(role=role, rank=rank, epoch=Epoch(2), restored=5), FailoverEnded(failover=1, seconds=0.4)],
        *([commit(n)] for n in range(6, 12)),
    ]
    for step in steps:
        await service.seen(service.as_master("learn-1", *step))
        await asyncio.sleep(0.05)
    logs = service.app.home.job("learn-1").logs
    for role, rank in members:
        with (logs / log_name(role, rank)).open("a") as file:
            at = service.app.clock.wall_s()
            file.writelines(
                format_line(at + i, 1, 1, "out" if i % 9 else "err", f"step {i}: {role} {rank} worked on batch {i * 7}")
                for i in range(40)
            )


async def fail_single(service: Standing, job: str) -> None:
    """The job's one instance raises, and the job fails."""
    main, text = RoleName("main"), "ValueError: the batch is empty"
    trace = f'Traceback (most recent call last):\n  File "x.py", line 7, in main\n    step(batch)\n{text}'
    await service.seen(
        service.as_master(
            job,
            InstanceLost(
                role=main, rank=0, epoch=Epoch(1), reason=Reason.USER_ERROR, text=text, traceback=trace, exit_code=1
            ),
            JobEnded(state=JobState.FAILED, reason=Reason.USER_ERROR, text=text, role=main, rank=0, traceback=trace),
        )
    )
