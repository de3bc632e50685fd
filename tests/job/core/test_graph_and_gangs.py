"""Graph, checks, gangs, binding and blast radius."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import at, command, fail, mesh, op, placement, rl, service, spec
from tests.makers import loop as the_loop

from rota.job.core.check import check_graph
from rota.job.core.graph import blast_radius, expand
from rota.job.core.placement import bind, bindings, requests_of
from rota.spec.dispatch import OpSpec
from rota.spec.gang import Apart, Grant, Together
from rota.spec.ids import RoleName
from rota.spec.job import Bound, Edge, Interface, JobSpec, Near, RoleSpec, SizedPlan, StreamSpec, WeightsEdge
from rota.spec.resources import Res

GRPO_STREAMS = (StreamSpec(name="prompts", source="m:prompts"), StreamSpec(name="groups", cap=64))


def grpo(**fields: object) -> JobSpec:
    return spec(
        mesh("actor", 2),
        service("rollout", 2, op("generate", send="Each", recv="Stream")),
        service("reward", 2, op("score", send="Each")),
        the_loop(),
        streams=GRPO_STREAMS,
        edges=(
            Edge(source="prompts", target="rollout.generate", kind="stream"),
            Edge(source="rollout.generate", target="reward.score"),
            Edge(source="reward.score", target="groups", kind="stream"),
        ),
        **fields,
    )


def towers(loop: bool = True, more: Edge | None = None, **read: str) -> JobSpec:
    """Two meshes joined by a gradient edge."""
    fields: dict[str, str] = {"send": "Shard(dp,none)", "retry": "commit"}
    return spec(
        service("vision", 2, op("encode", **fields), mesh=(("dp", 2),), state=True),
        service("speller", 2, op("read", **(fields | read)), mesh=(("dp", 2),), state=True),
        *([the_loop()] if loop else []),
        edges=(Edge(source="vision.encode", target="speller.read", kind="grad"), *([more] if more else [])),
    )


def near(role: str, level: str = "device", share: str | None = None) -> Near:
    return Near(role=role, level=level, share=share)  # type: ignore[arg-type]


def turns(job: JobSpec, one: str = "vision", other: str = "speller") -> JobSpec:
    """The job with two roles on one device in turn."""
    lease = near(one, share="lease")
    return replace(job, roles=tuple(replace(r, collocate=(lease,)) if r.name == other else r for r in job.roles))


def written(source: RoleSpec, **fields: object) -> JobSpec:
    """Weights from ``source`` to a role that loads them."""
    reads = service("b", interface=Interface(kind="class", loads_weights=True))
    return spec(source, reads, weights=(WeightsEdge(source=source.name, target=RoleName("b"), **fields),))


def test_instances_units_and_data_flow_order():
    graph = expand(grpo())
    assert [str(one) for one in graph.instances][:3] == ["actor/0", "actor/1", "rollout/0"]
    assert graph.units[0] == (at("actor/0"), at("actor/1"))
    assert len(graph.units) == 1 + 2 + 2 + 1
    assert graph.order.index(RoleName("rollout")) < graph.order.index(RoleName("reward"))
    assert graph.stateful == {"actor"}
    assert graph.loop == "loop"


def test_grad_edges_make_one_failure_unit_and_call_edges_do_not():
    job = spec(
        mesh("enc", 2),
        mesh("dec", 2),
        service("log", 1, op("put")),
        edges=(
            Edge(source="enc.forward", target="dec.step", kind="grad"),
            Edge(source="dec.step", target="log.put"),
        ),
    )
    graph = expand(job)
    assert {str(one) for one in graph.close([at("enc/0")])} == {"enc/0", "enc/1", "dec/0", "dec/1"}
    assert [str(one) for one in graph.close([at("log/0")])] == ["log/0"]


def test_blast_radius_names_what_restarts_re_forms_and_pauses():
    job = grpo()
    graph = expand(job)
    reward = blast_radius(job, graph, RoleName("reward"))
    assert reward.text == "losing reward/0 restarts reward/0; pauses nothing"
    actor = blast_radius(job, graph, RoleName("actor"))
    assert [str(one) for one in actor.restarts] == ["actor/0", "actor/1"]
    assert [str(one) for one in actor.re_forms] == ["loop/0"]
    assert actor.text.endswith("rollout, reward continue until groups holds 64")
    whole = rl(name="w")
    whole = replace(whole, roles=tuple(replace(role, fail=fail(restart="job")) for role in whole.roles))
    everything = blast_radius(whole, graph := expand(whole), RoleName("reward"))
    assert (everything.text, everything.restarts) == ("losing reward/0 restarts the whole job", graph.instances)


def problems(job: JobSpec) -> dict[str, str]:
    return {problem.code: str(problem) for problem in check_graph(job)}


@pytest.mark.parametrize("job", [grpo(), rl(), towers(), spec(command("w", 4, mesh=(("dp", 4),)))])
def test_a_sound_job_has_no_problems(job):
    assert check_graph(job) == ()


@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        (spec(service("a", 3, mesh=(("dp", 2),))), "MESH", "dp 2 = 2, but 3 instances start"),
        (spec(service("a", 2, op("f", send="Shard(tp,none)"), mesh=(("dp", 2),))), "NO_AXIS", "axis tp"),
        (spec(service("a", 2, op("f", send="Shard(dp,none)", recv="Concat(dp)"))), "NO_AXIS", "add mesh: {dp: 2}"),
        (spec(service("a", 2, op("f", send="Rank(5)"))), "NO_RANK", "rank 5"),
        (spec(service("a", 2, fail=fail(degrade=3))), "OUT_OF_RANGE", "roles.a.fail.degrade: 3"),
        (spec(service("a", 1, op("f", retry="commit"))), "NO_STATE", "add a method with @op.state"),
        (spec(service("a", 1, op("f", recv="First", retry="never"))), "FIRST_NOT_SAFE", "a.f"),
        (
            spec(
                service("rollout", 1, op("generate")),
                edges=(Edge(source="rolout.generate", target="rollout.generate"),),
            ),
            "UNKNOWN_ROLE",
            "did you mean 'rollout'?",
        ),
        (
            spec(service("a", 1, op("score")), edges=(Edge(source="a.score", target="a.scor"),)),
            "UNKNOWN_OP",
            "did you mean 'score'?",
        ),
        (
            spec(
                service("a", 1, op("f")),
                service("b", 1, op("g")),
                edges=(Edge(source="a.f", target="b.g"), Edge(source="b.g", target="a.f")),
            ),
            "CYCLE",
            "a -> b -> a",
        ),
        (
            spec(service("a", start_after=("b",)), service("b", start_after=("a",))),
            "CYCLE",
            "a after b after a",
        ),
        (spec(service("a", start_after=("c",))), "UNKNOWN_ROLE", "no role 'c'"),
        (spec(command("a"), success_when=("b",)), "UNKNOWN_ROLE", "no role 'b'"),
        (spec(service("a"), success_when=("a",)), "UNREACHABLE", "never ends"),
        (spec(service("a"), success_when="loop"), "UNREACHABLE", "no role is a loop"),
        (spec(service("a"), service("b", collocate=(near("c"),))), "UNKNOWN_ROLE", "no role 'c'"),
        (
            spec(service("a"), streams=(StreamSpec(name="s", stale=Bound(versions=1)),)),
            "CONTRADICTION",
            "streams.s.stale",
        ),
        (
            spec(
                service("a", state=True),
                service("b"),
                weights=(WeightsEdge(source=RoleName("a"), target=RoleName("b")),),
            ),
            "NO_LOAD",
            "@op.weights",
        ),
        (spec(service("a"), service("a")), "DUPLICATE_NAME", "a second role"),
        (towers(loop=False), "NO_LOOP", "vision.encode -> speller.read needs a loop"),
        (towers(retry="safe"), "GRAD_RETRY", "add up in speller.read until a commit"),
        (towers(send="Shard(dp,repeat)"), "DISPATCH", "but speller.read has send=Shard(dp,repeat)"),
        (towers(send="Same"), "DISPATCH", "declare it with send=Shard(AXIS) and no padding"),
        (towers(more=Edge(source="speller.read", target="vision.encode", kind="grad")), "GRAD_CHAIN", "none leaves"),
        (spec(), "MISSING", "at least one"),
        (spec(service("a", fail=fail(limit_n=-1))), "LIMIT", "such as 3/10m"),
        (spec(service("a", fail=fail(same=-1))), "LIMIT", "0 keeps trying within limit"),
        (
            spec(
                service("a", 1, op("f")), service("b", 1, op("g")), edges=(Edge(source="a.f", target="b.g", micro=0),)
            ),
            "MICRO",
            "at least 1",
        ),
        (towers(more=Edge(source="vision.encode", target="vision.encode", kind="grad")), "GRAD_SELF", "with itself"),
        (turns(towers()), "TURNS", "both ends work at the same time, but vision and speller take turns"),
        (turns(grpo(), "rollout", "reward"), "TURNS", "items come at any time, but reward takes turns with rollout"),
        (written(service("a")), "NO_STATE", "a writes weights, but has neither @op.state nor a publishing operation"),
        (written(service("a", state=True), via="nccl"), "VIA", "from a to b cannot go via nccl"),
        (written(service("a", state=True), every=0), "EVERY", "at least 1 commit"),
    ],
)
def test_each_mistake_is_refused_with_its_role_and_next_step(job, code, words):
    assert words in problems(job)[code]


def test_members_tied_to_one_instance_cannot_be_apart_and_both_lines_are_named():
    job = spec(service("hub"), service("ref", 2, collocate=(near("hub"),), apart=(near("self", "node"),)))
    text = problems(job)["CONTRADICTION"]
    assert "roles.ref.apart[0]" in text
    assert "roles.ref.collocate[0]" in text
    many = spec(service("hub"), service("ref", 4, collocate=(near("hub"),), apart=(near("self", "node"),)))
    assert len(check_graph(many)) == 1, "one problem a pair of lines, however many instances"


def test_a_contradiction_over_a_third_role_names_the_whole_chain():
    job = spec(
        service("a", 1),
        service("b", 2, collocate=(near("a"),)),
        service("c", 2, collocate=(near("b"),), apart=(near("self", "rack"),)),
    )
    text = problems(job)["CONTRADICTION"]
    assert "roles.c.collocate[0] with roles.b.collocate[0]" in text


def test_apart_on_a_device_agrees_with_together_on_a_node():
    job = spec(service("a", 2), service("b", 2, collocate=(near("a", "node"),), apart=(near("a", "device"),)))
    assert check_graph(job) == ()


def test_device_collocation_shares_a_bundle_and_leases_take_the_larger_device():
    job = spec(
        service("actor", 2, res=Res(cpus=2, gpus=1, memory_bytes=10)),
        service("ref", 2, res=Res(cpus=1, gpus=1, memory_bytes=5), collocate=(near("actor", share="lease"),)),
        service("reward", 1),
    )
    (request,) = requests_of(job)
    assert [tuple(map(str, ask.members)) for ask in request.bundles] == [
        ("actor/0", "ref/0"),
        ("actor/1", "ref/1"),
        ("reward/0",),
    ]
    assert request.bundles[0].res == Res(cpus=3, gpus=1, memory_bytes=15)


def test_prefill_and_decode_are_near_each_other_spread_and_far_from_the_trainer():
    job = spec(
        service("actor", 1, res=Res(gpus=1)),
        service("rollout.prefill", 2, res=Res(gpus=1)),
        service(
            "rollout.decode",
            2,
            res=Res(gpus=1),
            collocate=(near("rollout.prefill", "node"),),
            apart=(near("actor"), near("self", "node")),
        ),
    )
    assert check_graph(job) == ()
    (request,) = requests_of(job)
    assert request.together == (
        Together(bundles=(1, 3), level="node"),
        Together(bundles=(2, 4), level="node"),
    )
    assert request.apart == (
        Apart(left=(3, 4), right=(0,), level="device"),
        Apart(left=(3, 4), right=(3, 4), level="node"),
    )


@pytest.mark.parametrize(
    ("rule", "tied", "close"), [("together", ((0, 1), (2, 3)), ()), ("close", (), ((0, 1), (2, 3)))]
)
def test_runs_of_a_plan_are_kept_on_a_node_or_should_be(rule, tied, close):
    plan = replace(SizedPlan(replicas=4, plan="{}", why=""), **{rule: 2})
    job = spec(replace(command("train", 4, mesh=(("dp", 4),)), plans=(plan,)))
    (request,), runs = requests_of(job), ((0, 1), (2, 3))
    assert (request.tied, request.close) == ((runs, ()) if rule == "together" else ((), runs))


def test_gang_subgraph_asks_for_one_gang_a_sub_graph_in_data_flow_order():
    job = grpo(gang="subgraph")
    requests = requests_of(job)
    assert len(requests) == 6
    order = [request.bundles[0].members[0].role for request in requests]
    assert order.index(RoleName("rollout")) < order.index(RoleName("reward"))
    tied = spec(service("a", 1), service("b", 1, apart=(near("a", "node"),)), gang="subgraph")
    assert len(requests_of(tied)) == 1


def test_a_grant_that_does_not_answer_the_request_is_refused():
    job = rl()
    (request,) = requests_of(job)
    with pytest.raises(ValueError, match="does not answer"):
        bind(request, Grant(gang=request.gang, bundles=()))


ROLES = st.lists(
    st.builds(
        lambda i, n, meshed, together: (i, n, meshed, together),
        st.integers(0, 4),
        st.integers(1, 4),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda one: one[0],
)


def build(roles: list[tuple[int, int, bool, bool]], gang: str) -> JobSpec:
    made = [
        service(
            f"r{i}",
            n,
            mesh=(("dp", n),) if meshed else (),
            collocate=(near(f"r{roles[0][0]}"),) if together and i != roles[0][0] else (),
        )
        for i, n, meshed, together in roles
    ]
    return spec(*made, gang=gang)


@given(ROLES, st.sampled_from(["all", "subgraph"]))
def test_every_instance_is_in_exactly_one_bundle_of_one_gang(roles, gang):
    job = build(roles, gang)
    graph = expand(job)
    members = [m for request in requests_of(job) for ask in request.bundles for m in ask.members]
    assert sorted(members) == sorted(graph.instances)
    assert set(bindings(job, placement(job))) == set(graph.instances)


@given(ROLES)
def test_units_and_sub_graphs_partition_the_instances_and_units_are_finer(roles):
    graph = expand(build(roles, "all"))
    assert sorted(one for unit in graph.units for one in unit) == sorted(graph.instances)
    assert sorted(one for part in graph.subgraphs for one in part.members) == sorted(graph.instances)
    for unit in graph.units:
        assert sum(set(unit) <= set(part.members) for part in graph.subgraphs) == 1


def test_an_interface_says_whether_a_role_holds_state():
    job = spec(service("a", interface=Interface(kind="class", ops=(OpSpec(name="f", retry="commit"),), has_state=True)))
    assert expand(job).stateful == {"a"}
    off = spec(service("a", state=True, fail=fail(state=("none",))))
    assert expand(off).stateful == frozenset()
