"""The loop of the service: masters asked for, leftovers swept, conflicts decided anew, the engine's troubles told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from standing import HELLO, PlayedEngine, Standing, with_service

from rota.cluster.live import Scheduler
from rota.cluster.policies import PROFILES, get_profile
from rota.cluster.sim.sharing import SIMULATED, with_sharing
from rota.service.control import loop
from rota.spec.events import (
    DowntimePassed,
    JobEnded,
    JobRequeued,
    MasterStarted,
    NodeJoined,
    NodeLost,
    NodeMarked,
    ServiceStarted,
    TimerFired,
)
from rota.spec.ids import Epoch, JobId, NodeId
from rota.spec.reasons import Reason
from rota.spec.resources import LOST_BY, Health
from rota.spec.states import JobState

NODE = NodeId("r0n0")
FAILED = JobEnded(state=JobState.FAILED, reason=Reason.USER_ERROR, text="no luck")


async def admitted(service: Standing) -> None:
    await service.submit()
    await service.until("hello-1", JobState.ADMITTED)
    await service.until_asked("hello-1")


def test_a_master_is_asked_for_once_an_attempt(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)
        await service.seen(service.as_master("hello-1", MasterStarted(master_epoch=Epoch(1), pid=7)))
        for i in range(5):
            await service.seen(service.as_master("hello-1", TimerFired(timer=str(i))))
        assert service.engine.asked == ["hello-1"]

    with_service(tmp_path, test)


def test_a_round_of_the_loop_acts_on_the_jobs_that_changed_alone(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for _ in range(20):
            await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        await service.until("hello-2", JobState.ADMITTED)
        for job in ("hello-1", "hello-2"):
            await service.until_asked(job)
        acted, act = list[str](), service.app.loop._act
        service.app.loop._act = lambda history: acted.append(history.id) or act(history)
        for i in range(5):
            await service.seen(service.as_master("hello-1", TimerFired(timer=str(i))))
        assert 5 <= len(acted) < 20 and "hello-3" not in acted

    with_service(tmp_path, test)


def test_when_the_engine_or_gateway_is_another_one_every_live_master_is_asked_for_again(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)
        await service.submit(HELLO.replace("hello", "other"))
        await service.until_asked("other-1")
        service.engine.generation += 1
        await service.until_asked("hello-1", 2)
        await service.until_asked("other-1", 2)
        assert sorted(service.engine.asked) == ["hello-1", "hello-1", "other-1", "other-1"]

    with_service(tmp_path, test)


def test_after_a_restart_of_the_service_masters_of_live_jobs_are_asked_for_and_no_others(tmp_path: Path) -> None:
    async def first(service: Standing) -> None:
        await admitted(service)
        await service.submit(HELLO.replace("hello", "other"))
        await service.until_asked("other-1")
        await service.seen(service.as_master("other-1", FAILED))

    async def second(service: Standing) -> None:
        await service.until_asked("hello-1")
        assert service.engine.asked == ["hello-1"]

    with_service(tmp_path, first)
    with_service(tmp_path, second)


class EndedEngine(PlayedEngine):
    """One that does not run until a job asks for it."""

    @property
    def running(self) -> str:
        return ""


def test_time_in_which_neither_service_nor_engine_ran_counts_for_no_limit_of_a_job(tmp_path: Path) -> None:
    async def first(service: Standing) -> None:
        await admitted(service)

    async def second(service: Standing) -> None:
        records = service.log.read()
        [(at, since)] = [(one.at, one.event.since) for one in records if isinstance(one.event, DowntimePassed)]
        start = next(one for one in reversed(records) if isinstance(one.event, ServiceStarted))
        assert since == records[start.number - 2].at < start.at, "the last sign of life of the one before"
        assert service.app.loop.installation.jobs[JobId("hello-1")].ctx.used_s == pytest.approx(since - at)
        await service.until_asked("hello-1")

    async def third(service: Standing) -> None:
        assert sum(isinstance(one.event, DowntimePassed) for one in service.log.read()) == 1, "its engine ran on"

    with_service(tmp_path, first)
    with_service(tmp_path, second, engine=EndedEngine())
    with_service(tmp_path, third)


def test_a_job_whose_engine_is_away_says_so_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        service.engine.away = "the engine did not start: no memory"
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        while (job := await service.get("/jobs/hello-1"))["reason"] is None:
            await service.app.clock.sleep(0.01)
        assert (job["reason"], job["text"]) == ("ENGINE_STARTING", "the engine did not start: no memory")
        service.engine.away = ""
        await service.until_asked("hello-1")
        events = (await service.get("/jobs/hello-1/events", type="JobWaits"))["items"]
        assert len(events) == 1, "the same trouble is told once"
        await service.seen(service.as_master("hello-1", MasterStarted(master_epoch=Epoch(1), pid=7)))
        assert (await service.get("/jobs/hello-1"))["reason"] is None

    with_service(tmp_path, test)


def test_what_an_ended_or_unknown_job_left_in_the_engine_is_swept_and_a_live_job_is_not(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)
        await service.submit(HELLO.replace("hello", "other"))
        await service.until_asked("other-1")
        await service.seen(service.as_master("other-1", FAILED))
        async with asyncio.timeout(60):
            while "other-1" not in service.engine.swept:
                await asyncio.sleep(0.005)
        assert "hello-1" not in service.engine.swept

    with_service(tmp_path, test)

    leftover = PlayedEngine(alive={JobId("ghost-1"), JobId("hello-1")})

    async def again(service: Standing) -> None:
        async with asyncio.timeout(60):
            while "ghost-1" not in service.engine.swept:
                await asyncio.sleep(0.005)
        assert service.engine.swept == ["ghost-1"]

    with_service(tmp_path, again, engine=leftover)


def test_a_stop_is_taken_while_the_master_writes_all_the_time(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)
        writing = True

        async def write() -> None:
            n = 0
            while writing:
                n += 1
                await asyncio.to_thread(service.as_master, "hello-1", TimerFired(timer=str(n)))
                await asyncio.sleep(0.01)

        busy = asyncio.create_task(write())
        answers = [await service.http.post("/api/v1/jobs/hello-1:stop", json={"grace_s": 9 - i}) for i in range(5)]
        writing = False
        await busy
        assert [answer.status_code for answer in answers] == [202] * 5
        assert (await service.get("/jobs/hello-1"))["state"] == "STOPPING"

    with_service(tmp_path, test)


def test_a_requeued_job_is_admitted_again_and_keeps_its_history(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)
        master = MasterStarted(master_epoch=Epoch(1), pid=7)
        await service.seen(service.as_master("hello-1", master))
        await service.http.post("/api/v1/jobs/hello-1:stop", json={"grace_s": 0})
        await service.seen(service.as_master("hello-1", JobRequeued(attempt=1, reason=Reason.PREEMPTED_PRIORITY)))
        job = await service.get("/jobs/hello-1")
        assert job["attempts"][0]["reason"] == "PREEMPTED_PRIORITY"

    with_service(tmp_path, test)


async def lost_its_engine(service: Standing) -> None:
    """Wait until the log says so."""

    async def said() -> list[Any]:
        return (await service.get("/events", type="EngineLost"))["items"]

    await service.until_true(said)


class VolatileEngine(PlayedEngine):
    """An engine whose state is in memory only."""

    async def status(self) -> dict[str, Any]:
        found = await super().status()
        found["engine"] |= {"volatile": True}
        return found


def test_an_engine_whose_state_is_not_durable_is_told_in_status_and_in_the_log(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)

        async def warnings() -> list[str]:
            return (await service.get("/status"))["warnings"]

        assert "engine state is not durable" in (await service.until_true(warnings))[0]
        service.engine.generation += 1
        await service.until_asked("hello-1", 2)
        await lost_its_engine(service)

    with_service(tmp_path, test, engine=VolatileEngine())


def reported(by: str) -> NodeMarked:
    return NodeMarked(node=NODE, health=Health.SUSPECT, by=by, text="lost, as hello-1 reports")


@pytest.mark.parametrize(("by", "health"), [(LOST_BY, Health.HEALTHY), ("failover", Health.SUSPECT)])
def test_a_node_that_was_lost_with_its_engine_is_fit_under_another_and_one_that_a_job_left_is_not(
    tmp_path: Path, by: str, health: Health
) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)
        await service.app.loop.append([reported(by)])
        service.engine.generation += 1
        await service.until_asked("hello-1", 2)
        await lost_its_engine(service)
        await service.app.loop.wait_for(service.log.last_number())
        assert service.app.loop.installation.nodes[NODE].node.health is health

    with_service(tmp_path, test)


@pytest.fixture
def sweeps_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SWEEP_PERIOD_S", 0.05)


@pytest.mark.usefixtures("sweeps_often")
def test_a_node_that_was_lost_is_fit_again_though_no_job_asks_for_its_master(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.app.loop.append([reported(LOST_BY)])
        async with asyncio.timeout(60):
            while service.app.loop.installation.nodes[NODE].node.health is not Health.HEALTHY:
                await service.app.loop.wait_for(service.app.loop.installation.number + 1)
        marks = [one.event for one in service.log.read() if isinstance(one.event, NodeMarked)]
        assert [(one.health, one.by) for one in marks] == [(Health.SUSPECT, LOST_BY), (Health.HEALTHY, LOST_BY)]

    with_service(tmp_path, test)


@pytest.mark.usefixtures("sweeps_often")
def test_a_machine_that_is_lost_stays_lost_whatever_marks_it_until_it_joins(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        nodes, joined = service.app.loop.installation.nodes, service.app.loop.installation.nodes[NODE].joined
        await service.app.loop.append([NodeLost(node=NODE, text="gone"), reported(LOST_BY)])
        await service.app.loop._sweep_ended()
        await asyncio.sleep(0.1)
        await service.app.loop._sweep_ended()
        assert nodes[NODE].lost and nodes[NODE].node.health is Health.SUSPECT
        await service.app.loop.append([NodeMarked(node=NODE, health=Health.HEALTHY, by="admin")])
        assert nodes[NODE].lost and NODE not in {node.id for node in service.app.loop.installation.usable_nodes()}
        await service.app.loop.append([NodeJoined(node=joined)])
        assert not nodes[NODE].lost

    with_service(tmp_path, test)


class FaultyEngine(PlayedEngine):
    """Fails three times at ``fault`` in a way that nobody foresaw."""

    def __init__(self, fault: str) -> None:
        super().__init__(alive={JobId("gone-1")})
        self.fault, self.failed_at = fault, list[float]()

    def _fail(self, what: str) -> None:
        if what == self.fault and len(self.failed_at) < 3:
            self.failed_at.append(monotonic())
            raise RuntimeError("a bug")

    async def ensure_master(self, job: JobId) -> None:
        self._fail("ensure_master")
        await super().ensure_master(job)

    async def jobs(self) -> tuple[JobId, ...]:
        self._fail("jobs")
        return await super().jobs()


@pytest.mark.parametrize(
    ("fault", "is_done"),
    [
        ("ensure_master", lambda engine: "hello-1" in engine.asked),
        ("jobs", lambda engine: "gone-1" in engine.swept),
    ],
)
def test_work_that_failed_unforeseen_is_begun_again_and_not_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, is_done: Callable[[FaultyEngine], bool]
) -> None:
    monkeypatch.setattr(loop, "FAILED_PAUSE_S", 0.05)
    engine = FaultyEngine(fault)

    async def test(service: Standing) -> None:
        await service.submit()
        async with asyncio.timeout(60):
            while not is_done(engine):
                await asyncio.sleep(0.005)
        assert len(engine.failed_at) == 3, "done only after every one of the faults"

    with_service(tmp_path, test, engine=engine)
    gaps = [later - sooner for sooner, later in zip(engine.failed_at, engine.failed_at[1:], strict=False)]
    assert min(gaps) >= 0.05


def test_a_scheduler_that_fails_is_told_and_what_runs_is_served_and_ended(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await admitted(service)
        scheduler = service.app.loop.scheduler
        scheduler.profile = replace(scheduler.profile, prepare=lambda state: 1 // 0)
        await service.submit(HELLO.replace("hello", "other"))
        await service.until("other-1", JobState.QUEUED)
        await service.seen(service.as_master("hello-1", FAILED))
        warnings = (await service.get("/status"))["warnings"]
        text = "nothing new starts: ZeroDivisionError('integer division or modulo by zero')"
        assert f"the scheduler contradicts itself: {text}" in warnings
        scheduler.profile = replace(scheduler.profile, prepare=None)
        await service.submit(HELLO.replace("hello", "third"))
        await service.until_asked("other-1")
        assert not any("scheduler" in one for one in (await service.get("/status"))["warnings"])

    with_service(tmp_path, test)


def test_what_of_a_profile_is_simulated_alone_is_among_the_warnings(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        scheduler = service.app.loop.scheduler
        assert (await service.get("/status"))["warnings"] == []
        scheduler.profile = Scheduler(get_profile("gandiva-pack"), lambda spec: ()).profile
        (warning,) = (await service.get("/status"))["warnings"]
        assert warning.startswith("profile gandiva-pack: Two jobs share devices in simulations alone")

    with_service(tmp_path, test)


def test_only_a_simulation_adds_shared_devices_to_a_profile_and_a_service_says_so() -> None:
    assert [name for name in PROFILES if get_profile(name).sharing is not None] == []
    assert {name for name in PROFILES if with_sharing(get_profile(name)).sharing is not None} == SIMULATED.keys()
