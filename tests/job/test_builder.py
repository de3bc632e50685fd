"""A job built in Python is the value that a file would give."""

from __future__ import annotations

import pytest

import rota
from rota.job.builder import Group
from rota.spec.errors import BadInput
from rota.spec.job import JobSpec, Near


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


def grpo() -> rota.Job:
    job = rota.Job("grpo-sums", seed=3, queue="research", env={"B": "2", "A": "1"})
    contract = rota.Fail(restart="role", state="peer|checkpoint", limit="2/5m")
    actor = job.role("actor", Policy, mesh={"dp": 2}, res=rota.Res(cpus=1, memory="2GiB"), fail=contract)
    rollout = job.role("rollout", Rollout, n=(1, 4), apart=actor)
    prompts = job.source("prompts", "data:prompts")
    groups = job.stream("groups", key="uid", cap=64, stale=rota.Bound(versions=2))
    job.flow(prompts, rollout.generate, groups)
    job.weights(actor, rollout, every=2)

    @job.loop
    async def main(f: object) -> None: ...

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
    assert (role.mesh, role.replicas_min, role.replicas_max, role.elastic_axis) == ((("dp", 2),), 1, 2, "dp")
    assert role.fail.check == "none"


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
