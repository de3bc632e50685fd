"""Parallel plans of a job's roles, found when it is admitted: one for each size that a role may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf, lcm

from rota.cluster.core.choice import CHOICES_MAX, split_roles, splits_count
from rota.runtime.clock import Clock
from rota.service.control.plan_hardware import PROCESS_BYTES, PlannedDevices, on_large_devices, own_file
from rota.service.plans import load_plan
from rota.spec.errors import BadInput, Infeasible, TimedOut
from rota.spec.job import AUTO_PLAN, JobSpec, RoleSpec, SizedPlan, TrainedModel
from rota.spec.resources import counted, types_of
from rota.spec.torchrun import read_torchrun, shell_operators
from rota.train.plan.cost import step_time
from rota.train.plan.explain import summary
from rota.train.plan.importers import model_from_json
from rota.train.plan.memory import host_bytes
from rota.train.plan.model import Dtype
from rota.train.plan.search import Scored, SearchResult, search
from rota.train.plan.space import MIXED, CostTable, SearchRequest, divisors

SIZES_MAX = 32
SEARCH_S = 5.0
"""Time for all sizes of all roles of a job; what is not proven by then says so."""


def with_plans(spec: JobSpec, workdir: str, clock: Clock, devices: PlannedDevices | None = None) -> JobSpec:
    """The job with the plans of its roles, which then have the sizes that a plan exists for, and the memory it needs.

    ``devices`` are those of the cluster and what is known of them.
    Raises BadInput for a plan file or a model that makes no sense and for a type of device without a description,
    Infeasible when no size of a role has a plan, TimedOut when none was found in time.
    """
    if (count := splits_count(spec)) > CHOICES_MAX:
        names = " and ".join(role.name for role in split_roles(spec))
        raise BadInput(
            f"replicas: {count} splits between {names}; at most {CHOICES_MAX} are compared", hint="ask for fewer sizes"
        )
    there = devices or PlannedDevices()
    limit = _Limit(clock, clock.monotonic_s() + SEARCH_S)
    return replace(spec, roles=tuple(_with_plan(role, workdir, limit, there) for role in spec.roles))


@dataclass(frozen=True, slots=True)
class _Limit:
    """When all searches must be over."""

    clock: Clock
    ends_s: float

    def share(self, left: int) -> Callable[[], bool]:
        """True once the first of ``left`` searches has had its part of the time."""
        now_s = self.clock.monotonic_s()
        ends_s = now_s + (self.ends_s - now_s) / left
        return lambda: self.clock.monotonic_s() > ends_s


def _with_plan(role: RoleSpec, workdir: str, limit: _Limit, there: PlannedDevices) -> RoleSpec:
    if role.plan is None or role.splits:
        return replace(role, plans=()) if role.plans else role
    try:
        plans = _searched(role, workdir, limit, there) if role.plan == AUTO_PLAN else (_read(role, workdir),)
    except BadInput as error:
        raise BadInput(f"roles.{role.name}.plan: {error}", hint=error.hint) from error
    role = replace(role, replicas_min=plans[0].replicas, replicas_max=plans[-1].replicas, plans=plans)
    return on_large_devices(role, there, max(one.device_bytes for one in plans))


def _read(role: RoleSpec, workdir: str) -> SizedPlan:
    """The plan of a file; it gives the size of a role that names none."""
    assert role.plan is not None
    plan, _ = load_plan(own_file(role.plan, workdir))
    local, world = _local_ranks(role), plan.gang().world
    size = world // local
    given = (role.replicas_min, role.replicas_max)
    if world % local or (given != (1, 1) and not given[0] <= size <= given[1]):
        raise BadInput(
            f"{role.plan} is for {counted(world, 'rank')}, the role has {given[0]} to {given[1]} instances of {local}",
            hint="leave replicas out, or search a plan for that many ranks",
        )
    shape = plan.gang()
    together, close = (_instances(ranks, local) for ranks in (shape.ranks_together, shape.ranks_adjacent))
    why = f"{role.plan}, for {counted(world, 'rank')}"
    text = plan.to_json()
    return SizedPlan(replicas=size, plan=text, why=why, together=together, close=close, device_bytes=shape.memory_bytes)


def _sized(size: int, scored: Scored, question: SearchRequest, local: int, why: str, *, on_devices: bool) -> SizedPlan:
    """A plan that was searched, with how many consecutive instances of ``local`` ranks must, or should, be on one node.

    They must where they hold whole tensor groups, and context groups that were priced inside a node: elsewhere the
    step would take longer than the plan says. They should as far as whole groups of neighbours fit a node.
    """
    together, unit = _together(scored, question, local), question.hardware.levels[0].size or question.gpus
    inner = together * local
    host = host_bytes(scored.plan, question.model) if on_devices else scored.memory_bytes
    wider = max((n for n in divisors(question.gpus) if n <= unit and n % inner == 0), default=inner)
    return SizedPlan(
        replicas=size,
        plan=scored.plan.to_json(),
        why=why,
        together=together,
        close=_instances(wider, local),
        step_s=scored.step.total_s,
        device_bytes=int(scored.memory_bytes) if on_devices else 0,
        memory_bytes=int(host + PROCESS_BYTES) * local if host else 0,
    )


def _together(scored: Scored, question: SearchRequest, local: int) -> int:
    """How many instances of ``local`` ranks hold whole groups of the axes that the plan has inside a node."""
    mesh, unit = scored.plan.mesh, question.hardware.levels[0].size or question.gpus
    return _instances(mesh.tp * mesh.cp if mesh.tp * mesh.cp <= unit else mesh.tp, local)


def _instances(ranks: int, local: int) -> int:
    """The fewest instances of ``local`` ranks that hold whole groups of ``ranks``."""
    return lcm(ranks, local) // local


def _local_ranks(role: RoleSpec) -> int:
    """Ranks in each instance: those of its torchrun line, one where a shell reads the line."""
    assert role.run is not None, "spec.check lets no other in"
    by_shell = role.shell and shell_operators(role.run[0])
    return 1 if by_shell else read_torchrun(role.run, shell=role.shell).local


def _searched(role: RoleSpec, workdir: str, limit: _Limit, there: PlannedDevices) -> tuple[SizedPlan, ...]:
    """The best plan of each size, smallest first; sizes that are not faster than a smaller one are left out."""
    assert role.model is not None, "spec.check lets no other in"
    sizes = range(role.replicas_min, role.replicas_max + 1)
    if len(sizes) > SIZES_MAX:
        raise BadInput(f"replicas {sizes[0]} to {sizes[-1]} are too many sizes", hint=f"at most {SIZES_MAX} sizes")
    local, plans, fastest_s, late = _local_ranks(role), list[SizedPlan](), float("inf"), list[int]()
    one, note = _question(role, role.model, local, workdir, there)
    tables = dict[int | None, CostTable]()
    for index, size in enumerate(sizes):
        question = replace(one, gpus=size * local, hardware=there.for_ranks(one.hardware, role, local, size * local))
        table = tables.setdefault(question.hardware.levels[0].size, CostTable(question))
        stop = limit.share(len(sizes) - index)
        found = search(question, top=2, stop=stop, table=table, under_s=fastest_s)
        if len(sizes) > 1 and found.best and _together(found.best[0], question, local) > 1:
            question, found = _within_instances(question, local, stop, table, fastest_s)
        if not found.best and not found.certificate.complete:
            late.append(size)
        if found.best:
            fastest_s = found.best[0].step.total_s
            why = f"{_why(found, question)}{note}"
            sized = _sized(size, found.best[0], question, local, why, on_devices=role.res.gpus > 0)
            plans.append(replace(sized, steps=_steps(role, found.best[0], question, local, there)))
    if late and not plans:
        raise TimedOut(
            f"roles.{role.name}.plan: no plan was found in {SEARCH_S:g} s for {', '.join(map(str, late))} instances",
            hint="ask for fewer sizes, or give a plan file: rota plan search",
        )
    if not plans:
        raise Infeasible(
            f"roles.{role.name}.plan: no plan for {sizes[0] * local} to {sizes[-1] * local} ranks: batch "
            f"{role.model.batch}, {role.model.layers} layers and {role.model.heads} heads must divide over them, and "
            f"each has {one.memory_gib:.3g} GiB",
            hint="another range of replicas or batch, more memory, or a smaller model",
        )
    if late:
        told = f"{plans[-1].why} No plan was found in time for {', '.join(map(str, late))} instances."
        plans[-1] = replace(plans[-1], why=told)
    return tuple(plans)


def _steps(
    role: RoleSpec, scored: Scored, question: SearchRequest, local: int, there: PlannedDevices
) -> tuple[tuple[str, float], ...]:
    """Seconds a step of a plan by device type, where the role may get several types that have descriptions."""
    assert role.model is not None
    kinds = there.types()
    asked = [kind for kind in types_of(role.res.gpu_type) or kinds if kind in kinds]
    if not role.res.gpus or role.model.hardware or len(asked) < 2:
        return ()
    found: list[tuple[str, float]] = []
    for kind in asked:
        if (hardware := there.described(kind, kinds[kind])) is not None:
            alone = replace(role, res=replace(role.res, gpu_type=kind))
            on_type = there.for_ranks(hardware, alone, local, question.gpus)
            found.append((kind, step_time(scored.plan, question.model, on_type).total_s))
    return tuple(found)


def _within_instances(
    question: SearchRequest, local: int, stop: Callable[[], bool], table: CostTable, under_s: float
) -> tuple[SearchRequest, SearchResult]:
    """The best plan of which no group that must be on one node is on several instances: they come and go one by one."""
    pins = [{"tp": tp, "cp": cp} for tp in divisors(local) for cp in divisors(local // tp)]
    asked = [replace(question, pins=one) for one in pins]
    answers = [(one, search(one, top=2, stop=stop, table=table, under_s=under_s)) for one in asked]
    return min(answers, key=lambda answer: answer[1].best[0].step.total_s if answer[1].best else inf)


def _question(
    role: RoleSpec, model: TrainedModel, local: int, workdir: str, there: PlannedDevices
) -> tuple[SearchRequest, str]:
    """What is asked of one instance, with ``local`` ranks, and for which devices."""
    fields = asdict(model)
    batch, named = fields.pop("batch"), fields.pop("hardware")
    shape, _ = model_from_json(fields)
    hardware, note = there.of_role(role, named, local, workdir)
    question = SearchRequest(
        model=shape,
        hardware=hardware,
        gpus=local,
        memory_gib=hardware.device.memory_gib,
        batch=batch,
        dtype=MIXED if role.res.gpus or named else Dtype(),
    )
    return question, note


def _why(found: SearchResult, question: SearchRequest) -> str:
    """Shape, time and memory in sentences, the proof, and the next best."""
    proof = found.certificate
    text = " ".join(summary(found.best[0], question))
    text += f" Gap to the bound {proof.gap_pct:.3g} %, {proof.enumerated} settings"
    if not proof.complete:
        text += f", {proof.bounded} of them not looked into in time"
    if len(found.best) > 1:
        return f"{text}; the next best takes {found.best[1].step.total_s:.3g} s."
    return f"{text}."
