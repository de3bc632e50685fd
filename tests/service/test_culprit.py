"""One culprit everywhere: the command line, the lists of failures and what the tabs of the page read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standing import Standing, with_service
from test_cli import own_home, reached_when_there, with_cli

from rota.spec.events import FailoverEnded, FailoverStarted, InstanceLost, InstanceReady, InstanceStarted, JobEnded
from rota.spec.ids import Epoch, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level

assert own_home  # the fixture of every test here, too

TWO = "name: duo\nroles:\n  main: {run: [x], replicas: 2}\n"
MAIN = RoleName("main")


def lost(rank: int, reason: Reason, text: str, epoch: int = 1) -> InstanceLost:
    return InstanceLost(role=MAIN, rank=rank, epoch=Epoch(epoch), reason=reason, text=text, traceback=f"Tb: {text}")


def failed(rank: int | None, reason: Reason, text: str) -> JobEnded:
    role = None if rank is None else MAIN
    return JobEnded(state=JobState.FAILED, reason=reason, text=text, role=role, rank=rank, traceback="")


async def named(service: Standing, ask: Callable[..., Any], job: str) -> dict[str, str]:
    """Whom each of them names: two commands, the list of failures, and what the graph and logs tabs show."""
    document, failures = await service.get(f"/jobs/{job}"), await service.get(f"/jobs/{job}/failures")
    by_command = (await ask("failures", job)).out
    return {
        "graph and logs": document["error"]["instance"],
        "failures tab": (failures["first"] or {"instance": ""})["instance"],
        "its end": failures["end"]["instance"],
        "rota failures": by_command.partition("first: ")[2].partition(" ")[0],
    }


@pytest.mark.parametrize("healed_before", [False, True])
def test_every_view_of_a_failed_job_names_the_instance_that_the_master_blames(
    tmp_path: Path, healed_before: bool
) -> None:
    """main/0 is reported first, as main/1 went away: a symptom. Before that another failure may have healed."""

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        waiting = asyncio.create_task(ask("run", "-w", "job.yaml"))
        await reached_when_there(service, "duo-1")
        await service.play_start("duo-1", "main/0", "main/1")
        epoch = 1
        if healed_before:
            cause = lost(0, Reason.SIGNALLED, "SIGKILL")
            service.as_master("duo-1", cause, recovery(1, Level.PROCESS, cause), *healed(1, rank=0))
            epoch = 2
        symptom = lost(0, Reason.USER_ERROR, "connection reset by peer", epoch)
        cause = lost(1, Reason.USER_ERROR, "ValueError: bad")
        service.as_master("duo-1", symptom, cause, failed(1, Reason.USER_ERROR, "ValueError: bad"))
        run = await asyncio.wait_for(waiting, 60)
        assert "first failure: main/1 USER_ERROR: ValueError: bad" in run.err
        assert set((await named(service, ask, "duo-1")).values()) == {"main/1"}
        first = (await service.get("/jobs/duo-1/failures"))["first"]
        assert (first["traceback"], first["text"]) == ("Tb: ValueError: bad", "ValueError: bad")

    (tmp_path / "job.yaml").write_text(TWO)
    with_cli(tmp_path / "service", test)


def test_a_job_that_failed_at_its_limit_blames_no_instance_anywhere(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit(TWO)
        await reached_when_there(service, "duo-1")
        await service.play_start("duo-1", "main/0", "main/1")
        cause = lost(0, Reason.SIGNALLED, "SIGKILL")
        over = service.as_master(
            "duo-1",
            cause,
            recovery(1, Level.PROCESS, cause),
            *healed(1, rank=0),
            failed(None, Reason.TIME_LIMIT, "over"),
        )
        await service.seen(over)
        assert set((await named(service, ask, "duo-1")).values()) == {""}
        assert (await service.get("/jobs/duo-1/failures", attempt=1))["items"][0]["instance"] == "main/0"

    with_cli(tmp_path / "service", test)


def test_an_open_recovery_names_its_cause_and_not_the_first_report(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit(TWO)
        await service.until("duo-1", JobState.ADMITTED)
        await service.play_start("duo-1", "main/0", "main/1")
        symptom, cause = lost(0, Reason.USER_ERROR, "broken pipe"), lost(1, Reason.OOM_KILLED, "out of memory")
        await service.seen(service.as_master("duo-1", symptom, cause))
        assert (await service.get("/jobs/duo-1/failures"))["first"]["instance"] == "main/0", "no verdict yet"
        await service.seen(service.as_master("duo-1", recovery(1, Level.ROLE, cause)))
        failures = await service.get("/jobs/duo-1/failures")
        assert failures["first"]["instance"] == failures["items"][0]["instance"] == "main/1"
        assert (await service.get("/jobs/duo-1/why"))["cause"]["instance"] == "main/1"
        await service.seen(service.as_master("duo-1", failed(0, Reason.USER_ERROR, "ValueError: bad")))
        assert (await service.get("/jobs/duo-1/failures"))["first"]["instance"] == "main/0"
        assert (await service.get("/jobs/duo-1/why"))["cause"] is None, "no recovery is open any more"

    with_service(tmp_path, test)


def recovery(number: int, level: Level, cause: InstanceLost) -> FailoverStarted:
    scope = ((MAIN, cause.rank, Epoch(2)),)
    return FailoverStarted(
        failover=number, level=level, scope=scope, restore=0, reason=cause.reason, role=MAIN, rank=cause.rank
    )


def healed(number: int, rank: int) -> tuple[InstanceStarted, InstanceReady, FailoverEnded]:
    return (
        InstanceStarted(role=MAIN, rank=rank, epoch=Epoch(2), node=NodeId("r0n0"), pid=1001),
        InstanceReady(role=MAIN, rank=rank, epoch=Epoch(2)),
        FailoverEnded(failover=number, seconds=0.5),
    )
