"""What a parallel plan needs close together is on one node; else the job waits with the missing level as its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_makers import ask, node, slot, state
from hypothesis import given
from hypothesis import strategies as st

from rota.cluster.core.admission import shape_feasible
from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived, JobGone
from rota.cluster.core.explain import explain_ask
from rota.cluster.core.jobs import Allocation, JobAsk, LiveJob, Shape, compile_shape
from rota.cluster.core.placement import place
from rota.cluster.core.state import TENANT_LABEL, State
from rota.cluster.policies import PROFILES, get_profile
from rota.job.core.placement import requests_of
from rota.spec.ids import JobId, RoleName
from rota.spec.job import JobSpec, Near, RoleSpec, SizedPlan
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Res


def planned(instances: int, together: int, close: int = 1, gpus: float = 1, **more: object) -> JobSpec:
    plan = SizedPlan(replicas=instances, plan="{}", why="", together=together, close=max(close, together))
    train = RoleSpec(
        name=RoleName("train"),
        run=("torchrun train.py",),
        replicas_min=instances,
        replicas_max=instances,
        res=Res(cpus=1, gpus=gpus),
        plan="auto",
        plans=(plan,),
    )
    return JobSpec(name="t", roles=(train, *more.pop("roles", ())), **more)  # type: ignore[misc,arg-type]


def asks(spec: JobSpec, name: str = "j", **more: object) -> JobAsk:
    return JobAsk(id=JobId(name), shape=compile_shape(requests_of(spec)), **more)  # type: ignore[arg-type]


def racks(*free: int, per_rack: int = 2) -> State:
    """Nodes of 8 devices, two a rack, of which so many are free; all belong to the queue ``default``."""
    made = [node(f"n{i}", 8, rack=f"r{i // per_rack}", cpus=64, gib=512) for i in range(len(free))]
    nodes = [replace(one, labels=((TENANT_LABEL, "default"),)) for one in made]
    s = state(*nodes, queues=(Queue(path="default", guaranteed=Res(cpus=0, gpus=8 * len(free))),))
    for row, count in enumerate(free):
        if count < 8:
            rows = tuple(range(int(s.dev0[row]) + count, int(s.dev0[row + 1])))
            with s.txn() as txn:
                s.put(txn, LiveJob(ask=ask(f"fill{row}", slot(1), preemptible=False)))
                s.hold(txn, JobId(f"fill{row}"), (Allocation(row, rows, 0, 0, 0),), now=0.0)
                txn.keep()
    return s


def nodes_of(s: State, job: str = "j") -> list[int]:
    return [held.node for held in s.jobs[JobId(job)].held]


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_tensor_parallel_group_is_never_split_over_nodes(profile: str) -> None:
    """Two groups of four: best fit would fill the small gaps first, and split a group over racks."""
    s = racks(3, 5, 2, 8)
    step(s, JobArrived(ask=asks(planned(8, together=4))), get_profile(profile), 0.0)
    held = nodes_of(s)
    assert len(held) == 8, "node 3 has room for both groups"
    assert len(set(held[:4])) == len(set(held[4:])) == 1, f"the groups are on {held}"


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_plan_does_not_start_on_devices_that_break_it_and_its_reason_names_the_level(profile: str) -> None:
    s = racks(3, 3, 3, 3)
    step(s, JobArrived(ask=asks(planned(4, together=4))), get_profile(profile), 0.0)
    assert not nodes_of(s)
    why = s.jobs[JobId("j")].wait
    assert why is not None
    if why.reason is Reason.TOPOLOGY:
        assert why.fields["level"] == "node"
    found = explain_ask(s, get_profile("fifo"), asks(planned(4, together=4)), 1.0)
    assert found.why is not None
    assert found.why.reason is Reason.TOPOLOGY
    numbers = {key: found.why.fields[key] for key in ("level", "rule", "roles", "groups", "group_gpus", "nodes_left")}
    assert numbers == {
        "level": "node", "rule": "plan", "roles": ["train"], "groups": 1, "group_gpus": 4, "nodes_left": 0
    }  # fmt: skip
    assert found.why.text == "The plan of train needs 1 times 4 GPUs on one node; nodes that have them free: 0."
    assert found.tally[-1].nodes_left == 0
    assert not any("replicas" in str(one["change"]) for one in found.would_start_now_with), "the plan is for 4"


def test_a_group_larger_than_any_node_is_refused_with_its_plan_named() -> None:
    short = shape_feasible(racks(8, 8), asks(planned(16, together=16)).shape)
    assert short is not None
    assert (short.reason, short.resource) == (Reason.TOO_LARGE, "gpu")
    assert short.text == "the plan of train asks 16 GPUs on one node; the cluster has at most 8 GPUs on one node"


def test_context_groups_are_on_one_node_where_that_is_possible_and_start_otherwise() -> None:
    spec = planned(8, together=2, close=4)
    s = racks(4, 2, 2, 4)
    step(s, JobArrived(ask=asks(spec)), get_profile("default"), 0.0)
    assert nodes_of(s) == [0] * 4 + [3] * 4
    s = racks(2, 2, 2, 2)
    step(s, JobArrived(ask=asks(spec)), get_profile("default"), 0.0)
    assert nodes_of(s) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_neighbours_in_a_mesh_are_neighbours_in_the_cluster_and_the_outer_axis_crosses_racks() -> None:
    s = racks(8, 5, 8, 3, 6, 8)
    step(s, JobArrived(ask=asks(planned(32, together=1))), get_profile("default"), 0.0)
    held = nodes_of(s)
    assert held == sorted(held)
    s = racks(8, 6, 8, 3)
    step(s, JobArrived(ask=asks(planned(10, together=2))), get_profile("default"), 0.0)
    assert nodes_of(s) == [2] * 8 + [3] * 2 or len({s.domain[one] for one in nodes_of(s)}) == 1


def test_other_roles_and_their_rules_hold_beside_a_plan() -> None:
    loop = RoleSpec(
        name=RoleName("loop"), run=("python x.py",), res=Res(cpus=1), collocate=(Near(role="train", level="node"),)
    )
    s = racks(3, 5, 2, 8)
    step(s, JobArrived(ask=asks(planned(8, together=4, roles=(loop,)))), get_profile("default"), 0.0)
    held = nodes_of(s)
    assert len(held) == 9
    assert len(set(held[:4])) == len(set(held[4:8])) == 1
    assert held[8] in held[:4]


def test_a_role_of_several_sizes_ties_no_instances_since_they_come_and_go_one_by_one() -> None:
    spec = planned(4, together=2)
    role = spec.roles[0]
    assert requests_of(spec)[0].tied == ((0, 1), (2, 3))
    sizes = replace(role, replicas_max=8, plans=(*role.plans, replace(role.plans[0], replicas=8)))
    assert requests_of(replace(spec, roles=(sizes,)))[0].tied == ()


@st.composite
def tied_gangs(draw: st.DrawFn) -> Shape:
    size = draw(st.sampled_from([1, 2, 3]))
    count = draw(st.integers(1, 3))
    one = slot(draw(st.sampled_from([0, 1, 2])), cpus=draw(st.sampled_from([0, 1, 2])))
    others = draw(st.lists(st.builds(slot, st.sampled_from([0, 0.5, 1])), max_size=1))
    groups = tuple(tuple(range(i * size, (i + 1) * size)) for i in range(count)) if size > 1 else ()
    return Shape(slots=(*[one] * (size * count), *others), tied=groups)


@given(tied_gangs(), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5))
def test_a_gang_with_a_plan_fits_exactly_when_brute_force_over_nodes_says_so(
    gang: Shape, taken: list[tuple[int, int]]
) -> None:
    s = state(node("a", 4, rack="r0", cpus=6), node("b", 3, rack="r0", cpus=6), node("c", 2, rack="r1", cpus=4))
    with s.txn() as txn:
        for row, device in taken:
            rows = range(int(s.dev0[row]), int(s.dev0[row + 1]))
            if device < len(rows) and s.dev_milli[rows[device]] == 1000:
                s.take(txn, Allocation(row, (rows[device],), 0, 0, 0), 1)
        before = s.digest()
        held = place(s, txn, gang)
        assert s.digest() == before
        assert (held is not None) == _possible(s, gang)
        if held is not None:
            for one in held:
                s.take(txn, one, 1)
            assert (s.dev_milli >= 0).all()
            assert (s.cpu >= 0).all()
            assert [len(one.devices) for one in held] == [x.gpus or (1 if x.milli else 0) for x in gang.slots]
            assert all(len({held[i].node for i in group}) == 1 for group in gang.tied)


def _possible(s: State, gang: Shape) -> bool:
    """Try every node for every tied group and every slot outside of one."""
    inside = {i for group in gang.tied for i in group}
    units = [*gang.tied, *((i,) for i in range(len(gang.slots)) if i not in inside)]
    free, cpu = [int(n) for n in s.free.sum(axis=1)], [int(n) for n in s.cpu]

    def fits(at: int) -> bool:
        if at == len(units):
            return True
        gpus = sum(gang.slots[i].gpus + (1 if gang.slots[i].milli else 0) for i in units[at])
        cores = sum(gang.slots[i].cpu_milli for i in units[at])
        for row in range(len(free)):
            if free[row] >= gpus and cpu[row] >= cores:
                free[row], cpu[row] = free[row] - gpus, cpu[row] - cores
                found = fits(at + 1)
                free[row], cpu[row] = free[row] + gpus, cpu[row] + cores
                if found:
                    return True
        return False

    return fits(0)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 1)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=8),
    st.sampled_from(sorted(PROFILES)),
)
def test_no_plan_ever_lies_on_cells_that_break_it(
    nodes: list[tuple[int, int]], jobs: list[tuple[int, int, int, bool]], profile: str
) -> None:
    """Random small clusters, meshes, streams and ends, under every policy: each group that must be on one node is."""
    made = [node(f"n{i}", gpus, rack=f"r{rack}", cpus=64, gib=512) for i, (gpus, rack) in enumerate(nodes)]
    made = [replace(one, labels=((TENANT_LABEL, "default"),)) for one in made]
    total = sum(gpus for gpus, _ in nodes)
    s = state(*made, queues=(Queue(path="default", guaranteed=Res(cpus=0, gpus=total)),))
    rules, running = get_profile(profile), 0
    for i, (together, groups, close, ends) in enumerate(jobs):
        spec = planned(together * groups, together, close * together)
        step(s, JobArrived(ask=asks(spec, f"j{i}", priority=50 + i % 2, queued_at=float(i))), rules, float(i))
        for row in (row for row in s.jobs.values() if row.held):
            running += 1
            for group in row.ask.shape.tied:
                there = [row.held[slot].node for slot in group]
                assert len(set(there)) == 1, f"{profile}: {row.ask.id} has a group on {there}"
        held = [row.ask.id for row in s.jobs.values() if row.held and row.phase == "running"]
        if ends and held:
            step(s, JobGone(job=held[0]), rules, i + 0.5)
    if any(together * groups <= max(gpus for gpus, _ in nodes) for together, groups, *_ in jobs[:1]):
        assert running, f"{profile}: nothing started on an empty cluster"
