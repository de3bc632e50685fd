"""An image is refused where nothing can hold it, and for what does not run in it; one that is ignored is said so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standing import Standing, with_service
from test_cli import own_home, with_cli

import rota
from rota.runtime import image
from rota.service.api import body_of
from rota.service.control import intake
from rota.service.jobfile.reader import read_job
from rota.spec import codec
from rota.spec.check import check, image_refused, tenant_refused
from rota.spec.errors import JobFileError
from rota.spec.events import JobSubmitted

assert own_home  # the fixture of every test here, too

IMAGE = "name: boxed\nimage: pytorch:2\nroles: {main: {run: [x], resources: {memory: 1GiB}}}\n"
OLDER = "jobName: boxed\nimage: pytorch:2\ntaskRoles:\n  - {name: main, taskNumber: 1, command: x, memoryMB: 1024}\n"
REFUSED = "'pytorch:2' cannot be used: this machine has neither podman, nor docker"


@pytest.fixture(autouse=True)
def no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "TOOLS", ("podman-that-is-missing",))


NOTE = "image pytorch:2: ignored"


@pytest.mark.parametrize("source", [IMAGE, OLDER], ids=["roles", "taskRoles"])
def test_an_image_is_refused_at_its_line_by_every_verb_and_taken_when_it_is_said_to_be_ignored(
    source: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(source)

    async def test(service: Standing, ask: Callable[..., Any]) -> None:
        for option in ("--dry-run", "-d"):
            refused = await ask("run", str(file), option)
            assert (refused.status, f"{file}:2:8: image: {REFUSED}" in refused.err) == (2, True), refused.err
            assert "--ignore-image" in refused.err
        assert service.app.loop.installation.jobs == {}, "nothing was submitted"
        assert (await ask("run", str(file), "--check", "--ignore-image")).status == 0
        shown = await ask("run", str(file), "--dry-run", "--ignore-image")
        assert f"note: {NOTE}" in shown.out and "memory" not in shown.out.partition("note:")[2]
        taken = await ask("run", str(file), "-d", "--ignore-image")
        assert taken.status == 0 and f"note: {NOTE}" in taken.err
        assert [*service.app.loop.installation.jobs] == ["boxed-1"]

    with_cli(tmp_path / "service", test)


def test_rest_and_python_refuse_an_image_and_take_it_with_ignore_image(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        for path in ("/api/v1/jobs", "/api/v1/jobs:plan"):
            refused = await service.http.post(path, json={"source": IMAGE})
            assert (refused.status_code, REFUSED in refused.text) == (422, True)
            taken = await service.http.post(path, json={"source": IMAGE, "ignore_image": True})
            assert taken.status_code in (200, 201), taken.text
        assert any(NOTE in note for note in taken.json()["notes"])

    with_service(tmp_path, test)
    job = rota.Job("boxed", image="pytorch:2")
    job.role("main", run="x", res=rota.Res(memory="1GiB"))
    assert body_of(job)["spec"]["image"] == "pytorch:2"
    with pytest.raises(JobFileError, match="cannot be used"):
        job.plan()
    assert [NOTE in note for note in job.plan(ignore_image=True)["notes"]] == [True]

    class Client:
        def run(self, given: object, **options: object) -> object:
            return options

    assert job.submit(Client(), ignore_image=True) == {"ignore_image": True}


def test_the_clients_send_ignore_image(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def test(service: Standing) -> None:
        from rota.service.aclient import AsyncClient

        token = service.http.headers["Authorization"].removeprefix("Bearer ")
        async with AsyncClient(str(service.http.base_url), token, transport=service.http._transport) as client:
            with pytest.raises(JobFileError, match="cannot be used"):
                await client.run(IMAGE)
            sent.append(await client.run(IMAGE, ignore_image=True))

    with_service(tmp_path, test)
    assert sent[0]["name"] == "boxed"


def test_a_job_that_asks_for_neither_has_no_notes() -> None:
    job = rota.Job("plain")
    job.role("main", run="x")
    assert job.plan()["notes"] == []


def test_what_would_not_run_in_the_image_is_refused_at_its_place(tmp_path: Path) -> None:
    spec = read_job(
        "name: boxed\nimage: pytorch:2\nroles:\n  main: {workload: 'a:b'}\n  more: {run: [x], packages: [numpy]}\n",
        filename="job.yaml",
    )
    assert [one.path for one in image_refused(spec)] == [("roles", "main", "workload"), ("roles", "more", "packages")]
    assert next(one.path for one in tenant_refused(replace(spec, run_as="daemon"))) == ("image",)
    assert not [*image_refused(replace(spec, image=None))]


def test_the_tools_of_images_are_looked_for_once_in_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(intake, "find_tool", lambda: asked.append("tool") or "")

    async def test(service: Standing) -> None:
        for known_s, times in ((0.0, 1), (0.0, 2), (60.0, 3), (60.0, 3)):
            monkeypatch.setattr(intake, "TOOL_KNOWN_S", known_s)
            assert (await service.http.post("/api/v1/jobs:plan", json={"source": IMAGE})).status_code == 422
            assert len(asked) == times

    with_service(tmp_path, test)


def test_a_job_of_a_log_from_before_images_were_used_runs_without_and_one_of_an_older_client_in_it() -> None:
    spec = read_job(IMAGE, filename="job.yaml")
    older = {"spec": {**spec.to_json(), "spec_version": 1}}
    event = codec.from_json_value(JobSubmitted, codec.to_json_value(JobSubmitted(spec=spec)) | older)
    assert event.spec == replace(spec, image=None, spec_version=1)
    assert intake._from_json(older["spec"]).image == spec.image == "pytorch:2"


def test_an_image_is_a_reference_or_an_absolute_path() -> None:
    spec = read_job(IMAGE, filename="job.yaml")
    names = ("--help", "-v", "env.sif", "./env.sif", "../x", "a b", "a//b", "x:", "")
    for name in names:
        faults = [one for one in check(replace(spec, image=name)) if one.path == ("image",)]
        assert faults and "absolute path" in str(faults[0]), name
    digest = f"ghcr.io:443/a/b-c@sha256:{'0' * 64}"
    for name in ("pytorch", "localhost:5000/x/y_z:1.2-rc", digest, "/data/my env.sif", "docker://ubuntu:24.04"):
        assert not check(replace(spec, image=name)), name
