"""What the launcher on Ray and the gateway hold at most, and answers that come too late; over no engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from rota.runtime.directory import FixedDirectory
from rota.runtime.launcher import Call, CallTimeout, DeathsLost, ProcessDied, ProcessGone, instance_name
from rota.spec.ids import Epoch, InstanceId, JobId, RoleName

pytestmark = pytest.mark.slow  # imports Ray
JOB = JobId("a-1")
SECRETS: Any = FixedDirectory(host="", address="", secret=b"k" * 32)


def death(n: int) -> ProcessDied:
    who = InstanceId(RoleName("w"), n)
    return ProcessDied(name=instance_name(JOB, who, Epoch(1)), job=JOB, instance=who, epoch=Epoch(1), text="gone")


class Ref:
    """A reference of Ray as far as a waiter sees it."""

    def __init__(self) -> None:
        self.answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def future(self) -> concurrent.futures.Future[Any]:
        return self.answer


def test_who_did_not_hear_of_all_deaths_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from rota.runtime.ray import deaths
    from rota.runtime.ray.launcher import RayLauncher

    monkeypatch.setattr(deaths, "_DEATHS_MAX", 3)

    async def main() -> None:
        launcher = RayLauncher("rota/test")
        for n in range(3):
            launcher._deaths.add(JOB, death(n))
        events = launcher.events(JOB)
        assert [await anext(events) for _ in range(3)] == [death(0), death(1), death(2)], "as many as fit are kept"
        for n in range(5):
            launcher._deaths.add(JOB, death(n))
        with pytest.raises(DeathsLost, match="3 deaths of a-1"):
            await anext(events)
        assert await anext(launcher.events(JOB)) == death(4), "what comes after it is heard again"

    asyncio.run(main())


def test_a_call_without_a_limit_gives_up_when_no_master_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from rota.runtime.ray import launcher as module

    monkeypatch.setattr(module, "_MASTER_AWAY_S", 0.2)

    async def main() -> None:
        one, sent = module.RayLauncher("rota/test"), list[str]()

        async def send(name: str, call: Call, deadline: float | None = None) -> object:
            sent.append(name)
            raise ProcessGone("no master")

        monkeypatch.setattr(one, "_send", send)
        with pytest.raises(CallTimeout, match=r"gave no answer within 0\.2 s: no master"):
            await one._call_master("a-1/master", Call(method="ping"))
        assert len(sent) > 1

    asyncio.run(main())


def test_a_launcher_that_watches_nobody_keeps_nothing_of_those_it_finds() -> None:
    from rota.runtime.ray.host import Begun
    from rota.runtime.ray.launcher import RayLauncher

    async def main() -> None:
        launcher = RayLauncher("rota/test", watches=False)
        who = InstanceId(RoleName("w"), 0)
        name = instance_name(JOB, who, Epoch(1))
        launcher._handle(name, Begun(pid=1, start_time=1.0, node="n"))
        assert (launcher._deaths._watches, launcher._deaths._events) == ({}, {})

    asyncio.run(main())


def test_an_answer_after_the_limit_is_dropped_and_one_before_it_counts_though_it_is_read_late() -> None:
    from rota.runtime.ray.launcher import _answer

    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        late, failed, held = Ref(), Ref(), Ref()
        for ref in (late, failed):
            with pytest.raises(CallTimeout):
                await _answer(ref, 0.01)
        late.answer.set_result("nobody waits")
        failed.answer.set_exception(RuntimeError("nobody waits"))
        waiting = asyncio.ensure_future(_answer(held, 0.05))
        await asyncio.sleep(0)
        held.answer.set_result(7)
        time.sleep(0.1)  # the loop is held up until after the limit
        assert await waiting == 7

    asyncio.run(main())
    after = Ref()

    async def leaves_early() -> None:
        with pytest.raises(CallTimeout):
            await _answer(after, 0.01)

    asyncio.run(leaves_early())
    after.answer.set_result("the loop is closed")
    assert complaints == []


def test_masters_are_started_one_at_a_time_a_job_and_no_job_leaves_a_lock_behind() -> None:
    from rota.runtime.ray.operations import GatewayOps

    open_now, most, starts = Counter[JobId](), Counter[JobId](), Counter[JobId]()

    async def start_master(wanted: Any, *, avoid: list[str], timeout_s: float) -> SimpleNamespace:
        open_now[wanted.job] += 1
        most[wanted.job] = max(most[wanted.job], open_now[wanted.job])
        await asyncio.sleep(0.001)
        open_now[wanted.job] -= 1
        starts[wanted.job] += 1
        return SimpleNamespace(name="", pid=1, start_time=0.0)

    async def nothing(*_: Any, **__: Any) -> None:
        await asyncio.sleep(0)

    async def for_ever(_: str) -> str:
        await asyncio.Event().wait()
        return ""

    async def main() -> None:
        ops = GatewayOps("rota/test")
        launcher: Any = SimpleNamespace(start_master=start_master, stop=nothing, wait_end=for_ever, close=nothing)
        ops._launcher, ops._directory = launcher, SECRETS
        jobs = [JobId(f"j-{n}") for n in range(200)]
        await asyncio.gather(*(ops.ensure_master(job, "t", {}, {}, "") for job in jobs for _ in range(3)))
        assert set(most.values()) == {1} and set(starts.values()) == {3}
        await asyncio.gather(*(ops.kill_master(job) for job in jobs[1:]))
        asking = asyncio.ensure_future(ops.ensure_master(jobs[0], "t", {}, {}, ""))
        await asyncio.sleep(0)
        await ops.kill_master(jobs[0])  # while it is started
        await asking
        assert len(ops._locks) == 0
        await ops.close()

    asyncio.run(main())


def test_a_master_that_is_made_anew_by_another_gateway_has_the_key_of_the_instances_that_live() -> None:
    from rota.runtime.ray.operations import GatewayOps

    async def key_of(job: str) -> bytes:
        found: list[Any] = []

        async def start_master(wanted: Any, **_: Any) -> SimpleNamespace:
            await asyncio.sleep(0)
            found.append(wanted)
            return SimpleNamespace(name="", pid=1, start_time=0.0)

        async def for_ever(_: str) -> str:
            await asyncio.Event().wait()
            return ""

        ops = GatewayOps("rota/test")
        launcher: Any = SimpleNamespace(start_master=start_master, wait_end=for_ever, close=lambda: asyncio.sleep(0))
        ops._launcher, ops._directory = launcher, SECRETS
        await ops.ensure_master(job, "t", {}, {}, "")
        await ops.close()
        assert found[0].key.hex() not in repr(found[0])
        return found[0].key

    first, again, other = (asyncio.run(key_of(job)) for job in ("a-1", "a-1", "b-1"))
    assert first == again != other and len(first) == 32 and first != b"k" * 32
