"""Alerts: a job that may hang, recoveries, lost nodes and starving queues, and who has seen them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standing import Standing, with_service
from test_cli import own_home, with_cli

from rota.cluster.core.capacity import OverLimit
from rota.service.process.tasks import look_for_hangs
from rota.service.views.alerts import alert_list, suspicion
from rota.service.views.installation import Installation
from rota.service.webhooks import notice_of
from rota.spec.errors import EngineUnavailable
from rota.spec.events import (
    FailoverEnded,
    FailoverStarted,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    NodeLost,
    TimerFired,
)
from rota.spec.ids import Epoch, JobId, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.states import JobState, Level

assert own_home


def waits(still_s: float, limit_s: float | None = 300.0) -> dict[str, Any]:
    """The wait graph of a master in which rollout/1 has made no progress for ``still_s``."""
    root = {"members": ["main/0"], "deadlock": False, "text": "main/0 makes no progress", "cycle": [], "waiters": []}
    vertex = {"name": "main/0", "limit_s": limit_s, "still_s": still_s, "silent_s": 0.0, "excuse": "", "doing": "step"}
    return {"culprits": [], "suspects": [root], "vertices": [vertex | {"stuck": False, "state": "READY"}]}


@pytest.mark.parametrize(
    ("still_s", "limit_s", "found"),
    [(20, 60, False), (31, 60, True), (99, 300, False), (101, 300, True), (110, None, False), (121, None, True)],
)
def test_an_instance_is_suspected_after_a_third_of_its_limit(still_s: float, limit_s: float, found: bool) -> None:
    one = suspicion(waits(still_s, limit_s), 1000.0)
    assert (one is not None) == found
    assert one is None or (one.members, one.since) == (("main/0",), 1000.0 - still_s)


def beat(idle_s: float) -> dict[str, Any]:
    named: dict[str, Any] = {"epoch": 1, "progress_n": 3, "progress_unit": "steps", "busy": ["step"], "quiet": ""}
    return {"main/0": named | {"idle_s": idle_s, "age_s": 0.1}}


async def running(service: Standing) -> str:
    await service.submit()
    await service.until("hello-1", JobState.ADMITTED)
    await service.play_start("hello-1", "main/0")
    await service.until("hello-1", JobState.RUNNING)
    return "hello-1"


def test_a_silent_job_is_suspected_in_its_state_and_as_an_alert_until_it_makes_progress(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        job = await running(service)
        service.engine.told, service.engine.waits = beat(200.0), waits(200.0)
        await look_for_hangs(service.app)
        await look_for_hangs(service.app)
        shown = await service.get(f"/jobs/{job}")
        row = (await service.get("/jobs"))["items"][0]
        assert shown["suspected"] == row["suspected"] == "main/0 makes no progress"
        [alert] = (await service.get("/alerts"))["items"]
        assert (alert["code"], alert["severity"], alert["job"]) == ("SUSPECTED_HANG", "critical", job)
        assert "main/0" in alert["text"] and alert["hint"] == f"rota why {job}"
        service.engine.told = beat(0.2)
        await look_for_hangs(service.app)
        assert (await service.get(f"/jobs/{job}"))["suspected"] == ""
        assert (await service.get("/alerts"))["items"] == []

    with_service(tmp_path, test)


def test_a_full_disk_is_shown_again_the_day_after_it_was_acknowledged() -> None:
    def ids(now: float) -> list[str]:
        found = alert_list(
            Installation(), now=now, suspicions={}, beyond={}, queues=(), disk=["/ is 97 % full"], jobs=()
        )
        return [one["id"] for one in found["items"]]

    assert ids(1000.0) == ids(2000.0) != ids(1000.0 + 86_400.0)


def test_a_job_whose_master_does_not_answer_does_not_keep_others_from_being_looked_at(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        first = await running(service)
        asked = list[str]()

        async def beats(job: str) -> dict[str, Any]:
            asked.append(job)
            raise EngineUnavailable("no answer")

        service.engine.beats = beats
        live = service.app.loop.installation.live
        live[JobId("hello-0")] = replace(live[JobId(first)], id=JobId("hello-0"))
        await look_for_hangs(service.app)
        assert sorted(asked) == ["hello-0", first]
        del live[JobId("hello-0")]

    with_service(tmp_path, test)


def test_a_limit_below_what_a_waiting_job_asks_is_an_alert_until_the_limit_or_the_job_is_changed(
    tmp_path: Path,
) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        async def limited(gpus: int) -> list[dict[str, Any]]:
            tree = [{"path": "default", "limit": {"gpus": gpus}}]
            assert (await service.http.put("/api/v1/queues", json={"queues": tree})).status_code == 200
            return (await ask("alerts", "--json")).document["items"]

        holder = (await service.submit("roles: {main: {run: [sleep, '9'], resources: {gpus: 4}}}\nname: holder\n"))[
            "id"
        ]
        await service.until(holder, JobState.ADMITTED)
        text = "roles: {main: {run: [sleep, '9'], replicas: 2, resources: {gpus: 4}}}\nname: large\n"
        large = (await service.submit(text))["id"]
        await service.until(large, JobState.QUEUED)
        assert await limited(8) == [], "it starts when the other one ends"
        (alert,) = await limited(6)
        assert (alert["code"], alert["job"], alert["hint"]) == ("LIMIT_BELOW_JOB", large, f"rota explain {large}")
        said = f"{large} asks 8 GPUs and starts only with a higher limit: queue default has 6 GPUs"
        assert alert["text"] == said and said in (await ask("alerts")).out.replace("\n", " ")
        assert await limited(8) == []
        for _ in range(4):
            await service.until((await service.submit(text))["id"], JobState.QUEUED)
        (alert,) = await limited(6)
        asks = "ask up to 8 GPUs each and start only with a higher limit"
        said = f"5 jobs (large-1, large-2, large-3 and 2 more) {asks}: queue default has 6 GPUs"
        assert (alert["job"], alert["text"]) == (large, said)
        assert await limited(8) == []
        jobs = [service.app.loop.installation.jobs[JobId(f"large-{n}")] for n in (1, 2)]
        for second, whose in (("ann", "user ann"), ("bob", "each user")):
            over = OverLimit(queue="default", dim="gpu", used=0, asked=8000, allowed=6000, user="ann")
            beyond = {jobs[0].id: over, jobs[1].id: replace(over, user=second)}
            found = alert_list(Installation(), now=0.0, suspicions={}, beyond=beyond, queues=(), disk=(), jobs=jobs)
            (alert,) = found["items"]
            assert alert["text"].endswith(f"(large-1, large-2) {asks}: {whose} in queue default has 6 GPUs")

    with_cli(tmp_path, test)


def test_an_alert_is_acknowledged_once_and_shown_after_those_that_nobody_has_seen(tmp_path: Path) -> None:
    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        job = await running(service)
        number = service.as_master(
            job,
            InstanceLost(role=RoleName("main"), rank=0, epoch=Epoch(1), reason=Reason.EXIT_NONZERO, text="exit 3"),
            FailoverStarted(
                failover=1,
                level=Level.PROCESS,
                scope=((RoleName("main"), 0, Epoch(2)),),
                restore=0,
                reason=Reason.EXIT_NONZERO,
                role=RoleName("main"),
                rank=0,
            ),
            InstanceStopped(role=RoleName("main"), rank=0, epoch=Epoch(1)),
            InstanceStarted(role=RoleName("main"), rank=0, epoch=Epoch(2), node=NodeId("r0n0"), pid=4100),
            InstanceReady(role=RoleName("main"), rank=0, epoch=Epoch(2)),
            FailoverEnded(failover=1, seconds=2.0),
        )
        await service.seen(number)
        assert (await ask("alerts", "--json")).document["items"] == [], "that it runs again proves nothing yet"
        await service.heal(job)
        history = service.app.loop.installation.jobs[JobId(job)]
        mine = [one for one in service.log.read(after=0) if one.job == job]
        assert [type(one.event) for one in mine if notice_of(one, history) == "healed"] == [TimerFired]
        await service.app.loop.append([NodeLost(node=NodeId("r0n1"), text="no heartbeat")])
        listed = (await ask("alerts", "--json")).document["items"]
        assert [one["code"] for one in listed] == ["NODE_LOST", "RECOVERED"]
        assert "no heartbeat" in listed[0]["text"] and "main/0: EXIT_NONZERO" in listed[1]["text"]
        done = await ask("alerts", "ack", listed[0]["id"], "--note", "known", "--json")
        seen = done.document["items"]
        assert [(one["code"], one["acknowledged_by"]) for one in seen] == [("RECOVERED", ""), ("NODE_LOST", "local")]
        assert "local known" in (await ask("alerts")).out
        after = Installation()
        for record in service.log.read(after=0):  # as the next start of the service reads it
            after.apply(record)
        assert after.acknowledged[listed[0]["id"]].text == "known"
        wrong = await ask("alerts", "ack", "recoverd:hello-1:1")
        assert (wrong.status, "did you mean 'recovered:hello-1:1'" in wrong.err) == (2, True)
        await ask("user", "create", "ann", "--role", "user", "--queue", "default")
        token = (await ask("token", "create", "--user", "ann", "--json")).document["token"]
        refused = await ask("--token", token, "alerts", "ack", listed[0]["id"])
        assert refused.status == 2, "a node is an admin's"

    with_cli(tmp_path, test)
