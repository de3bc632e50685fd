"""Best plan for a model on given devices, with a certificate: best-first branch and bound over settings.

Each setting gets a lower bound that no cut and no recompute can beat; settings are scored by the full cost model in the
order of their bounds until the best bound left is not below the best plan found. What the bound leaves out needs no
score, so the result is the optimum of the space.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NotRequired, TypedDict

from rota.spec.errors import BadInput
from rota.train.plan.cost import StepTime, step_time
from rota.train.plan.importers import NUMBER_MAX
from rota.train.plan.memory import GIB, host_bytes, memory
from rota.train.plan.model import Layer, ParallelPlan
from rota.train.plan.space import (
    SPACE,
    CostTable,
    MemoryBudget,
    SearchRequest,
    Setting,
    cuts,
    plan_of,
    settings,
    spread,
)
from rota.train.plan.traffic import bytes_by_collective


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
class SearchResult:
    """Outcome of a search: the best plans in order (none when nothing fits) and the certificate."""

    best: tuple[Scored, ...]
    certificate: Certificate


def check_request(question: SearchRequest) -> None:
    """Raise BadInput that names field, value and rule when the question makes no sense."""
    model = question.model
    for name, value in (("gpus", question.gpus), ("batch", question.batch), ("layers", model.layers)):
        if not 1 <= value <= NUMBER_MAX:
            raise BadInput(f"{name}: {value} is not in 1 to {NUMBER_MAX}")
    reserve = question.hardware.device.reserve_gib
    if not reserve < question.memory_gib < float("inf"):
        raise BadInput(f"memory: {question.memory_gib} GiB leaves nothing after the reserve of {reserve} GiB")
    number, peaks = question.dtype.param, question.hardware.device.peak_tflops
    if number not in peaks:
        raise BadInput(
            f"hardware.device.peak_tflops: has no {number}, in which the model is trained",
            hint=f"add it, or set the model's dtype to one of {', '.join(peaks)}",
        )
    if model.hidden % model.heads:
        raise BadInput(f"heads: hidden {model.hidden} does not divide by heads {model.heads}")
    for name in question.allow:
        if name not in ("cp", "offload"):
            raise BadInput(f"allow {name}: unknown", hint="one of cp, offload")
    known = ("tp", "pp", "dp", "cp", "zero", "micro_batch", "interleave", "sp")
    for name in question.pins:
        if name not in known:
            raise BadInput(f"pin {name}: unknown degree", hint=f"one of {', '.join(known)}")


def search(
    question: SearchRequest,
    *,
    top: int = 5,
    stop: Callable[[], bool] = lambda: False,
    table: CostTable | None = None,
    under_s: float = float("inf"),
) -> SearchResult:
    """The best ``top`` plans that take less than ``under_s``. Deterministic.

    ``stop`` is asked at each bound, each cut and each score; True ends with the best so far and what is proven of it.
    Searches for the same model, hardware and number formats may share a ``table``. Raises BadInput for a question that
    makes no sense.
    """
    check_request(question)
    table = table or CostTable(question)
    run = _Search(question, table, top, stop, under_s)
    complete = run.finish()
    anywhere = under_s == float("inf") and not run.best
    if complete and anywhere and "offload" not in question.allow and question.hardware.host.gb_s:
        return search(replace(question, allow=(*question.allow, "offload")), top=top, stop=stop, table=table)
    return SearchResult(best=tuple(run.best), certificate=run.certificate(complete))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A cut of a setting with the cheapest recompute that fits: (selective, full) layers of each rank."""

    setting: Setting
    cut: tuple[int, ...]
    chosen: tuple[tuple[int, int], ...]


