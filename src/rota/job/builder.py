"""Job, Group, spmd: a spec from a few lines of Python; equal to the spec of the same job written as a file.

::

    job = Job("grpo-sums", seed=0)
    actor = job.role("actor", Policy, mesh={"dp": 2}, res=Res(cpus=1), fail=Fail(restart="role", limit="3/10m"))
    rollout = job.role("rollout", Rollout, n=(1, 4), apart=actor)
    job.weights(actor, rollout, every=1)
    @job.loop
    async def grpo(f): ...
    job.spec()
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rota.job.workload import interface_of
from rota.spec import job as model
from rota.spec.errors import BadInput
from rota.spec.ids import NAME_PATTERN, RoleName
from rota.spec.resources import Res as SpecRes
from rota.spec.resources import parse_duration, parse_size

Replicas = int | tuple[int, int]


def Res(*, cpus: float = 1.0, gpus: float = 0.0, gpu_type: str | None = None, memory: str = "0B") -> SpecRes:
    """Resources of one instance; ``memory`` has a unit (``"2GiB"``). Raises ValueError for a bare number."""
    return SpecRes(cpus=cpus, gpus=gpus, gpu_type=gpu_type, memory_bytes=parse_size(memory))


def Fail(
    *,
    restart: model.Restart | None = None,
    limit: str = "3/10m",
    then: str = "node|job",
    state: str = "shadow",
    progress: str = "5m",
    backoff: str = "0s",
    **fields: Any,
) -> model.Fail:
    """A failure contract as a job file writes it: ``limit`` is ``N/WINDOW``, lists are joined by ``|``.

    Further fields are those of ``rota.spec.job.Fail``. Raises BadInput or ValueError for another form.
    """
    count, sep, window = limit.partition("/")
    if not sep or not count.strip().isdigit():
        raise BadInput(f"limit {limit!r} is not N/WINDOW, for example 3/10m")
    return model.Fail(
        restart=restart,
        limit_n=int(count),
        limit_window_s=parse_duration(window),
        then=tuple(part.strip() for part in then.split("|") if part.strip()),  # pyright: ignore[reportArgumentType] - checked by the service
        state=tuple(part.strip() for part in state.split("|") if part.strip()),  # pyright: ignore[reportArgumentType] - checked by the service
        progress_s=parse_duration(progress),
        backoff_s=parse_duration(backoff),
        **fields,
    )


@dataclass(frozen=True, slots=True)
class Port:
    """One operation of a role as the end of an edge: ``role.op``."""

    role: str
    op: str

    def __str__(self) -> str:
        return f"{self.role}.{self.op}"


class Role:
    """Handle of a declared role; an attribute is one of its operations, for edges."""

    def __init__(self, spec: model.RoleSpec) -> None:
        self.spec = spec

    @property
    def name(self) -> str:
        """The name of the role."""
        return self.spec.name

    def __getattr__(self, op: str) -> Port:
        if op.startswith("_"):
            raise AttributeError(op)
        found = self.spec.interface
        if found is not None and found.op(op) is None:
            names = ", ".join(each.name for each in found.ops)
            raise AttributeError(f"{self.spec.name} has no operation {op!r}; it has {names}")
        return Port(self.spec.name, op)


class Group:
    """Parts of one role under a common name: ``Group(job, "rollout").role("decode", ...)`` is ``rollout.decode``."""

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.name = name

    def role(self, part: str, workload: object = None, **fields: Any) -> Role:
        """A role of the group; arguments as for ``Job.role``."""
        return self.job.role(f"{self.name}.{part}", workload, **fields)


class Job:
    """Builds a JobSpec step by step; keyword arguments are the top-level fields of the job file."""

    def __init__(self, name: str, *, backend: str = "ray", **fields: Any) -> None:
        if not NAME_PATTERN.match(name):
            raise BadInput(f"name {name!r} must begin with a letter and hold letters, digits, '_', '.', '-' only")
        if backend not in ("ray", "sim"):
            raise BadInput(f"backend {backend!r} is neither ray nor sim")
        for key in ("env", "labels"):
            if isinstance(fields.get(key), Mapping):
                fields[key] = tuple(sorted(fields[key].items()))
        self.backend = backend
        self._spec = model.JobSpec(name=name, roles=(), **fields)

    def role(
        self,
        name: str,
        workload: object = None,
        *,
        run: str | Sequence[str] | None = None,
        n: Replicas | None = None,
        mesh: Mapping[str, int] | None = None,
        res: SpecRes | None = None,
        fail: model.Fail | None = None,
        env: Mapping[str, str] | None = None,
        share: Role | None = None,
        apart: Role | Sequence[Role] = (),
        **fields: Any,
    ) -> Role:
        """Declare a role of a class, function or import path, or of a command (``run``).

        ``n`` is the number of instances or (min, max); ``mesh`` gives it by its product. ``share`` is a device lease
        with another role, ``apart`` other devices than those of another role. Raises BadInput for a contradiction.
        """
        if any(each.name == name for each in self._spec.roles):
            raise BadInput(f"role {name!r} is declared twice")
        least, most = _replicas(name, n, mesh)
        path, interface = self._workload(workload)
        if (path is None) is (run is None):
            raise BadInput(f"role {name!r}: give exactly one of workload and run")
        near = (model.Near(role=share.name, share="lease"),) if share is not None else ()
        spec = model.RoleSpec(
            name=RoleName(name),
            workload=path,
            run=(run,) if isinstance(run, str) else (tuple(run) if run is not None else None),
            shell=isinstance(run, str),
            replicas_min=least,
            replicas_max=most,
            mesh=tuple((mesh or {}).items()),
            res=res or SpecRes(),
            fail=fail or model.Fail(),
            env=tuple(sorted((env or {}).items())),
            interface=interface,
            **{
                "collocate": near,
                "apart": tuple(model.Near(role=each.name) for each in ([apart] if isinstance(apart, Role) else apart)),
                **fields,
            },
        )
        self._spec = replace(self._spec, roles=(*self._spec.roles, spec))
        return Role(spec)

    def loop(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: this async function of one Flow is the loop of the job, role ``loop``."""
        if not inspect.iscoroutinefunction(function):
            raise BadInput(f"{function.__name__} must be an async function of one Flow argument")
        self.role(model.LOOP_ROLE, function)
        return function

    def source(self, name: str, source: str, *, key: str = "uid") -> str:
        """A stream that a data set (import path) feeds; returns its name for ``flow``."""
        return self._stream(model.StreamSpec(name=name, source=source, key=key))

    def stream(self, name: str, schema: object = None, **fields: Any) -> str:
        """A bounded queue of leased items; fields are those of ``StreamSpec``. ``schema`` documents the item."""
        del schema
        return self._stream(model.StreamSpec(name=name, **fields))

    def flow(self, *ends: str | Port) -> None:
        """Edges along a path: streams and operations in the order in which items pass them."""
        for source, target in itertools.pairwise(ends):
            self.edge(source, target)

    def edge(
        self, source: str | Port, target: str | Port, *, grad: bool = False, micro: int = 1, inflight: int = 1
    ) -> None:
        """One edge; ``grad=True`` sends activations forward and gradients back in ``micro`` micro-batches."""
        streams = isinstance(source, str) or isinstance(target, str)
        kind: model.EdgeKind = "grad" if grad else ("stream" if streams else "call")
        edge = model.Edge(source=str(source), target=str(target), kind=kind, micro=micro, inflight=inflight)
        self._spec = replace(self._spec, edges=(*self._spec.edges, edge))

    def weights(self, source: Role, target: Role, **fields: Any) -> None:
        """Versioned weights from one role to another; fields are those of ``WeightsEdge``."""
        edge = model.WeightsEdge(source=RoleName(source.name), target=RoleName(target.name), **fields)
        self._spec = replace(self._spec, weights=(*self._spec.weights, edge))

    def spec(self) -> model.JobSpec:
        """The finished value. Raises BadInput when there is no role or more than one loop."""
        loops = [role.name for role in self._spec.roles if role.is_loop]
        if not self._spec.roles:
            raise BadInput(f"job {self._spec.name!r} has no role")
        if len(loops) > 1:
            raise BadInput(f"job {self._spec.name!r} has {len(loops)} loops: {', '.join(loops)}; one is allowed")
        return self._spec

    def submit(self, client: Any = None) -> Any:
        """Hand the job to the service; returns what ``Client.submit`` returns."""
        if client is None:
            # The client lies above this package; it is looked up by name because only this door needs it.
            client = importlib.import_module("rota.service.client").Client()
        return client.submit(self.spec())

    def _stream(self, stream: model.StreamSpec) -> str:
        self._spec = replace(self._spec, streams=(*self._spec.streams, stream))
        return stream.name

    def _workload(self, workload: object) -> tuple[str | None, model.Interface | None]:
        """Import path and interface; the folder of a workload's file becomes the job's workdir if it has none."""
        if workload is None or isinstance(workload, str):
            return workload, None
        if not callable(workload):
            raise BadInput(f"{workload!r} is no class, function or import path")
        module: str = workload.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and self._spec.workdir is None:
            depth = 0 if module == "__main__" else module.count(".")
            self._spec = replace(self._spec, workdir=str(Path(file).absolute().parents[depth]))
        if module == "__main__" and file is not None:
            module = Path(file).stem
        return f"{module}:{workload.__qualname__}", interface_of(workload)


