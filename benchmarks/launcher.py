"""Launcher and engine against bare Ray in one run: start, call, death, eight at once, GCS killed.

``python benchmarks/launcher.py [--rounds N] [--json]``. A row is a median and its ratio to bare Ray on the same engine
in the same run; rows without a peer stand for themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rota.runtime import process
from rota.runtime.launcher import Call, Handle, InstanceSpec, Reservation
from rota.runtime.ray.engine import EngineSettings, client_environment, find_engine, start_engine, stop_engine
from rota.spec.gang import BundleGrant
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.resources import Res
from run import Row, hand_in

HOST = "bench"
JOB = JobId("bench")
LIMIT_S = 120.0
TOGETHER = 8


class Echo:
    """What both sides start: answers with what it is given."""

    def echo(self, value: Any) -> Any:
        return value


async def seconds(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    since = time.perf_counter()
    result = await work()
    return time.perf_counter() - since, result


class Ours:
    """The launcher's side."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher
        self.epoch = 0

    async def reserve(self) -> Reservation:
        bundles = [
            BundleGrant(index=i, node=NodeId(HOST), host=HOST, devices=(), res=Res(cpus=1.0)) for i in range(TOGETHER)
        ]
        wanted = Reservation(job=JOB, gang=GangId("g"), epoch=Epoch(1))
        return await self.launcher.reserve(wanted, bundles, timeout_s=LIMIT_S)

    async def start(self, rank: int = 0) -> Handle:
        self.epoch += 1
        spec = InstanceSpec(
            job=JOB,
            instance=InstanceId(RoleName("r"), rank),
            epoch=Epoch(self.epoch),
            target="launcher:Echo",
            reservation=f"{JOB}/g/1",
            bundle=rank,
            res=Res(cpus=1.0),
            workdir=str(Path(__file__).resolve().parent),
        )
        return await self.launcher.start(spec, timeout_s=LIMIT_S)

    async def stop(self, handle: Handle) -> None:
        await self.launcher.stop(handle, grace_s=0)

    async def call(self, handle: Handle) -> None:
        await self.launcher.call(handle, Call(method="echo", args=(1,)))

    async def wait_death(self, handle: Handle) -> None:
        events = self.launcher.events(JOB)
        while (await anext(events)).name != handle.name:
            pass

    def pid(self, handle: Handle) -> int:
        return handle.pid


class Bare:
    """Ray's side: a detached async actor, ready when it has answered once."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.count = 0

        class Actor:
            async def echo(self, value: Any) -> Any:
                return value

            async def pid(self) -> int:
                return os.getpid()

            async def until_end(self) -> None:
                await asyncio.Event().wait()

        self.actor = ray.remote(num_cpus=1, max_restarts=0)(Actor)

    async def start(self, rank: int = 0) -> Any:
        self.count += 1
        made = self.actor.options(name=f"bare/{self.count}", lifetime="detached").remote()
        await made.echo.remote(1)
        return made

    async def stop(self, made: Any) -> None:
        self.ray.kill(made)

    async def call(self, made: Any) -> None:
        await made.echo.remote(1)

    async def wait_death(self, made: Any) -> None:
        try:
            await made.until_end.remote()
        except self.ray.exceptions.RayActorError:
            return

    def pid(self, made: Any) -> int:
        return self.ray.get(made.pid.remote())


Found = dict[str, list[float]]


async def one_round(side: Any, found: Found) -> None:
    """Start, call, kill; then eight starts at once."""
    took, made = await seconds(side.start)
    found["start_s"].append(took)
    found["call_s"] += [(await seconds(lambda: side.call(made)))[0] for _ in range(50)]
    pid = side.pid(made)
    waiting = asyncio.ensure_future(side.wait_death(made))
    await side.call(made)
    os.kill(pid, signal.SIGKILL)
    found["death_s"].append((await seconds(lambda: waiting))[0])
    took, all_made = await seconds(lambda: asyncio.gather(*(side.start(rank) for rank in range(TOGETHER))))
    found["eight_s"].append(took)
    await asyncio.gather(*(side.stop(each) for each in all_made))


async def in_turn(sides: dict[str, Any], rounds: int) -> dict[str, Found]:
    """The sides take turns, and who goes first too, so that what else runs on the machine meets both alike."""
    found: dict[str, Found] = {name: defaultdict(list) for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=number % 2 == 0):
            await one_round(sides[name], found[name])
    return found


async def gcs_killed(ours: Ours, home: Path) -> dict[str, float]:
    """Kill the GCS under a living instance: the longest gap between its answers, and the time to a new one."""
    handle = await ours.start()
    state = find_engine(home)
    assert state is not None and state.gcs is not None
    process.send_signal(state.gcs, signal.SIGKILL)
    since, gap, last = time.perf_counter(), 0.0, time.perf_counter()
    fresh = asyncio.ensure_future(ours.start(1))
    while not fresh.done():
        await ours.call(handle)
        gap, last = max(gap, time.perf_counter() - last), time.perf_counter()
        await asyncio.sleep(0.01)
    return {"gcs_gap_s": gap, "gcs_new_instance_s": time.perf_counter() - since}


def measure(rounds: int) -> dict[str, Any]:
    """Everything, in a fresh home that is gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    try:
        since = time.perf_counter()
        state = start_engine(home, EngineSettings(host=HOST, cpus=64))
        took = time.perf_counter() - since
        for name, value in client_environment(state.token_path, state.folder).items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        import ray

        from rota.runtime.ray.launcher import RayLauncher

        ray.init(state.address, namespace="rota/bench", log_to_driver=False, logging_level=40)

        async def body() -> dict[str, Any]:
            ours, bare = Ours(RayLauncher("rota/bench")), Bare(ray)
            await ours.reserve()
            sides = await in_turn({"bare": bare, "rota": ours}, rounds)
            return {"engine_start_s": took, **sides, **await gcs_killed(ours, home)}

        return asyncio.run(body())
    finally:
        left = stop_engine(home)
        assert not left, left


def rows(found: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """Name, our figure, and that of bare Ray."""
    names = {"start_s": "start to ready", "call_s": "call", "death_s": "kill -9 known", "eight_s": "eight at once"}
    compared = [
        (text, statistics.median(found["rota"][key]), statistics.median(found["bare"][key]))
        for key, text in names.items()
    ]
    alone = {
        "engine_start_s": "engine started",
        "gcs_gap_s": "GCS killed: longest gap between answers",
        "gcs_new_instance_s": "GCS killed: new instance after",
    }
    return [*compared, *((text, found[key], None) for key, text in alone.items())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.rounds)
    hand_in(
        Row(text, ours * 1e3, "ms", None if peer is None else peer * 1e3, "Ray") for text, ours, peer in rows(found)
    )
    if given.json:
        print(json.dumps({text: {"rota_s": ours, "ray_s": peer} for text, ours, peer in rows(found)}))
        return
    for text, ours, peer in rows(found):
        beside = "" if peer is None else f"   bare Ray {peer * 1000:9.1f} ms   {ours / peer:5.2f} x"
        print(f"{text:42s} {ours * 1000:9.1f} ms{beside}")


if __name__ == "__main__":
    sys.exit(main())