class _Search:
    """Best first: a heap of settings and of candidates by their bounds, and the best plans scored so far."""

    def __init__(
        self, question: SearchRequest, table: CostTable, top: int, stop: Callable[[], bool], under_s: float
    ) -> None:
        self.best: list[Scored] = []
        self._question, self._table, self._top = question, table, top
        self._stop, self._under_s = stop, under_s
        self._heap: list[tuple[float, int, Setting | _Candidate]] = []
        self._count = itertools.count()
        self._enumerated = self._opened = 0

    def finish(self) -> bool:
        """Search until nothing left can be among the best; False when stopped before."""
        for one in settings(self._question):
            if self._stop():
                self._heap.clear()
                return False
            self._enumerated += 1
            if self._table.least_bytes(one) <= self._question.budget_bytes:
                self._push(lower_bound_s(self._question, one, self._table), one)
        while self._heap and self._heap[0][0] < self._cutoff_s:
            bound_s, _, one = heapq.heappop(self._heap)
            done = self._open(one, bound_s) if isinstance(one, Setting) else self._score(one)
            if not done:  # its bound holds for what is left of it
                heapq.heappush(self._heap, (bound_s, next(self._count), one))
                return False
        return True

    @property
    def _cutoff_s(self) -> float:
        """What a plan must beat to be among the best."""
        return self.best[-1].step.total_s if len(self.best) == self._top else self._under_s

    def _push(self, bound_s: float, one: Setting | _Candidate) -> None:
        if bound_s < self._cutoff_s:
            heapq.heappush(self._heap, (bound_s, next(self._count), one))

    def _open(self, setting: Setting, bound_s: float) -> bool:
        """Put the cuts of a setting that fit on the heap; score the best at once until there is a first plan."""
        room = MemoryBudget(self._question, setting, self._table)
        bounds = _CutBounds(setting, self._table)
        found: list[tuple[float, _Candidate]] = []
        for cut in cuts(self._question.model.layers, setting.pp * setting.interleave):
            if self._stop():
                return False
            counts = [sum(cut[rank :: setting.pp]) for rank in range(setting.pp)]
            if bounds.without_last_s(counts) >= self._cutoff_s:
                break  # a smaller last chunk leaves the others with no less
            chosen = [room.recompute(rank, count) for rank, count in enumerate(counts)]
            if None in chosen[:-1]:
                break
            fits = tuple(one for one in chosen if one is not None)
            if len(fits) == setting.pp and self._host_fits(setting, cut):
                candidate = _Candidate(setting, cut, fits)
                found.append((max(bound_s, bounds.of(cut, counts, fits)), candidate))
        if found and not self.best:
            first = min(range(len(found)), key=lambda index: found[index][0])
            self._take(found.pop(first)[1])
        for bound, candidate in found:
            self._push(bound, candidate)
        self._opened += 1
        return True

    def _host_fits(self, setting: Setting, cut: tuple[int, ...]) -> bool:
        if not setting.offloads:
            return True
        bare = plan_of(self._question.dtype, setting, cut, [(("none", count),) for count in cut])
        return host_bytes(bare, self._question.model) <= self._question.hardware.host.memory_gib * GIB

    def _score(self, one: _Candidate) -> bool:
        if self._stop():
            return False
        self._take(one)
        return True

    def _take(self, one: _Candidate) -> None:
        runs = spread(one.chosen, one.cut, one.setting.pp)
        scored = score(plan_of(self._question.dtype, one.setting, one.cut, runs), self._question)
        if scored.step.total_s < self._under_s:
            self.best = sorted([*self.best, scored], key=lambda other: other.order)[: self._top]

    def certificate(self, complete: bool) -> Certificate:
        """What the search has proven of its best plan."""
        bound_s = self._heap[0][0] if self._heap else float("inf")
        if not complete and not self._heap:
            bound_s = 0.0
        return _certificate(self.best, bound_s, complete, self._enumerated, self._opened)


def _certificate(best: list[Scored], bound_s: float, complete: bool, enumerated: int, opened: int) -> Certificate:
    total_s = best[0].step.total_s if best else float("inf")
    proven_s = min(total_s, bound_s)
    gap_pct = 0.0 if proven_s == total_s or not best else 100 * (total_s - proven_s) / proven_s
    return Certificate(
        lower_bound_s=proven_s,
        gap_pct=gap_pct,
        complete=complete,
        enumerated=enumerated,
        bounded=enumerated - opened,
        scored=opened,
        space=SPACE,
    )


def score(plan: ParallelPlan, question: SearchRequest) -> Scored:
    """Predict one plan."""
    need = max(memory(plan, question.model), key=lambda stage: stage.total)
    step = step_time(plan, question.model, question.hardware)
    return Scored(plan=plan, step=step, memory_bytes=need.total, memory_by_class_gib=need.by_class_gib())