def _replicas(name: str, n: Replicas | None, mesh: Mapping[str, int] | None) -> tuple[int, int]:
    size = math.prod(mesh.values()) if mesh else None
    least, most = (n if isinstance(n, tuple) else (n, n)) if n is not None else (size or 1, size or 1)
    if size is not None and n is not None and size != most:
        raise BadInput(f"role {name!r}: mesh {dict(mesh or {})} has {size} members but n is {n}")
    if not 1 <= least <= most:
        raise BadInput(f"role {name!r}: n must be at least 1, and (min, max) in order, not {n}")
    return least, most


def spmd(
    script: str,
    *args: str,
    nproc: int = 1,
    elastic: tuple[int, int] | None = None,
    check: str = "quick",
    name: str | None = None,
    res: SpecRes | None = None,
    fail: model.Fail | None = None,
    **fields: Any,
) -> Job:
    """A job of one unmodified training script in ``nproc`` ranks, each an instance with torchrun's environment.

    ``elastic`` = (fewest, most) ranks the job may go on with; ``check`` is the node check before the start.
    """
    job = Job(name or Path(script).stem.replace("_", "-"), **fields)
    least, most = elastic or (nproc, nproc)
    if not least <= nproc <= most:
        raise BadInput(f"nproc {nproc} lies outside elastic {elastic}")
    contract = replace(fail or model.Fail(), check=check)  # pyright: ignore[reportArgumentType] - checked by the service
    job.role(
        "main",
        run=("python", script, *args),
        n=(least, nproc) if elastic else None,
        mesh={"dp": nproc},
        res=res,
        fail=contract,
        elastic_axis="dp" if elastic else None,
    )
    return job
