"""Packages of a job are installed before it may have devices; a failure ends it with the last lines of pip."""

from __future__ import annotations

from pathlib import Path

import pytest
from standing import Standing, with_service
from tests.runtime.wheels import make_wheel

from rota.spec.events import JobAdmitted
from rota.spec.ids import JobId
from rota.spec.states import JobState

BAD = """name: bad
env: {{PIP_NO_INDEX: "1", PIP_FIND_LINKS: {folder}}}
roles:
  main:
    run: "true"
    packages: [rota-missing==3]
"""
GOOD = """name: good
packages: [rota-leaf]
env: {{PIP_NO_INDEX: "1", PIP_FIND_LINKS: {folder}}}
roles: {{main: {{workload: "of_leaf:work"}}}}
"""


@pytest.mark.slow
def test_a_package_that_is_missing_ends_the_job_before_it_has_devices(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        source = BAD.format(folder=tmp_path)
        await service.submit(source, workdir=str(tmp_path))
        job = await service.until("bad-1", JobState.FAILED)
        assert (job["reason"], job["error"]["role"]) == ("ENV_SETUP_FAILED", "main")
        said = "could not be installed: No matching distribution found for rota-missing==3"
        assert job["error"]["text"] == f"roles.main.packages: {said}"
        assert "pip ended with status 1; its last lines:" in job["error"]["traceback"]
        events = [record.event for record in service.app.loop.log.read(job=JobId("bad-1"))]
        assert not any(isinstance(event, JobAdmitted) for event in events)
        plan = await service.http.post("/api/v1/jobs:plan", json={"source": source, "workdir": str(tmp_path)})
        assert (plan.status_code, said in plan.json()["detail"]) == (422, True)

    with_service(tmp_path / "home", test)


@pytest.mark.slow
def test_a_workload_is_inspected_with_the_packages_of_its_role(tmp_path: Path) -> None:
    make_wheel(tmp_path, "rota_leaf")
    (tmp_path / "of_leaf.py").write_text("import rota_leaf\ndef work(ctx): print(rota_leaf.VERSION)\n")

    async def test(service: Standing) -> None:
        body = {"source": GOOD.format(folder=tmp_path), "workdir": str(tmp_path)}
        plan = await service.http.post("/api/v1/jobs:plan", json=body)
        assert plan.status_code == 200, plan.text
        assert plan.json()["spec"]["roles"][0]["interface"]["kind"] == "function"

    with_service(tmp_path / "home", test)


def test_an_option_of_pip_is_refused_at_its_place_with_the_remedy(tmp_path: Path) -> None:
    async def test(service: Standing) -> None:
        source = "name: odd\nroles:\n  main: {run: x, packages: [numpy, '--pre']}\n"
        refused = await service.http.post("/api/v1/jobs", json={"source": source, "filename": "odd.yaml"})
        assert refused.status_code == 422
        assert "odd.yaml:3:36: roles.main.packages[1]: '--pre' is not a requirement" in refused.text
        assert "PIP_INDEX_URL" in refused.text

    with_service(tmp_path / "home", test)
