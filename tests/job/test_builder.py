"""A job built in Python is the value that a file would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import rota
from rota.job.builder import Fail, Group, Job, Res
from rota.job.inspect import import_target
from rota.job.workload import FLOW
from rota.service.jobfile.models import job_text
from rota.service.jobfile.reader import read_job
from rota.spec.check import check
from rota.spec.errors import BadInput, JobFileError
from rota.spec.job import Checkpoint, JobSpec, Near


class Policy(rota.Workload):
    @rota.op(retry="commit")
    def update(self, batch: object) -> None: ...

    @rota.op.state
    def state(self) -> dict[str, int]:
        return {}


class Rollout(rota.Workload):
    @rota.op(send=rota.Each)
    def generate(self, item: object) -> None: ...

    @rota.op.weights
    def load(self, version: int, tensors: object) -> None: ...


async def main(f: object) -> None: ...


def grpo() -> rota.Job:
    job = rota.Job("grpo-sums", seed=3, queue="research", env={"B": "2", "A": "1"})
    contract = rota.Fail(restart="role", state="peer|checkpoint", limit="2/5m")
    actor = job.role("actor", Policy, mesh={"dp": 2}, res=rota.Res(cpus=1, memory="2GiB"), fail=contract)
    rollout = job.role("rollout", Rollout, n=(1, 4), apart=actor)
    prompts = job.source("prompts", "data:prompts")
    groups = job.stream("groups", key="uid", cap=64, stale=rota.Bound(versions=2))
    job.flow(prompts, rollout.generate, groups)
    job.weights(actor, rollout, every=2)

    job.loop(main)
    return job


def test_the_whole_spec_of_a_job_built_in_python() -> None:
    spec = grpo().spec()
    actor, rollout, loop = spec.roles
    assert (actor.replicas_min, actor.mesh, actor.restart) == (2, (("dp", 2),), "role")
    assert (actor.fail.limit_n, actor.fail.limit_window_s, actor.fail.state) == (2, 300.0, ("peer", "checkpoint"))
    assert actor.res.memory_bytes == 2 * 2**30
    assert (rollout.replicas_min, rollout.replicas_max) == (1, 4)
    assert rollout.apart == (Near(role="actor"),)
    assert actor.workload == f"{__name__}:Policy"
    assert actor.interface is not None and actor.interface.has_state
    assert loop.is_loop and spec.loop is loop
    assert [(edge.source, edge.target, edge.kind) for edge in spec.edges] == [
        ("prompts", "rollout.generate", "stream"),
        ("rollout.generate", "groups", "stream"),
    ]
    assert [edge.name for edge in spec.weights] == ["actor-rollout"]
    assert spec.env == (("A", "1"), ("B", "2"))


def test_a_built_spec_survives_its_json() -> None:
    spec = grpo().spec()
    assert JobSpec.from_json(spec.to_json()) == spec


def test_spmd_is_one_role_of_ranks_that_fail_together() -> None:
    spec = rota.spmd("train.py", "--lr", "1e-3", nproc=2, elastic=(1, 4), check="none").spec()
    (role,) = spec.roles
    assert role.run == ("python", "train.py", "--lr", "1e-3")
    assert (role.mesh, role.replicas_min, role.replicas_max, role.elastic_axis) == ((("dp", 1),), 1, 4, "dp")
    assert role.fail.check == "none"


@pytest.mark.parametrize("sizes", [{}, {"nproc": 3}, {"nproc": 4, "elastic": (2, 4)}, {"elastic": (2, 4)}])
def test_an_spmd_job_breaks_no_rule(sizes: dict[str, object]) -> None:
    assert check(rota.spmd("train.py", **sizes).spec()) == ()  # pyright: ignore[reportArgumentType] - of one test each


def test_one_axis_of_a_mesh_may_change_as_in_a_job_file() -> None:
    job = rota.Job("j")
    job.role("a", run="python t.py", n=(4, 8), mesh={"tp": 2, "dp": "*"})
    (built,) = job.spec().roles
    text = "name: j\nroles: {a: {run: python t.py, replicas: {min: 4, max: 8}, mesh: {tp: 2, dp: '*'}}}\n"
    assert (built,) == read_job(text, filename="j.yaml").roles
    assert built.mesh == (("tp", 2), ("dp", 2))


def test_a_role_that_takes_turns_has_the_size_of_the_other() -> None:
    job = rota.Job("j")
    actor = job.role("actor", Policy, mesh={"dp": 2})
    job.role("ref", Policy, share=actor)
    assert job.spec().role("ref").replicas_max == 2


NUMBERS = [1, 2, 3]


def made() -> list[int]:
    return NUMBERS


LATER = lambda: NUMBERS  # noqa: E731 - as people write a short source
STREAM = (number for number in NUMBERS)


def test_a_source_is_an_import_path_or_what_a_module_has_under_a_name() -> None:
    job = rota.Job("j")
    given = {"a": "data:prompts", "b": NUMBERS, "c": made, "d": LATER, "e": STREAM}
    for name, source in given.items():
        assert job.source(name, source) == name
    names = ("NUMBERS", "made", "LATER", "STREAM")
    assert [one.source for one in job._spec.streams] == ["data:prompts", *(f"{__name__}:{name}" for name in names)]
    for source in ([4], None, lambda: NUMBERS, iter(NUMBERS)):
        with pytest.raises(BadInput, match=f"no import path leads to this {type(source).__name__}"):
            job.source("d", source)


def test_a_workload_that_instances_cannot_import_is_refused_at_once() -> None:
    class Inside(rota.Workload): ...

    for workload in (Inside, lambda flow: None):
        with pytest.raises(BadInput, match="no import path leads to this"):
            rota.Job("j").role("a", workload)


class Told:
    """What the loop of a running job finds: notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.roles = {"rollout": self}
        self.streams = {"groups": self}

    def generate(self, *args: object) -> None:
        self.asked.append(("generate", args))

    def batches(self, size: int) -> None:
        self.asked.append(("batches", size))


