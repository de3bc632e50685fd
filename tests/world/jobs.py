"""Random jobs of every shape that the core knows, each with the script of its roles."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from rota.spec.ids import RoleName
from rota.spec.job import After, Bound, Edge, Fail, JobSpec, RoleSpec, StreamSpec, WeightsEdge
from rota.spec.resources import Res
from tests.makers import command, loop, mesh, op, service, spec
from tests.world.bodies import Script

Scripts = dict[str, Script]


def random_job(
    rng: random.Random, name: str, *, failing: bool, calm_after_s: float, shape: str = ""
) -> tuple[JobSpec, Scripts]:
    """A job and how its roles behave; with ``failing`` its code raises now and then until ``calm_after_s``."""
    shapes = (_reinforcement, _spmd, _commands, _servers_first, _pipeline, _streams, _streams, _elastic)
    make = rng.choice([one for one in shapes if shape in one.__name__])
    job, scripts = make(rng)
    if failing:
        scripts = {role: _fragile(rng, script) for role, script in scripts.items()}
    scripts = {role: replace(script, calm_after_s=calm_after_s) for role, script in scripts.items()}
    limited = rng.random() < 0.15
    return replace(
        job,
        name=name,
        retry=rng.choice((0, 0, 1, 3)),
        gang=rng.choice(("all", "all", "subgraph")),
        grace_s=rng.choice((1.0, 5.0, 30.0)),
        time_limit_s=rng.choice((20.0, 60.0, 300.0)) if limited else None,
    ), scripts


def with_peers(job: JobSpec) -> JobSpec:
    """The job with a copy of its state on another host."""
    roles = (replace(role, fail=replace(role.fail, state=("shadow", "peer"))) for role in job.roles)
    return replace(job, roles=tuple(roles))


def after_another(rng: random.Random, job: JobSpec, before: int) -> JobSpec:
    """The job, which needs the success or the end of one of the ``before`` jobs before it."""
    return replace(job, after=(After(job=f"j{rng.randrange(before)}", when=rng.choice(("succeeded", "ended"))),))


def _fragile(rng: random.Random, script: Script) -> Script:
    if rng.random() < 0.05:
        return replace(script, always_fails=True)
    return replace(
        script,
        setup_fails_p=rng.choice((0.0, 0.1)),
        unfit_p=rng.choice((0.0, 0.05)),
        run_fails_p=rng.choice((0.0, 0.05, 0.2)),
        ignores_stop=rng.random() < 0.1,
    )


def _fail(rng: random.Random) -> Fail:
    return Fail(
        restart=rng.choice((None, "process", "role")),
        limit_n=rng.choice((0, 1, 3, 8)),
        limit_window_s=rng.choice((60.0, 86400.0)),
        backoff_s=rng.choice((0.0, 0.0, 2.0)),
        then=rng.choice((("node", "job"), ("job",), ("role", "job"))),
    )


def _degradable(rng: random.Random, role: RoleSpec) -> RoleSpec:
    if role.replicas_min == 1 or rng.random() < 0.6:
        return role
    return replace(role, fail=replace(role.fail, degrade=role.replicas_min - 1))


def _res(rng: random.Random) -> Res:
    return Res(cpus=rng.choice((0.5, 1.0)), gpus=rng.choice((0.0, 0.0, 1.0)))


def _script(rng: random.Random) -> Script:
    return Script(
        setup_s=rng.choice((0.1, 1.0)),
        step_s=rng.choice((0.5, 2.0)),
        steps=rng.randint(2, 8),
        run_s=rng.choice((2.0, 10.0, 30.0)),
        checkpoint_every=rng.choice((0, 0, 2)),
    )


def _reinforcement(rng: random.Random) -> tuple[JobSpec, Scripts]:
    roles = [
        mesh("actor", rng.randint(1, 3), fail=_fail(rng), res=_res(rng)),
        _degradable(rng, service("reward", rng.randint(1, 3), op("score"), fail=_fail(rng))),
        loop(fail=_fail(rng)),
    ]
    if rng.random() < 0.5:
        roles.append(mesh("critic", 2, fail=_fail(rng)))
    return spec(*roles), {role.name: _script(rng) for role in roles}


def _spmd(rng: random.Random) -> tuple[JobSpec, Scripts]:
    n = rng.randint(2, 4)
    role = command("train", n, mesh=(("dp", n),), fail=_fail(rng), res=_res(rng))
    return spec(role), {"train": _script(rng)}


def _elastic(rng: random.Random) -> tuple[JobSpec, Scripts]:
    """A world of one to three, beside servers of which there may be more, and one stands by."""
    world = replace(command("train", 1, mesh=(("dp", 1),), elastic_axis="dp", fail=_fail(rng)), replicas_max=3)
    serve = service("serve", rng.randint(1, 2), op("map"), fail=replace(_fail(rng), standby=rng.choice((0, 1))))
    serve = replace(serve, replicas_max=serve.replicas_min + rng.choice((0, 2)))
    return spec(_degradable(rng, serve), world), {"train": _script(rng), "serve": _script(rng)}


def _commands(rng: random.Random) -> tuple[JobSpec, Scripts]:
    roles = [command(f"task{i}", rng.randint(1, 2), fail=_fail(rng)) for i in range(rng.randint(1, 3))]
    success = rng.choice((None, "all", ("task0",)))
    return spec(*roles, success_when=success), {role.name: _script(rng) for role in roles}


def _servers_first(rng: random.Random) -> tuple[JobSpec, Scripts]:
    roles = [
        command("server", 1, fail=_fail(rng)),
        command("worker", rng.randint(1, 3), fail=_fail(rng), start_after=("server",)),
        service("log", 1, start_after=("worker",)),
    ]
    return spec(*roles, success_when=("worker",)), {role.name: _script(rng) for role in roles}


def numbers() -> range:
    """The source of the streams: item i is i."""
    return range(24)


def _streams(rng: random.Random) -> tuple[JobSpec, Scripts]:
    fail = replace(_fail(rng), bad_data=rng.choice((0, 100)))
    roles = [
        mesh("actor", rng.randint(1, 2), fail=_fail(rng), res=_res(rng)),
        service("rollout", rng.randint(1, 3), op("generate", send="Each", is_async=rng.random() < 0.5), fail=fail),
        service("reward", rng.randint(1, 2), op("score", send="Each"), fail=fail),
        loop(fail=_fail(rng)),
    ]
    every = rng.choice((1, 1, 2))
    bound = Bound(versions=every - 1 + rng.choice((0, 0, 1, 2)), by=rng.choice(("pace", "drop", "abort")))
    batch = rng.randint(1, 4)
    ends = ("prompts", "rollout.generate", *(("reward.score",) if rng.random() < 0.5 else ()), "groups")
    job = spec(
        *roles,
        streams=(
            StreamSpec(name="prompts", source="tests.world.jobs:numbers"),
            StreamSpec(
                name="groups",
                cap=rng.randint(batch, 12),
                stale=rng.choice((bound, bound, bound, None)),
                full=rng.choice(("block", "block", "drop_oldest")),
            ),
        ),
        edges=tuple(Edge(source=a, target=b, kind="stream") for a, b in pairwise(ends)),
        weights=(WeightsEdge(source=RoleName("actor"), target=RoleName("rollout"), every=every),),
    )
    return job, {role.name: replace(_script(rng), step_s=0.3, batch=batch) for role in roles}


def _pipeline(rng: random.Random) -> tuple[JobSpec, Scripts]:
    roles = [
        service("feat", 2, op("map"), fail=_fail(rng)),
        mesh("train", 2, fail=_fail(rng), res=_res(rng)),
        command("driver", 1, fail=_fail(rng), start_after=("feat", "train")),
    ]
    return spec(*roles), {role.name: _script(rng) for role in roles}
