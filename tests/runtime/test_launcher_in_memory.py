"""The simulated launcher keeps what every launcher promises, and its faults are what they say."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from tests.runtime.conformance import LauncherConformance
from tests.runtime.conformance_targets import Subject
from tests.world.virtual import run

from rota.runtime.clock import SystemClock
from rota.runtime.launcher import Call, Handle, InstanceSpec, ProcessGone, Reservation, ReserveFailed
from rota.spec.gang import BundleGrant
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.resources import Res
from rota.testing.launcher import SimEngine, SimFaults, SimLauncher, SimProcess
from rota.testing.memory import VirtualClock

NODE = NodeId("n0")
JOB = JobId("j")


class SimSubject(Subject):
    """A process that computes holds its own thread, not the loop that all simulated ones share."""

    async def block(self, seconds: float) -> str:  # type: ignore[override]
        await asyncio.sleep(seconds)
        return "blocked"


def subject(spec: InstanceSpec, process: SimProcess) -> SimSubject:
    return SimSubject(**dict(spec.args))


def engine(clock: SystemClock | VirtualClock, **faults: float) -> SimEngine:
    return SimEngine(
        clock=clock,
        rng=random.Random(1),
        make_body=subject,
        faults=SimFaults(**{"start_s": 0.01, **faults}),
        capacity={NODE: 2.0},
        hosts=frozenset({"h0"}),
    )


class SimRig:
    """A simulated engine for the conformance tests, in real time."""

    host = "h0"
    workdir = ""
    target = "subject"

    def __init__(self) -> None:
        self._jobs = itertools.count()
        self._engine = engine(SystemClock())

    def launcher(self) -> SimLauncher:
        return SimLauncher(self._engine)

    def fresh_job(self) -> JobId:
        return JobId(f"j{next(self._jobs)}")

    def kill(self, handle: Handle) -> None:
        self._engine.kill(handle.name)


class TestSimLauncher(LauncherConformance):
    @pytest.fixture
    def rig(self) -> SimRig:
        return SimRig()


def reservation(gang: str = "all") -> Reservation:
    return Reservation(job=JOB, gang=GangId(gang), epoch=Epoch(1))


def bundle(cpus: float = 1.0, devices: tuple[int, ...] = ()) -> BundleGrant:
    return BundleGrant(index=0, node=NODE, host="h0", devices=devices, res=Res(cpus=cpus))


def spec(epoch: int = 1) -> InstanceSpec:
    return InstanceSpec(
        job=JOB,
        instance=InstanceId(RoleName("r"), 0),
        epoch=Epoch(epoch),
        target="subject",
        reservation=reservation().name,
        bundle=0,
        res=Res(cpus=1.0),
    )


def test_a_device_is_reserved_once_and_the_next_one_waits_until_it_is_released() -> None:
    async def main(clock: VirtualClock) -> None:
        sim = SimLauncher(engine(clock))
        await sim.reserve(reservation("a"), [bundle(devices=(3,))], timeout_s=1.0)
        with pytest.raises(ReserveFailed):
            await sim.reserve(reservation("b"), [bundle(devices=(3,))], timeout_s=10.0)
        waiting = asyncio.ensure_future(sim.reserve(reservation("b"), [bundle(devices=(3,))], timeout_s=100.0))
        await clock.sleep(1.0)
        assert not waiting.done()
        await sim.release(reservation("a"))
        assert await waiting == reservation("b")

    run(main)


def test_cpus_of_a_node_are_not_reserved_beyond_its_capacity() -> None:
    async def main(clock: VirtualClock) -> None:
        sim = SimLauncher(engine(clock))
        await sim.reserve(reservation("a"), [bundle(1.5)], timeout_s=1.0)
        with pytest.raises(ReserveFailed):
            await sim.reserve(reservation("b"), [bundle(1.0)], timeout_s=10.0)

    run(main)


def test_a_hung_process_stays_silent_and_goes_only_by_force() -> None:
    async def main(clock: VirtualClock) -> None:
        made = engine(clock)
        sim = SimLauncher(made)
        await sim.reserve(reservation(), [bundle()], timeout_s=1.0)
        handle = await sim.start(spec(), timeout_s=10.0)
        made.hang(handle.name)
        call = asyncio.ensure_future(sim.call(handle, Call(method="greet", args=("you",))))
        await clock.sleep(1000.0)
        assert not call.done()
        before_s = clock.monotonic_s()
        await sim.stop(handle, grace_s=7.0)
        assert clock.monotonic_s() - before_s == pytest.approx(7.0)
        with pytest.raises(ProcessGone):
            await call

    run(main)


def test_a_stop_waits_for_a_start_that_is_under_way_so_that_nothing_comes_after() -> None:
    async def main(clock: VirtualClock) -> None:
        sim = SimLauncher(engine(clock, start_s=30.0))
        await sim.reserve(reservation(), [bundle()], timeout_s=1.0)
        start = asyncio.ensure_future(sim.start(spec(), timeout_s=100.0))
        await clock.sleep(0.001)
        start.cancel()
        named = Handle(name=spec().name, job=JOB, instance=spec().instance, epoch=Epoch(1), node=NODE, pid=0)
        await sim.stop(named, grace_s=0.0)
        await clock.sleep(1000.0)
        assert (await sim.find(JOB)).instances == ()

    run(main)


def test_two_processes_of_one_instance_and_a_release_under_a_process_are_noticed() -> None:
    async def main(clock: VirtualClock) -> None:
        made = engine(clock)
        sim = SimLauncher(made)
        await sim.reserve(reservation(), [bundle()], timeout_s=1.0)
        await sim.start(spec(1), timeout_s=10.0)
        await sim.start(spec(2), timeout_s=10.0)
        assert made.violations == ["j/r/0/2 started beside j/r/0/1"]
        await sim.release(reservation())
        assert "j/all/1 released under j/r/0/1" in made.violations

    run(main)


def test_a_client_that_is_dead_has_no_effect() -> None:
    async def main(clock: VirtualClock) -> None:
        made = engine(clock)
        sim = SimLauncher(made)
        sim.cut()
        with pytest.raises(asyncio.CancelledError):
            await sim.reserve(reservation(), [bundle()], timeout_s=1.0)
        assert not made.reservations

    run(main)


def test_the_same_seed_gives_the_same_times() -> None:
    async def main(clock: VirtualClock) -> float:
        sim = SimLauncher(engine(clock, start_s=3.0))
        await sim.reserve(reservation(), [bundle()], timeout_s=1.0)
        await sim.start(spec(), timeout_s=100.0)
        return clock.monotonic_s()

    assert run(main) == run(main) > 0


def test_a_process_that_ends_cancels_its_work_in_the_order_in_which_it_began() -> None:
    """In the order of addresses, which differ from one run to the next, a seed does not give the same again."""
    cancelled: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def main(clock: VirtualClock) -> None:
        sim = engine(clock)
        await sim.reserve(reservation(), [bundle()], timeout_s=1.0)
        handle = await sim.start(spec(), timeout_s=10.0)
        process = sim.processes[handle.name]
        for number in range(50):
            process.spawn(wait(number))
        await clock.sleep(0.1)
        sim.kill(handle.name)
        await clock.sleep(0.1)

    run(main)
    assert cancelled == list(range(50))