def lower_bound_s(question: SearchRequest, setting: Setting, table: CostTable) -> float:
    """No plan of this setting is faster: perfect cut, no recompute, transfers for free.

    With stages of work ``w_i`` and ``m`` micro-batches, 1F1B takes at least ``sum_{j<i} w_j + m w_i`` for every stage
    ``i``. The cut that minimises the largest of these makes them all equal to ``W / (1 - (1 - 1/m)^p)``. With several
    chunks a rank the sum is over first chunks ``c_j`` alone; their mean over ``i`` is ``m W / p + sum_i sum_{j<i} c_j /
    p``, and no first chunk is smaller than that of the cut with the largest last one. One micro-batch must pass
    everything, and some rank holds an even share of layers or more.
    """
    layer_s, layers = table.layer(setting).both_s, question.model.layers
    work_s = layers * layer_s + 3 * table.head_s(setting)
    m, p = setting.micro_batches, setting.pp
    if p == 1:
        return m * work_s + table.least_s(setting)
    even_s = max(work_s, m * -(-layers // p) * layer_s)
    if setting.interleave == 1:
        return max(even_s, work_s / (1 - (1 - 1 / m) ** p)) + table.least_s(setting)
    chunks = p * setting.interleave
    first = (layers - -(-layers // chunks)) // (chunks - 1)
    return max(even_s, m * work_s / p + (p - 1) / 2 * first * layer_s) + table.least_s(setting)


class _CutBounds:
    """As ``lower_bound_s`` for one cut after the other: the work of a rank, and what the first micro-batch must pass
    before it and the last one after it, transfers included."""

    def __init__(self, setting: Setting, table: CostTable) -> None:
        time = table.layer(setting)
        self._setting, self._table = setting, table
        self._layer_s, self._last_s = time.both_s, 3 * table.head_s(setting)
        self._again_s = [time.again_s(Layer(recompute=kind)) for kind in ("selective", "full")]
        self._hops_s = [2 * one for one in table.hops_s(setting)]

    def without_last_s(self, counts: Sequence[int]) -> float:
        """Seconds of the slowest rank without the head, without recompute."""
        others = max(counts[:-1], default=0)
        return self._setting.micro_batches * others * self._layer_s

    def of(self, cut: tuple[int, ...], counts: list[int], chosen: Sequence[tuple[int, int]]) -> float:
        """Seconds of a cut with its recompute."""
        setting, bound_s, passed_s = self._setting, 0.0, 0.0
        last = len(counts) - 1
        for rank, (count, (selective, full)) in enumerate(zip(counts, chosen, strict=True)):
            again_s = selective * self._again_s[0] + full * self._again_s[1]
            work_s = count * self._layer_s + again_s + (self._last_s if rank == last else 0.0)
            bound_s = max(bound_s, passed_s + setting.micro_batches * work_s)
            passed_s += self._hops_s[rank] + (work_s if setting.interleave == 1 else cut[rank] * self._layer_s)
        return bound_s + self._table.state_s(setting, self._table.held(setting, counts), max(counts))


class Predicted(TypedDict):
    """Seconds, rates, share of peak and GiB of a plan; the parts of ``breakdown_s`` add up to ``iteration_s``."""

    iteration_s: float
    samples_per_s: float
    tokens_per_s: float
    mfu_pct: float
    memory_gib: float
    breakdown_s: dict[str, float]
    memory_gib_by_class: dict[str, float]
    bytes_by_collective: dict[str, int] | None


class RunnerUp(TypedDict):
    """Another plan, how much slower it is, and why."""

    plan: ParallelPlan
    iteration_s: float
    slower_pct: float
    why: str


class SearchDocument(TypedDict):
    """The document of ``plan search``: a plan and what is said of it, or the ``reason`` why there is none."""

    api: str
    kind: str
    plan: ParallelPlan | None
    certificate: dict[str, object]
    reason: NotRequired[str]
    predicted: NotRequired[Predicted]
    binds: NotRequired[str]
    notes: NotRequired[list[str]]
    runner_ups: NotRequired[list[RunnerUp]]


def found_to_json(found: SearchResult, question: SearchRequest) -> SearchDocument:
    """The document of ``plan search`` without its time; see the command line reference."""
    certificate: dict[str, object] = asdict(found.certificate)
    if not found.best:
        why = "out_of_memory" if found.certificate.enumerated else "no_setting"
        return {
            "api": "rota/v1",
            "kind": "PlanSearch",
            "plan": None,
            "reason": why if found.certificate.complete else "timed_out",
            "certificate": {**certificate, "lower_bound_s": None},
        }
    first = found.best[0]
    return {
        "api": "rota/v1",
        "kind": "PlanSearch",
        "plan": first.plan,
        "predicted": predicted(first, question),
        "certificate": certificate,
        "binds": binds(first),
        "notes": notes(first.plan, question),
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


def predicted(scored: Scored, question: SearchRequest) -> Predicted:
    """Time, throughput, share of peak and memory of a plan, with the parts that add up.

    Of ``T`` tokens a step the model needs ``72 T L h^2 (1 + s/(6 h)) + 6 T h V`` operations in both passes, nothing
    repeated (Narayanan et al., SC21, section 5.1, without its recompute); ``mfu_pct`` is their share of the peak.
    """
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
        "bytes_by_collective": bytes_by_collective(scored.plan, model),
    }


def notes(plan: ParallelPlan, question: SearchRequest) -> list[str]:
    """What the search did without being asked to."""
    if "offload" in question.allow or plan.layers[0].offload == "none":
        return []
    return [f"nothing fits without offload, so this plan has offload {plan.layers[0].offload}"]


def binds(scored: Scored) -> str:
    """What keeps the plan from being faster: memory when recompute is paid for it, else the largest part."""
    if scored.step.breakdown_s["recompute"] > 0:
        return "memory"
    return max(scored.step.breakdown_s, key=lambda name: scored.step.breakdown_s[name])


def why_slower(other: Scored, best: Scored) -> str:
    """The part of the step that grew most against the best plan."""
    grown = {name: seconds - best.step.breakdown_s[name] for name, seconds in other.step.breakdown_s.items()}
    name = max(grown, key=lambda part: grown[part])
    return f"{name} {grown[name]:+.3g} s" if grown[name] > 0 else "equal time, more memory"
