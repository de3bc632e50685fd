"""Replay cases of fair-share actions: nodes, queues and jobs in; the status of every task after the actions out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from rota.cluster.core import cycle, events
from rota.cluster.core.admission import AWAITED
from rota.cluster.core.guarded import check
from rota.cluster.core.jobs import Allocation, Allocations, JobAsk, Shape, Slot, asked
from rota.cluster.core.profile import Admit, Preempt, Profile
from rota.cluster.core.state import State
from rota.cluster.policies.kai import kai
from rota.spec.gang import CellLevel
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.resources import Device, Node, Res
from tests.proof.cases.compare import Mismatch, Unsupported, expect_equal

Raw = dict[str, Any]
ROUNDS, QUIET_ROUNDS = 2, 5
"""Rounds of all actions until the expected state must be reached, and rounds after that in which it must stay."""
ACTIONS = {"consolidation": "consolidate", "reclaim": "reclaim", "preempt": "preempt"}
NODE_CPU_MILLI, NODE_MEMORY = 20_000, 20_000_000_000
NONE_CPUS, NONE_MEMORY = 1e-3, 1
"""Next to nothing: in a queue a zero would say that nothing is stated."""
UNLIMITED_GPUS = 1e15
PREEMPTIBLE_BELOW = 100
QUEUE_PRIORITY = 100
SYMBOLS = {
    "PriorityTrainNumber": 50,
    "PriorityBuildNumber": 100,
    "PriorityInferenceNumber": 125,
    "DefaultQueuePriority": QUEUE_PRIORITY,
}


def kai_case(case: Raw, profile: Profile) -> None:
    """Replay one case under a profile. Raises Mismatch or Unsupported."""
    replay = _Replay(case)
    action = case["action"]
    if action == "all-actions":
        for n in range(ROUNDS + QUIET_ROUNDS):
            replay.round(profile)
            if n >= ROUNDS - 1:
                replay.compare(case["expect"])
    else:
        replay.act(_one_action(action))
        replay.note()
        replay.compare(case["expect"])
    for name, most in (case["expect_counts"] or {}).items():
        if name not in ("binds", "evictions"):
            raise Unsupported(f"count {name!r}")
        if replay.most[name] > most:
            raise Mismatch(f"{name} in one round: expected at most {most}, got {replay.most[name]}")


def _one_action(action: str) -> Profile:
    """The profile reduced to one of its actions."""
    profile = kai()
    if action == "allocate":
        return replace(profile, victims=None)
    if action not in ACTIONS or profile.victims is None:
        raise Unsupported(f"action {action!r}")
    victims: Any = profile.victims
    return replace(profile, victims=replace(victims, actions=(ACTIONS[action],)), starts=False)


@dataclass(slots=True)
class _Task:
    """One task of a case: the job that it became, and its slot in it."""

    job: JobId
    slot: int


@dataclass(slots=True)
class _Status:
    """What became of a job in this round, and on which nodes."""

    name: str
    nodes: tuple[str, ...] = ()


class _Replay:
    def __init__(self, case: Raw) -> None:
        names, queues = _queues(case)
        self.state = State(_nodes(case), queues)
        self.tasks: dict[str, list[_Task]] = {}
        self.status: dict[JobId, _Status] = {}
        self.counts: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.groups: dict[tuple[int, str], int] = {}
        self.now = float(len(case["jobs"]))
        for position, raw in enumerate(case["jobs"]):
            _Reader(self, raw, names, position).read()
        self._settle()

    def add(self, ask: JobAsk, held: Allocations = ()) -> None:
        """Put a job into the state, running if it holds something."""
        events.apply(self.state, events.JobArrived(ask=ask), ask.queued_at)
        if held:
            events.apply(self.state, events.JobHolds(job=ask.id, held=held), ask.queued_at)

    def note(self) -> None:
        """Keep the largest counts of any round."""
        self.most |= self.counts
        self.counts.clear()

    def round(self, profile: Profile) -> None:
        """One round: decide, then let stopping jobs go and started ones run."""
        self.act(profile)
        self.note()
        for job in sorted(self.state.stopping):
            events.apply(self.state, events.JobReleased(job=job), self.now)
        self._settle()

    def act(self, profile: Profile) -> None:
        """One pass of decisions; the statuses tell what came of each job."""
        self.now += 1.0
        for decision in cycle.step(self.state, events.Tick(), profile, self.now):
            match decision:
                case Admit(job=job, held=held):
                    self.counts["binds"] += 1
                    self.status[job] = _Status("binding", self._names(held))
                case Preempt(job=job, to=to):
                    self.counts["evictions"] += 1
                    held = to or self.state.jobs[job].held
                    self.status[job] = _Status("pipelined" if to else "releasing", self._names(held))
                case _:
                    pass
        check(self.state)
        for job, row in self.state.jobs.items():
            if row.phase == "queued" and row.wait is not None and row.wait.reason in AWAITED:
                self.status[job] = _Status("pipelined", tuple(row.wait.fields["nodes"]))

    def _settle(self) -> None:
        for job, row in self.state.jobs.items():
            self.status[job] = _Status("running" if row.held else "pending", self._names(row.held))

    def _names(self, held: Sequence[Allocation]) -> tuple[str, ...]:
        return tuple(self.state.nodes[slot.node].id for slot in held)

    def compare(self, expected: Mapping[str, Raw]) -> None:
        """Raise Mismatch unless every task has the expected status and, where one is named, lies on that node."""
        for name, wanted in expected.items():
            for task in self._tasks_of(name):
                status = self.status[task.job]
                expect_equal(f"status of {name}", wanted["status"].lower(), status.name)
                if wanted["node"] is not None and status.name != "pending":
                    nodes = status.nodes if len(status.nodes) <= task.slot else (status.nodes[task.slot],)
                    if wanted["node"] not in nodes:
                        raise Mismatch(f"node of {name}: expected {wanted['node']}, got {', '.join(nodes)}")

    def _tasks_of(self, name: str) -> list[_Task]:
        """All tasks of a job, or the one that is named with its number; a name that fits none names nothing."""
        if name in self.tasks:
            return self.tasks[name]
        job, _, number = name.rpartition("-")
        tasks = self.tasks.get(job, [])
        return [tasks[int(number)]] if number.isdigit() and int(number) < len(tasks) else []


# -- reading --


def _product(value: Any) -> int:
    return prod(round(float(part)) for part in str(value).split("*"))


def _nodes(case: Raw) -> list[Node]:
    level = next((found for raw in case["jobs"] if (found := _level(raw))), None)
    return [
        Node(
            id=NodeId(name),
            host="case",
            cpus=(raw.get("CPUMillis") or NODE_CPU_MILLI) / 1000,
            memory_bytes=_product(raw.get("CPUMemory") or NODE_MEMORY),
            # A device that is cut into parts is no whole device; parts of that kind are not asked here.
            devices=() if raw.get("MigStrategy") else tuple(Device(index=i, type="gpu") for i in range(_gpus(raw))),
            cells=(_cell(raw, level),) if level else (),
        )
        for name, raw in sorted(case["nodes"].items(), key=lambda item: (_cell(item[1], level), item[0]))
    ]


def _cell(raw: Raw, level: str | None) -> str:
    return str((raw.get("Labels") or {}).get(level, ""))


def _gpus(raw: Raw) -> int:
    return int(raw.get("GPUs") or 0)


def _level(raw: Raw) -> str | None:
    """The label on which a job must lie together."""
    found = re.search(r"RequiredLevel:([^\s\]]+)", str((raw.get("extra") or {}).get("RootSubGroupSet", "")))
    return found.group(1) if found else None


def _queues(case: Raw) -> tuple[dict[str, str], list[Queue]]:
    """Paths by name, and the queues, departments first; a department competes with what it deserves as weight."""
    departments = {raw["name"]: raw for raw in case["departments"] or ()}
    given = {raw["name"]: raw for raw in case["queues"]}
    paths = dict.fromkeys(departments)

    def path(name: str) -> str:
        parent = given[name]["parent"] if name in given else None
        return f"{path(str(parent))}/{name}" if parent in given or parent in departments else name

    made = [_queue(name, raw, raw["deserved_gpus"]) for name, raw in departments.items()]
    made += [_queue(path(name), raw, raw["over_quota_weight"]) for name, raw in given.items()]
    return {name: path(name) for name in (*paths, *given)}, made


def _queue(path: str, raw: Raw, weight: Any) -> Queue:
    deserved, most = raw["deserved_gpus"], raw["max_gpus"]
    most = -1.0 if most is None else float(most)
    gpus = UNLIMITED_GPUS if float(deserved or 0) < 0 else float(deserved or 0)
    limit = _beside(raw, "max", gpus=max(0.0, most))
    return Queue(
        path=path,
        guaranteed=_beside(raw, "deserved", gpus=gpus),
        limit=limit if most >= 0 or limit.cpus or limit.memory_bytes else None,
        weight=max(0.0, float(weight or 0)),
        priority=_symbol(raw.get("priority"), QUEUE_PRIORITY),
    )


def _beside(raw: Raw, word: str, *, gpus: float) -> Res:
    """Devices with what is stated of thousandths of cores and megabytes; a case counts whole cores as thousandths."""
    cpus, memory = raw.get(f"{word}_cpus"), raw.get(f"{word}_memory")
    return Res(
        cpus=0.0 if cpus is None else max(NONE_CPUS, cpus / 1e6),
        memory_bytes=0 if memory is None else max(NONE_MEMORY, int(memory * 1e6)),
        gpus=gpus,
    )


def _symbol(value: Any, default: int) -> int:
    """A number, or a name such as ``PriorityTrainNumber-1`` or ``Int(DefaultQueuePriority+1)``."""
    if value is None:
        return default
    text = re.sub(r"^Int\((.*)\)$", r"\1", str(value))
    found = re.fullmatch(r"(\w*?[A-Za-z]\w*)?([+-]?\d+)?", text)
    if not text or found is None or found.group(1) not in (None, *SYMBOLS):
        raise Unsupported(f"value {value!r}")
    return SYMBOLS.get(found.group(1) or "", 0) + int(found.group(2) or 0)


@dataclass(slots=True)
class _Reader:
    """One job of a case: its gang, and a job of its own for each task beyond the least that must run."""

    replay: _Replay
    raw: Raw
    paths: Mapping[str, str]
    position: int
    at: list[Allocation] = field(default_factory=list[Allocation])

    def read(self) -> None:
        raw, tasks = self.raw, self.raw["tasks"]
        least = self._least()
        groups = [list(range(least)), *([i] for i in range(least, len(tasks)))]
        made = self.replay.tasks[raw["name"]] = [_Task(JobId(""), 0) for _ in tasks]
        for n, members in enumerate(groups):
            job = JobId(raw["name"] if n == 0 else f"{raw['name']}#{n}")
            for slot, i in enumerate(members):
                made[i].job, made[i].slot = job, slot
            states = {str(tasks[i]["state"]).lower() for i in members}
            if states - {"running", "pending"} or len(states) > 1:
                raise Unsupported(f"tasks of one gang that are {' and '.join(sorted(states))}")
            ask = self._ask(job, [self._slot(tasks[i]) for i in members], n)
            held = tuple(self._holding(tasks[i]) for i in members) if states == {"running"} else ()
            self.replay.add(ask, held)

    def _least(self) -> int:
        text = str((self.raw.get("extra") or {}).get("RootSubGroupSet", ""))
        if found := re.fullmatch(r"DefaultSubGroup\((\d+)\)", text):
            return int(found.group(1))
        if text and not _level(self.raw):
            raise Unsupported(f"RootSubGroupSet {text!r}")
        least = self.raw["min_available"]
        return len(self.raw["tasks"]) if least is None else int(least)

    def _slot(self, task: Raw) -> Slot:
        gpus = float(self.raw["gpus_per_task"] or 0)
        cpu = int(self.raw["cpus_per_task"] or 0)
        if (self.raw.get("extra") or {}).get("IsBestEffortJob"):
            return Slot()
        names = task.get("affinity", ())
        if self.replay.state.node_row.keys() & names:
            raise Unsupported("a task that must lie on a node that is there")
        # One that is not there is like a type of device that nobody has.
        return Slot(
            gpus=int(gpus) if gpus >= 1 else 0,
            milli=round(gpus * 1000) if gpus < 1 else 0,
            type=next(iter(names), None),
            cpu_milli=cpu,
            mem=int(self.raw.get("memory_per_task") or 0),
        )

    def _ask(self, job: JobId, slots: Sequence[Slot], extra: int) -> JobAsk:
        level: CellLevel = "rack"
        bound = _level(self.raw) is not None and len(slots) > 1
        together: tuple[tuple[tuple[int, ...], CellLevel], ...] = ((tuple(range(len(slots))), level),) if bound else ()
        priority = _symbol(self.raw["priority"], 0)
        return JobAsk(
            id=job,
            shape=Shape(slots=tuple(slots), together=together),
            queue=self.paths[self.raw["queue"]],
            priority=priority,
            queued_at=self.position + extra / 1000,
            preemptible=priority < PREEMPTIBLE_BELOW,
        )

    def _holding(self, task: Raw) -> Allocation:
        """Devices for a task that runs already: that of its group, else the first that have room."""
        state, slot = self.replay.state, self._slot(task)
        node = state.node_row[NodeId(task["node"])]
        rows = range(int(state.dev0[node]), int(state.dev0[node + 1]))
        taken: dict[int, int] = {}
        for held in self.at:
            for device in held.devices:
                taken[device] = taken.get(device, 0) + (held.milli or 1000)
        need = slot.milli or 1000
        free = [row for row in rows if int(state.dev_milli[row]) - taken.get(row, 0) >= need]
        for group in task.get("gpu_group") or ():
            # Groups are names: the first of a name takes the first wholly free device, the others share it.
            whole = [row for row in free if int(state.dev_milli[row]) == 1000]
            free = [self.replay.groups.setdefault((node, str(group)), whole[0] if whole else -1)]
        count = slot.gpus or (1 if slot.milli else 0)
        if len(free) < count:
            raise Unsupported(f"{self.raw['name']} runs on {task['node']}, which has no room for it")
        held = asked(slot, node, tuple(free[:count]))
        self.at.append(held)
        return held
