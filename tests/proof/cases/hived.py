"""Replay cases of virtual clusters: scenarios of pods that come, run, preempt and go."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rota.cluster.core.capacity import CellSpec
from rota.cluster.core.state import InvariantBroken
from rota.cluster.core.txn import Txn
from rota.cluster.virtual.cells import FREE, NONE, CellType, TenantCells, TopologyError, VirtualCells
from rota.cluster.virtual.hived import GangAsk, GangPlan, HivedCluster
from rota.spec.errors import BadInput
from tests.proof.cases.compare import Mismatch, Unsupported, expect_equal

Raw = dict[str, Any]
Kept = tuple[GangAsk, list[list[tuple[str, str]]], list[str]]
"""A gang, the node and device of every leaf of every member, and per leaf the kind of the owned cell around it."""


def hived_case(document: Raw, case: Raw) -> None:
    """Replay one case of a document. Raises Mismatch or Unsupported."""
    _Replay(document, case).run()


def build_cells(config: Raw) -> VirtualCells:
    """The cells of a configuration. Raises TopologyError when tenants own more than there is."""
    types = {
        name: CellType(child=t["childCellType"], count=t["childCellNumber"], is_node=t.get("isNodeLevel", False))
        for name, t in config["cellTypes"].items()
    }
    counter: dict[str, int] = {}
    forest = [_physical(types, cell["cellType"], cell, 0, counter, in_node=False) for cell in config["physicalCells"]]
    tenants = [
        TenantCells(
            name=name,
            cells=tuple((cell["cellType"], cell["cellNumber"]) for cell in vc.get("virtualCells") or ()),
            pinned=tuple(cell["pinnedCellId"] for cell in vc.get("pinnedCells") or ()),
        )
        for name, vc in config["virtualClusters"].items()
    ]
    return VirtualCells(forest, types, tenants)


def start_all_nodes(cluster: HivedCluster, txn: Txn) -> None:
    """Take the nodes in as a cluster does that comes up: all are bad until they report."""
    for healthy in (False, True):
        for leaf in cluster.cells.physical.leaf_cells:
            cluster.buddy.set_health(txn, leaf, healthy)


def set_node_health(cluster: HivedCluster, txn: Txn, node: int, healthy: bool) -> None:
    """Every device of a node (row among the nodes) turns good or bad."""
    physical = cluster.cells.physical
    cell = physical.node_cells[node]
    for leaf in physical.leaf_cells[int(physical.leaf0[cell]) : int(physical.leaf1[cell])]:
        cluster.buddy.set_health(txn, leaf, healthy)


def _physical(
    types: dict[str, CellType], kind: str, raw: Raw | None, position: int, counter: dict[str, int], *, in_node: bool
) -> CellSpec:
    """One physical cell; children that the file leaves out are made in order, devices numbered inside their node."""
    given = raw or {}
    made = types.get(kind)
    if made is not None and made.is_node:
        counter["device"] = 0
        in_node = True
    address = given.get("cellAddress")
    if made is None:
        if address is None:
            address = counter.get("device", position)
        counter["device"] = counter.get("device", 0) + 1
        return CellSpec(kind=kind, address=str(address), pinned=given.get("pinnedCellId", ""))
    children = given.get("cellChildren") or [None] * made.count
    if len(children) != made.count:
        raise TopologyError(f"{kind} {address}: has {len(children)} children, its type says {made.count}")
    return CellSpec(
        kind=kind,
        address=str(position if address is None else address),
        children=tuple(
            _physical(types, made.child, child, i, counter, in_node=in_node) for i, child in enumerate(children)
        ),
        is_node=made.is_node,
        pinned=given.get("pinnedCellId", ""),
    )


def configured(document: Raw, overrides: Raw) -> Raw:
    """The configuration of a document with the overrides of a case applied. Raises Unsupported for an unknown key."""
    config: Raw = copy.deepcopy({**document["physical_cluster"], "virtualClusters": document["virtual_clusters"]})
    cells: list[Any] = [[cell] for cell in config["physicalCells"]]
    for path, value in overrides.items():
        value = copy.deepcopy(value)
        if match := re.fullmatch(r"physicalCells\[(\d+|\+)\]", path):
            given = [] if value is None else value if isinstance(value, list) else [value]
            if match.group(1) == "+":
                cells.append(given)
            else:
                cells[int(match.group(1))] = given
        elif match := re.fullmatch(r"node (\S+) renamed", path):
            _rename(cells, match.group(1), value)
        elif path.startswith("cellTypes."):
            config["cellTypes"][path.removeprefix("cellTypes.")] = value
        elif path.startswith("physicalCells["):
            _set_path({"physicalCells": [group[0] for group in cells]}, path, value)
        else:
            _set_path(config["virtualClusters"], path, value)
    config["physicalCells"] = [cell for group in cells for cell in group]
    return config


def _rename(value: Any, old: str, new: str) -> None:
    if isinstance(value, list):
        for item in value:
            _rename(item, old, new)
    elif isinstance(value, dict):
        if value.get("cellAddress") == old:
            value["cellAddress"] = new
        _rename(value.get("cellChildren"), old, new)


def _set_path(root: Any, path: str, value: Any) -> None:
    """Set a dotted path with indices, ``VC1.virtualCells[0].cellNumber``; ``[+]`` appends, None removes."""
    keys: list[str | int] = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
    target = root
    try:
        for key in keys[:-1]:
            target = target[key]
        last = keys[-1]
        if last == "+":
            target.extend(value if isinstance(value, list) else [value])
        elif value is None and not isinstance(last, int):
            target.pop(last, None)
        elif value is None:
            target[last] = {**target[last], "cellNumber": 0}
        else:
            target[last] = value
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Unsupported(f"override {path!r}") from None


@dataclass(slots=True)
class _Pod:
    """A pod whose gang has a placement: which member of it it is."""

    name: str
    gang: str
    member: int


@dataclass(slots=True)
class _Replay:
    document: Raw
    case: Raw
    cluster: HivedCluster = field(init=False)
    txn: Txn = field(default_factory=Txn)
    offers: dict[str, tuple[GangPlan, int]] = field(default_factory=dict[str, tuple[GangPlan, int]])
    committed: dict[str, _Pod] = field(default_factory=dict[str, _Pod])
    preempting: dict[str, str] = field(default_factory=dict[str, str])
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    before_cancel: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def run(self) -> None:
        """Play all steps of the case. Raises Mismatch at the first one that goes otherwise."""
        overrides = self.case.get("config_overrides") or {}
        steps = self.case["steps"]
        later = any(step["op"] in ("run_case", "restart_with_overrides") for step in steps)
        expects_start = bool(steps) and steps[0]["op"] == "start"
        if not expects_start:
            self._start({} if later else overrides)
        for number, step in enumerate(steps):
            act = self._acts().get(step["op"])
            if act is None:
                raise Unsupported(f"op {step['op']!r}")
            try:
                act(step)
                self._check()
            except Mismatch as mismatch:
                subject = step.get("pod") or step.get("node") or ""
                raise Mismatch(f"step {number} ({step['op']} {subject}): {mismatch}") from None

    def _acts(self) -> dict[str, Callable[[Raw], None]]:
        return {
            "start": self._op_start,
            "schedule": self._op_schedule,
            "commit": self._op_commit,
            "delete": self._op_delete,
            "delete_unallocated": self._op_delete_unallocated,
            "delete_all_committed": self._op_delete_all_committed,
            "delete_all_preempting": self._op_delete_all_preempting,
            "set_bad": lambda step: self._set_health(step["node"], False),
            "set_healthy": lambda step: self._set_health(step["node"], True),
            "expect_no_gangs": lambda _: expect_equal("gangs without pods", [], self._orphans()),
            "expect_gangs_absent": self._op_absent,
            "expect_lazy_preempted_gangs": self._op_lazy,
            "expect_free_cells": self._op_free_cells,
            "expect_cells_of_gang_before_cancel": self._op_before_cancel,
            "run_case": self._op_run_case,
            "restart_with_overrides": self._op_restart,
            "replay_committed": self._op_replay,
        }

    def _start(self, overrides: Raw) -> None:
        self.cluster = HivedCluster(build_cells(configured(self.document, overrides)))
        start_all_nodes(self.cluster, self.txn)
        self.offers, self.preempting, self.waiting = {}, {}, {}

    def _op_start(self, step: Raw) -> None:
        try:
            self._start(self.case.get("config_overrides") or {})
            got = "ok"
        except TopologyError:
            got = "config_error"
        expect_equal("start", step["expect"]["result"], got)

    def _check(self) -> None:
        if hasattr(self, "cluster"):
            unsafe = [chain for chain in self.cluster.cells.chains if not self.cluster.buddy.is_safe(chain)]
            if unsafe:
                raise InvariantBroken(f"{unsafe}: guarantees of tenants can no longer be kept")

    # -- scheduling --------------------------------------------------------------------------------------------------

    def _ask(self, pod: Raw) -> GangAsk:
        sizes = [(member["leaf_cells"], member["pods"]) for member in self.document["gangs"][pod["gang"]]]
        if pod["leaf_cells"] not in [size for size, _ in sizes]:
            raise BadInput(f"no member of gang {pod['gang']} asks {pod['leaf_cells']} leaf cells")
        return GangAsk(
            name=pod["gang"],
            tenant=pod["vc"],
            priority=pod["priority"],
            members=tuple(size for size, count in sorted(sizes) for _ in range(count)),
            kind=pod.get("leaf_type"),
            pinned=pod.get("pinned_cell"),
            lazy=bool(pod.get("lazy_preemption")),
        )

    def _op_schedule(self, step: Raw) -> None:
        name = step["pod"]
        try:
            got = self._schedule(name, step)
        except BadInput as error:
            got = {"result": "user_error", "why": error.message}
        self._compare(step.get("expect") or {}, got, step)

    def _schedule(self, name: str, step: Raw) -> Raw:
        phase = step.get("phase", "preempting")
        if phase not in ("filtering", "preempting"):
            raise Unsupported(f"phase {phase!r}")
        pod = self.document["pods"][name]
        ask = self._ask(pod)
        allowed = self._allowed(step.get("suggested_nodes", "ALL"))
        self.waiting[name] = ask.name
        plan = self._existing_plan(ask, allowed, phase)
        if plan is None:
            plan = self._new_plan(ask, allowed, phase)
        if plan is None:
            return {"result": "wait"}
        victims = self._victim_pods(plan)
        if victims:
            if ask.name in self.cluster.gangs:
                self.preempting[name] = ask.name
            return {"result": "preempt", "victims": victims}
        member = self._free_member(plan, pod["leaf_cells"])
        self.offers[name] = (plan, member)
        return {"result": "bind", **self._where(plan, member)}

    def _existing_plan(self, ask: GangAsk, allowed: Callable[[int], bool], phase: str) -> GangPlan | None:
        """The placement that the gang has; a preemption that left the allowed nodes is cancelled."""
        self.cluster.check(ask)
        gang = self.cluster.gangs.get(ask.name)
        if gang is None or gang.state != "preempting":
            return gang.plan if gang is not None else None
        node = self.cluster.cells.physical.node
        healthy = self.cluster.buddy.healthy
        if any(not allowed(int(node[leaf])) or not healthy[leaf] for leaf, _ in gang.plan.flat):
            self._cancel(ask.name)
            return None
        return gang.plan

    def _new_plan(self, ask: GangAsk, allowed: Callable[[int], bool], phase: str) -> GangPlan | None:
        plan = self.cluster.find(self.txn, ask, allowed)
        if plan is not None and plan.victims and phase == "preempting":
            self.cluster.reserve(self.txn, plan)
        return plan

    def _allowed(self, text: Any) -> Callable[[int], bool]:
        names = self._node_names()
        if isinstance(text, list):
            return lambda node: names[node] in text
        if text == "ALL":
            return lambda node: True
        if match := re.fullmatch(r"ALL-\{(.*)\}", text):
            left_out = {part.strip() for part in match.group(1).split(",")}
            return lambda node: names[node] not in left_out
        raise Unsupported(f"suggested_nodes {text!r}")

    def _node_names(self) -> list[str]:
        physical = self.cluster.cells.physical
        return [physical.specs[cell].address for cell in physical.node_cells]

    def _victim_pods(self, plan: GangPlan) -> list[str]:
        mine = plan.ask.name
        gangs = {self.cluster.user[leaf] for leaf, _ in plan.flat if leaf in self.cluster.user} - {mine}
        return sorted(pod.name for pod in self.committed.values() if pod.gang in gangs)

    def _free_member(self, plan: GangPlan, size: int) -> int:
        taken = {pod.member for pod in self.committed.values() if pod.gang == plan.ask.name}
        for member, leaves in enumerate(plan.leaves):
            if len(leaves) == size and member not in taken:
                return member
        raise BadInput(f"gang {plan.ask.name} already has all its pods")

    def _where(self, plan: GangPlan, member: int) -> Raw:
        physical = self.cluster.cells.physical
        leaves = plan.leaves[member]
        return {
            "node": self._node_names()[int(physical.node[leaves[0]])],
            "gpus": [int(physical.specs[leaf].address) for leaf in leaves],
        }

    def _compare(self, expect: Raw, got: Raw, step: Raw) -> None:
        wanted = expect.get("result")
        result = got["result"]
        match wanted:
            case None:
                pass
            case "bind":
                for key in ("result", "node", "gpus"):
                    if key in expect:
                        expect_equal(key, expect[key], got.get(key, got.get("why")))
            case "bind_any":
                expect_equal("result", "bind", result)
            case "preempt":
                expect_equal("result", "preempt", result)
                within = expect.get("victims_subset_of")
                if within is not None and not set(got["victims"]) <= set(within):
                    raise Mismatch(f"victims: expected some of {within}, got {got['victims']}")
            case "wait" | "wait_or_preempt_none":
                expect_equal("result", "wait", result)
            case "no_state_created":
                if self.document["pods"][step["pod"]]["gang"] in self.cluster.gangs:
                    raise Mismatch("expected no state, but the gang exists")
            case "user_error":
                expect_equal("result", "user_error", result)
            case _:
                raise Unsupported(f"expect.result {wanted!r}")
        if "gang_absent" in expect:
            self._op_absent({"gangs": [expect["gang_absent"]]})
        for gang, state in (expect.get("gang_state") or {}).items():
            expect_equal(f"state of {gang}", state, self._gang_state(gang))

    def _gang_state(self, gang: str) -> str:
        if gang in self.cluster.gangs:
            return self.cluster.gangs[gang].state
        return "pending" if gang in self.waiting.values() else "absent"

    # -- pods come and go --------------------------------------------------------------------------------------------

    def _op_commit(self, step: Raw) -> None:
        name = step["pod"]
        if name not in self.offers:
            raise Mismatch("the pod was not bound before it was committed")
        plan, member = self.offers.pop(name)
        gang = self.cluster.gangs.get(plan.ask.name)
        if gang is None or gang.state == "preempting":
            self.cluster.allocate(self.txn, plan)
        self.preempting.pop(name, None)
        self.waiting.pop(name, None)
        self.committed[name] = _Pod(name, plan.ask.name, member)

    def _op_delete(self, step: Raw) -> None:
        name = step["pod"]
        pod = self.committed.pop(name, None)
        if pod is None:
            self._op_delete_unallocated(step)
        elif not any(other.gang == pod.gang for other in self.committed.values()):
            self.cluster.release(self.txn, pod.gang)

    def _op_delete_unallocated(self, step: Raw) -> None:
        name = step["pod"]
        self.offers.pop(name, None)
        self.waiting.pop(name, None)
        gang = self.preempting.pop(name, None)
        if gang is not None and gang not in self.preempting.values():
            self._cancel(gang)

    def _cancel(self, gang: str) -> None:
        found = self.cluster.gangs.get(gang)
        if found is not None and found.state == "preempting":
            self.before_cancel[gang] = [leaf for leaf, _ in found.plan.flat]
            self.cluster.cancel(self.txn, gang)

    def _op_delete_all_committed(self, step: Raw) -> None:
        for name in self._in_order(step, list(self.committed)):
            self._op_delete({"pod": name})

    def _op_delete_all_preempting(self, step: Raw) -> None:
        for name in self._in_order(step, list(self.preempting)):
            self._op_delete_unallocated({"pod": name})

    def _in_order(self, step: Raw, names: list[str]) -> list[str]:
        order = step.get("order", "forward")
        if order not in ("forward", "reverse"):
            raise Unsupported(f"order {order!r}")
        return names if order == "forward" else names[::-1]

    def _set_health(self, node: str, healthy: bool) -> None:
        names = self._node_names()
        if node not in names:
            raise Unsupported(f"node {node!r}")
        set_node_health(self.cluster, self.txn, names.index(node), healthy)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _op_absent(self, step: Raw) -> None:
        found = [gang for gang in step["gangs"] if gang in self.cluster.gangs]
        expect_equal("gangs that should be absent", [], found)

    def _orphans(self) -> list[str]:
        """Gangs that are still there; one whose pods wait for their victims is not expected to be gone."""
        return sorted(set(self.cluster.gangs) - set(self.preempting.values()))

    def _op_lazy(self, step: Raw) -> None:
        found = sorted(name for name, gang in self.cluster.gangs.items() if gang.lazily_preempted)
        expect_equal("lazily preempted gangs", sorted(step["gangs"]), found)

    def _op_free_cells(self, step: Raw) -> None:
        wanted = step["all_free_cells"]
        if wanted not in ("healthy", "bad"):
            raise Unsupported(f"all_free_cells {wanted!r}")
        cluster, buddy = self.cluster, self.cluster.buddy
        for vcell, spec in enumerate(cluster.cells.virtual.specs):
            mine = cluster.cells.tenants[cluster.cells.tenant[vcell]].name == step["vc"]
            if mine and spec.kind == step["cell_type"] and buddy.vprio[vcell] == FREE:
                cell = buddy.serves[vcell]
                state = "healthy" if cell == NONE or buddy.healthy[cell] else "bad"
                expect_equal(f"free cell {vcell} of {step['vc']}", wanted, state)

    def _op_before_cancel(self, step: Raw) -> None:
        match = re.fullmatch(r"used with priority (-?\d+) \(owner (\w+)\) or free", step["each"])
        if match is None:
            raise Unsupported(f"each {step['each']!r}")
        owner = self.committed.get(match.group(2))
        for leaf in self.before_cancel.get(step["gang"], []):
            user = self.cluster.user.get(leaf)
            if user is None:
                expect_equal("priority of a free cell", FREE, self.cluster.buddy.prio[leaf])
            else:
                expect_equal("owner of a used cell", owner.gang if owner else None, user)
                expect_equal("priority of a used cell", int(match.group(1)), self.cluster.buddy.prio[leaf])

    # -- restarts ----------------------------------------------------------------------------------------------------

    def _op_run_case(self, step: Raw) -> None:
        """Play another case first, under the plain configuration, up to where ``until`` says."""
        other = next((case for case in self.document["cases"] if case["id"] == step["case"]), None)
        if other is None:
            raise Unsupported(f"case {step['case']!r} is not in the file")
        until = step.get("until")
        self._start({})
        for inner in other["steps"]:
            result = (inner.get("expect") or {}).get("result")
            if until is not None and ("user_error" in str(until)) and result == "user_error":
                return
            if until is not None and result == until:
                return
            self._acts()[inner["op"]](inner)

    def _op_restart(self, step: Raw) -> None:
        """Start anew under the overrides of the case, or of the step; what was committed is remembered, not placed."""
        old = self.cluster
        self._kept = self._bindings(old)
        self._start(step.get("config_overrides") or step.get("overrides") or self.case.get("config_overrides") or {})

    _kept: dict[str, Kept] = field(default_factory=dict)

    def _bindings(self, old: HivedCluster) -> dict[str, Kept]:
        physical = old.cells.physical
        names = [physical.specs[cell].address for cell in physical.node_cells]
        kept: dict[str, Kept] = {}
        for pod in self.committed.values():
            plan = old.gangs[pod.gang].plan
            leaves = [
                [(names[int(physical.node[leaf])], physical.specs[leaf].address) for leaf in member]
                for member in plan.leaves
            ]
            kinds = [old.cells.virtual.specs[old.cells.root[v]].kind if v != NONE else "" for _, v in plan.flat]
            kept[pod.gang] = (plan.ask, leaves, kinds)
        return kept

    def _op_replay(self, step: Raw) -> None:
        physical = self.cluster.cells.physical
        names = self._node_names()
        where = {(names[int(physical.node[leaf])], physical.specs[leaf].address): leaf for leaf in physical.leaf_cells}
        level_of = {
            (self.cluster.cells.chain[row], spec.kind): int(physical.level[row])
            for row, spec in enumerate(physical.specs)
        }
        for name, (ask, members, kinds) in self._kept.items():
            leaves = [[where[at] for at in member if at in where] for member in members]
            placed = [(where[at], k) for at, k in zip((a for m in members for a in m), kinds) if at in where]
            kept = [(level_of.get((self.cluster.cells.chain[leaf], kind), 0),) for leaf, kind in placed]
            if any(leaves):
                self.cluster.adopt(self.txn, ask, leaves, kept)
            else:
                self.committed = {n: pod for n, pod in self.committed.items() if pod.gang != name}
