"""Paths of items, and every graph of streams that could never run, refused with its edge or stream named."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.makers import loop, mesh, op, service, spec

from rota.job.core.check import check_graph
from rota.job.core.paths import paths_of, with_default_loop, with_shared_meshes
from rota.spec.check import ROLES_MAX, check, dotted
from rota.spec.ids import RoleName
from rota.spec.job import STREAM_LOOP, Bound, Edge, Interface, JobSpec, Near, StreamSpec, WeightsEdge

PROMPTS, GROUPS = StreamSpec(name="prompts", source="m:prompts"), StreamSpec(name="groups", cap=8)
ROLES = (
    mesh("actor", 2),
    service(
        "rollout",
        2,
        interface=Interface(
            kind="class",
            ops=(op("generate", send="Each"), op("all"), op("learn", send="Each", retry="never")),
            loads_weights=True,
        ),
    ),
    service("reward", 2, op("score", send="Each")),
)
LOOPED = (*ROLES, loop())
WEIGHTS = WeightsEdge(source=RoleName("actor"), target=RoleName("rollout"))


def job(*ends: str, streams: Any = (PROMPTS, GROUPS), roles: Any = LOOPED, **fields: Any) -> JobSpec:
    edges = tuple(Edge(source=a, target=b) for a, b in pairwise(ends))
    return spec(*roles, streams=streams, edges=edges, **fields)


def test_a_path_has_its_stops_its_ledger_and_the_weights_that_make_ages() -> None:
    (path,) = paths_of(job("prompts", "rollout.generate", "reward.score", "groups", weights=(WEIGHTS,)))
    assert [stop.op.name for stop in path.stops] == ["generate", "score"]
    assert (path.head.name, path.ledger.name, path.sink, path.put) == ("prompts", "groups", None, False)
    assert path.weights == (WEIGHTS,)


def test_a_path_that_ends_in_a_batch_operation_drives_itself() -> None:
    made = with_default_loop(job("prompts", "reward.score", "actor.update", streams=(PROMPTS,), roles=ROLES))
    (path,) = paths_of(made)
    assert path.sink is not None and path.sink.op.name == "update" and [s.op.name for s in path.stops] == ["score"]
    assert made.loop is not None and made.loop.workload == STREAM_LOOP
    assert check_graph(made) == ()
    assert with_default_loop(made) == made


def test_a_role_that_takes_turns_with_a_mesh_of_its_size_has_that_mesh_if_it_splits_over_its_axes() -> None:
    actor = mesh("actor", 2)
    axis = actor.mesh[0][0]
    split, whole = op("ask", send=f"Shard({axis},none)", recv=f"Concat({axis})"), op("ask")
    turns = (Near(role="actor", share="lease"),)
    cases = [
        (service("ref", 2, split, collocate=turns), actor.mesh),
        (service("ref", 2, whole, collocate=turns), ()),
        (service("ref", 3, split, collocate=turns), ()),
        (service("ref", 2, split), ()),
    ]
    for ref, expected in cases:
        made = with_shared_meshes(spec(actor, ref, loop()))
        assert (made.role("ref").mesh, made.role("actor")) == (expected, actor)


def test_a_role_that_takes_turns_with_an_elastic_mesh_changes_with_it() -> None:
    actor = replace(mesh("actor", 1), replicas_max=4, elastic_axis="dp")
    ref = service("ref", 1, op("ask", send="Shard(dp,none)"), collocate=(Near(role="actor", share="lease"),))
    made = with_shared_meshes(spec(actor, replace(ref, replicas_max=4), loop()))
    assert (made.role("ref").mesh, made.role("ref").elastic_axis) == ((("dp", 1),), "dp")
    assert check(made) == ()


def test_the_loop_that_is_added_is_not_counted_among_the_roles_of_a_job() -> None:
    more = tuple(service(f"x{i}", 1, op("go")) for i in range(ROLES_MAX - len(ROLES)))
    ends = ("prompts", "reward.score", "actor.update")
    made = with_default_loop(job(*ends, streams=(PROMPTS,), roles=(*ROLES, *more)))
    assert len(made.roles) == ROLES_MAX + 1 and check_graph(made) == ()
    assert refused(replace(made, roles=(*made.roles, service("y", 1)))) == [("OUT_OF_RANGE", "roles")]


def refused(made: JobSpec) -> list[tuple[str, str]]:
    return [(problem.code, dotted(problem.path)) for problem in check_graph(made)]


GOOD = ("prompts", "rollout.generate", "groups")
MORE, FED = StreamSpec(name="more"), replace(GROUPS, source="m:x")
OLD = replace(GROUPS, stale=Bound(versions=1))
ROUND = [("prompts", "rollout.generate"), ("rollout.generate", "reward.score"), ("reward.score", "prompts")]


@pytest.mark.parametrize(
    ("made", "code", "path"),
    [
        (job("prompts", "rollout.all", "groups"), "DISPATCH", "edges[0]"),
        (job("prompts", "rollout.learn", "groups"), "NOT_SAFE", "edges[0]"),
        (job("prompts", "rollout.generate", "groups", "reward.score"), "CHAIN", "edges[2]"),
        (job("prompts", "groups", streams=(PROMPTS, FED)), "TWO_FEEDS", "streams.groups.source"),
        (job(*GOOD, streams=(PROMPTS, replace(GROUPS, full="spill"))), "FULL", "streams.groups.full"),
        (job(*GOOD, streams=(PROMPTS, replace(GROUPS, cap=0))), "CAP", "streams.groups.cap"),
        (job("prompts", "actor.update"), "TWO_SINKS", "streams.prompts"),
        (
            job("prompts", "reward.score", "groups", streams=(PROMPTS, OLD), weights=(WEIGHTS,)),
            "STALE_WITHOUT_WEIGHTS",
            "streams.groups.stale",
        ),
        (
            job(*GOOD, streams=(PROMPTS, OLD), weights=(replace(WEIGHTS, every=3),)),
            "STALE_BELOW_EVERY",
            "streams.groups.stale",
        ),
        (job(*GOOD, weights=(replace(WEIGHTS, via="disk"),)), "VIA", "weights[0].via"),
        (with_default_loop(job(streams=(PROMPTS, MORE), roles=ROLES)), "NO_LOOP", "streams"),
    ],
)
def test_what_cannot_run_is_refused_by_the_name_of_its_place(made: JobSpec, code: str, path: str) -> None:
    assert (code, path) in refused(made)


@pytest.mark.parametrize(
    ("edges", "code"),
    [
        ([("prompts", "rollout.generate"), ("prompts", "reward.score")], "FORK"),
        ([("prompts", "reward.score"), ("more", "reward.score")], "JOIN"),
        (ROUND, "CYCLE"),
        ([("prompts", "rollout.nothing")], "UNKNOWN_OP"),
        ([("prompt", "rollout.generate")], "UNKNOWN_ROLE"),
    ],
)
def test_what_is_no_line_is_refused(edges: list[tuple[str, str]], code: str) -> None:
    made = spec(*ROLES, loop(), streams=(PROMPTS, MORE), edges=tuple(Edge(source=a, target=b) for a, b in edges))
    assert code in [found for found, _ in refused(made)]


def test_a_batch_larger_than_the_stream_would_wait_for_ever() -> None:
    edges = (Edge(source="prompts", target="actor.update", micro=9),)
    made = with_default_loop(spec(*ROLES, streams=(replace(PROMPTS, cap=8),), edges=edges))
    assert refused(made) == [("CAP_BELOW_BATCH", "streams.prompts.cap")]
