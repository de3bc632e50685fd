"""What the pages ask beyond the commands: heat map, edits with their versions, search, other policies, templates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from standing import HELLO, Standing, with_service

from rota.job.core.context import InstanceRecord, Process
from rota.service.cli import app
from rota.service.cli.verbs import inspect
from rota.service.views.jobs import phase
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.states import InstanceState, JobState


def test_the_heat_map_names_the_holder_of_every_device(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for _ in range(2):
            await service.submit(HELLO.replace("gpus: 2", "gpus: 3"))
        await service.until("hello-2", JobState.ADMITTED)
        await service.http.post("/api/v1/nodes/r0n1:drain")
        heat = await service.get("/cluster/heat")
        assert sorted(heat["jobs"]) == ["hello-1", "hello-2"]
        by_node = {row["id"]: [None if i is None else heat["jobs"][i] for i in row["held"]] for row in heat["items"]}
        full = {row["id"]: [one["job"] for one in row["devices"]] for row in (await service.get("/nodes"))["items"]}
        assert by_node == full
        assert sorted(map(len, by_node.values())) == [4, 4]
        assert {row["id"]: row["state"] for row in heat["items"]} == {"r0n0": "healthy", "r0n1": "draining"}

    with_service(tmp_path, test)


def test_nodes_come_page_by_page_none_twice_and_none_left_out(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        whole = [row["id"] for row in (await service.get("/nodes"))["items"]]
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = await service.get("/nodes", limit=2, cursor=cursor)
            seen += [row["id"] for row in page["items"]]
            cursor = page["next"]
        assert seen == whole == sorted(whole) and len(whole) == 5

    with_service(tmp_path, test, pretend="1x5x1")


def test_an_edit_made_from_an_old_version_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        shown = await service.http.get("/api/v1/jobs/hello-1")
        tag = shown.headers["etag"]
        assert tag == f'"{shown.json()["version"]}"'

        async def change(priority: int, version: str = "") -> int:
            headers = {"If-Match": version} if version else {}
            body = {"changes": {"priority": priority}}
            return (await service.http.patch("/api/v1/jobs/hello-1", json=body, headers=headers)).status_code

        assert await change(60, tag) == 200
        assert await change(70, tag) == 412
        assert (await service.get("/jobs/hello-1"))["priority"] == 60
        assert [await change(70, "*"), await change(80)] == [200, 200]
        refused = await service.http.patch(
            "/api/v1/jobs/hello-1", json={"changes": {"priority": 1}}, headers={"If-Match": '"2"'}
        )
        assert (refused.json()["code"], refused.json()["fields"]) == ("VERSION_MISMATCH", {"version": 4})

    with_service(tmp_path, test)


def test_the_spec_shows_every_edit_with_what_was_before_and_after(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        await service.until("hello-1", JobState.ADMITTED)
        for changes in ({"priority": 60}, {"time_limit_s": 90.0, "priority": 61}):
            await service.http.patch("/api/v1/jobs/hello-1", json={"changes": changes})
        first, last = (await service.get("/jobs/hello-1/spec"))["edits"]
        assert [(one["before"]["priority"], one["after"]["priority"]) for one in (first, last)] == [(50, 60), (60, 61)]
        assert (last["before"]["time_limit_s"], last["after"]["time_limit_s"]) == (None, 90.0)
        assert last["by"] == "local"

    with_service(tmp_path, test)


def test_jobs_are_found_by_a_part_of_their_id_or_user(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for name in ("alpha", "beta"):
            await service.submit(HELLO.replace("name: hello", f"name: {name}"))
        found = [
            [row["id"] for row in (await service.get("/jobs", text=text))["items"]] for text in ("LPH", "local", "x")
        ]
        assert found == [["alpha-1"], ["beta-1", "alpha-1"], []]

    with_service(tmp_path, test)


def test_the_jobs_of_now_are_played_under_two_policies_and_stay_as_they_are(tmp_path: Path) -> None:
    """One node of 4: big holds it for 100 s; then first come first served starts long, shortest first starts short."""

    def job(name: str, limit: str) -> str:
        return f"name: {name}\ntime_limit: {limit}\n" + HELLO.partition("\n")[2].replace("gpus: 2", "gpus: 4")

    async def test(service: Standing) -> None:
        await service.submit(job("big", "100s"))
        await service.until("big-1", JobState.ADMITTED)
        await service.submit(job("long", "1000s"))
        await service.submit(job("short", "10s"))
        await service.until("short-1", JobState.QUEUED)
        answer = await service.http.post("/api/v1/sim/outlook", json={"profiles": ["fifo", "srtf"]})
        played = answer.json()
        starts = {row["job"]: row["starts_s"] for row in played["items"]}
        assert starts["big-1"] == {"fifo": 0.0, "srtf": 0.0}
        assert abs(starts["long-1"]["fifo"] - 100) < 2 and abs(starts["short-1"]["fifo"] - 1100) < 2
        assert starts["short-1"]["srtf"] < 2 and abs(starts["long-1"]["srtf"] - 110) < 2, "it takes the place of big"
        waits = {name: figures["wait_s"]["max"] for name, figures in played["summary"].items()}
        assert waits["fifo"] > waits["srtf"]
        assert "3 of 3 jobs" in played["basis"]
        assert (await service.get("/jobs/short-1"))["state"] == "QUEUED"
        unknown = await service.http.post("/api/v1/sim/outlook", json={"profiles": ["fifi"]})
        assert (unknown.status_code, unknown.json()["hint"]) == (404, "did you mean 'fifo'?")

    with_service(tmp_path, test, pretend="1x1x4")


PLANNED = """
name: trains
roles:
  main:
    run: torchrun --nproc-per-node 1 train.py
    replicas: {min: 2, max: 4}
    resources: {gpus: 1}
    plan: auto
    model: {layers: 4, hidden: 1024, heads: 8, seq: 1024, vocab: 1024, batch: 64}