def test_spmd_takes_the_fields_of_its_role_and_the_node_check_of_its_contract() -> None:
    (role,) = rota.spmd("t.py", fail={"check": "full"}, limits={"disk": "1GiB"}, ports=["tb"]).spec().roles
    assert (role.fail.check, role.limits, role.ports) == ("full", rota.Limits(disk="1GiB"), ("tb",))
    assert rota.spmd("t.py", fail={"check": "full"}, check="none").spec().roles[0].fail.check == "none"


def test_in_the_loop_the_handles_of_a_job_are_those_of_its_flow() -> None:
    job = rota.Job("j")
    rollout, groups = job.role("rollout", Rollout), job.stream("groups")
    for use in (lambda: rollout.generate([1]), lambda: groups.batches(2)):
        with pytest.raises(AttributeError, match="is for the loop of a job that runs; here it is only declared"):
            use()
    told = Told()
    token = FLOW.set(told)
    try:
        rollout.generate([1])
        groups.batches(2)
    finally:
        FLOW.reset(token)
    assert told.asked == [("generate", ([1],)), ("batches", 2)]


def test_a_plan_tells_what_a_job_would_become_and_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    job = rota.Job("j")
    job.role("rollout", Rollout, n=2)
    plan = job.plan()
    assert (plan["kind"], [role["name"] for role in plan["roles"]]) == ("PlanReport", ["rollout"])
    plan.show()
    assert "LOSING ONE" in capsys.readouterr().out
    job.role("actor", Policy, mesh={"dp": 2}, apart=rota.Job("other").role("x", "m:A"))
    with pytest.raises(JobFileError, match=r"roles\.actor\.apart\[0\]: no role 'x'"):
        job.plan()


