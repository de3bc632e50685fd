"""RayLauncher on a real engine: the promises of every launcher, and those of processes."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rota.runtime import process
from rota.runtime.launcher import (
    Call,
    CallTimeout,
    Handle,
    NodeDied,
    ProcessDied,
    ProcessGone,
    RemoteError,
    remote_traceback,
)
from rota.runtime.process import ProcessId
from rota.spec.ids import JobId

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))
from conformance import WAIT_S, LauncherConformance, bundles, instance, reservation, used

pytestmark = [pytest.mark.slow]
KEY = b"k" * 32
TARGETS = Path(__file__).resolve().parent.parent / "runtime"


def identity(handle: Handle) -> ProcessId:
    return ProcessId(pid=handle.pid, start_time=handle.start_time)


@dataclass
class RayRig:
    engine: object
    host: str
    workdir: str = str(TARGETS)
    target: str = "conformance_targets:Subject"
    jobs: int = 0

    def launcher(self):
        return self.engine.launcher()

    def fresh_job(self) -> JobId:
        self.jobs += 1
        return JobId(f"j{os.getpid()}-{time.monotonic_ns()}-{self.jobs}")

    def kill(self, handle: Handle) -> None:
        assert process.send_signal(identity(handle), signal.SIGKILL)


@pytest.fixture
def rig(engine) -> RayRig:
    return RayRig(engine=engine, host=engine.host)


class TestRayLauncher(LauncherConformance):
    pass


def run(rig, body) -> None:
    async def main() -> None:
        async with used(rig) as (launcher, job):
            await launcher.reserve(reservation(job), bundles(rig, 2), timeout_s=WAIT_S)
            await asyncio.wait_for(body(launcher, job), 2 * WAIT_S)

    asyncio.run(main())


def test_kill_9_is_known_within_a_quarter_second_with_its_signal(rig) -> None:
    waits = []

    async def body(launcher, job) -> None:
        for epoch in range(1, 4):
            handle = await launcher.start(instance(rig, job, epoch=epoch), timeout_s=WAIT_S)
            events = launcher.events(job)
            pending = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            since = time.monotonic()
            rig.kill(handle)
            died = await asyncio.wait_for(pending, WAIT_S)
            waits.append(time.monotonic() - since)
            assert isinstance(died, ProcessDied) and died.name == handle.name
            assert (died.signal, died.exit_code) == (9, None)

    run(rig, body)
    print(f"kill -9 known after {statistics.median(waits) * 1000:.0f} ms (median of {len(waits)})")
    assert min(waits) < 0.25


def test_an_exit_status_is_reported(rig) -> None:
    async def body(launcher, job) -> None:
        handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
        asyncio.ensure_future(launcher.call(handle, Call(method="exit", args=(7,)))).add_done_callback(
            lambda task: task.exception()
        )
        died = await asyncio.wait_for(anext(launcher.events(job)), WAIT_S)
        assert (died.exit_code, died.signal) == (7, None)

    run(rig, body)


def test_every_line_of_every_kind_of_output_is_stamped_in_the_log_and_survives_kill_9(rig, tmp_path) -> None:
    log = tmp_path / "logs" / "subject-0.log"

    async def body(launcher, job) -> None:
        spec = replace(instance(rig, job), log_path=str(log), env={"ROTA_ATTEMPT": "3"})
        handle = await launcher.start(spec, timeout_s=WAIT_S)
        await launcher.call(handle, Call(method="write"))
        asyncio.ensure_future(launcher.call(handle, Call(method="write_and_die", args=(500,)))).add_done_callback(
            lambda task: task.exception()
        )
        await asyncio.wait_for(anext(launcher.events(job)), WAIT_S)

    run(rig, body)
    deadline = time.monotonic() + WAIT_S
    while not (log.exists() and "line 499" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    assert all(len(line) == 4 and line[0].endswith("Z") and line[1] == "3/1" for line in lines)
    texts = {(line[2], line[3]) for line in lines}
    assert {
        ("stdout", "from print"),
        ("stderr", "to stderr"),
        ("stdout", "from the descriptor"),
        ("stdout", "echo from a child".removeprefix("echo ")),
    } <= texts
    assert [line[3] for line in lines if line[3].startswith("line ")] == [f"line {i}" for i in range(500)]


def test_environment_devices_and_folder_are_set_before_the_target_is_imported(rig) -> None:
    async def body(launcher, job) -> None:
        spec = replace(instance(rig, job), env={"COLOUR": "blue"}, devices=(2, 5))
        handle = await launcher.start(spec, timeout_s=WAIT_S)

        async def environment(name: str):
            return await launcher.call(handle, Call(method="environment", args=(name,)))

        assert await environment("COLOUR") == "blue"
        assert await environment("CUDA_VISIBLE_DEVICES") == "2,5"
        assert await environment("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        assert await environment("ROTA_NAMESPACE") == rig.engine.namespace
        assert await launcher.call(handle, Call(method="place")) == (rig.workdir, rig.workdir)

    run(rig, body)


def test_an_exception_of_the_users_own_class_arrives_with_name_and_traceback(rig) -> None:
    async def body(launcher, job) -> None:
        handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
        with pytest.raises(RemoteError, match="OwnError: 1 and 2") as caught:
            await launcher.call(handle, Call(method="fail_own"))
        assert caught.value.type_name == "conformance_targets.OwnError"
        assert "in fail_own" in remote_traceback(caught.value)

    run(rig, body)


def test_user_calls_on_one_machine_do_without_the_engine(rig, monkeypatch) -> None:
    async def body(launcher, job) -> None:
        handle = await launcher.start(instance(rig, job, 0), timeout_s=WAIT_S)
        actor = launcher._actors[handle.name]
        monkeypatch.setattr(launcher, "_actors", {})
        monkeypatch.setattr(launcher, "_lookup", None)
        assert await launcher.call(handle, Call(method="pid")) == handle.pid
        with pytest.raises(TypeError):  # a control call is one of the engine
            await launcher.call(handle, Call(method="pid", control=True))
        monkeypatch.undo()
        launcher._actors[handle.name] = actor
        rig.kill(handle)
        began = time.monotonic()
        with pytest.raises(ProcessGone):
            await launcher.call(handle, Call(method="pid"))
        assert time.monotonic() - began < WAIT_S

    run(rig, body)


def test_a_blocked_event_loop_of_user_code_does_not_hold_up_control_calls(rig) -> None:
    async def body(launcher, job) -> None:
        handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
        blocked = asyncio.ensure_future(launcher.call(handle, Call(method="block_loop", args=(2.0,))))
        await launcher.call(handle, Call(method="greet", args=("you",), control=True, timeout_s=1.5))
        assert not blocked.done()
        assert await blocked == "blocked"

    run(rig, body)


def test_stop_asks_first_and_ends_a_stopped_process_by_force_with_its_children(rig, tmp_path) -> None:
    asked = tmp_path / "asked"

    async def body(launcher, job) -> None:
        spec = replace(instance(rig, job), env={"STOPPED_FILE": str(asked)})
        polite = await launcher.start(spec, timeout_s=WAIT_S)
        await launcher.stop(polite, grace_s=5.0)
        assert asked.read_text() == "asked to stop" and not process.is_alive(identity(polite))
        frozen = await launcher.start(instance(rig, job, 1, bundle=1), timeout_s=WAIT_S)
        child = process.identify(await launcher.call(frozen, Call(method="start_child")))
        assert child is not None
        process.send_signal(identity(frozen), signal.SIGSTOP)
        await launcher.stop(replace(frozen, pid=0, start_time=0.0), grace_s=0.2)
        assert process.wait_gone((identity(frozen), child), 2.0) == ()

    run(rig, body)


def test_starting_costs_little_more_than_a_bare_ray_actor(rig) -> None:
    import ray

    @ray.remote(num_cpus=0, max_restarts=0)
    class Bare:
        async def answer(self) -> int:
            return 1

    ours, bare = [], []

    async def body(launcher, job) -> None:
        for epoch in range(1, 6):
            since = time.monotonic()
            actor = Bare.options(name=f"{job}/bare/{epoch}", lifetime="detached").remote()
            await actor.answer.remote()
            bare.append(time.monotonic() - since)
            ray.kill(actor)
            since = time.monotonic()
            handle = await launcher.start(instance(rig, job, epoch=epoch), timeout_s=WAIT_S)
            ours.append(time.monotonic() - since)
            await launcher.stop(handle, grace_s=0)

    run(rig, body)
    ratio = statistics.median(ours) / statistics.median(bare)
    print(f"start to ready {statistics.median(ours):.3f} s, bare actor {statistics.median(bare):.3f} s, {ratio:.2f} x")
    assert ratio < 2.0


def test_waiting_for_an_answer_costs_next_to_no_processor(rig) -> None:
    async def body(launcher, job) -> None:
        handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
        await launcher.call(handle, Call(method="greet", args=("you",)))
        waiting = [
            asyncio.ensure_future(launcher.call(handle, Call(method="block", args=(3.0,), timeout_s=20.0)))
            for _ in range(20)
        ]
        own = process.own_id()
        before = [process.usage_of(own), process.usage_of(identity(handle))]
        since = time.monotonic()
        await asyncio.gather(*waiting)
        wall = time.monotonic() - since
        after = [process.usage_of(own), process.usage_of(identity(handle))]
        shares = [(late.cpu_s - early.cpu_s) / wall for early, late in zip(before, after, strict=True)]
        print(f"20 open calls for {wall:.1f} s: {shares[0]:.1%} of a core at the caller, {shares[1]:.1%} at the callee")
        assert max(shares) < 0.05

    run(rig, body)


def engine_of(handle: Handle) -> str:
    """The node of the engine that runs a process: every process of it inherits the mark."""
    entries = Path(f"/proc/{handle.pid}/environ").read_bytes().decode().split("\0")
    return next(entry for entry in entries if entry.startswith("ROTA_ENGINE=")).rpartition("/")[2]


def test_bundles_run_on_the_host_they_are_granted_on_and_the_death_of_a_node_is_reported(rig) -> None:
    from tests.real.nodes import add_node, stop_node

    from rota.runtime.ray.engine import EngineSettings

    second = add_node(rig.engine.home, EngineSettings(host="second", cpus=8))

    async def body() -> None:
        async with used(rig) as (launcher, job):
            hosts = ("second", rig.host, "second", rig.host)
            wanted = tuple(
                replace(bundle, host=host, node=f"node-{host}")
                for bundle, host in zip(bundles(rig, 4), hosts, strict=True)
            )
            await launcher.reserve(reservation(job), wanted, timeout_s=WAIT_S)
            handles = []
            for rank, host in enumerate(hosts):
                spec = replace(instance(rig, job, rank, bundle=rank), node=f"node-{host}")
                handles.append(await launcher.start(spec, timeout_s=WAIT_S))
            assert [engine_of(handle) for handle in handles] == list(hosts)
            process.send_signal(second.raylet, signal.SIGKILL)
            told = [await asyncio.wait_for(anext(launcher.events(job)), WAIT_S) for _ in range(4)]
            dead = {event.instance.rank for event in told if isinstance(event, ProcessDied)}
            assert dead == {0, 2}
            assert {event.node for event in told if isinstance(event, NodeDied)} == {"node-second"}
            assert await launcher.call(handles[1], Call(method="greet", args=("you",))) == "hello you!"

    try:
        asyncio.run(body())
    finally:
        assert stop_node(rig.engine.home, "second") == ()


def test_instances_call_each_other_and_their_master_through_its_restart(rig, tmp_path) -> None:
    from rota.runtime.ray.launcher import MasterStart, handle_of

    async def body(launcher, job) -> None:
        code = {"folder": str(tmp_path)}
        start = MasterStart(
            job=job, target="master_target:CountingMaster", args=code, env={}, workdir=rig.workdir, key=KEY
        )
        master = await launcher.start_master(start, timeout_s=WAIT_S)
        assert await launcher.start_master(start, timeout_s=WAIT_S) == master
        one = await launcher.start(replace(instance(rig, job), target="master_target:Caller"), timeout_s=WAIT_S)
        two = await launcher.start(instance(rig, job, 1, bundle=1), timeout_s=WAIT_S)

        async def ask(name: str, method: str, timeout_s: float = WAIT_S):
            return await launcher.call(one, Call(method="ask", args=(name, method, timeout_s)))

        assert await ask(two.name, "pid") == two.pid
        first = await ask(master.name, "status")
        assert (first["pid"], first["starts"], first["torch"]) == (master.pid, 1, False)
        (tmp_path / "fail-once").touch()
        rig.kill(master)
        again = await ask(master.name, "status")
        assert again["starts"] == 3 and again["pid"] != master.pid
        assert (await launcher.find(job)).instances == (one, two)
        found = await launcher.find_one(master.name)
        assert found is not None and found.pid == again["pid"]
        rig.kill(two)
        with pytest.raises(ProcessGone):
            await ask(two.name, "pid")
        await launcher.stop(handle_of(master.name, pid=0, start_time=0.0, node=""), grace_s=0)
        with pytest.raises(CallTimeout):
            await ask(master.name, "status", 1.0)
        assert process.wait_gone((identity(found),), 5.0) == ()

    run(rig, body)


def test_a_death_is_told_without_rays_guesses(engine) -> None:
    from rota.runtime.ray.deaths import death_text

    guess = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Host\nThe actor is dead because its "
        "worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
        "connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM "
        "killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed."
    )
    assert death_text(guess) == "its process ended without an error message"
    assert death_text("1 worker(s) were killed due to the node running low on memory. Object...").startswith("out of")
    assert death_text("The actor died because\n  its node has died.") == "The actor died because its node has died."


def test_a_sweep_ends_master_instances_and_reservations_of_one_job_alone(rig, tmp_path) -> None:
    from rota.runtime.ray.launcher import MasterStart
    from rota.runtime.ray.operations import GatewayOps

    async def body(launcher, job) -> None:
        other = rig.fresh_job()
        await launcher.reserve(reservation(other), bundles(rig, 1), timeout_s=WAIT_S)
        kept = await launcher.start(instance(rig, other), timeout_s=WAIT_S)
        start = MasterStart(
            job=job,
            target="master_target:CountingMaster",
            args={"folder": str(tmp_path)},
            env={},
            workdir=rig.workdir,
            key=KEY,
        )
        master = await launcher.start_master(start, timeout_s=WAIT_S)
        handles = [await launcher.start(instance(rig, job, i, bundle=i), timeout_s=WAIT_S) for i in range(2)]
        ops = GatewayOps(rig.engine.namespace)
        try:
            assert {job, other} <= set(await ops.list_jobs())
            told = await ops.sweep(job)
            assert told == {"instances": [each.name for each in handles], "reservations": [reservation(job).name]}
            assert process.wait_gone([identity(each) for each in (master, *handles)], 5.0) == ()
            assert job not in await ops.list_jobs()
            assert await ops.sweep(job) == {"instances": [], "reservations": []}
            assert process.is_alive(identity(kept))
            await ops.sweep(other)
            assert not process.is_alive(identity(kept))
        finally:
            await ops.close()

    run(rig, body)


def test_a_master_starts_on_no_node_that_is_to_be_avoided(rig, tmp_path) -> None:
    import ray

    from rota.runtime.ray.launcher import MasterStart

    async def body(launcher, job) -> None:
        start = MasterStart(
            job=job,
            target="master_target:CountingMaster",
            args={"folder": str(tmp_path)},
            env={},
            workdir=rig.workdir,
            key=KEY,
        )
        with pytest.raises(CallTimeout):
            await launcher.start_master(start, avoid=[one["NodeID"] for one in ray.nodes()], timeout_s=1.0)
        await launcher._wait_unnamed(f"{job}/master")
        master = await launcher.start_master(start, avoid=["0" * 56, "1" * 56], timeout_s=WAIT_S)
        assert process.is_alive(identity(master))
        await launcher.stop(master, grace_s=0.0)

    run(rig, body)
