"""Explanation of a plan in sentences with numbers: what binds, the runner-ups, why not another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Literal, TypedDict

from rota.spec.errors import BadInput
from rota.spec.resources import counted
from rota.train.plan.memory import GIB, memory
from rota.train.plan.model import ParallelPlan
from rota.train.plan.search import Scored, SearchResult, binds, predicted, score, search
from rota.train.plan.space import CostTable, SearchRequest

WORTH_TELLING = 0.01
"""A part of a step is named when it makes up at least this share of the difference."""


def parse_degrees(text: str) -> dict[str, int]:
    """``tp=8,pp=1`` as pins. Raises BadInput for another form."""
    pins: dict[str, int] = {}
    for part in text.split(","):
        name, sep, value = part.strip().partition("=")
        if not sep or not value.strip().isdigit():
            raise BadInput(f"{part.strip()!r} is not NAME=NUMBER", hint="for example tp=8,pp=1")
        pins[name.strip()] = int(value)
    return pins


class StageRow(TypedDict):
    """A pipeline rank: its layers ``[first, last)`` by chunk, and its memory."""

    rank: int
    layers: list[list[int]]
    memory_gib: float
    memory_gib_by_class: dict[str, float]


class SlowerPlan(TypedDict):
    """A runner-up and the parts of its step that cost more."""

    plan_id: str
    iteration_s: float
    slower_pct: float
    because: list[str]


class PlanExplanation(TypedDict):
    """The document of ``plan explain``."""

    api: str
    kind: str
    plan_id: str
    summary: list[str]
    binds: str
    breakdown_s: dict[str, float]
    memory_gib_by_class: dict[str, float]
    stages: list[StageRow]
    certificate: dict[str, object] | None
    runner_ups: list[SlowerPlan]


class PlanVerdict(TypedDict):
    """What other degrees would give: seconds and GiB of their best plan, None where there is none."""

    plan: ParallelPlan | None
    iteration_s: float | None
    memory_gib: float | None
    verdict: Literal["slower", "faster", "does_not_fit", "illegal"]
    because: list[str]


def explain(plan: ParallelPlan, question: SearchRequest, *, found: SearchResult | None = None) -> PlanExplanation:
    """The document of ``plan explain`` for one plan, without ``why_not``."""
    scored = score(plan, question)
    parts = predicted(scored, question)
    return {
        "api": "rota/v1",
        "kind": "PlanExplanation",
        "plan_id": plan.id,
        "summary": summary(scored, question),
        "binds": binds(scored),
        "breakdown_s": parts["breakdown_s"],
        "memory_gib_by_class": parts["memory_gib_by_class"],
        "stages": stages(plan, question),
        "certificate": None if found is None else asdict(found.certificate),
        "runner_ups": [] if found is None else [_runner_up(one, scored) for one in found.best if one.plan != plan],
    }


def summary(scored: Scored, question: SearchRequest) -> list[str]:
    """Three sentences: the shape, the time with its largest part, the memory with its largest class."""
    plan, mesh, step = scored.plan, scored.plan.mesh, scored.step
    axes = ", ".join(f"{name} {size}" for name, size in _axes(plan) if size > 1) or "one device"
    part = max(step.breakdown_s, key=lambda name: step.breakdown_s[name])
    held = max(scored.memory_by_class_gib, key=lambda name: scored.memory_by_class_gib[name])
    share = 100 * step.breakdown_s[part] / step.total_s
    micro = counted(plan.micro_batches, "micro-batch", "micro-batches")
    return [
        f"{counted(mesh.world, 'device')}: {axes}; schedule {plan.schedule}, {micro} of {plan.micro_batch}, "
        f"ZeRO stage {plan.layers[0].zero}, offload {plan.layers[0].offload}.",
        f"One step takes {step.total_s:.3g} s ({question.batch / step.total_s:.3g} sequences a second); "
        f"{part} is {share:.0f} % of it.",
        f"The fullest device needs {scored.memory_bytes / GIB:.3g} of {question.memory_gib:.3g} GiB, most of it "
        f"{held} ({scored.memory_by_class_gib[held]:.3g} GiB).",
    ]


def _axes(plan: ParallelPlan) -> list[tuple[str, int]]:
    mesh = plan.mesh
    return [("pp", mesh.pp), ("dp", mesh.dp), ("cp", mesh.cp), ("tp", mesh.tp), ("ep", mesh.ep)]


def stages(plan: ParallelPlan, question: SearchRequest) -> list[StageRow]:
    """One row a pipeline rank: its layers, its work for one micro-batch, its memory."""
    return [
        {
            "rank": rank,
            "layers": [list(chunk.layers) for chunk in plan.stages[rank :: plan.mesh.pp]],
            "memory_gib": need.total / GIB,
            "memory_gib_by_class": need.by_class_gib(),
        }
        for rank, need in enumerate(memory(plan, question.model))
    ]


def _runner_up(other: Scored, best: Scored) -> SlowerPlan:
    return {
        "plan_id": other.plan.id,
        "iteration_s": other.step.total_s,
        "slower_pct": 100 * (other.step.total_s / best.step.total_s - 1),
        "because": because(other, best),
    }


def why_not(pins: Mapping[str, int], best: Scored, question: SearchRequest) -> PlanVerdict:
    """What the named degrees would give when everything else is chosen best for them.

    ``verdict``: ``slower``, ``does_not_fit`` (it would with more memory; the need is given), ``illegal`` (no plan of
    the space has these degrees), or ``faster`` when ``best`` was not the best of the space.
    """
    pinned = replace(question, pins=dict(pins))
    found = search(pinned, top=1)
    if found.best:
        other = found.best[0]
        return _verdict(other, "faster" if other.step.total_s < best.step.total_s else "slower", because(other, best))
    roomy = search(replace(pinned, memory_gib=1e9), top=1)
    if not roomy.best:
        degrees = ", ".join(f"{name}={value}" for name, value in pins.items())
        reason = (
            f"no plan of the space has {degrees} on {question.gpus} devices with batch {question.batch}: degrees must "
            f"divide the devices, heads {question.model.heads}, kv heads {question.model.key_heads} and the batch"
        )
        return {"plan": None, "iteration_s": None, "memory_gib": None, "verdict": "illegal", "because": [reason]}
    need = least_memory(pinned)
    reason = (
        f"even with full recompute its fullest device needs {need.memory_bytes / GIB:.3g} GiB, "
        f"{question.memory_gib - question.hardware.device.reserve_gib:.3g} are there"
    )
    return _verdict(need, "does_not_fit", [reason])


def least_memory(question: SearchRequest) -> Scored:
    """Among the best plans of each memory limit, the one that needs least: the limit is bisected to 1 %."""
    low, high = question.hardware.device.reserve_gib, 1e6
    table = CostTable(question)
    best = search(replace(question, memory_gib=high), top=1, table=table).best[0]
    while high - low > 0.01 * high:
        middle = (low + high) / 2 if high < 4 * max(low, 1) else (max(low, 1) * high) ** 0.5
        found = search(replace(question, memory_gib=middle), top=1, table=table)
        if found.best:
            best, high = found.best[0], middle
        else:
            low = middle
    return best


def _verdict(other: Scored, verdict: Literal["slower", "faster", "does_not_fit"], reasons: list[str]) -> PlanVerdict:
    return {
        "plan": other.plan,
        "iteration_s": other.step.total_s,
        "memory_gib": other.memory_bytes / GIB,
        "verdict": verdict,
        "because": reasons,
    }


def because(other: Scored, best: Scored) -> list[str]:
    """The parts of a step that cost more, largest first, and the difference in all."""
    difference_s = other.step.total_s - best.step.total_s
    grown = {name: seconds - best.step.breakdown_s[name] for name, seconds in other.step.breakdown_s.items()}
    worse = sorted(
        (name for name in grown if grown[name] > WORTH_TELLING * difference_s), key=lambda name: -grown[name]
    )
    sentences = [
        f"{name} takes {other.step.breakdown_s[name]:.3g} s instead of {best.step.breakdown_s[name]:.3g} s"
        for name in worse[:3]
    ]
    if difference_s < 0:
        return [f"a step is {-difference_s:.3g} s shorter: the plan that is explained is not the best of the space"]
    return [f"a step is {difference_s:.3g} s longer", *sentences] if difference_s else ["it is equally fast"]
