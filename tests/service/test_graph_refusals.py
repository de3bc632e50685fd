"""A graph that cannot work is refused after its workloads were looked at, before any process of the job starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.makers import command, spec

from rota.service.cli import app
from rota.service.control.submission import Refused, inspect_workloads
from rota.spec.ids import RoleName
from rota.spec.job import Edge, JobSpec, RoleSpec
from rota.spec.reasons import Reason

WORKLOAD = """
from rota import Workload, op
class Actor(Workload):
    @op
    def update(self, batch): return batch
"""


def test_an_operation_that_the_workload_does_not_have_is_named_with_the_nearest_one(tmp_path: Path):
    (tmp_path / "refused_roles.py").write_text(WORKLOAD)
    role = RoleSpec(name=RoleName("actor"), workload="refused_roles:Actor")
    job = spec(role, edges=(Edge(source="actor.update", target="actor.updat"),))
    found = asyncio.run(inspect_workloads(job, str(tmp_path)))
    assert isinstance(found, Refused)
    assert found.reason is Reason.INVALID
    assert "role 'actor' has no operation 'updat'; did you mean 'update'?" in found.text


def test_a_mesh_without_the_axis_of_an_operation_is_refused_with_the_axes_it_has(tmp_path: Path):
    (tmp_path / "sharded_roles.py").write_text(
        "from rota import Shard, Workload, op\n"
        "class Actor(Workload):\n"
        "    @op(send=Shard('dp', pad='repeat'))\n"
        "    def update(self, batch): return batch\n"
    )
    role = RoleSpec(
        name=RoleName("actor"), workload="sharded_roles:Actor", replicas_min=2, replicas_max=2, mesh=(("tp", 2),)
    )
    found = asyncio.run(inspect_workloads(spec(role), str(tmp_path)))
    assert isinstance(found, Refused)
    assert "actor.update splits over the axis dp, which the mesh does not have" in found.text


def test_check_tells_what_only_workloads_and_graph_show_at_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    edges = "edges:\n  - {from: a.f, to: b.g, kind: grad}\n"
    (tmp_path / "job.yaml").write_text("name: t\nroles: {a: {run: x}, b: {run: y}}\n" + edges)
    assert app.call(["run", str(tmp_path / "job.yaml"), "--check"]) == 2
    assert "job.yaml:4:5: edges[0]: a.f -> b.g needs a loop that sends batches over it" in capsys.readouterr().err


def test_a_sound_job_of_commands_passes_without_a_child():
    job = spec(command("a", 2))
    assert isinstance(asyncio.run(inspect_workloads(job, "")), JobSpec)
