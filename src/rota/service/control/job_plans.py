"""Find the parallel plans of a job's roles when it is admitted: one for each size that a role may have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf, lcm
from pathlib import Path

from rota.runtime.clock import Clock
from rota.runtime.node import local_node
from rota.service.plans import find_hardware, load_plan
from rota.spec.errors import BadInput, Infeasible, TimedOut
from rota.spec.job import AUTO_PLAN, JobSpec, RoleSpec, SizedPlan, TrainedModel
from rota.spec.resources import Device, counted, types_of
from rota.spec.torchrun import read_torchrun, shell_operators
from rota.train.plan.explain import summary
from rota.train.plan.hardware import A100_80G_DGX, SHIPPED, Hardware, cpu_ranks, hardware_of_type
from rota.train.plan.importers import model_from_json
from rota.train.plan.memory import GIB
from rota.train.plan.model import Dtype, ParallelPlan
from rota.train.plan.search import SearchResult, search
from rota.train.plan.space import MIXED, CostTable, SearchRequest, divisors

SIZES_MAX = 32
SEARCH_S = 5.0
"""Time for all sizes of all roles of a job; what is not proven by then says so."""


def with_plans(spec: JobSpec, workdir: str, clock: Clock, devices: Iterable[Device] = ()) -> JobSpec:
    """The job with the plans of its roles, which then have the sizes that a plan exists for.

    ``devices`` are those of the cluster: what a role that names no type may get, and how much memory they have.
    Raises BadInput for a plan file or a model that makes no sense and for a type of device without a description,
    Infeasible when no size of a role has a plan, TimedOut when none was found in time.
    """
    there: dict[str, int] = {}
    for device in devices:
        there[device.type] = min(there.get(device.type, device.memory_bytes), device.memory_bytes)
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


def _with_plan(role: RoleSpec, workdir: str, limit: _Limit, there: Mapping[str, int]) -> RoleSpec:
    if role.plan is None:
        return replace(role, plans=()) if role.plans else role
    try:
        plans = _searched(role, workdir, limit, there) if role.plan == AUTO_PLAN else (_read(role, workdir),)
    except BadInput as error:
        raise BadInput(f"roles.{role.name}.plan: {error}", hint=error.hint) from error
    return replace(role, replicas_min=plans[0].replicas, replicas_max=plans[-1].replicas, plans=plans)


def _read(role: RoleSpec, workdir: str) -> SizedPlan:
    """The plan of a file; it gives the size of a role that names none."""
    assert role.plan is not None
    plan, _ = load_plan(_own_file(role.plan, workdir))
    local, world = _local_ranks(role), plan.gang().world
    size = world // local
    given = (role.replicas_min, role.replicas_max)
    if world % local or (given != (1, 1) and not given[0] <= size <= given[1]):
        raise BadInput(
            f"{role.plan} is for {counted(world, 'rank')}, the role has {given[0]} to {given[1]} instances of {local}",
            hint="leave replicas out, or search a plan for that many ranks",
        )
    return _sized(size, plan, local, f"{role.plan}, for {counted(world, 'rank')}")


def _sized(size: int, plan: ParallelPlan, local: int, why: str) -> SizedPlan:
    """A plan with how many consecutive instances of ``local`` ranks hold whole groups of it."""
    shape = plan.gang()
    together, close = (lcm(ranks, local) // local for ranks in (shape.ranks_together, shape.ranks_adjacent))
    return SizedPlan(replicas=size, plan=plan.to_json(), why=why, together=together, close=close)


def _local_ranks(role: RoleSpec) -> int:
    """Ranks in each instance: those of its torchrun line, one where a shell reads the line."""
    assert role.run is not None, "spec.check lets no other in"
    by_shell = role.shell and shell_operators(role.run[0])
    return 1 if by_shell else read_torchrun(role.run, shell=role.shell).local


def _searched(role: RoleSpec, workdir: str, limit: _Limit, there: Mapping[str, int]) -> tuple[SizedPlan, ...]:
    """The best plan of each size, smallest first; sizes that are not faster than a smaller one are left out."""
    assert role.model is not None, "spec.check lets no other in"
    sizes = range(role.replicas_min, role.replicas_max + 1)
    if len(sizes) > SIZES_MAX:
        raise BadInput(f"replicas {sizes[0]} to {sizes[-1]} are too many sizes", hint=f"at most {SIZES_MAX} sizes")
    local, plans, fastest_s, late = _local_ranks(role), list[SizedPlan](), float("inf"), list[int]()
    one, note = _question(role, role.model, local, workdir, there)
    table = CostTable(one)
    for index, size in enumerate(sizes):
        question = replace(one, gpus=size * local)
        stop = limit.share(len(sizes) - index)
        found = search(question, top=2, stop=stop, table=table, under_s=fastest_s)
        if len(sizes) > 1 and found.best and local % found.best[0].plan.mesh.tp:
            question, found = _within_instances(question, local, stop, table, fastest_s)
        if not found.best and not found.certificate.complete:
            late.append(size)
        if found.best:
            fastest_s = found.best[0].step.total_s
            plans.append(_sized(size, found.best[0].plan, local, f"{_why(found, question)}{note}"))
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


def _within_instances(
    question: SearchRequest, local: int, stop: Callable[[], bool], table: CostTable, under_s: float
) -> tuple[SearchRequest, SearchResult]:
    """The best plan of which no tensor-parallel group is on several instances: they come and go one by one."""
    asked = [replace(question, pins={"tp": tp}) for tp in divisors(local)]
    answers = [(one, search(one, top=2, stop=stop, table=table, under_s=under_s)) for one in asked]
    return min(answers, key=lambda answer: answer[1].best[0].step.total_s if answer[1].best else inf)


def _question(
    role: RoleSpec, model: TrainedModel, local: int, workdir: str, there: Mapping[str, int]
) -> tuple[SearchRequest, str]:
    """What is asked of one instance, with ``local`` ranks, and for which devices."""
    fields = asdict(model)
    batch, named = fields.pop("batch"), fields.pop("hardware")
    shape, _ = model_from_json(fields)
    hardware, note = _hardware(role, named, local, workdir, there)
    question = SearchRequest(
        model=shape,
        hardware=hardware,
        gpus=local,
        memory_gib=hardware.device.memory_gib,
        batch=batch,
        dtype=MIXED if role.res.gpus or named else Dtype(),
    )
    return question, note


def _hardware(role: RoleSpec, named: str, local: int, workdir: str, there: Mapping[str, int]) -> tuple[Hardware, str]:
    """What the file names, else the description of the devices that the role may get, and a sentence that says so.

    Of several the plan is for those with the least memory, so that it fits all. Raises BadInput for a type without a
    description, where the role names it.
    """
    if named:
        return find_hardware(named if named in SHIPPED else str(_own_file(named, workdir))), ""
    if not role.res.gpus:
        return cpu_ranks((role.res.memory_bytes or local_node().memory_bytes) / GIB, local), ""
    asked = types_of(role.res.gpu_type)
    found = {kind: hardware_of_type(kind, there.get(kind, 0)) for kind in asked or there}
    known = [one for one in found.values() if one is not None]
    unknown = " and ".join(kind for kind, one in found.items() if one is None)
    shipped = ", ".join(SHIPPED)
    if asked and unknown:
        raise BadInput(
            f"there is no description of devices of type {unknown}",
            hint=f"model.hardware: a file of rota plan calibrate, or a shipped name ({shipped})",
        )
    if unknown or not known:
        least = min((size / GIB for size in there.values() if size), default=inf)
        why = f"there is no description of {unknown} devices" if unknown else "the cluster has no devices yet"
        name = A100_80G_DGX.name
        text = f" The role names no gpu_type and {why}: planned for {name}; name gpu_type or model.hardware for others."
        return A100_80G_DGX.with_memory(least), text
    chosen = min(known, key=lambda one: (one.device.memory_gib, one.device.peak_tflops["bf16"]))
    if len(found) == 1:
        return chosen, f" Planned for {chosen.name}."
    return chosen, f" Planned for {chosen.name}, which has the least memory of {' and '.join(found)}: it fits them all."


def _own_file(name: str, workdir: str) -> Path:
    """A file of the job's folder. Raises BadInput for any other: the service opens it, not who asks."""
    path = Path(os.path.normpath(Path(workdir) / name))
    if not workdir or not path.is_relative_to(os.path.normpath(workdir)):
        raise BadInput(f"{name} is not below the folder of the job", hint="put it beside the job file")
    return path


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
