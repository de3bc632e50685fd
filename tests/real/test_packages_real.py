"""Packages of a role on a real engine: built once for all instances, imported by workloads and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.real.jobs import Run, deep, role, run_job
from tests.runtime.wheels import make_wheel, settings

from rota.spec.events import InstanceLost
from rota.spec.ids import RoleName
from rota.spec.job import Fail, JobSpec, RoleSpec
from rota.spec.reasons import Reason
from rota.spec.resources import Res
from rota.spec.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHOW = "import json, os, sys, rota, rota_leaf, rota_twig; open(os.environ['ROTA_OUTPUT_DIR'] + '/' + os.environ['ROLE_RANK'], 'w').write(json.dumps([sys.prefix, rota_leaf.VERSION, rota_twig.VERSION]))"  # noqa: E501


def test_four_instances_share_one_environment_and_a_function_imports_from_it(engine: Any, tmp_path: Path) -> None:
    for name in ("rota_leaf", "rota_twig", "rota_bark"):
        make_wheel(tmp_path, name, "1.5")
    main = RoleSpec(
        name=RoleName("main"), run=("python", "-c", SHOW), replicas_min=4, replicas_max=4, res=Res(cpus=0.1)
    )
    work = role("work", "basic:imports", packages=("rota-bark",))
    names = ("rota-leaf", "rota-twig")
    env = tuple(settings(tmp_path).items())
    spec = JobSpec(name="packed", roles=(main, work), packages=names, env=env, grace_s=5.0)

    async def body(run: Run) -> None:
        assert (await run.end()).state is JobState.SUCCEEDED, run.story()
        seen = [json.loads((run.output / str(rank)).read_text()) for rank in range(4)]
        assert len({row[0] for row in seen}) == 1 and all(row[1:] == ["1.5", "1.5"] for row in seen)
        assert (run.output / "imported.txt").read_text() == "1.5 1.5"
        logs = [path.read_text() for path in run.home.job(run.job).logs.glob("main-*.log")]
        assert sum("packages: installing rota-leaf, rota-twig" in log for log in logs) == 1, "one built, three waited"

    run_job(engine, spec, body)


@deep
def test_packages_that_a_machine_cannot_install_end_the_job_with_what_pip_says(engine: Any, tmp_path: Path) -> None:
    env = tuple(settings(tmp_path).items())
    fail = Fail(limit_n=0, then=())
    main = RoleSpec(name=RoleName("main"), run=("true",), packages=("rota-missing",), res=Res(cpus=0.1), fail=fail)

    async def body(run: Run) -> None:
        ended = await run.end()
        assert (ended.state, ended.reason) == (JobState.FAILED, Reason.ENV_SETUP_FAILED), run.story()
        assert "No matching distribution found for rota-missing" in run.events(InstanceLost)[0].text

    run_job(engine, JobSpec(name="packless", roles=(main,), env=env, grace_s=5.0), body)
