"""Rules between the fields of a job, once its workloads are known."""

# ruff: noqa: E501  a table of cases, one a line

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.spec.check import Finding, check, dotted, find_circle
from rota.spec.dispatch import OpSpec
from rota.spec.errors import NAMED_MAX, nearest
from rota.spec.ids import RoleName
from rota.spec.job import Edge, Interface, JobSpec, Near, RoleSpec
from rota.spec.resources import Res

LOOP = Interface(kind="loop")
SERVES = Interface(kind="class", ops=(OpSpec(name="go"),))


def role(name: str, interface: Interface | None = SERVES, **more: object) -> RoleSpec:
    return RoleSpec(name=RoleName(name), workload="m:W", interface=interface, **more)  # type: ignore[arg-type]


def texts(*roles: RoleSpec, **more: object) -> list[str]:
    return [str(finding) for finding in check(JobSpec(name="t", roles=roles, **more))]  # type: ignore[arg-type]


def test_a_job_of_serving_roles_and_one_loop_is_whole() -> None:
    assert texts(role("a"), role("loop", LOOP), edges=(Edge(source="loop.x", target="a.go"),)) == [
        "edges[0]: role 'loop' has no operation 'x'; there is none"
    ]
    assert texts(role("a"), role("loop", LOOP)) == []


@pytest.mark.parametrize(
    ("roles", "more", "said"),
    [
        ((role("a"), role("b")), {"edges": (Edge(source="a.go", target="b.goo"),)}, "edges[0]: role 'b' has no operation 'goo'; did you mean 'go'?"),
        ((role("a", LOOP), role("b", LOOP)), {}, "roles.b: a second loop; 'a' is the first; a job has one loop"),
        ((role("a", LOOP, replicas_min=2, replicas_max=2),), {}, "roles.a.replicas: the loop runs once"),
        ((role("a"),), {"success_when": "loop"}, "success_when: no role is a loop; name roles, or say all"),
        ((role("a"),), {"success_when": "all"}, "success_when: no role ever ends, so the job cannot succeed; add a loop role or a command"),
        ((role("a"),), {"success_when": ("a",)}, "success_when[0]: role 'a' serves calls and never ends by itself"),
        ((role("a"),), {"success_when": ()}, "success_when: names no role"),
        ((), {}, "roles: a job needs at least one role"),
        ((role("self"),), {}, "roles.self: 'self' is kept for members of the same role; choose another name"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_its_field(roles: tuple[RoleSpec, ...], more: dict[str, object], said: str) -> None:
    assert texts(*roles, **more) == [said]


def on(name: str, kinds: str, *near: str) -> RoleSpec:
    return role(name, res=Res(gpus=1, gpu_type=kinds), collocate=tuple(Near(role=one) for one in near))


def test_roles_that_share_a_device_ask_for_a_type_that_it_can_have() -> None:
    assert texts(on("a", "A100|H100"), on("b", "H100|B200", "a")) == []
    assert texts(on("a", "A100"), on("b", "H100")) == [], "they do not share"
    assert texts(on("a", "A100|H100"), on("b", "V100", "a")) == [
        "roles.b.resources.gpu_type: V100 here, A100 or H100 for role 'a' on the same device; name one type for both"
    ]
    assert texts(on("a", "A100|H100"), on("b", "H100|B200", "a"), on("c", "A100", "b")) == [
        "roles.c.resources.gpu_type: A100 here, H100 for role 'a' on the same device; name one type for both"
    ]
    assert texts(on("a", "A100|")) == [
        "roles.a.resources.gpu_type: 'A100|' has a type without a name; write A100, or A100|H100 where either will do"
    ]


def test_a_hint_says_how_many_names_it_leaves_out() -> None:
    names = [f"name{number}" for number in range(NAMED_MAX)]
    assert nearest("zzz", names) == f"there is {', '.join(names)}"
    assert nearest("zzz", [*names, "a", "b"], "roles") == f"roles: {', '.join(names)} and 2 more"
    assert (nearest("zzz", ()), nearest("NAME7", names)) == ("there is none", "did you mean 'name7'?")


def test_what_is_not_known_yet_is_not_judged() -> None:
    unknown = role("a", None)
    assert texts(unknown, success_when="loop", edges=()) == []
    assert texts(unknown, role("b", None), edges=(Edge(source="a.x", target="b.y"),)) == []


def test_a_circle_is_found_wherever_it_hangs() -> None:
    assert find_circle({"a": ("b",), "b": ("c",), "c": (), "d": ("a",)}) == ()
    circle = find_circle({"x": ("a",), "a": ("b",), "b": ("c", "d"), "c": (), "d": ("a",)})
    assert circle[0] == circle[-1] and set(circle) == {"a", "b", "d"}
    assert find_circle({"a": ("a",)}) == ("a", "a")


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), max_size=3), max_size=6))
def test_a_circle_is_found_where_brute_force_finds_one(arrows: dict[str, list[str]]) -> None:
    def reach(start: str) -> set[str]:
        found: set[str] = set()
        todo = list(arrows.get(start, ()))
        while todo:
            here = todo.pop()
            if here not in found:
                found.add(here)
                todo += arrows.get(here, ())
        return found

    circle = find_circle(arrows)
    assert bool(circle) == any(name in reach(name) for name in arrows)
    assert not circle or circle[0] == circle[-1]
    assert all(b in arrows[a] for a, b in pairwise(circle))


def test_paths_are_written_as_people_write_them() -> None:
    assert dotted(("weights", 0, "from")) == "weights[0].from"
    assert str(Finding(path=("name",), message="no", hint="yes")) == "name: no; yes"
