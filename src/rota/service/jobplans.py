"""Find the parallel plans of a job's roles when it is admitted: one for each size that a role may have."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rota.job.spmd import parse_command
from rota.runtime.clock import Clock
from rota.runtime.devices import local_node
from rota.service.plans import find_hardware, load_plan
from rota.spec.errors import BadInput, Infeasible, TimedOut
from rota.spec.job import AUTO_PLAN, JobSpec, RoleSpec, SizedPlan, TrainedModel
from rota.spec.resources import counted
from rota.train.plan.exchange import model_from_json
from rota.train.plan.explain import summary
from rota.train.plan.hardware import A100_80G_DGX, SHIPPED, Hardware, cpu_ranks
from rota.train.plan.memory import GIB
from rota.train.plan.model import Dtype
from rota.train.plan.search import Found, search
from rota.train.plan.space import MIXED, Question
from rota.train.plan.table import Table

SIZES_MAX = 32
SEARCH_S = 5.0
"""Time for all sizes of all roles of a job; what is not proven by then says so."""


def with_plans(spec: JobSpec, workdir: str, clock: Clock) -> JobSpec:
    """The job with the plans of its roles, which then have the sizes that a plan exists for.

    Raises BadInput for a plan file or a model that makes no sense, Infeasible when no size of a role has a plan,
    TimedOut when none was found in time.
    """
    limit = _Limit(clock, clock.monotonic_s() + SEARCH_S)
    return replace(spec, roles=tuple(_with_plan(role, workdir, limit) for role in spec.roles))


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


def _with_plan(role: RoleSpec, workdir: str, limit: _Limit) -> RoleSpec:
    if role.plan is None:
        return replace(role, plans=()) if role.plans else role
    try:
        plans = _searched(role, workdir, limit) if role.plan == AUTO_PLAN else (_read(role, workdir),)
    except BadInput as error:
        raise BadInput(f"roles.{role.name}.plan: {error}", hint=error.hint) from error
    return replace(role, replicas_min=plans[0].replicas, replicas_max=plans[-1].replicas, plans=plans)


def _read(role: RoleSpec, workdir: str) -> SizedPlan:
    """The plan of a file; it gives the size of a role that names none."""
    assert role.plan is not None
    plan, _ = load_plan(_own_file(role.plan, workdir))
    local, world = parse_command(role).local, plan.gang().world
    size = world // local
    given = (role.replicas_min, role.replicas_max)
    if world % local or (given != (1, 1) and not given[0] <= size <= given[1]):
        raise BadInput(
            f"{role.plan} is for {counted(world, 'rank')}, the role has {given[0]} to {given[1]} instances of {local}",
            hint="leave replicas out, or search a plan for that many ranks",
        )
    return SizedPlan(replicas=size, plan=plan.to_json(), why=f"{role.plan}, for {counted(world, 'rank')}")


def _searched(role: RoleSpec, workdir: str, limit: _Limit) -> tuple[SizedPlan, ...]:
    """The best plan of each size, smallest first; a size that is no faster than a smaller one is left out."""
    assert role.model is not None, "spec.check lets no other in"
    sizes = range(role.replicas_min, role.replicas_max + 1)
    if len(sizes) > SIZES_MAX:
        raise BadInput(f"replicas {sizes[0]} to {sizes[-1]} are too many sizes", hint=f"at most {SIZES_MAX} sizes")
    local, plans, fastest_s, late = parse_command(role).local, list[SizedPlan](), float("inf"), list[int]()
    one = _question(role, role.model, local, workdir)
    table = Table(one)
    for index, size in enumerate(sizes):
        question = replace(one, gpus=size * local)
        found = search(question, top=2, stop=limit.share(len(sizes) - index), table=table, under_s=fastest_s)
        if not found.best and not found.certificate.complete:
            late.append(size)
        if found.best:
            fastest_s = found.best[0].step.total_s
            plans.append(SizedPlan(replicas=size, plan=found.best[0].plan.to_json(), why=_why(found, question)))
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


def _question(role: RoleSpec, model: TrainedModel, local: int, workdir: str) -> Question:
    """What is asked of one instance, with ``local`` ranks."""
    fields = asdict(model)
    batch, named = fields.pop("batch"), fields.pop("hardware")
    shape, _ = model_from_json(fields)
    hardware = _hardware(role, named, local, workdir)
    return Question(
        model=shape,
        hardware=hardware,
        gpus=local,
        memory_gib=hardware.device.memory_gib,
        batch=batch,
        dtype=MIXED if role.res.gpus or named else Dtype(),
    )


def _hardware(role: RoleSpec, named: str, local: int, workdir: str) -> Hardware:
    """What the file names, else what the devices that the role asks for are most like."""
    if named:
        return find_hardware(named if named in SHIPPED else str(_own_file(named, workdir)))
    if role.res.gpus:
        return A100_80G_DGX
    return cpu_ranks((role.res.memory_bytes or local_node().memory_bytes) / GIB, local)


def _own_file(name: str, workdir: str) -> Path:
    """A file of the job's folder. Raises BadInput for any other: the service opens it, not who asks."""
    path = Path(os.path.normpath(Path(workdir) / name))
    if not workdir or not path.is_relative_to(os.path.normpath(workdir)):
        raise BadInput(f"{name} is not below the folder of the job", hint="put it beside the job file")
    return path


def _why(found: Found, question: Question) -> str:
    """Shape, time and memory in sentences, the proof, and the next best."""
    proof = found.certificate
    text = " ".join(summary(found.best[0], question))
    text += f" Gap to the bound {proof.gap_pct:.3g} %, {proof.enumerated} settings"
    if not proof.complete:
        text += f", {proof.bounded} of them not looked into in time"
    if len(found.best) > 1:
        return f"{text}; the next best takes {found.best[1].step.total_s:.3g} s."
    return f"{text}."
