"""A graph that cannot work is refused after its workloads were looked at, before any process of the job starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.makers import command, spec

from rota.service.inspection import Refused, inspect_workloads
from rota.spec.ids import RoleName
from rota.spec.job import Edge, JobSpec, RoleSpec
from rota.spec.reasons import Reason

WORKLOAD = """
from rota import Workload, op
class Actor(Workload):
    @op(retry="commit")
    def update(self, batch): return batch
"""


def test_an_operation_that_the_workload_does_not_have_is_named_with_the_nearest_one(tmp_path: Path):
    (tmp_path / "refused_roles.py").write_text(WORKLOAD.replace('retry="commit"', 'retry="safe"'))
    role = RoleSpec(name=RoleName("actor"), workload="refused_roles:Actor")
    job = spec(role, edges=(Edge(source="actor.update", target="actor.updat"),))
    found = asyncio.run(inspect_workloads(job, str(tmp_path)))
    assert isinstance(found, Refused)
    assert found.reason is Reason.INVALID
    assert "role actor has no operation updat (did you mean update?)" in found.text


def test_a_commit_operation_without_state_is_refused_with_the_next_step(tmp_path: Path):
    (tmp_path / "stateless_roles.py").write_text(WORKLOAD)
    job = spec(RoleSpec(name=RoleName("actor"), workload="stateless_roles:Actor"))
    found = asyncio.run(inspect_workloads(job, str(tmp_path)))
    assert isinstance(found, Refused)
    assert "add a method with @op.state" in found.text


def test_a_sound_job_of_commands_passes_without_a_child():
    job = spec(command("a", 2))
    assert isinstance(asyncio.run(inspect_workloads(job, "")), JobSpec)
