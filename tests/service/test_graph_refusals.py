"""A graph that cannot work is refused after its workloads were looked at, before any process of the job starts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.makers import command, spec

from rota.service.cli import app
from rota.service.control.submission import Refused, Submission, inspect_workloads, with_interfaces
from rota.service.jobfile.reader import read_job
from rota.spec.errors import JobFileError
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


ARGS = """name: learns
roles:
  learner:
    workload: learns:Learner
    args: {lr: 1e-4}
"""


@pytest.mark.parametrize(
    ("sets", "loc", "line", "said"),
    [
        (("roles.learner.args.dept=2",), "roles.learner.args.dept", 0, "did you mean 'depth'"),
        pytest.param(
            ("roles.learner.args.lr=fast",),
            "roles.learner.args.lr",
            0,
            "lr is 'fast', and its type is float",
            marks=pytest.mark.slow,
        ),
        ((), "", 0, ""),
        pytest.param(("roles.learner.args={}",), "roles.learner.args", 0, "needs 'lr'", marks=pytest.mark.slow),
    ],
)
def test_arguments_are_held_against_the_constructor_before_devices_are_taken(
    tmp_path: Path, sets: tuple[str, ...], loc: str, line: int, said: str
) -> None:
    (tmp_path / "learns.py").write_text(
        "from rota import Workload, op\nclass Learner(Workload):\n"
        "    def __init__(self, lr: float, depth: int = 1): ...\n    @op\n    def work(self): ...\n"
    )
    given = Submission(source=ARGS, filename=str(tmp_path / "job.yaml"), sets=sets)
    spec = read_job(ARGS, filename=given.filename, sets=sets)
    if not loc:
        found = asyncio.run(with_interfaces(spec, given))
        assert found.roles[0].interface is not None and found.roles[0].args == {"lr": 1e-4}
        return
    with pytest.raises(JobFileError) as caught:
        asyncio.run(with_interfaces(spec, given))
    (problem,) = caught.value.problems
    assert problem.loc == loc and said in problem.message and "--set" in problem.file
    assert caught.value.hint == "", "the module itself is sound"
    several = replace(spec, roles=(replace(spec.roles[0], args={"lr": "fast", "dept": 2}),))
    with pytest.raises(JobFileError) as caught:
        asyncio.run(with_interfaces(several, given))
    assert {one.loc for one in caught.value.problems} == {"roles.learner.args.lr", "roles.learner.args.dept"}


def test_only_a_workload_has_arguments() -> None:
    text = "name: a\nroles:\n  main:\n    run: [echo]\n    args: {lr: 1, 'a b': 2}\n"
    with pytest.raises(JobFileError) as caught:
        read_job(text, filename="job.yaml")
    places = [(one.loc, one.line, one.code) for one in caught.value.problems]
    assert places == [("roles.main.args", 5, "CONTRADICTION"), ("roles.main.args.a b", 5, "BAD_NAME")]
