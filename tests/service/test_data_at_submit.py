"""Data and output by URL: looked for before a job has devices, uploaded when it ends; a wrong one is refused."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standing import HELLO, Standing, with_service

from rota.job.core.desired import next_emit
from rota.runtime.environ import Home
from rota.service.control import job_files, loop
from rota.service.control.submission import Submission, check_urls, fetch_data, with_stores
from rota.service.jobfile.reader import read_job
from rota.spec.commands import Emit
from rota.spec.errors import JobFileError
from rota.spec.events import GangReleased, InstanceEnded, InstanceStopped, JobAdmitted, UploadEnded
from rota.spec.ids import Epoch, GangId, InstanceId, JobId
from rota.spec.job import JobSpec
from rota.spec.states import JobState

pytest.importorskip("fsspec")
JOB = "name: reads\ndata: {url}\nroles: {{main: {{run: [echo, hi]}}}}\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of its own, whose uploads are tried again at once."""
    monkeypatch.setenv("ROTA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(job_files, "UPLOAD_PAUSES_S", (0.01,))


@pytest.mark.slow
def test_data_that_is_not_there_ends_the_job_before_it_has_devices(tmp_path: Path) -> None:
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
        await service.submit(JOB.format(url=tmp_path / "none"))
        job = await service.until("reads-3", JobState.FAILED)
        said = f"data: {tmp_path}/none does not exist on this machine, where all jobs run"
        assert (job["reason"], job["error"]["text"]) == ("DATA_UNREACHABLE", said)
        await service.submit(JOB.format(url=there))
        await service.until("reads-4", JobState.ADMITTED)
        await service.submit(JOB.format(url=tmp_path / "made") + "after: [reads-4]\n")
        await service.until("reads-5", JobState.QUEUED)
        answer = await service.http.post("/api/v1/jobs", json={"source": JOB.format(url="htps://host/x")})
        (problem,) = answer.json()["errors"]
        assert (problem["loc"], problem["line"], problem["code"]) == ("data", 2, "NOT_SUPPORTED")
        assert "no store has the scheme 'htps'" in problem["message"] and "'https'" in problem["hint"]

    with_service(tmp_path / "home", test)


@pytest.mark.parametrize(
    ("more", "run_as", "refused"),
    [
        ("", None, True),
        ("after: [other]\n", None, False),
        ("roles: {main: {run: [echo, hi], setup: 'mkdir -p $ROTA_DATA_DIR'}}\n", None, False),
        ("", "1234:1234", False),
    ],
)
def test_a_folder_is_looked_for_unless_the_job_makes_it_or_runs_as_another_user(
    tmp_path: Path, more: str, run_as: str | None, refused: bool
) -> None:
    """A tenant would learn of any path, whether it is there: the service may look where the tenant may not."""
    text = f"name: reads\ndata: {tmp_path}/none\n{more}"
    text += "" if "roles" in more else "roles: {main: {run: [echo, hi]}}\n"
    spec = replace(read_job(text, filename="job.yaml"), run_as=run_as)
    found = asyncio.run(fetch_data(spec, "user", here=True))
    assert (found is not None) == refused


OUTPUT = "name: writes\noutput: {url}\nroles: {{main: {{run: [echo, hi], resources: {{gpus: 2}}}}}}\n"


async def ends(service: Standing, job: str) -> None:
    """Its process has written its files and returned, and everything it held is given back."""
    await service.play_start(job, "main/0")
    one, first = InstanceId.parse("main/0"), Epoch(1)
    number = service.as_master(
        job,
        InstanceEnded(role=one.role, rank=one.rank, epoch=first),
        InstanceStopped(role=one.role, rank=one.rank, epoch=first),
        GangReleased(gang=GangId("all"), epoch=first),
    )
    await service.seen(number)
    history = service.app.loop.installation.jobs[JobId(job)]
    async with asyncio.timeout(30):
        while history.ctx.uploads_since_s is None:
            await service.app.loop.wait_for(service.app.loop.installation.number + 1)


async def uploaded(service: Standing, job: str) -> dict[str, Any]:
    """Play its master until its end, which it writes once the upload is in the log."""
    history = service.app.loop.installation.jobs[JobId(job)]
    async with asyncio.timeout(30):
        while history.ctx.uploads:
            await service.app.loop.wait_for(service.app.loop.installation.number + 1)
    emit = next_emit(replace(history.ctx, attached=True))
    assert isinstance(emit, Emit)
    await service.seen(service.as_master(job, emit.event))
    return await service.get(f"/jobs/{job}")


@pytest.mark.slow
def test_output_is_at_its_url_when_the_job_has_ended_and_holds_no_devices_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, gate, there = f"file://{tmp_path}/store/run7", asyncio.Event(), tmp_path / "store" / "run7"
    upload = loop.upload_output

    async def later(*args: Any) -> UploadEnded:
        await gate.wait()
        return await upload(*args)

    monkeypatch.setattr(loop, "upload_output", later)

    async def test(service: Standing) -> None:
        await service.submit(OUTPUT.format(url=url))
        await service.until("writes-1", JobState.ADMITTED)
        assert [*there.iterdir()] == []  # it was written to before there were devices, and nothing is left
        out = service.app.home.job(JobId("writes-1")).output
        (out / "deep").mkdir()
        (out / "deep" / "model.bin").write_bytes(b"w" * 5000)
        (out / "newest").symlink_to("deep/model.bin")
        await ends(service, "writes-1")
        job = await service.get("/jobs/writes-1")
        assert (job["state"], job["phase"]) == ("STOPPING", f"its output is being uploaded to {url}")
        assert job["nodes"] == [] and job["output_url"] == url and job["upload"] is None
        await service.submit(HELLO.replace("gpus: 2", "gpus: 4").replace("hello", "all"))
        await service.until("all-1", JobState.ADMITTED)  # every device there is
        gate.set()
        job = await uploaded(service, "writes-1")
        assert (job["state"], job["reason"]) == ("SUCCEEDED", "COMPLETED")
        assert (there / "deep" / "model.bin").read_bytes() == b"w" * 5000
        assert {**job["upload"], "seconds": 0} == {
            "url": url,
            "files": 1,
            "bytes": 5000,
            "seconds": 0,
            "error": "",
            "notes": ["newest is a link or a socket, and was left out"],
        }
        listed = await service.get("/jobs/writes-1/files")
        assert "deep/model.bin" in [row["path"] for row in listed["items"]]

    with_service(tmp_path / "home", test, pretend="1x1x4")


@pytest.mark.slow
def test_an_output_that_cannot_be_uploaded_is_said_and_stays_where_it_is(tmp_path: Path) -> None:
    store = tmp_path / "store"

    async def test(service: Standing) -> None:
        store.write_text("a file where the folder would be")
        await service.submit(OUTPUT.format(url=f"file://{store}/run"))
        job = await service.until("writes-1", JobState.FAILED)
        assert job["reason"] == "OUTPUT_UNREACHABLE" and f"output: file://{store}/run" in job["error"]["text"]
        events = [record.event for record in service.app.loop.log.read(job=JobId("writes-1"))]
        assert not any(isinstance(event, JobAdmitted) for event in events)
        store.unlink()
        await service.submit(OUTPUT.format(url=f"file://{store}/run"))
        await service.until("writes-2", JobState.ADMITTED)
        out = service.app.home.job(JobId("writes-2")).output
        (out / "model.bin").write_text("weights")
        shutil.rmtree(store)
        store.write_text("it became a file")
        await ends(service, "writes-2")
        job = await uploaded(service, "writes-2")
        assert (job["state"], job["reason"]) == ("FAILED", "OUTPUT_UNREACHABLE")
        assert f"its files stay in {out}; copy them: rota cp writes-2: FOLDER" in job["text"]
        assert job["upload"]["error"] in job["text"] and (out / "model.bin").read_text() == "weights"

    with_service(tmp_path / "home", test)


@pytest.mark.slow
def test_output_of_machines_with_files_of_their_own_is_uploaded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "store"

    async def test(service: Standing) -> None:
        await service.submit(OUTPUT.format(url=f"file://{there}"))
        await service.until("writes-1", JobState.ADMITTED)
        job = service.app.loop.installation.jobs[JobId("writes-1")]
        monkeypatch.setattr(job_files, "hosts_of", lambda *_: {"m1": {"main/0"}, "m2": {"main/1"}})
        for host, text in (("m1", "one" * 300_000), ("m2", "two")):
            service.engine.homes[host] = tmp_path / host
            out = Home.of(tmp_path / host).job(job.id).make().output
            (out / "log.txt").write_text(text)
            (out / f"{host}.txt").write_text(host)
        home, clock = service.app.home, service.app.clock
        found = await job_files.upload_output(job, service.app.loop.installation, service.app.engine, home, clock)
        assert (found.files, found.error) == (4, "")
        assert {one.name: one.read_text() for one in there.iterdir()} == {
            "log.txt": "one" * 300_000,
            "log.txt@m2": "two",
            "m1.txt": "m1",
            "m2.txt": "m2",
        }
        assert found.notes == ("several machines have log.txt: that of m2 is log.txt@m2",)
        assert not home.job(job.id).gathered.exists()
        del service.engine.homes["m2"]
        found = await job_files.upload_output(job, service.app.loop.installation, service.app.engine, home, clock)
        assert "m2 does not answer" in found.error and "on m1 and on m2" in found.error

    with_service(tmp_path / "home", test)


def test_checkpoints_go_to_no_url() -> None:
    text = "name: writes\ncheckpoint: {dir: 's3://b/c'}\nroles: {main: {run: [echo, hi]}}\n"
    with pytest.raises(JobFileError) as caught:
        read_job(text, filename="job.yaml")
    (problem,) = caught.value.problems
    assert (problem.loc, problem.line, problem.code) == ("checkpoint.dir", 2, "NOT_SUPPORTED")
    assert "checkpoints are not written to one" in problem.message and "output may be a URL" in problem.hint


@pytest.mark.parametrize(("url", "said"), [("memory://x", "is gone when"), ("s4://b", "no store has the scheme 's4'")])
def test_a_url_that_keeps_no_output_is_refused_at_its_place(url: str, said: str) -> None:
    text = OUTPUT.format(url=url)
    with pytest.raises(JobFileError) as caught:
        check_urls(read_job(text, filename="job.yaml"), Submission(source=text))
    (problem,) = caught.value.problems
    assert (problem.loc, problem.line, problem.code) == ("output", 2, "NOT_SUPPORTED") and said in problem.message


STORES = {"datasets": "s3://team/sets/", "results": "file:///shared/results"}


def with_names(line: str) -> JobSpec:
    text = f"name: named\n{line}\nroles: {{main: {{run: [echo, hi]}}}}\n"
    return with_stores(read_job(text, filename="job.yaml"), Submission(source=text), STORES)


def test_named_stores_stand_for_their_urls() -> None:
    spec = with_names("data: datasets:/imagenet\noutput: results:/run7")
    assert (spec.data, spec.output) == ("s3://team/sets/imagenet", "file:///shared/results/run7")
    assert (spec.data_url, spec.output_dir) == (spec.data, None)
    spec = with_names("data: /mnt/a:/b\noutput: folder:x")
    assert (spec.data, spec.output) == ("/mnt/a:/b", "folder:x")
    assert with_names("data: datasets:/").data == "s3://team/sets/"


@pytest.mark.parametrize(
    ("line", "message", "hint", "code"),
    [
        ("data: dataset:/a", "has no store 'dataset'", "did you mean 'datasets'", "UNKNOWN_NAME"),
        ("output: zzz:/a", "has no store 'zzz'", "stores: datasets, results", "UNKNOWN_NAME"),
        ("output: results:run7", "'run7' is not a path in the store", "write results:/run7", "BAD_TYPE"),
        ("output: results:/../x", "leaves the store 'results'", "without '..'", "BAD_TYPE"),
    ],
)
def test_a_store_that_is_not_there_is_refused_with_the_nearest_name(
    line: str, message: str, hint: str, code: str
) -> None:
    with pytest.raises(JobFileError) as caught:
        with_names(line)
    (problem,) = caught.value.problems
    assert (problem.loc, problem.line, problem.code) == (line.partition(":")[0], 2, code)
    assert message in problem.message and hint in problem.hint


@pytest.mark.slow
def test_a_service_knows_the_stores_of_its_settings_and_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, there = tmp_path / "home", tmp_path / "there"
    monkeypatch.setenv("ROTA_HOME", str(home))
    home.mkdir()
    table = f'[stores]\nteam = "file://{there}"\nmore = "s3://ada:secret@bucket/x"\n'
    (home / "config.toml").write_text(table)
    (there / "set1").mkdir(parents=True)
    (there / "set1" / "a.txt").write_text("alpha")

    async def test(service: Standing) -> None:
        await service.submit(JOB.format(url="team:/set1"))
        await service.until("reads-1", JobState.ADMITTED)
        (found,) = (home / "cache" / "data").glob("*/a.txt")
        assert found.read_text() == "alpha"
        stores = (await service.get("/status"))["stores"]
        assert stores == {"team": f"file://{there}", "more": "s3://ada:***@bucket/x"}
        answer = await service.http.post("/api/v1/jobs", json={"source": JOB.format(url="taem:/set1")})
        assert "did you mean 'team'" in answer.json()["errors"][0]["hint"]

    with_service(home, test)