def test_a_module_that_submits_its_job_at_its_top_is_imported_as_far_as_that(tmp_path, monkeypatch) -> None:
    code = "import rota\njob = rota.Job('j')\nclass A(rota.Workload): ...\njob.submit()\nafter = 1\n"
    (tmp_path / "submits_at_its_top.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert import_target("submits_at_its_top:A").__name__ == "A"  # pyright: ignore[reportAttributeAccessIssue] - a class
    with pytest.raises(BadInput, match="has no 'after'"):
        import_target("submits_at_its_top:after")
    with pytest.raises(BadInput, match="is the name of a file") as refused:
        import_target("parts/wl.py:main")
    assert refused.value.hint == "write parts.wl:main"


def test_a_job_is_submitted_as_the_client_does() -> None:
    job = grpo()
    seen: list[object] = []

    class Client:
        def run(self, given: object) -> str:
            seen.append(given)
            return "handle"

    assert (job.submit(Client()), seen) == ("handle", [job])


def test_a_group_names_the_parts_of_a_role() -> None:
    job = rota.Job("serve")
    Group(job, "rollout").role("decode", Rollout)
    assert [role.name for role in job.spec().roles] == ["rollout.decode"]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda job: job.role("a", "m:A", mesh={"dp": 2}, n=3), "has 2 members but n is 3"),
        (lambda job: job.role("a"), "exactly one of workload and run"),
        (lambda job: job.role("a", "m:A", run="true"), "exactly one of workload and run"),
        (lambda job: (job.role("a", "m:A"), job.role("a", "m:A")), "declared twice"),
        (lambda job: job.role("a", "m:A", n=0), "n must be at least 1"),
        (lambda job: job.loop(lambda f: None), "must be an async function"),
        (lambda job: rota.Fail(limit="three"), "limit 'three' is not N/WINDOW"),
        (lambda job: job.spec(), "has no role"),
        (lambda job: rota.Job("1st"), "must begin with a letter"),
        (lambda job: rota.spmd("t.py", nproc=5, elastic=(1, 4)), "outside elastic"),
    ],
)
def test_a_contradiction_is_refused_in_words(build, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        build(rota.Job("j"))


def test_a_role_knows_its_operations() -> None:
    role = rota.Job("j").role("actor", Policy)
    assert str(role.update) == "actor.update"
    with pytest.raises(AttributeError, match="actor has no operation 'updte'; it has update"):
        _ = role.updte


class Learner(rota.Workload):
    def __init__(self, lr: float, layers: Sequence[int] = ()) -> None:
        self.lr, self.layers = lr, layers

    @rota.op
    def work(self) -> None: ...


def test_arguments_of_a_constructor_are_those_of_the_job_file() -> None:
    job = rota.Job("learns")
    job.role("learner", Learner, args={"lr": 1e-4, "layers": (1, 2)})
    (role,) = job.spec().roles
    text = (
        f"name: learns\nroles:\n  learner:\n    workload: {__name__}:Learner\n    args: {{lr: 1e-4, layers: [1, 2]}}\n"
    )
    (read,) = read_job(text, filename="job.yaml").roles
    assert role.args == read.args == {"lr": 1e-4, "layers": [1, 2]}
    assert JobSpec.from_json(job.spec().to_json()) == job.spec()
    again = read_job(job_text(job.spec()), filename="job.yaml")
    assert again.roles[0].args == role.args


def test_an_argument_that_the_constructor_or_json_does_not_take_is_refused_where_it_is_declared() -> None:
    with pytest.raises(BadInput, match="has no argument 'rl'"):
        rota.Job("learns").role("learner", Learner, args={"lr": 1.0, "rl": 1})
    with pytest.raises(BadInput, match="role 'learner': args are sent as JSON"):
        rota.Job("learns").role("learner", Learner, args={"lr": object()})


def test_the_words_of_a_job_file_mean_the_same_in_python() -> None:
    text = """
name: a
time_limit: 2h
grace: 10s
packages: numpy
checkpoint: {every: 10 commits, keep: 2}
roles:
  main:
    run: hostname
    replicas: {min: 1, max: 4}
    resources: {cpus: 2, memory: 2GiB}
    limits: {disk: 1GiB}
    fail: {restart: role, limit: 2/5m, then: [node, job], progress: 1m}
    collocate: [{role: b, level: node}, c]
    apart: self
  b: {run: hostname}
  c: {run: hostname, start_after: b}
"""
    checkpoint = {"every": "10 commits", "keep": 2}
    job = rota.Job("a", time_limit="2h", grace="10s", idle_limit=None, packages="numpy", checkpoint=checkpoint)
    job.role(
        "main",
        run="hostname",
        replicas={"min": 1, "max": 4},
        resources={"cpus": 2, "memory": "2GiB"},
        limits={"disk": "1GiB"},
        fail={"restart": "role", "limit": "2/5m", "then": ["node", "job"], "progress": "1m"},
        collocate=[{"role": "b", "level": "node"}, "c"],
        apart={"role": "self"},
    )
    b = job.role("b", run="hostname")
    job.role("c", run="hostname", start_after=b)
    assert job.spec() == read_job(text, filename="a.yaml")
    short = rota.Job("a", time_limit_s=7200.0, grace_s=10.0, packages=("numpy",), checkpoint=Checkpoint(**checkpoint))
    short.role(
        "main",
        run="hostname",
        n=(1, 4),
        res=rota.Res(cpus=2, memory="2GiB"),
        limits=rota.Limits(disk="1GiB"),
        fail=rota.Fail(restart="role", limit="2/5m", progress="1m"),
        collocate=[Near(role="b", level="node"), "c"],
        apart="self",
    )
    short.role("b", run="hostname")
    short.role("c", run="hostname", start_after=("b",))
    assert check(job.spec()) == ()
    assert short.spec() == job.spec()


@pytest.mark.parametrize(
    ("fields", "of_role", "said"),
    [
        ({"time_limt": "2h"}, {}, "a job has no field 'time_limt' (did you mean 'time_limit'?)"),
        ({"time_limit": 600}, {}, "time_limit=600 has no unit (write time_limit='600s', or time_limit_s=600)"),
        ({"time_limit": "2h", "time_limit_s": 7200}, {}, "give time_limit or time_limit_s, not both"),
        ({"roles": {}}, {}, "roles of a job are declared one by one in Python (use job.role(NAME, ...))"),
        ({"replicas": 2}, {}, "replicas is a field of a role, not of a job (write job.role(NAME, replicas=...))"),
        ({"checkpoint": {"evry": 1}}, {}, "checkpoint has no field 'evry' (did you mean 'every'?)"),
        ({}, {"replica": 2}, "role 'main' has no field 'replica' (did you mean 'replicas'?)"),
        ({}, {"replicas": "2"}, "role 'main': replicas='2' is not a number, or (min, max)"),
        ({}, {"replicas": 2, "n": 2}, "role 'main': replicas and n are the same; give one of them"),
        ({}, {"resources": {"gpu": 1}}, "resources of role 'main' has no field 'gpu' (did you mean 'gpus'?)"),
        ({}, {"resources": {"memory": "2G"}}, "role 'main': resources: '2G' is not a size with a unit; write 2GiB"),
        ({}, {"fail": {"limt": "3/10m"}}, "fail of role 'main' has no field 'limt' (did you mean 'limit'?)"),
        (
            {"time_limit": "2 parsec"},
            {},
            "time_limit: '2 parsec' is not a duration with a unit; for example 90s, 5m, 8h, 2d",
        ),
        ({"checkpoint": 5}, {}, "checkpoint=5 is not a mapping, or Checkpoint(...)"),
        ({}, {"replicas": True}, "role 'main': replicas=True is not a number, or (min, max)"),
        ({}, {"n": ("1", "2")}, "role 'main': n=('1', '2') is not a number, or (min, max)"),
        ({}, {"resources": {"memory": 2}}, "role 'main': resources: '2' is not a size with a unit; write 2MiB or 2GiB"),
        ({}, {"resources": 2}, "role 'main': resources=2 is not a mapping, or Res(...)"),
        ({}, {"fail": {"limit": 3}}, "role 'main': fail: limit 3 is not N/WINDOW, for example 3/10m"),
        (
            {},
            {"fail": {"then": 3}},
            "role 'main': fail: then=3 is not a list of names, or a text of them with | between",
        ),
        ({}, {"apart": 3}, "role 'main': apart=3 is not a role, its name, or a mapping"),
        ({}, {"apart": [{"rolle": "b"}]}, "apart of role 'main' has no field 'rolle' (did you mean 'role'?)"),
        ({}, {"collocate": {"level": "node"}}, "role 'main': collocate needs role"),
        ({}, {"model": {"layers": 1}}, "role 'main': model needs hidden, heads, seq, vocab, batch"),
    ],
)
def test_a_wrong_word_in_python_is_named_with_the_right_one(
    fields: dict[str, object], of_role: dict[str, object], said: str
) -> None:
    with pytest.raises(BadInput) as refused:
        rota.Job("a", **fields).role("main", run="hostname", **of_role)  # pyright: ignore[reportArgumentType] - wrong on purpose
    assert str(refused.value) == said


WRONG: tuple[dict[str, Any], ...] = ({"gpu": 1}, {"cpus": "2"}, {"restart": "never"})


def _role(**given: Any) -> None:
    Job("x").role("w", run=["true"], **given)


@pytest.mark.parametrize(
    ("make", "said", "hint"),
    [
        (lambda: Res(**WRONG[0]), "Res has no field 'gpu'", "did you mean 'gpus'?"),
        (lambda: Res(**WRONG[1]), "cpus='2' is not a number", "write cpus=2"),
        (lambda: Fail(**WRONG[2]), "restart='never' is not one of process, ", "limit='0/10m', then=[]"),
        (lambda: _role(resources={"cpus": "2"}), "role 'w': resources: cpus='2' is not a number", ""),
        (lambda: _role(fail={"same": "x"}), "role 'w': fail: same='x' is not a whole number", ""),
        (lambda: _role(env={"A": 1}), "role 'w': env A=1 is not text", "write 'A': '1'"),
        (lambda: _role(env="A=1"), "role 'w': env='A=1' is not a mapping", "write env={'NAME': 'text'}"),
        (lambda: _role(gpus=1), "role 'w' has no field 'gpus'", "write resources={'gpus': 1}"),
        (lambda: _role(setup=3), "role 'w': setup=3 is not text", ""),
        (lambda: Job("x", time_limit_s="10m"), "a job: time_limit_s='10m' is not a number", "write time_limit='10m'"),
        (lambda: Job("x", gpus=1), "gpus is a field of a role", "write job.role(NAME, resources={'gpus': 1})"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_where_it_is_given_by_role_and_field(
    make: Callable[[], object], said: str, hint: str
) -> None:
    with pytest.raises(BadInput) as refused:
        make()
    assert said in str(refused.value) and hint in str(refused.value)
