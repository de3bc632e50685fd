"""Jobs that start after others: named at submit, refused where the other can never end as asked, kept over restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from standing import HELLO, Standing, with_service

from rota import Job
from rota.service.cli.verbs.run import ChangeFlags
from rota.service.jobfile.models import job_text
from rota.service.jobfile.reader import read_job
from rota.spec.events import JobEnded
from rota.spec.job import After
from rota.spec.reasons import Reason
from rota.spec.states import JobState

NEXT = HELLO.replace("name: hello", "name: next")


def after(*jobs: str) -> str:
    return NEXT + f"after: [{', '.join(jobs)}]\n"


def ended(state: JobState) -> JobEnded:
    failed = state is JobState.FAILED
    return JobEnded(state=state, reason=Reason.EXIT_NONZERO if failed else Reason.COMPLETED)


def test_a_job_waits_for_the_newest_of_a_name_over_a_restart_and_starts_when_that_succeeded(tmp_path: Path) -> None:
    async def before(service: Standing) -> None:
        await service.submit()
        await service.submit()
        assert (await service.submit(after("hello")))["id"] == "next-1"
        await service.until("next-1", JobState.QUEUED)

        async def dependent() -> dict[str, Any]:
            job = await service.get("/jobs/next-1")
            return job if job["reason"] == "DEPENDENCY" else {}

        assert (await service.until_true(dependent))["text"] == "It starts after hello-2."
        assert (await service.get("/jobs/next-1/spec"))["spec"]["after"] == [{"job": "hello-2", "when": "succeeded"}]
        why = (await service.get("/jobs/next-1/explain"))["why"]
        assert (why["code"], why["fields"]) == ("DEPENDENCY", {"after": ["hello-2"]})
        plan = (await service.http.post("/api/v1/jobs:plan", json={"source": after("hello")})).json()
        assert (plan["starts_now"], plan["why"]["code"]) == (False, "DEPENDENCY")

    async def again(service: Standing) -> None:
        await service.play_start("hello-1", "main/0")
        service.as_master("hello-1", ended(JobState.SUCCEEDED))
        assert (await service.get("/jobs/next-1"))["state"] == "QUEUED"
        await service.play_start("hello-2", "main/0")
        service.as_master("hello-2", ended(JobState.SUCCEEDED))
        await service.until("next-1", JobState.ADMITTED)

    with_service(tmp_path, before)
    with_service(tmp_path, again)


def test_a_failed_job_ends_those_after_it_with_its_name_and_refuses_new_ones_at_the_field(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        await service.submit(after("hello-1"))
        await service.submit(after("{job: hello-1, when: ended}"))
        await service.play_start("hello-1", "main/0")
        service.as_master("hello-1", ended(JobState.FAILED))
        job = await service.until("next-1", JobState.FAILED)
        assert (job["reason"], job["text"]) == (
            "DEPENDENCY_FAILED",
            "hello-1 had to succeed first; it ended as FAILED (EXIT_NONZERO)",
        )
        await service.until("next-2", JobState.ADMITTED)
        for given, said, hint in (
            ("hello", "hello-1 had to succeed first; it ended as FAILED", "hello-1:ended starts after it"),
            ("helo", "no job 'helo'", "did you mean 'hello'?"),
            ("unheard", "no job 'unheard'", "submit that job first"),
        ):
            answer = await service.http.post("/api/v1/jobs", json={"source": after("next:ended", given)})
            (problem,) = answer.json()["errors"]
            assert (answer.status_code, problem["loc"]) == (422, "after[1]")
            assert said in problem["message"] and hint in problem["hint"]
        assert (await service.submit(after("hello:ended")))["id"] == "next-3"

    with_service(tmp_path, test)


def test_a_job_of_another_user_is_found_by_its_id_alone(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        await service.submit()
        job = service.app.loop.installation.jobs
        (first,) = job.values()
        object.__setattr__(first.submitted, "user", "somebody-else")
        assert (await service.submit(after("hello-1")))["id"] == "next-1"
        answer = await service.http.post("/api/v1/jobs", json={"source": after("hello")})
        assert answer.status_code == 422 and answer.json()["errors"][0]["message"] == "no job 'hello'"

    with_service(tmp_path, test)


def test_file_flag_script_and_builder_say_the_same() -> None:
    wanted = (After(job="prep"), After(job="gen-2", when="ended"))
    (change,) = ChangeFlags(after=["prep", "gen-2:ended"]).sets()
    for read in (
        read_job(after("prep", "gen-2:ended"), filename="j.yaml"),
        read_job(NEXT, filename="j.yaml", sets=[change]),
        Job("next", after=["prep", "gen-2:ended"])._spec,
    ):
        assert read.after == wanted
    again = job_text(read_job(after("prep", "gen-2:ended"), filename="j.yaml"))
    assert read_job(again, filename="j.yaml").after == wanted
