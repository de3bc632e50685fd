"""Jobs through the REST door: submit, refuse, list, explain, stop; each as a user would see it."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import datetime
from pathlib import Path

import pytest
from standing import HELLO, Standing, standing, with_service

from rota.job.core.resize import ask_emits
from rota.service.control import intake, submission
from rota.service.control import loop as service_loop
from rota.service.http import error_of
from rota.service.rest.routes import jobs
from rota.spec.errors import Fenced, JobFileError
from rota.spec.events import GangReleased, JobEnded, JobRequeued, MasterStarted, Reattached
from rota.spec.ids import Epoch
from rota.spec.job import JobSpec
from rota.spec.reasons import Reason
from rota.spec.states import AskState, JobState

BROKEN = "name: x\nroles:\n  main:\n    rum: [echo]\n    replicas: -1\n"


def test_a_job_is_listed_and_shown_when_submit_answers(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        answer = await service.http.post("/api/v1/jobs", json={"source": HELLO, "filename": "/data/job.yaml"})
        assert answer.status_code == 201
        assert answer.headers["location"] == "/api/v1/jobs/hello-1"
        assert [row["id"] for row in (await service.get("/jobs"))["items"]] == ["hello-1"]
        job = await service.until("hello-1", JobState.ADMITTED)
        assert job["workdir"] == "/data"
        assert job["instances"][0] | {"since": None} == {
            "instance": "main/0",
            "role": "main",
            "rank": 0,
            "state": "PLANNED",
            "since": None,
            "node": "",
            "pid": None,
            "epoch": 1,
            "standby": False,
            "restarts": 0,
            "devices": [0, 1],
            "restored": 0,
            "progress": None,
            "error": None,
            "ports": {},
        }

    with_service(tmp_path, test)


def test_the_same_key_gives_the_same_job_and_another_body_a_conflict(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        first = await service.submit(key="k1")
        again = await service.submit(key="k1")
        assert first["id"] == again["id"] == "hello-1"
        other = await service.http.post(
            "/api/v1/jobs", json={"source": HELLO.replace("hi", "ho")}, headers={"Idempotency-Key": "k1"}
        )
        assert (other.status_code, other.json()["code"]) == (409, "IDEMPOTENCY_CONFLICT")
        assert len((await service.get("/jobs", all=True))["items"]) == 1

    with_service(tmp_path, test)


def test_a_key_is_still_known_after_a_restart(tmp_path: Path) -> None:
    with_service(tmp_path, lambda service: service.submit(key="k1"))
    again = with_service(tmp_path, lambda service: service.submit(key="k1"))
    assert again["id"] == "hello-1"


def test_eight_clients_with_one_key_make_one_job(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        answers = await asyncio.gather(*(service.submit(key="k") for _ in range(8)))
        assert {answer["id"] for answer in answers} == {"hello-1"}

    with_service(tmp_path, test)


def test_every_mistake_of_a_job_file_is_told_with_its_place(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        answer = await service.http.post("/api/v1/jobs", json={"source": BROKEN, "filename": "job.yaml"})
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert (problem["code"], problem["exit"]) == ("INVALID", 2)
        places = {(one["line"], one["loc"]) for one in problem["errors"]}
        assert (4, "roles.main.rum") in places
        assert (5, "roles.main.replicas") in places
        named = f"{BROKEN.rstrip()}\nqueue: defalt\n"
        answer = await service.http.post("/api/v1/jobs", json={"source": named, "filename": "job.yaml"})
        [one] = [one for one in answer.json()["errors"] if one["loc"] == "queue"]
        assert (one["line"], one["code"]) == (named.count("\n"), "UNKNOWN_QUEUE")
        assert (one["message"], one["hint"]) == ("queue 'defalt' does not exist", "did you mean 'default'?")

    with_service(tmp_path, test)


def test_what_can_never_run_is_refused_with_the_nearest_that_can(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        answer = await service.http.post("/api/v1/jobs", json={"source": HELLO.replace("gpus: 2", "gpus: 999")})
        problem = answer.json()
        assert (answer.status_code, problem["code"], problem["exit"]) == (422, "INFEASIBLE", 4)
        assert "999 GPUs" in problem["detail"]
        assert any("4" in str(change["text"]) for change in problem["fields"]["nearest"])
        assert (await service.get("/jobs", all=True))["items"] == []

    with_service(tmp_path, test)


def test_an_unknown_queue_and_an_unknown_job_name_what_was_meant(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        queue = await service.http.post("/api/v1/jobs", json={"source": "queue: defualt\n" + HELLO})
        assert queue.status_code == 404
        assert queue.json()["detail"] == "queue 'defualt' does not exist" and "'default'" in queue.json()["hint"]
        job = await service.http.get("/api/v1/jobs/helo-1")
        assert job.status_code == 404
        assert "hello-1" in job.json()["hint"]

    with_service(tmp_path, test)


def test_a_prefix_finds_a_job_while_it_is_unique(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        assert (await service.get("/jobs/hel"))["id"] == "hello-1"
        await service.submit()
        assert (await service.http.get("/api/v1/jobs/hel")).status_code == 422
        assert (await service.get("/jobs/hello-1"))["id"] == "hello-1"

    with_service(tmp_path, test)


def test_pages_of_a_list_neither_repeat_nor_hide_a_job_while_others_come_in(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for _ in range(7):
            await service.submit()
        seen: list[str] = []
        cursor = ""
        while True:
            page = await service.get("/jobs", limit=3, cursor=cursor)
            seen += [row["id"] for row in page["items"]]
            cursor = page["next"]
            await service.submit()
            if not cursor:
                break
        assert seen == [f"hello-{n}" for n in range(7, 0, -1)]

    with_service(tmp_path, test)


def test_a_list_shows_what_the_filters_ask_for(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit("labels: {team: a}\n" + HELLO)
        await service.submit(HELLO.replace("hello", "other") + "after: [hello]\n")  # not admitted, it ends
        await service.http.post("/api/v1/jobs/other-1:stop")
        await service.until("hello-1", JobState.ADMITTED)
        await service.until_asked("hello-1")
        assert [row["id"] for row in (await service.get("/jobs", label="team=a"))["items"]] == ["hello-1"]
        assert [row["id"] for row in (await service.get("/jobs", name="other", all=True))["items"]] == ["other-1"]
        assert [row["id"] for row in (await service.get("/jobs", state="admitted"))["items"]] == ["hello-1"]
        await service.until("other-1", JobState.CANCELLED)
        both = await service.get("/jobs", state="admitted, cancelled", sort="name")
        assert [row["id"] for row in both["items"]] == ["hello-1", "other-1"]
        bad = await service.http.get("/api/v1/jobs", params={"state": "walking"})
        assert bad.status_code == 422
        assert "RUNNING" in bad.json()["hint"]

    with_service(tmp_path, test)


def test_a_waiting_job_says_what_binds_it_and_what_would_let_it_start(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for _ in range(2):
            await service.submit(HELLO.replace("gpus: 2", "gpus: 3"))
        await service.submit(HELLO.replace("gpus: 2", "gpus: 3"))
        await service.until("hello-2", JobState.ADMITTED)
        job = await service.until("hello-3", JobState.QUEUED)
        explain = await service.get("/jobs/hello-3/explain")
        assert (explain["kind"], explain["waiting"]) == ("Explanation", True)
        assert explain["why"]["code"] == "NO_FREE_DEVICES"
        assert {row["job"] for row in explain["blocked_by"]} == {"hello-1", "hello-2"}
        assert explain["queue"] | {"guaranteed": None, "limit": None} == {
            "path": "default",
            "used": 6.0,
            "used_cpus": 2.0,
            "guaranteed": None,
            "limit": None,
            "guaranteed_cpus": None,
            "limit_cpus": None,
        }
        assert [one["change"] for one in explain["would_start_now_with"]] == [
            {"set": "priority", "value": 51},
            {"set": "roles.main.resources.gpus", "value": 1},
        ]
        assert job["id"] == "hello-3"
        await service.http.post("/api/v1/jobs/hello-1:stop", json={"grace_s": 20})
        held = (await service.get("/jobs/hello-3/explain"))["blocked_by"]
        assert (held[0]["job"], held[0]["basis"], held[1]["basis"]) == ("hello-1", "stopping", "unknown")

    with_service(tmp_path, test)


def test_a_waiting_job_that_is_stopped_ends_cancelled_and_then_stopping_is_a_conflict(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4"))
        answer = await service.http.post("/api/v1/jobs/hello-3:stop", json={"grace_s": 1})
        assert answer.status_code == 202
        job = await service.until("hello-3", JobState.CANCELLED)
        assert job["reason"] == "STOPPED_BY_USER"
        again = await service.http.post("/api/v1/jobs/hello-3:stop")
        assert (again.status_code, again.json()["code"]) == (409, "CONFLICT")

    with_service(tmp_path, test)


def test_a_plan_shows_placement_and_blast_radius_and_keeps_nothing(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        before = await service.get("/status")
        answer = await service.http.post("/api/v1/jobs:plan", json={"source": HELLO})
        plan = answer.json()
        assert plan["starts_now"] is True
        assert plan["placement"]["gangs"][0]["bundles"][0]["devices"] == [0, 1]
        assert plan["roles"][0]["blast_radius"]["restarts"] == ["main/0"]
        assert (await service.get("/jobs", all=True))["items"] == []
        assert (await service.get("/status"))["parts"]["store"]["records"] == before["parts"]["store"]["records"]
        for _ in range(3):
            await service.submit("time_limit: 60s\n" + HELLO.replace("gpus: 2", "gpus: 4"))
        for job in ("hello-1", "hello-2"):
            await service.until(job, JobState.ADMITTED)
        body = {"source": HELLO.replace("gpus: 2", "gpus: 4")}
        full = (await service.http.post("/api/v1/jobs:plan", json=body)).json()
        assert (full["starts_now"], full["placement"]) == (False, None)
        assert full["why"]["code"] in ("NO_FREE_DEVICES", "BEHIND_IN_ORDER")
        started = service.app.loop.installation.find("hello-1").attempts[0].admitted_at
        estimate = full["explanation"]["estimate"]
        first, late = (datetime.fromisoformat(estimate[name]).timestamp() for name in ("p50", "p90"))
        assert started + 59.999 <= first <= started + 62 < late, "when the first of the two that run ends"

    with_service(tmp_path, test)


def test_priority_and_labels_change_after_submit_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        changes = {"priority": 80, "labels.team": "rl", "time_limit_s": 60}
        answer = await service.http.patch("/api/v1/jobs/hello-1", json={"changes": changes})
        assert (answer.json()["priority"], answer.json()["labels"]) == (80, {"team": "rl"})
        bad = ({"priority": 101}, {"priority": "x"}, {"roles.main.run": "rm"}, {"labels": 5}, {"time_limit_s": -1}, {})
        for changes in (*bad, {"queue": "nowhere"}):
            refused = await service.http.patch("/api/v1/jobs/hello-1", json={"changes": changes})
            assert refused.status_code in (404, 422), changes
        assert (await service.get("/jobs/hello-1"))["priority"] == 80
        await service.submit()
        await service.until("hello-2", JobState.ADMITTED)

    with_service(tmp_path, test)


def test_everything_is_the_same_after_a_restart(tmp_path: Path) -> None:
    async def first(service: Standing) -> tuple[object, ...]:
        await service.submit()
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4"), key="k")
        await service.until("hello-2", JobState.ADMITTED)
        await service.until_asked("hello-2")
        return await told(service)

    async def told(service: Standing) -> tuple[object, ...]:
        jobs = [await service.get(f"/jobs/hello-{n}") for n in (1, 2)]
        return (
            *jobs,
            await service.get("/nodes"),
            await service.get("/queues"),
            await service.get("/jobs/hello-1/graph"),
        )

    assert with_service(tmp_path, first) == with_service(tmp_path, told)


def test_an_edit_made_while_the_workloads_are_looked_at_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Standing) -> None:
        begun, edited, looked = asyncio.Event(), asyncio.Event(), list[int]()

        async def look(spec: JobSpec, *_: object) -> JobSpec:
            looked.append(spec.priority)
            begun.set()
            await edited.wait()
            return spec

        monkeypatch.setattr(service_loop, "inspect_workloads", look)
        await service.submit()
        await begun.wait()
        answer = await service.http.patch("/api/v1/jobs/hello-1", json={"changes": {"priority": 7}})
        assert answer.status_code == 200, answer.text
        edited.set()
        await service.until_asked("hello-1")
        assert looked[1:] == [7]
        assert (await service.get("/jobs/hello-1"))["priority"] == 7

    with_service(tmp_path, test)


@pytest.mark.slow
def test_a_workload_that_cannot_be_imported_fails_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nos.system('echo noise')\nraise RuntimeError('no such luck')\n")
    source = "name: bad\nroles:\n  main:\n    workload: bad:Thing\n"

    async def test(service: Standing) -> None:
        await service.submit(source, workdir=str(tmp_path))
        job = await service.until("bad-1", JobState.FAILED)
        assert (job["reason"], job["error"]["role"]) == ("IMPORT_ERROR", "main")
        assert "no such luck" in job["error"]["traceback"] and "rota/job" not in job["error"]["traceback"]
        plan = await service.http.post("/api/v1/jobs:plan", json={"source": source, "workdir": str(tmp_path)})
        assert plan.status_code == 422
        assert "no such luck" in plan.json()["detail"]
        for text, remedy in (
            ("import sys\nsys.modules['torch'] = None\nimport torch\n", "pip install './[engine]'"),
            ("import nowhere.at_all\n", "put nowhere beside the job file (workdir), or install it into"),
        ):
            (tmp_path / "bad.py").write_text(text)
            plan = await service.http.post("/api/v1/jobs:plan", json={"source": source, "workdir": str(tmp_path)})
            assert remedy in plan.json()["detail"], plan.text

    with_service(tmp_path / "home", test)


@pytest.mark.slow
def test_a_dry_run_tells_every_workload_that_cannot_be_imported_at_its_place(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("class Thing: pass\n")
    source = "name: bad\nroles:\n  a:\n    workload: nowhere:A\n  b: {workload: 'half:Thin'}\n"

    async def test(service: Standing) -> None:
        body = {"source": source, "filename": "bad.yaml", "workdir": str(tmp_path), "sets": ["roles.c.workload=no:C"]}
        answer = (await service.http.post("/api/v1/jobs:plan", json=body)).json()
        places = [(one["file"], one["line"], one["col"], one["loc"]) for one in answer["errors"]]
        assert places == [
            ("bad.yaml", 4, 15, "roles.a.workload"),
            ("bad.yaml", 5, 17, "roles.b.workload"),
            ("--set #1", 1, 18, "roles.c.workload"),
        ]
        assert answer["code"] == "IMPORT_ERROR"
        error = error_of(422, json.dumps(answer), url="here")
        assert isinstance(error, JobFileError) and "did you mean 'Thing'?" in error.problems[1].message
        assert error.hint == answer["hint"] and error.fields["said_code"] == "IMPORT_ERROR"

    with_service(tmp_path / "home", test)


def test_of_two_services_over_one_home_the_older_one_is_refused_and_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with standing(tmp_path) as old, standing(tmp_path) as new:
            answer = await old.http.post("/api/v1/jobs", json={"source": HELLO})
            assert (answer.status_code, answer.json()["code"]) == (409, "FENCED")
            await new.submit()
            await new.until("hello-1", JobState.ADMITTED)

    with pytest.raises(Fenced):
        asyncio.run(test())


def test_dry_runs_import_workloads_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = [0], [0]

    async def inspect(spec: JobSpec, workdir: str) -> JobSpec:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return spec

    async def test(service: Standing) -> None:
        asked = [service.http.post("/api/v1/jobs:plan", json={"source": HELLO}) for _ in range(8)]
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 8

    monkeypatch.setattr(submission, "inspect_workloads", inspect)
    with_service(tmp_path, test)
    assert most == [intake.DRY_RUNS_MAX]


def test_a_waiting_job_is_paused_and_resumed_and_asking_twice_is_asking_once(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        first = await service.submit(HELLO.replace("gpus: 2}", "gpus: 4}\n    replicas: 2"))
        await service.until(first["id"], JobState.ADMITTED)
        second = (await service.submit())["id"]
        await service.until(second, JobState.QUEUED)
        for _ in range(2):
            paused = await service.http.post(f"/api/v1/jobs/{second}:pause")
            assert (paused.status_code, paused.json()["state"], paused.json()["reason"]) == (202, "PAUSED", "PAUSED")
        await service.http.post(f"/api/v1/jobs/{first['id']}:stop")
        service.as_master(first["id"], JobEnded(state=JobState.CANCELLED, reason=Reason.STOPPED_BY_USER))
        await service.until(first["id"], JobState.CANCELLED)
        assert (await service.get(f"/jobs/{second}"))["state"] == "PAUSED", "the devices are free, and it waits"
        for _ in range(2):
            assert (await service.http.post(f"/api/v1/jobs/{second}:resume")).status_code == 202
        await service.until(second, JobState.ADMITTED)

    with_service(tmp_path, test)


def test_a_script_with_checkpoints_of_its_own_is_told_how_to_continue_from_them(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        ends = {
            "hello-1": (JobState.FAILED, Reason.TIME_LIMIT),
            "hello-2": (JobState.CANCELLED, Reason.STOPPED_BY_USER),
        }
        for job, (state, reason) in ends.items():
            assert (await service.submit())["id"] == job
            await service.until(job, JobState.ADMITTED)
            service.as_master(job, JobEnded(state=state, reason=reason))
            await service.until(job, state)
            assert (await service.get(f"/jobs/{job}"))["checkpoints"] == ""
        hints = [(await service.http.post(f"/api/v1/jobs/{job}:resume")).json()["hint"] for job in ends]
        assert hints[0] == "none of its commits is kept: rota clone hello-1 begins anew"
        assert hints[1].endswith("rota clone hello-2 begins anew; rota pause in place of stop keeps them")
        folder = service.app.home.checkpoints / "hello-1"
        folder.mkdir(parents=True)
        (folder / "last.pt").write_text("60")
        assert (await service.get("/jobs/hello-1"))["checkpoints"] == str(folder)
        hint = (await service.http.post("/api/v1/jobs/hello-1:resume")).json()["hint"]
        assert hint.endswith(f"continues by: rota clone hello-1 --set checkpoint.dir={folder}")

    with_service(tmp_path, test)


def test_a_running_job_gives_everything_back_before_it_is_paused(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        job = (await service.submit())["id"]
        await service.until(job, JobState.ADMITTED)
        service.as_master(job, MasterStarted(master_epoch=Epoch(1), pid=1))
        await service.seen(service.as_master(job, Reattached(master_epoch=Epoch(1))))
        asked = (await service.http.post(f"/api/v1/jobs/{job}:pause", json={"grace_s": 3})).json()
        assert (asked["state"], asked["reason"]) == ("PREEMPTING", "PAUSED")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "RESUME_WAIT_S", 0.1)
            refused = await service.http.post(f"/api/v1/jobs/{job}:resume")
        assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
        resumed = asyncio.create_task(service.http.post(f"/api/v1/jobs/{job}:resume"))
        await asyncio.sleep(0.1)
        assert not resumed.done(), "it waits for the devices"
        gang = service.app.loop.installation.find(job).ctx.gangs[0]
        service.as_master(job, GangReleased(gang=gang.id, epoch=gang.epoch))
        service.as_master(job, JobRequeued(attempt=1, reason=Reason.PAUSED, counts=False))
        assert (await resumed).status_code == 202
        again = await service.until(job, JobState.ADMITTED)
        assert [one["reason"] for one in again["attempts"]] == ["PAUSED", None]

    with_service(tmp_path, test)


def test_a_job_that_is_still_inspected_is_paused_as_soon_as_it_is_queued(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "slow.py").write_text(f"open({str(gate)!r}).read()\ndef work(ctx): ...\n")

    async def test(service: Standing) -> None:
        job = (await service.submit("name: slow\nroles: {main: {workload: slow:work}}\n", workdir=str(tmp_path)))["id"]
        with await asyncio.to_thread(gate.open, "w"):  # opens when the import has come there, which waits for its end
            assert (await service.get(f"/jobs/{job}"))["state"] == "SUBMITTED"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jobs, "RESUME_WAIT_S", 0.05)
                refused = await service.http.post(f"/api/v1/jobs/{job}:pause")
            assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
            paused = asyncio.create_task(service.http.post(f"/api/v1/jobs/{job}:pause"))
            await asyncio.sleep(0.1)
            assert not paused.done(), "it waits for the end of the inspection"
        assert (await paused).status_code == 202
        await service.until(job, JobState.PAUSED, JobState.PREEMPTING)  # the latter if it was admitted in between

    with_service(tmp_path / "service", test)


def test_a_role_is_scaled_by_the_scheduler_and_what_cannot_change_its_size_says_why(tmp_path: Path) -> None:
    elastic = "name: e\nroles:\n  main: {run: torchrun t.py, replicas: {min: 1, max: 2}}\n  one: {run: [sleep, '9']}\n"

    async def test(service: Standing) -> None:
        job = (await service.submit(elastic))["id"]
        await service.until(job, JobState.ADMITTED)
        service.as_master(job, MasterStarted(master_epoch=Epoch(1), pid=1))
        await service.seen(service.as_master(job, Reattached(master_epoch=Epoch(1))))
        ctx = service.app.loop.installation.find(job).ctx
        for emit in ask_emits(ctx):
            await service.seen(service.as_master(job, emit.event))
        async with asyncio.timeout(60):
            while not any(ask.state is AskState.GRANTED for ask in service.app.loop.installation.find(job).ctx.asks):
                await asyncio.sleep(0.01)
        placed = await service.get(f"/jobs/{job}/placement")
        assert [one["instance"] for one in placed["items"]] == ["main/0", "main/1", "one/0"]
        answers = [
            await service.http.post(f"/api/v1/jobs/{job}:scale", json={"role": role, "n": n})
            for role, n in (("main", 1), ("one", 2), ("mian", 2), ("main", 0), ("main", 3))
        ]
        assert [one.status_code for one in answers] == [202, 422, 404, 422, 422], [one.text for one in answers]
        assert "main=3: main has at most 2 instances (replicas.max)" in answers[4].text
        assert "one cannot change its size: it runs to its end" in answers[1].text
        assert "did you mean 'main'?" in answers[2].text
        assert service.app.loop.installation.find(job).ctx.sizes == {"main": 1}
        assert [(one["name"], one["replicas"]) for one in answers[0].json()["roles"]] == [("main", 1), ("one", 1)]
        graph = await service.get(f"/jobs/{job}/graph")
        main = graph["roles"][0]
        assert (main["replicas"], main["replicas_max"], len(main["states"])) == (1, 2, 1)

    with_service(tmp_path, test)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30)) + "name: x\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (BOMB, 422, "job.yaml:13:12: more than 20000 values, aliases written out"),
        ("name: ../../etc\nroles: {main: {run: hi}}\n", 422, "is not a name"),
        ("name: x\nroles: {../up: {run: hi}}\n", 422, "is not a name"),
        ("name: jöb\nroles: {main: {run: hi}}\n", 422, "is not a name"),
        ("name: x\u202e\nroles: {main: {run: hi}}\n", 422, "job.yaml:1:7: name:"),
        ("name: x\nqueue: ../default\nroles: {main: {run: hi}}\n", 422, "is not a queue"),
        ("name: x\nroles: {main: {run: hi}}\n#" + "x" * 10 * 2**20, 422, "at most 1048576 characters"),
        ("[" * 100_000, 422, "job.yaml"),
    ],
    ids=["bomb", "name-up", "role-up", "unicode", "right-to-left", "queue-up", "10MB", "deep"],
)  # fmt: skip
def test_a_hostile_job_file_gets_a_named_error_and_leaves_nothing(
    tmp_path: Path, source: str, status: int, said: str
) -> None:
    async def test(service: Standing) -> None:
        before = service.log.last_number()
        answer = await service.http.post("/api/v1/jobs", json={"source": source})
        assert answer.status_code == status and said in answer.json()["detail"], answer.text[:500]
        assert service.log.last_number() == before and not list((tmp_path / "jobs").iterdir())

    with_service(tmp_path, test)
