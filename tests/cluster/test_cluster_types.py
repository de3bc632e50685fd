"""A job that names several types of devices gets one of them, under every profile; each slot one type alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.admission import shape_feasible
from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived
from rota.cluster.core.explain import explain_ask
from rota.cluster.core.profile import Admit
from rota.cluster.core.state import TENANT_LABEL, State
from rota.cluster.policies import PROFILES, get_profile
from rota.cluster.sim.runs import run_sim
from rota.spec.ids import JobId
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Node, Res

ONE_QUEUE = (Queue(path="default", guaranteed=Res(cpus=0, gpus=24)),)


def owned(one: Node) -> Node:
    """A node of the only queue, for profiles that keep tenants on their own nodes."""
    return replace(one, labels=((TENANT_LABEL, "default"),))


def mixed() -> State:
    nodes = [owned(node(f"{kind}{i}", 4, type=kind)) for kind in ("V100", "A100", "H100") for i in (0, 1)]
    return state(*nodes, queues=ONE_QUEUE)


def types_held(s: State, job: str) -> list[set[str]]:
    return [{s.types[int(s.dev_type[d])] for d in held.devices} for held in s.jobs[JobId(job)].held]


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_job_of_two_types_starts_on_them_and_no_third(profile: str) -> None:
    s = mixed()
    slots = [slot(2, type="A100|H100")] * 6
    decisions = step(s, JobArrived(ask=ask("j", *slots)), get_profile(profile), 0.0)
    if profile == "hived":  # cells have devices of one type: twelve of one type there are not
        assert not any(isinstance(one, Admit) for one in decisions)
        decisions = step(s, JobArrived(ask=ask("j", *slots[:4])), get_profile(profile), 1.0)
    assert any(isinstance(one, Admit) for one in decisions)
    held = types_held(s, "j")
    assert all(len(types) == 1 for types in held), "a slot has devices of one type"
    assert set().union(*held) <= {"A100", "H100"}


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_job_of_two_types_waits_while_only_a_third_is_free(profile: str) -> None:
    s = mixed()
    for i, kind in enumerate(("A100", "H100")):
        step(s, JobArrived(ask=ask(f"full{i}", *[slot(4, type=kind)] * 2)), get_profile(profile), 0.0)
    step(s, JobArrived(ask=ask("j", slot(4, type="A100|H100"), at=1.0)), get_profile(profile), 1.0)
    assert s.jobs[JobId("full1")].held
    assert not s.jobs[JobId("j")].held


def test_why_it_waits_and_what_there_is_name_the_types() -> None:
    s = mixed()
    for i, kind in enumerate(("A100", "H100")):
        step(s, JobArrived(ask=ask(f"full{i}", *[slot(4, type=kind)] * 2)), get_profile("fifo"), 0.0)
    found = explain_ask(s, get_profile("fifo"), ask("j", slot(4, type="A100|H100"), at=1.0), 1.0)
    assert found.why is not None
    assert (found.why.reason, found.why.fields["free_gpus"]) == (Reason.NO_FREE_DEVICES, 0)
    assert {"change": {"set": "roles.bundle 0.resources.gpu_type", "value": None}} in [
        {"change": one["change"]} for one in found.would_start_now_with
    ]
    short = shape_feasible(mixed(), ask("j", slot(1, type="B200|P4")).shape)
    assert short is not None
    assert short.text == "bundle 0 asks devices of type B200 or P4; the cluster has devices of type V100, A100, H100"


def test_a_gang_whose_roles_ask_for_different_types_is_refused_by_cells_and_not_given_any() -> None:
    s = mixed()
    step(s, JobArrived(ask=ask("j", slot(4, type="A100"), slot(4, type="H100"))), get_profile("hived"), 0.0)
    row = s.jobs[JobId("j")]
    assert not row.held
    assert row.wait is not None
    assert row.wait.reason is Reason.WRONG_TYPE


def test_a_trace_may_name_several_types_and_the_job_runs_on_none_but_those(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "job_id,submit_s,duration_s,gpus,vc,gpu_type\nfirst,0,100,8,a,H100\nj,0,10,8,a,A100|H100\nold,0,5,8,v,V100|P4\n"
    )
    (tmp_path / "v.csv").write_text("vc,nodes,gpu_type\nv,1,V100\na,1,A100\nh,1,H100\n")

    def starts() -> dict[str, float]:
        shown = run_sim(tmp_path / "t.csv", tmp_path / "v.csv", "fifo")
        return {job["job_id"]: job["first_start_s"] for job in shown["jobs"]}

    assert starts() == {"first": 0.0, "j": 0.0, "old": 0.0}
    (tmp_path / "v.csv").write_text("vc,nodes,gpu_type\nv,1,V100\na,1,V100\nh,1,H100\n")
    assert starts() == {"first": 0.0, "j": 100.0, "old": 0.0}, "the only H100 node is taken first, V100 will not do"
