"""Data by URL is looked for before a job may have devices; a wrong one is refused at its place, or ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from standing import Standing, with_service

from rota.service.jobfile.reader import read_job
from rota.spec.errors import JobFileError
from rota.spec.events import JobAdmitted
from rota.spec.ids import JobId
from rota.spec.states import JobState

pytest.importorskip("fsspec")
JOB = "name: reads\ndata: {url}\nroles: {{main: {{run: [echo, hi]}}}}\n"


@pytest.mark.slow
def test_data_that_is_not_there_ends_the_job_before_it_has_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_HOME", str(tmp_path / "home"))
    there = tmp_path / "there"
    there.mkdir()
    (there / "a.txt").write_text("alpha")

    async def test(service: Standing) -> None:
        await service.submit(JOB.format(url=f"file://{tmp_path}/none"))
        job = await service.until("reads-1", JobState.FAILED)
        assert job["reason"] == "DATA_UNREACHABLE"
        said = f"data: file://{tmp_path}/none does not exist, or these credentials do not see it"
        assert job["error"]["text"] == said
        events = [record.event for record in service.app.loop.log.read(job=JobId("reads-1"))]
        assert not any(isinstance(event, JobAdmitted) for event in events)
        await service.submit(JOB.format(url=f"file://{there}"))
        await service.until("reads-2", JobState.ADMITTED)
        (found,) = (tmp_path / "home" / "cache" / "data").glob("*/a.txt")
        assert found.read_text() == "alpha"
        answer = await service.http.post("/api/v1/jobs", json={"source": JOB.format(url="htps://host/x")})
        (problem,) = answer.json()["errors"]
        assert (problem["loc"], problem["line"], problem["code"]) == ("data", 2, "NOT_SUPPORTED")
        assert "no store has the scheme 'htps'" in problem["message"] and "'https'" in problem["hint"]

    with_service(tmp_path / "home", test)


@pytest.mark.parametrize(
    ("line", "loc"), [("output: s3://bucket/runs", "output"), ("checkpoint: {dir: 's3://b/c'}", "checkpoint.dir")]
)
def test_what_is_written_to_is_no_url(line: str, loc: str) -> None:
    with pytest.raises(JobFileError) as caught:
        read_job(f"name: writes\n{line}\nroles: {{main: {{run: [echo, hi]}}}}\n", filename="job.yaml")
    (problem,) = caught.value.problems
    assert (problem.loc, problem.line, problem.code) == (loc, 2, "NOT_SUPPORTED")
    assert "is a URL, and nothing writes to one" in problem.message and "rota cp" in problem.hint
