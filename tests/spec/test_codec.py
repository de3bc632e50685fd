"""Every value of spec survives its JSON form; old readers and writers of the log understand each other."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.spec import codec, events
from rota.spec.dispatch import (
    Concat,
    Each,
    First,
    Mean,
    OpSpec,
    Rank,
    Same,
    Shard,
    Stream,
    Sum,
    rule_from_text,
    rule_to_text,
)
from rota.spec.gang import BundleGrant, GangRequest, Grant, Placement
from rota.spec.ids import Epoch, GangId, JobId, NodeId, RoleName
from rota.spec.job import Fail, Interface, JobSpec, Near, RoleSpec, WeightsEdge
from rota.spec.reasons import INFO, Reason, final_state
from rota.spec.resources import Res
from rota.spec.states import JobState, Level

NAMES = st.from_regex(r"\A[a-z][a-z0-9]{0,8}\Z")

roles = st.builds(
    RoleSpec,
    name=NAMES,
    workload=NAMES.map(lambda name: f"mod:{name}"),
    replicas_min=st.integers(1, 4),
    mesh=st.lists(st.tuples(NAMES, st.integers(1, 4)), max_size=2).map(tuple),
    res=st.builds(
        Res, cpus=st.floats(0, 64), gpus=st.sampled_from([0.0, 0.5, 8.0]), memory_bytes=st.integers(0, 2**40)
    ),
    env=st.lists(st.tuples(NAMES, st.text(max_size=5)), max_size=2).map(tuple),
    fail=st.builds(Fail, restart=st.sampled_from([None, "role", "job"]), standby=st.integers(0, 2)),
    collocate=st.lists(st.builds(Near, role=NAMES, share=st.sampled_from([None, "lease"])), max_size=1).map(tuple),
    interface=st.none()
    | st.builds(Interface, kind=st.just("class"), ops=st.just((OpSpec(name="go", send="Shard(dp,drop)"),))),
)
specs = st.builds(
    JobSpec,
    name=NAMES,
    roles=st.lists(roles, min_size=1, max_size=3).map(tuple),
    weights=st.lists(st.builds(WeightsEdge, source=NAMES, target=NAMES), max_size=1).map(tuple),
    success_when=st.sampled_from([None, "all", "loop", ("a", "b")]),
    time_limit_s=st.none() | st.floats(1, 1e6),
)


@pytest.mark.slow
@given(specs)
def test_a_job_survives_its_json_form(spec: JobSpec) -> None:
    text = codec.dumps(spec)
    assert JobSpec.from_json(json.loads(text)) == spec
    assert codec.dumps(JobSpec.from_json(json.loads(text))) == text


def example_of(kind: type) -> events.Event:
    """An event of that kind with every required field filled by its type."""
    grant = Grant(
        gang=GangId("all"),
        bundles=(BundleGrant(index=0, node=NodeId("n0"), host="h", devices=(0, 3), res=Res()),),
    )
    known = {
        "spec": JobSpec(name="j", roles=(RoleSpec(name=RoleName("r"), run=("true",)),)),
        "placement": Placement(gangs=(grant,)),
        "reason": Reason.USER_ERROR,
        "state": JobState.FAILED,
        "level": Level.ROLE,
        "scope": "job/x" if kind is events.FencedWrite else ((RoleName("r"), 1, Epoch(2)),),
        "health": "bad",
        "changes": {"priority": 3},
        "queues": ({"path": "a"},),
        "counts": True,
        "grants": (("team/a", "user"),),
    }
    from rota.spec.resources import Health, Node

    known["health"] = Health.BAD
    if kind.__name__ == "GangAsked":
        known["request"] = GangRequest(gang=GangId("g"), bundles=())
    if kind.__name__ == "GangGranted":
        known["bundles"] = (BundleGrant(index=0, node=NodeId("n0"), host="h", devices=(1,), res=Res()),)
    if kind.__name__ == "NodeJoined":
        known["node"] = Node(id=NodeId("n0"), host="h", cpus=4, memory_bytes=7)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            plain = {"str": "x", "int": 3, "float": 1.5, "bool": True}.get(str(field.type).rpartition(".")[2], 3)
            values[field.name] = known.get(field.name, plain if not str(field.type).endswith(("Name", "Id")) else "x")
    return kind(**values)


@pytest.mark.parametrize("kind", list(events.KINDS.values()), ids=lambda kind: kind.__name__)
def test_an_event_survives_its_json_form(kind: type) -> None:
    event = example_of(kind)
    raw = json.loads(json.dumps(events.event_to_json(event)))
    assert events.event_from_json(raw) == event


def test_a_field_of_a_newer_version_is_ignored_and_a_missing_one_takes_its_default() -> None:
    raw = {"kind": "InstanceReady", "role": "r", "rank": 0, "epoch": 1, "colour": "blue"}
    assert events.event_from_json(raw) == events.InstanceReady(role=RoleName("r"), rank=0, epoch=Epoch(1))


def test_an_unknown_event_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="Surprise"):
        events.event_from_json({"kind": "Surprise"})


@pytest.mark.parametrize("raw", [{"name": 3}, {"name": "x", "roles": "no"}, {"name": "x", "roles": [], "retry": True}])
def test_a_value_of_the_wrong_type_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        JobSpec.from_json({"roles": [], **raw})


@pytest.mark.parametrize(
    "rule", [Same, Each, Mean, Sum, First, Stream, Shard("dp"), Shard("tp", "repeat"), Concat(), Concat("dp"), Rank(2)]
)
def test_a_dispatch_rule_survives_its_text(rule: object) -> None:
    assert rule_from_text(rule_to_text(rule)) == rule  # type: ignore[arg-type]


def test_a_rule_that_cannot_send_is_refused_where_sending_is_asked() -> None:
    with pytest.raises(ValueError, match="cannot send"):
        _ = OpSpec(name="f", send="Mean").send_rule
    with pytest.raises(ValueError, match="not a dispatch rule"):
        rule_from_text("Guess")


def test_every_reason_is_explained_and_those_that_end_a_job_end_it_in_a_terminal_state() -> None:
    assert set(INFO) == set(Reason)
    for reason, info in INFO.items():
        assert info.text.endswith(".")
        if info.ends_in is not None:
            assert info.ends_in.terminal
            assert final_state(reason) is info.ends_in
    with pytest.raises(KeyError):
        final_state(Reason.NO_FREE_DEVICES)


def test_a_job_id_is_only_a_typed_text() -> None:
    assert JobId("a-1") == "a-1"
