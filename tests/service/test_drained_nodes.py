"""A drained node says who is left on it and until when, and that it may be taken down once the last one has gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standing import LIMIT_S, Standing, with_service
from test_cli import with_cli
from tests.job.core.conftest import Driven
from tests.makers import command, fail, loop, mesh, service, spec

from rota.job.core.desired import timers
from rota.service.cli.verbs.cluster import _note
from rota.service.views.job_history import Drain, JobHistory, begin_history
from rota.service.views.jobs import leaving, reason_of
from rota.spec.events import (
    CheckpointSaved,
    Committed,
    Event,
    FailoverEnded,
    FailoverStarted,
    GangAsked,
    GangGranted,
    GangReleased,
    GangReserved,
    GangWaits,
    InstanceLost,
    InstanceReady,
    InstanceStarted,
    InstanceStopped,
    JobRequeued,
    MoveAsked,
    TimerFired,
)
from rota.spec.gang import BundleAsk, BundleGrant, GangRequest
from rota.spec.ids import Epoch, GangId, InstanceId, JobId, NodeId, RoleName
from rota.spec.reasons import Reason
from rota.spec.resources import Res
from rota.spec.states import JobState, Level

SERVES = "name: serves\nroles:\n  w:\n    run: [sleep, inf]\n    replicas: 3\n    resources: {gpus: 2}\n"
W, JOB, MOVE = RoleName("w"), JobId("serves-1"), GangId("drained-2")


async def seen(service: Standing) -> tuple[dict[str, tuple[str, int, list[str]]], dict[str, int]]:
    """State, devices held and jobs of each node; and what totals, queue and heat map count as held."""
    rows = {one["id"]: one for one in (await service.get("/nodes"))["items"]}
    heat = (await service.get("/cluster/heat"))["items"]
    [queue] = (await service.get("/queues"))["items"]
    counts = {
        "totals": (await service.get("/cluster"))["gpus_used"],
        "queue": queue["used_gpus"],
        "heat": sum(held is not None for one in heat for held in one["held"]),
        "limits": int(service.app.loop.scheduler.state.used[0, 0]) // 1000,
    }
    assert {one["id"]: one["state"] for one in heat} == {name: one["state"] for name, one in rows.items()}
    return {name: (one["state"], one["gpus_used"], one["jobs"]) for name, one in rows.items()}, counts


async def until_said(service: Standing, kind: type[Event]) -> Event:
    """Wait until the service has taken in an event of this kind."""
    async with asyncio.timeout(LIMIT_S):
        while not (found := [one for one in service.log.read(after=0) if isinstance(one.event, kind)]):
            await service.app.loop.wait_for(service.app.loop.installation.number + 1)
    await service.seen(found[-1].number)
    return found[-1].event


def note(node: dict[str, Any]) -> str:
    return _note(node)


def test_a_drained_node_is_draining_until_the_last_of_its_jobs_has_gone_and_then_counts_nothing(tmp_path: Path) -> None:
    """Two of three instances are on r0n0; they move, and the third, of the same gang, runs on at r0n1."""

    async def test(service: Standing) -> None:
        await service.submit(SERVES)
        await service.until(JOB, JobState.ADMITTED)
        await service.play_start(JOB, "w/0", "w/1", "w/2")
        assert (await seen(service))[0]["r0n0"] == ("healthy", 4, [JOB])
        await service.http.post("/api/v1/nodes/r0n0:drain", json={"notice_s": 600, "reason": "new driver"})
        before, counts = await seen(service)
        assert before == {"r0n0": ("draining", 4, [JOB]), "r0n1": ("healthy", 2, [JOB]), "r0n2": ("healthy", 0, [])}
        left = (await service.get("/nodes"))["items"][0]
        assert (left["drain"]["jobs_left"], left["drain"]["safe"]) == (1, False)
        assert note(left).startswith(f"draining: 1 job left ({JOB}) until ") and note(left).endswith("; new driver")

        members = [InstanceId(W, 0), InstanceId(W, 1)]
        bundles = tuple(BundleAsk(index=i, members=(m,), res=Res(cpus=1, gpus=2)) for i, m in enumerate(members))
        await until_said(service, MoveAsked)
        job = await service.get(f"/jobs/{JOB}")
        assert job["reason"] == Reason.MIGRATED_DRAIN
        assert job["text"].startswith("r0n0 is drained (new driver): w/0, w/1 must leave by ")
        assert "; room on other nodes is asked for; without it by then the whole job waits in its queue" in job["text"]
        assert (await service.get(f"/jobs/{JOB}/explain"))["why"]["text"] == job["text"]
        service.as_master(JOB, GangAsked(request=GangRequest(gang=MOVE, bundles=bundles)))
        granted = await until_said(service, GangGranted)
        assert isinstance(granted, GangGranted)
        assert "; to other nodes, at the next commit" in (await service.get(f"/jobs/{JOB}"))["text"], "not reserved yet"
        homes = [bundle.node for bundle in granted.bundles]
        assert sorted(homes) == ["r0n1", "r0n2"]
        assert (await seen(service))[1]["totals"] == 10, "its new place is reserved beside the old one"
        moves = FailoverStarted(
            failover=1,
            level=Level.NODE,
            scope=((W, 0, Epoch(3)), (W, 1, Epoch(3))),
            restore=0,
            reason=Reason.MIGRATED_DRAIN,
            role=W,
            rank=0,
        )
        await service.seen(service.as_master(JOB, GangReserved(gang=MOVE, epoch=Epoch(2))))
        assert "; to other nodes, at the next commit" in (await service.get(f"/jobs/{JOB}"))["text"]
        await service.seen(service.as_master(JOB, moves))
        assert (await seen(service))[0]["r0n0"] == ("draining", 4, [JOB]), "the old processes are still there"
        for rank in (0, 1):
            number = service.as_master(JOB, InstanceStopped(role=W, rank=rank, epoch=Epoch(1)))
            await service.seen(number)
            assert (await seen(service))[0]["r0n0"][1] == 2 - 2 * rank, "each gives its devices back by itself"
        for rank in (0, 1):
            here = {"role": W, "rank": rank, "epoch": Epoch(3)}
            number = service.as_master(JOB, InstanceStarted(**here, node=homes[rank], pid=9), InstanceReady(**here))
        await service.seen(service.as_master(JOB, FailoverEnded(failover=1, seconds=1.0)) or number)
        after, counts = await seen(service)
        assert after == {"r0n0": ("drained", 0, []), "r0n1": ("healthy", 4, [JOB]), "r0n2": ("healthy", 2, [JOB])}
        assert counts == {"totals": 6, "queue": 6, "heat": 6, "limits": 6}
        assert (await service.get(f"/jobs/{JOB}"))["reason"] is None
        [came] = (await service.get(f"/jobs/{JOB}/failures"))["drains"]
        assert (came["outcome"], came["why"]) == ("moved", "new driver")
        assert came["text"].startswith(
            "r0n0 was drained (new driver): its instances there moved to other nodes and lost "
        )
        gone = (await service.get("/nodes"))["items"][0]
        assert gone["drain"] == {"jobs_left": 0, "until": None, "safe": True}
        assert note(gone) == "drained: safe to take down; new driver"

        await service.http.post("/api/v1/nodes/r0n0:undrain")
        await service.submit("name: next\nroles:\n  a:\n    run: [sleep, inf]\n    resources: {gpus: 4}\n")
        await service.until("next-1", JobState.ADMITTED)
        assert (await seen(service))[0]["r0n0"] == ("healthy", 4, ["next-1"])

    with_service(tmp_path, test, pretend="1x3x4")


def test_a_drain_without_room_says_to_admin_and_owner_what_is_lost_and_why_before_and_after(tmp_path: Path) -> None:
    """The owner reads the reason of the drain in show, why, explain and failures; a cordon withdraws the drain."""

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        await service.submit(SERVES)
        await service.until(JOB, JobState.ADMITTED)
        await service.play_start(JOB, "w/0", "w/1", "w/2")
        cost = re.compile(r"serves-1: moves within 10m00s, else waits in its queue; loses \S+ of work \(no commit or ")
        refused = await ask("nodes", "drain", "r0n0", "--reason", "new driver")
        assert refused.status == 2 and cost.search(refused.err) and "add --yes" in refused.err
        assert cost.search((await ask("nodes", "drain", "r0n0", "--reason", "new driver", "--yes")).out)
        await until_said(service, MoveAsked)
        assert "; room on other nodes is asked for; " in (await service.get(f"/jobs/{JOB}"))["text"]
        members = (InstanceId(W, 0), InstanceId(W, 1))
        bundles = tuple(BundleAsk(index=i, members=(m,), res=Res(cpus=1, gpus=2)) for i, m in enumerate(members))
        service.as_master(JOB, GangAsked(request=GangRequest(gang=MOVE, bundles=bundles)))
        await until_said(service, GangWaits)
        text = (await service.get(f"/jobs/{JOB}"))["text"]
        assert "; no other node has room for them now; without it by then the whole job waits in its queue" in text
        assert re.search(r", and loses 1\dm\d\ds of work \(no commit or checkpoint\)$", text), text
        for verb in ("show", "why", "explain", "failures"):
            assert "r0n0 is drained (new driver): w/0, w/1 must leave by " in (await ask(verb, JOB)).out, verb

        ctx = service.app.loop.installation.jobs[JOB].ctx
        [due] = [one.timer for one in timers(ctx) if one.timer.startswith("drain/")]
        await service.seen(service.as_master(JOB, TimerFired(timer=due)))
        now = await service.get(f"/jobs/{JOB}")
        stops = "r0n0 is drained (new driver): no other node had room, so it waits in its queue"
        assert (now["state"], now["text"]) == ("PREEMPTING", stops)
        left = [InstanceStopped(role=W, rank=rank, epoch=Epoch(1)) for rank in range(3)]
        gone = JobRequeued(attempt=1, reason=Reason.MIGRATED_DRAIN, counts=False)
        await service.seen(service.as_master(JOB, *left, GangReleased(gang=GangId("all"), epoch=Epoch(1)), gone))
        went = re.compile(
            r"r0n0 was drained \(new driver\): no other node had room, so the job went back into its queue and lost "
            r"\S+ of work \(no commit or checkpoint\)"
        )
        for words in (["show", JOB], ["show", JOB, "--attempt", "1"], ["explain", JOB], ["failures", JOB]):
            assert went.search((await ask(*words)).out), words
        withdrawn = (await ask("nodes", "cordon", "r0n0")).out
        assert withdrawn.startswith("r0n0 is cordoned; it was drained: that is withdrawn, and jobs that have not left")

    with_cli(tmp_path, test)


def test_a_drained_node_without_jobs_is_drained_at_once_and_an_old_server_has_no_word_of_it() -> None:
    assert note({"text": "why", "jobs": []}) == "why"
    assert note({"text": "", "jobs": [], "drain": {"jobs_left": 0, "until": None, "safe": True}}).startswith(
        "drained: safe"
    )


# -- what a job says of a drain, by the clock of its records ----------------------------------------------------------


def told_by(driven: Driven) -> JobHistory:
    story = begin_history(driven.records[0])
    for record in driven.records[1:]:
        story.apply(record)
    return story


def drain(driven: Driven, node: str, why: str = "", *, notice_s: float | None = 60.0, after_s: float = 1.0) -> None:
    due_at = None if notice_s is None else driven.ctx.at_s + notice_s
    driven.feed(MoveAsked(node=NodeId(node), due_at=due_at, text=why), after_s=after_s)


def end_notice(driven: Driven) -> None:
    [due] = [one.timer for one in timers(driven.ctx) if one.timer.startswith("drain/")]
    driven.feed(TimerFired(timer=due), after_s=60.0)


def commit(driven: Driven, n: int, *, after_s: float) -> None:
    driven.feed(Committed(n=n, loop_epoch=driven.ctx.loop_epoch), after_s=after_s)


def last_drain(driven: Driven) -> Drain:
    return told_by(driven).drains[-1]


def test_a_job_without_state_is_not_told_that_it_loses_nothing_in_half_a_sentence() -> None:
    driven = Driven().run(spec(command("w", fail=fail(state=("none",)))))
    drain(driven, "h0")
    assert leaving(told_by(driven)).endswith("; without it by then the whole job waits in its queue")
    holds = Driven().run(spec(command("w")))
    drain(holds, "h0")
    assert leaving(told_by(holds)).endswith(" waits in its queue, and loses 1m00s of work (no commit or checkpoint)")


@pytest.mark.parametrize("other", ["withdrawn", "later", "sooner is withdrawn too late"])
def test_the_drain_that_ends_an_attempt_is_named_whatever_came_of_a_newer_one(other: str) -> None:
    driven = Driven().run(spec(command("w", 2)), "h0", "h1")
    drain(driven, "h0", "AAA")
    drain(driven, "h1", "BBB", notice_s=600.0)
    if other == "withdrawn":
        drain(driven, "h1", notice_s=None)
    driven.settle()
    end_notice(driven)
    if other == "sooner is withdrawn too late":
        drain(driven, "h0", notice_s=None)
    stops = "h0 is drained (AAA): no other node had room, so it waits in its queue"
    assert (driven.ctx.state, reason_of(told_by(driven))[1]) == (JobState.PREEMPTING, stops)
    driven.settle()
    story = told_by(driven)
    went = "h0 was drained (AAA): no other node had room, so the job went back into its queue and lost "
    assert story.state is JobState.QUEUED and story.attempts[-1].text.startswith(went)
    assert story.drains[0].outcome == "queued"
    assert story.drains[-1].outcome == ("withdrawn" if other == "withdrawn" else "ended")


def test_a_limit_that_keeps_a_job_on_a_drained_node_is_named_and_not_the_room_elsewhere() -> None:
    driven = Driven().run(spec(command("w", 2)), "h0", "h1")
    drain(driven, "h0", "AAA")
    driven.settle()
    [asked] = driven.ctx.asks
    driven.feed(GangWaits(gang=asked.gang, reason=Reason.USER_LIMIT))
    assert "; its limit, or that of its queue, leaves them no room elsewhere now; " in leaving(told_by(driven))
    driven.feed(GangWaits(gang=GangId("another"), reason=Reason.NO_FREE_DEVICES))
    end_notice(driven)
    stops = "h0 is drained (AAA): a limit of its queue or user left no room elsewhere, so it waits in its queue"
    assert reason_of(told_by(driven))[1] == stops
    bundles = (BundleGrant(index=0, node=NodeId("h2"), host="h2", devices=(), res=Res()),)
    driven.feed(GangGranted(gang=asked.gang, bundles=bundles))
    assert reason_of(told_by(driven))[1] == "h0 is drained (AAA): there was no time to move, so it waits in its queue"


def test_a_move_at_the_end_of_the_notice_loses_what_came_after_the_commit_and_one_at_a_commit_nothing() -> None:
    driven = Driven().run(spec(service("w"), loop()))
    commit(driven, 1, after_s=100.0)
    driven.free = ["h1"]
    drain(driven, "h0", after_s=40.0)
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING and last_drain(driven).outcome == "waits"
    end_notice(driven)
    driven.settle()
    assert (last_drain(driven).outcome, last_drain(driven).lost) == ("moved", "1m40s of work since commit 1")
    driven.free = ["h2"]
    drain(driven, "h1")
    driven.settle()
    commit(driven, 2, after_s=30.0)
    driven.settle()
    assert (last_drain(driven).outcome, last_drain(driven).lost) == ("moved", "")


def test_commits_that_were_in_the_memory_of_the_node_alone_are_named_with_what_is_lost() -> None:
    driven = Driven()
    driven.saves = False
    driven.run(spec(mesh("actor"), loop()))
    commit(driven, 1, after_s=10.0)
    driven.feed(CheckpointSaved(n=1, path="c"))
    commit(driven, 2, after_s=10.0)
    driven.free = ["h1"]
    drain(driven, "h0", after_s=40.0)
    driven.settle()
    end_notice(driven)
    assert driven.ctx.spec is not None and last_drain(driven).outcome == "waits", "its state is being saved"
    [saves] = [one for one in timers(driven.ctx) if one.timer.startswith("drain/")]
    driven.feed(TimerFired(timer=saves.timer), after_s=saves.after_s)
    driven.settle()
    assert last_drain(driven).outcome == "moved" and driven.ctx.committed == 1
    assert last_drain(driven).lost.endswith(" of work since commit 2, and commit 2")


def test_what_a_member_has_not_saved_outlives_the_recovery_of_another_and_ends_with_its_own_move() -> None:
    driven = Driven().run(spec(command("w", 2)), "h0", "h1")
    driven.feed(InstanceLost(role=W, rank=1, epoch=Epoch(1), reason=Reason.SIGNALLED), after_s=600.0)
    driven.settle()
    assert driven.ctx.state is JobState.RUNNING and driven.ctx.instances[InstanceId(W, 1)].epoch > 1
    for node, place, lost in (("h0", "h2", "12m00s"), ("h2", "h3", "2m00s")):
        driven.free = [place]
        drain(driven, node, notice_s=3600.0, after_s=60.0)
        driven.settle()
        end_notice(driven)
        driven.settle()
        assert (last_drain(driven).outcome, last_drain(driven).lost) == (
            "moved",
            f"{lost} of work (no commit or checkpoint)",
        )


def test_a_checkpoint_of_a_script_saves_its_work() -> None:
    driven = Driven().run(spec(command("w")))
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=600.0)
    drain(driven, "h0")
    assert leaving(told_by(driven)).endswith(", and loses 1m00s of work since its last checkpoint")
    driven.free = ["h1"]
    driven.settle()
    driven.feed(CheckpointSaved(n=0, path="c"), after_s=30.0)
    driven.settle()
    assert (last_drain(driven).outcome, last_drain(driven).lost) == ("moved", "")
