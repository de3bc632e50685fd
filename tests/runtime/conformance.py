"""What every Launcher promises, as tests: a launcher passes by a subclass of ``LauncherConformance`` with a ``rig``.

::

    class TestMyLauncher(LauncherConformance):
        @pytest.fixture
        def rig(self): ...   # an object with the attributes of Rig

Each test runs in an event loop of its own; ``rig.launcher()`` is called inside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import pytest

from rota.runtime.launcher import (
    Call,
    CallTimeout,
    Found,
    Handle,
    InstanceSpec,
    Launcher,
    ProcessDied,
    ProcessGone,
    Reservation,
    ReserveFailed,
    remote_traceback,
)
from rota.spec.gang import BundleGrant
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.resources import Res

WAIT_S = 90.0


class Rig(Protocol):
    """What a launcher brings to these tests. ``target`` names a class that behaves like conformance_targets.Subject."""

    host: str
    workdir: str
    target: str

    def launcher(self) -> Any: ...

    def fresh_job(self) -> JobId: ...

    def kill(self, handle: Handle) -> None:
        """The process ends at once, as by kill -9."""
        ...


def reservation(job: JobId, epoch: int = 1) -> Reservation:
    return Reservation(job=job, gang=GangId("main"), epoch=Epoch(epoch))


def bundles(rig: Rig, count: int = 1, *, cpus: float = 1.0, host: str | None = None) -> tuple[BundleGrant, ...]:
    return tuple(
        BundleGrant(index=i, node=NodeId("n0"), host=host or rig.host, devices=(), res=Res(cpus=cpus))
        for i in range(count)
    )


async def held(launcher: Launcher, job: JobId) -> Found:
    """What exists of a job, whatever hosts the engine has."""
    return replace(await launcher.find(job), hosts=())


def instance(rig: Rig, job: JobId, rank: int = 0, *, epoch: int = 1, bundle: int = 0, **args: Any) -> InstanceSpec:
    return InstanceSpec(
        job=job,
        instance=InstanceId(RoleName("subject"), rank),
        epoch=Epoch(epoch),
        target=rig.target,
        args=args,
        reservation=reservation(job).name,
        bundle=bundle,
        node=NodeId("n0"),
        res=Res(cpus=1.0),
        workdir=rig.workdir,
    )


class LauncherConformance:
    """Run against each launcher."""

    def run(self, rig: Rig, body: Callable[[Launcher, JobId], Awaitable[None]]) -> None:
        async def main() -> None:
            async with used(rig) as (launcher, job):
                await asyncio.wait_for(body(launcher, job), 2 * WAIT_S)

        asyncio.run(main())

    def test_a_started_process_answers_calls_and_is_found_with_its_identity(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            await launcher.reserve(reservation(job), bundles(rig), timeout_s=WAIT_S)
            handle = await launcher.start(instance(rig, job, greeting="hi"), timeout_s=WAIT_S)
            assert handle.name == f"{job}/subject/0/1" and handle.node == "n0" and handle.pid > 0
            assert await launcher.call(handle, Call(method="greet", args=("you",), kwargs={"mark": "?"})) == "hi you?"
            assert await launcher.call(handle, Call(method="greet_later", args=("you",))) == "hi you"
            assert await held(launcher, job) == Found(reservations=(reservation(job),), instances=(handle,))

        self.run(rig, body)

    def test_reserving_and_starting_again_gives_what_exists(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            for _ in range(2):
                await launcher.reserve(reservation(job), bundles(rig), timeout_s=WAIT_S)
            spec = instance(rig, job)
            first = await launcher.start(spec, timeout_s=WAIT_S)
            assert await launcher.start(spec, timeout_s=WAIT_S) == first
            assert (await launcher.find(job)).reservations == (reservation(job),)

        self.run(rig, body)

    def test_bundles_that_do_not_all_fit_are_refused_and_nothing_stays_reserved(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            wanted = (*bundles(rig, 1), *bundles(rig, 1, host="no-such-host"))
            wanted = tuple(replace(bundle, index=i) for i, bundle in enumerate(wanted))
            with pytest.raises(ReserveFailed):
                await launcher.reserve(reservation(job), wanted, timeout_s=0.5)
            assert await held(launcher, job) == Found()

        self.run(rig, body)

    def test_a_constructor_that_raises_leaves_no_process_and_tells_where_it_raised(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            await launcher.reserve(reservation(job), bundles(rig), timeout_s=WAIT_S)
            with pytest.raises(ValueError, match="no such model") as caught:
                await launcher.start(instance(rig, job, fail="no such model"), timeout_s=WAIT_S)
            assert "in __init__" in remote_traceback(caught.value)
            assert (await launcher.find(job)).instances == ()
            await launcher.start(instance(rig, job), timeout_s=WAIT_S)

        self.run(rig, body)

    def test_what_a_method_raises_is_raised_to_the_caller_with_its_traceback(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            await launcher.reserve(reservation(job), bundles(rig), timeout_s=WAIT_S)
            handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
            with pytest.raises(KeyError, match="missing") as caught:
                await launcher.call(handle, Call(method="fail", args=("missing",)))
            assert "in fail" in remote_traceback(caught.value)
            assert await launcher.call(handle, Call(method="greet", args=("again",))) == "hello again!"

        self.run(rig, body)

    def test_a_killed_process_is_reported_once_and_calls_on_it_fail(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            await launcher.reserve(reservation(job), bundles(rig), timeout_s=WAIT_S)
            handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
            open_call = asyncio.ensure_future(launcher.call(handle, Call(method="block", args=(60.0,))))
            await launcher.call(handle, Call(method="greet", args=("you",)))
            rig.kill(handle)
            died = await anext(launcher.events(job))
            assert isinstance(died, ProcessDied)
            assert (died.name, died.instance, died.epoch) == (handle.name, handle.instance, handle.epoch)
            with pytest.raises(ProcessGone):
                await open_call
            with pytest.raises(ProcessGone):
                await launcher.call(handle, Call(method="greet", args=("you",)))
            assert (await launcher.find(job)).instances == ()

        self.run(rig, body)

    def test_a_call_that_takes_too_long_times_out_and_control_calls_do_not_wait_for_it(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            await launcher.reserve(reservation(job), bundles(rig), timeout_s=WAIT_S)
            handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
            with pytest.raises(CallTimeout):
                await launcher.call(handle, Call(method="block", args=(60.0,), timeout_s=0.2))
            control = Call(method="greet", args=("you",), control=True, timeout_s=5.0)
            assert await launcher.call(handle, control) == "hello you!"

        self.run(rig, body)

    def test_a_process_that_never_was_is_gone(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            who = InstanceId(RoleName("subject"), 7)
            name = f"{job}/subject/7/1"
            handle = Handle(name=name, job=job, instance=who, epoch=Epoch(1), node=NodeId("n0"), pid=0)
            with pytest.raises(ProcessGone) as caught:
                await launcher.call(handle, Call(method="greet", args=("you",), timeout_s=WAIT_S))
            assert not caught.value.started
            await launcher.stop(handle, grace_s=1.0)
            await launcher.release(reservation(job))

        self.run(rig, body)

    def test_after_stop_and_release_nothing_of_the_job_exists(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            await launcher.reserve(reservation(job), bundles(rig, 2), timeout_s=WAIT_S)
            specs = [instance(rig, job, rank, bundle=rank) for rank in range(2)]
            handles = await asyncio.gather(*(launcher.start(spec, timeout_s=WAIT_S) for spec in specs))
            await asyncio.gather(*(launcher.stop(handle, grace_s=0.5) for handle in handles))
            assert (await launcher.find(job)).instances == ()
            await launcher.release(reservation(job))
            await launcher.release(reservation(job))
            assert await held(launcher, job) == Found()

        self.run(rig, body)

    def test_another_launcher_finds_calls_and_watches_what_the_first_started(self, rig: Rig) -> None:
        async def body(launcher: Launcher, job: JobId) -> None:
            await launcher.reserve(reservation(job), bundles(rig), timeout_s=WAIT_S)
            handle = await launcher.start(instance(rig, job), timeout_s=WAIT_S)
            second = rig.launcher()
            try:
                assert (await second.find(job)).instances == (handle,)
                assert await second.call(handle, Call(method="greet", args=("you",))) == "hello you!"
                rig.kill(handle)
                died = await anext(second.events(job))
                assert isinstance(died, ProcessDied) and died.name == handle.name
            finally:
                await second.close()

        self.run(rig, body)


@asynccontextmanager
async def used(rig: Rig) -> AsyncIterator[tuple[Any, JobId]]:
    """A launcher and a job of its own, of which nothing is left afterwards."""
    launcher, job = rig.launcher(), rig.fresh_job()
    try:
        yield launcher, job
    finally:
        found = await launcher.find(job)
        for handle in found.instances:
            await launcher.stop(handle, grace_s=0)
        for each in found.reservations:
            await launcher.release(each)
        await launcher.close()