"""


def test_explain_of_a_planned_job_says_where_its_shape_lies_and_what_the_others_would_take(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit(PLANNED)
        await service.until("trains-1", JobState.ADMITTED)
        found = await service.get("/jobs/trains-1/explain")
        runs, *others = sorted(found["plans"], key=lambda row: not row["current"])
        assert (runs["role"], runs["replicas"], runs["current"]) == ("main", 4, True), "nothing else waits"
        assert (await service.get("/jobs/trains-1"))["gpus"] == 4, "what it holds, not the fewest it asked for"
        [node] = found["placement"]["nodes"]
        other = others[0]
        assert 0 < runs["step_s"] < other["step_s"], "a size that is no faster has no plan"
        assert runs["placed"].startswith(
            f"Runs with 4 instances on {node} (4). Started as 4 of main, {runs['step_s']:.3g} s a step as predicted: "
            "the shortest time for all of a step with at most"
        )
        assert f"2 of main {other['step_s']:.3g} s, {2 * other['step_s']:.3g} device-seconds" in runs["placed"]
        assert all((row["current"], row["placed"]) == (False, "") for row in others)
        assert "planned for a100-80g-dgx" in runs["why"] and "PRETEND devices have no description" in runs["why"]
        assert [runs["placed"] in inspect._plan(row) for row in (runs, other)] == [True, False]

    with_service(tmp_path, test)


def test_a_template_is_a_job_file_that_a_dry_run_takes(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        listed = {row["name"]: row for row in (await service.get("/templates"))["items"]}
        assert {"ppo", "ddp"} <= listed.keys() and listed["ppo"]["text"].startswith("Reinforcement learning")
        folder = tmp_path / "code"
        folder.mkdir()
        for name, text in listed["torchrun"]["files"].items():
            (folder / name).write_text(text)
        body = {"source": listed["torchrun"]["files"]["job.yaml"], "workdir": str(folder)}
        plan = await service.http.post("/api/v1/jobs:plan", json=body)
        assert plan.json()["kind"] == "PlanReport", plan.text
        names = {row["name"] for row in (await service.get("/sim/profiles"))["items"] if row["text"]}
        assert {"default", "fifo", "srtf"} <= names

    with_service(tmp_path, test)


def test_a_dry_run_leaves_the_state_of_the_scheduler_as_it_was(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        state = service.app.loop.scheduler.state
        state.stopped_for[JobId("low-1"), JobId("high-1")] = 5.0  # as after a preemption
        before = state.digest()
        plan = await service.http.post("/api/v1/jobs:plan", json={"source": HELLO})
        assert plan.is_success and service.app.loop.scheduler.state.digest() == before

    with_service(tmp_path, test)


def test_a_plan_says_of_which_role_the_range_is_never_used_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = "{run: hi, replicas: {min: 1, max: 2}"
    (tmp_path / "job.yaml").write_text(f"name: x\nroles:\n  a: {both}}}\n  b: {both}, mesh: {{dp: '*'}}}}\n")
    monkeypatch.setenv("ROTA_HOME", str(tmp_path / "home"))
    assert app.call(["run", str(tmp_path / "job.yaml"), "--dry-run", "--pretend", "1x2x4"]) == 0
    out = capsys.readouterr().out
    assert "a stays at 1, never 2: it runs to its end; roles that serve calls can, and commands with" in out
    assert "b stays" not in out


def test_a_node_that_left_the_installation_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    async def alone(service: Standing) -> None:
        states = {row["id"]: row["state"] for row in (await service.get("/nodes"))["items"]}
        assert states["r0n0"] == "healthy" and "r0n1" not in states

    async def both(service: Standing) -> None:
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        for job in ("hello-1", "hello-2"):
            await service.until(job, JobState.ADMITTED)

    async def nothing(service: Standing) -> None:
        assert len((await service.get("/nodes"))["items"]) == 2

    with_service(tmp_path, nothing, pretend="1x2x4")
    with_service(tmp_path, alone, pretend="1x1x4")
    with_service(tmp_path, both, pretend="1x2x4")


def test_instances_that_were_scaled_away_are_not_among_those_that_a_start_waits_for() -> None:
    process = Process(epoch=Epoch(1), pid=7)
    ready = InstanceRecord(id=InstanceId.parse("main/0"), state=InstanceState.READY, epoch=Epoch(1), process=process)
    coming = InstanceRecord(id=InstanceId.parse("main/1"), state=InstanceState.STALE, epoch=Epoch(1), process=process)
    away = InstanceRecord(id=InstanceId.parse("main/2"), state=InstanceState.READY, epoch=Epoch(1), retired=True)
    story: Any = SimpleNamespace(
        state=JobState.STARTING,
        instances={one.id: SimpleNamespace(id=one.id, now=one) for one in (ready, coming, away)},
    )
    assert phase(story) == "1 of 2 instances ready, waits for main/1"
