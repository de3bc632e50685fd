"""Best plan for a model on given devices, with a certificate: best-first branch and bound over settings.

Each setting gets a lower bound that no cut and no recompute can beat; settings are scored by the full cost model in the
order of their bounds until the best bound left is not below the best plan found. What the bound leaves out needs no
score, so the result is the optimum of the space.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rota.spec.errors import BadInput
from rota.train.plan.cost import (
    LayerTime,
    StepTime,
    gradient_s,
    head_s,
    layer_time,
    offload_s,
    optimizer_s,
    stage_works,
    step_time,
)
from rota.train.plan.exchange import NUMBER_MAX
from rota.train.plan.memory import GIB, memory
from rota.train.plan.model import Layer, ParallelPlan, Recompute
from rota.train.plan.space import RECOMPUTES, SPACE, Question, Setting, cheapest_plan, cuts, plan_of, settings

Times = dict[Recompute, LayerTime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A plan that fits, with its predicted step and its fullest rank."""

    plan: ParallelPlan
    step: StepTime
    memory_bytes: float
    memory_by_class_gib: Mapping[str, float]

    @property
    def order(self) -> tuple[float, float, int, tuple[int, ...]]:
        """Least time; ties by less memory, fewer axes, smaller degrees."""
        mesh = self.plan.mesh
        degrees = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
        return (self.step.total_s, self.memory_bytes, sum(size > 1 for size in degrees), degrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof of how good the plan is: no plan of the space is faster than ``lower_bound_s``."""

    lower_bound_s: float
    gap_pct: float
    complete: bool
    enumerated: int
    bounded: int
    scored: int
    space: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Outcome of a search: the best plans in order (none when nothing fits) and the certificate."""

    best: tuple[Scored, ...]
    certificate: Certificate


def check_question(question: Question) -> None:
    """Raise BadInput that names field, value and rule when the question makes no sense."""
    model = question.model
    for name, value in (("gpus", question.gpus), ("batch", question.batch), ("layers", model.layers)):
        if not 1 <= value <= NUMBER_MAX:
            raise BadInput(f"{name}: {value} is not in 1 to {NUMBER_MAX}")
    if question.memory_gib <= question.hardware.device.reserve_gib:
        reserve = question.hardware.device.reserve_gib
        raise BadInput(f"memory: {question.memory_gib} GiB leaves nothing after the reserve of {reserve} GiB")
    if model.hidden % model.heads:
        raise BadInput(f"heads: hidden {model.hidden} does not divide by heads {model.heads}")
    for name in question.allow:
        if name not in ("cp", "offload"):
            raise BadInput(f"allow {name}: unknown", hint="one of cp, offload")
    known = ("tp", "pp", "dp", "cp", "zero", "micro_batch", "interleave", "sp")
    for name in question.pins:
        if name not in known:
            raise BadInput(f"pin {name}: unknown degree", hint=f"one of {', '.join(known)}")


def search(question: Question, *, top: int = 5, stop: Callable[[], bool] = lambda: False) -> Found:
    """The best ``top`` plans. ``stop`` is asked at each bound and each cut; True ends with what is proven so far.

    Raises BadInput for a question that makes no sense. Deterministic.
    """
    check_question(question)
    heap: list[tuple[float, int, Setting]] = []
    for index, one in enumerate(settings(question)):
        if stop():
            return Found(best=(), certificate=_certificate([], 0.0, False, index, index, 0))
        heap.append((lower_bound_s(question, one), index, one))
    heapq.heapify(heap)
    enumerated, scored, best = len(heap), 0, list[Scored]()
    complete = True
    while heap:
        bound_s, _, setting = heap[0]
        if len(best) == top and bound_s >= best[-1].step.total_s:
            break
        plans = list(score_setting(question, setting, best, top, stop))
        best = sorted([*best, *(one for one in plans if one is not None)], key=lambda one: one.order)[:top]
        if None in plans:  # the setting stays in the heap: its bound holds for the cuts that are left
            complete = False
            break
        heapq.heappop(heap)
        scored += 1
    if complete and not best and "offload" not in question.allow and question.hardware.host.gb_s:
        return search(replace(question, allow=(*question.allow, "offload")), top=top, stop=stop)
    bound_s = heap[0][0] if heap else float("inf")
    return Found(best=tuple(best), certificate=_certificate(best, bound_s, complete, enumerated, len(heap), scored))


def _certificate(
    best: list[Scored], bound_s: float, complete: bool, enumerated: int, left: int, scored: int
) -> Certificate:
    total_s = best[0].step.total_s if best else float("inf")
    proven_s = min(total_s, bound_s)
    gap_pct = 0.0 if proven_s == total_s or not best else 100 * (total_s - proven_s) / proven_s
    return Certificate(
        lower_bound_s=proven_s,
        gap_pct=gap_pct,
        complete=complete,
        enumerated=enumerated,
        bounded=left,
        scored=scored,
        space=SPACE,
    )


def layer_times(question: Question, setting: Setting) -> Times:
    """Times of a layer under each kind of recompute."""
    base = Layer(tp=setting.tp, sp=setting.sp, zero=setting.zero)
    dtype = question.dtype.param
    return {
        kind: layer_time(
            question.model,
            replace(base, recompute=kind),
            setting.micro_batch,
            question.hardware,
            dtype,
            cp=setting.cp,
        )
        for kind in RECOMPUTES
    }


def score_setting(
    question: Question, setting: Setting, best: list[Scored], top: int, stop: Callable[[], bool]
) -> Iterator[Scored | None]:
    """The plans of one setting that fit, one a cut; cuts whose own bound is beaten already are left out.

    None is the last when ``stop`` said so.
    """
    times = layer_times(question, setting)
    for cut in cuts(question.model.layers, setting.pp * setting.interleave):
        if stop():
            yield None
            return
        if len(best) == top and _cut_bound_s(question, setting, cut, times) >= best[-1].step.total_s:
            continue
        plan = cheapest_plan(question, setting, cut, times)
        if plan is None or (len(best) == top and _plan_bound_s(plan, question, times) >= best[-1].step.total_s):
            continue
        yield score(plan, question)


def score(plan: ParallelPlan, question: Question) -> Scored:
    """Predict one plan."""
    need = max(memory(plan, question.model), key=lambda stage: stage.total)
    step = step_time(plan, question.model, question.hardware)
    return Scored(plan=plan, step=step, memory_bytes=need.total, memory_by_class_gib=need.by_class_gib())


def lower_bound_s(question: Question, setting: Setting) -> float:
    """No plan of this setting is faster: perfect cut, no recompute, transfers for free.

    With stages of work ``w_i`` and ``m`` micro-batches, 1F1B and GPipe take at least ``sum_{j<i} w_j + m w_i`` for
    every stage ``i``. The cut that minimises the largest of these makes them all equal to ``W / (1 - (1 - 1/m)^p)``.
    Interleaved schedules take at least ``m W / p``, and one micro-batch must pass everything.
    """
    none = layer_times(question, setting)["none"]
    layer_s = none.ahead_s + none.backward_s(Layer())
    bare = plan_of(question, setting, (question.model.layers,), [(("none", question.model.layers),)])
    work_s = question.model.layers * layer_s + 3 * head_s(bare, question.model, question.hardware)
    m, p = setting.micro_batches, setting.pp
    if setting.interleave > 1:
        pipeline_s = max(m * work_s / p, work_s)
    else:
        pipeline_s = work_s / (1 - (1 - 1 / m) ** p) if p > 1 else m * work_s
    return pipeline_s + _state_bound_s(question, setting)


def _state_bound_s(question: Question, setting: Setting) -> float:
    """Gradient exchange and optimizer of a rank that holds an even share of the layers and no embedding.

    All of the exchange that may hide behind compute is taken as hidden.
    """
    share = max(question.model.layers // setting.pp, 1)
    part = replace(question.model, layers=share, vocab=1)
    plan = plan_of(replace(question, model=part), replace(setting, pp=1, interleave=1), (share,), [(("none", share),)])
    exchange_s = gradient_s(plan, part, question.hardware, float("inf"))
    return exchange_s + optimizer_s(plan, part, question.hardware) + offload_s(plan, part, question.hardware)


def _cut_bound_s(question: Question, setting: Setting, cut: tuple[int, ...], times: Times) -> float:
    """As ``lower_bound_s`` for one cut: the work of a rank, and the first chunks that pass before and after it."""
    none = times["none"]
    layer_s = none.ahead_s + none.backward_s(Layer())
    pp, m = setting.pp, setting.micro_batches
    work = [sum(cut[rank::pp]) * layer_s for rank in range(pp)]
    first = [count * layer_s for count in cut[:pp]]
    bound_s = max(sum(first[:rank]) + m * work[rank] for rank in range(pp))
    return bound_s + _state_bound_s(question, setting)


def _plan_bound_s(plan: ParallelPlan, question: Question, times: Times) -> float:
    """As ``_cut_bound_s``, with the recompute that the plan needs and its head."""
    model, hardware, pp = question.model, question.hardware, plan.mesh.pp
    kinds = {replace(layer, count=1): times[layer.recompute] for layer in plan.layers}
    costs = [work.cost for work in stage_works(plan, kinds, head_s(plan, model, hardware))]
    both = [cost.forward_s + cost.backward_s for cost in costs]
    work = [sum(both[rank::pp]) for rank in range(pp)]
    bound_s = max(sum(both[:rank]) + plan.micro_batches * work[rank] for rank in range(pp))
    return (
        bound_s
        + gradient_s(plan, model, hardware, float("inf"))
        + optimizer_s(plan, model, hardware)
        + offload_s(plan, model, hardware)
    )


def found_to_json(found: Found, question: Question) -> dict[str, Any]:
    """The document of ``plan search`` without its time; see the command line reference."""
    document: dict[str, Any] = {"api": "rota/v1", "kind": "PlanSearch"}
    certificate = {name: getattr(found.certificate, name) for name in Certificate.__dataclass_fields__}
    if not found.best:
        return {
            **document,
            "plan": None,
            "reason": "out_of_memory" if found.certificate.complete else "timed_out",
            "certificate": {**certificate, "lower_bound_s": None},
        }
    first = found.best[0]
    return {
        **document,
        "plan": first.plan,
        "predicted": predicted(first, question),
        "certificate": certificate,
        "binds": binds(first, question),
        "runner_ups": [
            {
                "plan": one.plan,
                "iteration_s": one.step.total_s,
                "slower_pct": 100 * (one.step.total_s / first.step.total_s - 1),
                "why": why_slower(one, first),
            }
            for one in found.best[1:]
        ],
    }


def predicted(scored: Scored, question: Question) -> dict[str, Any]:
    """Time, throughput, share of peak and memory of a plan, with the parts that add up."""
    model, total_s = question.model, scored.step.total_s
    tokens = question.batch * model.seq
    flops = 6.0 * tokens * model.layers * 12 * model.hidden**2 * (1 + model.seq / (6 * model.hidden))
    flops += 6.0 * tokens * model.hidden * model.vocab
    peak = question.hardware.device.peak_tflops[question.dtype.param] * 1e12
    return {
        "iteration_s": total_s,
        "samples_per_s": question.batch / total_s,
        "tokens_per_s": tokens / total_s,
        "mfu_pct": 100 * flops / (total_s * question.gpus * peak),
        "memory_gib": scored.memory_bytes / GIB,
        "breakdown_s": dict(scored.step.breakdown_s),
        "memory_gib_by_class": dict(scored.memory_by_class_gib),
    }


def binds(scored: Scored, question: Question) -> str:
    """What keeps the plan from being faster: memory when recompute is paid for it, else the largest part."""
    if scored.step.breakdown_s["recompute"] > 0:
        return "memory"
    return max(scored.step.breakdown_s, key=lambda name: scored.step.breakdown_s[name])


def why_slower(other: Scored, best: Scored) -> str:
    """The part of the step that grew most against the best plan."""
    grown = {name: seconds - best.step.breakdown_s[name] for name, seconds in other.step.breakdown_s.items()}
    name = max(grown, key=lambda part: grown[part])
    return f"{name} {grown[name]:+.3g} s" if grown[name] > 0 else "equal time, more memory"
