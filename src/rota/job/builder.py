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
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Never, TypeVar, Union, get_args, get_origin, get_type_hints

from rota.job.inspect import not_while_imported
from rota.job.workload import FLOW, F, interface_of
from rota.spec import codec
from rota.spec import job as model
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, nearest
from rota.spec.ids import NAME_PATTERN, RoleName
from rota.spec.resources import Limits as SpecLimits
from rota.spec.resources import Res as SpecRes
from rota.spec.resources import parse_duration, parse_size

P = TypeVar("P")
Replicas = int | tuple[int, int]

_SECONDS = {"time_limit": "time_limit_s", "idle_limit": "idle_limit_s", "grace": "grace_s"}
"""Field of a job file to the one of the spec; the file, and a text here, has a unit."""
_BY_CALL = {
    "roles": "job.role(NAME, ...)",
    "edges": "job.flow(...)",
    "streams": "job.stream(NAME, ...)",
    "weights": "job.weights(WRITER, READER)",
}
"""What a job file has in one mapping and Python declares by a call each."""
_JOB = frozenset(one.name for one in fields(model.JobSpec)) - {*_BY_CALL, "name", "run_as", "spec_version"}
_ROLE = frozenset(one.name for one in fields(model.RoleSpec)) - {
    *("name", "replicas_min", "replicas_max", "elastic_axis", "interface", "plans", "start", "shell"),
    *("workload", "args", "run", "mesh", "res", "fail", "env", "apart"),
}
_ALSO = {"replicas": "n", "resources": "res"}
"""Field of a role in a job file to the argument that is the same."""
_SEVERAL = ("packages", "ports", "secrets", "start_after")
_FAIL = frozenset(one.name for one in fields(model.Fail)) - {"limit_n", "limit_window_s", "progress_s", "backoff_s"}
_RESOURCES = frozenset(("cpus", "gpus", "gpu_type", "memory"))
_FAIL_WORDS = ("limit", "progress", "backoff")


def _known(what: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Raises BadInput for the first name of ``given`` that is not ``known``."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise BadInput(f"{what} has no field {name!r}", hint=nearest(name, names, "fields"))


def _job_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a job, in the words of the spec or of a job file, as fields of the spec."""
    for name in given:
        if name in _BY_CALL:
            raise BadInput(f"{name} of a job are declared one by one in Python", hint=f"use {_BY_CALL[name]}")
        if name in {*_ROLE, *_ALSO} - _JOB:
            raise BadInput(f"{name} is a field of a role, not of a job", hint=f"write job.role(NAME, {name}=...)")
        if name in _RESOURCES:
            hint = f"write job.role(NAME, resources={{{name!r}: {given[name]!r}}})"
            raise BadInput(f"{name} is a field of a role, not of a job", hint=hint)
    _known("a job", given, _JOB | set(_SECONDS))
    made: dict[str, Any] = {}
    for name, value in given.items():
        field = _SECONDS.get(name, name)
        if field in given and field != name:
            raise BadInput(f"give {name} or {field}, not both")
        made[field] = _seconds(name, field, value) if field != name else _several(name, value)
    if "checkpoint" in made:
        made["checkpoint"] = _part("", "checkpoint", made["checkpoint"])
    return {name: value for name, value in made.items() if value is not None}


def _seconds(name: str, field: str, value: Any) -> float | None:
    """A duration with a unit; None is the default of the spec."""
    if value is not None and not isinstance(value, str):
        raise BadInput(f"{name}={value!r} has no unit", hint=f"write {name}='{value}s', or {field}={value!r}")
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from None


def _part(role: str, field: str, value: Any) -> Any:
    """A part that is written as a job file has it, a mapping; one that is made already, or None, as it is.

    Raises BadInput, which names the field, for everything else and for wrong values in the mapping.
    """
    make, made = _PARTS[field]
    if value is None or isinstance(value, made):
        return value
    of, before = (f"{field} of role {role!r}", f"role {role!r}: {field}") if role else (field, field)
    if not isinstance(value, Mapping):
        wanted = "a role, its name, or a mapping" if made is model.Near else f"a mapping, or {made.__name__}(...)"
        raise BadInput(f"{before}={value!r} is not {wanted}")
    names = {name: one for name, one in inspect.signature(make).parameters.items() if one.kind is one.KEYWORD_ONLY}
    _known(of, value, {*_FAIL, *_FAIL_WORDS} if make is Fail else names)
    required = (name for name, one in names.items() if one.default is one.empty)
    if missing := [name for name in required if name not in value]:
        raise BadInput(f"{before} needs {', '.join(missing)}")
    try:
        return make(**value)
    except (BadInput, TypeError, ValueError) as error:
        raise BadInput(f"{before}: {error}") from None


def _replicas(role: str, word: str, value: Any) -> Replicas:
    """``2``, ``(1, 4)`` or ``{"min": 1, "max": 4}``."""
    given = value
    if isinstance(value, Mapping):
        _known(f"replicas of role {role!r}", value, ("min", "max"))
        value = value.get("min", 1), value.get("max", value.get("min", 1))
    numbers = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(numbers) != 2 or any(type(one) is not int for one in numbers):
        raise BadInput(f"role {role!r}: {word}={given!r} is not a number, or (min, max)")
    return value if isinstance(value, int) else numbers


def _several(field: str, value: Any) -> Any:
    """A list as the spec has it; one of several alone, as a job file may write it."""
    if field in _SEVERAL and isinstance(value, str | Role):
        value = [value]
    return tuple(one.name if isinstance(one, Role) else one for one in value) if isinstance(value, list) else value


def _all_near(role: str, field: str, value: Any) -> tuple[model.Near, ...]:
    """Entries of ``collocate`` or ``apart``: a role, its name, or a mapping as a job file has it; one alone too."""
    entries: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for index, one in enumerate(entries):
        other = one.get("role") if isinstance(one, Mapping) else one
        if isinstance(other, str | Role):
            name = other if isinstance(other, str) else other.name
            entries[index] = {**(one if isinstance(one, Mapping) else {}), "role": name}
    return tuple(_part(role, field, one) for one in entries)


def _role_fields(
    role: str, n: Replicas | None, res: SpecRes | None, given: dict[str, Any]
) -> tuple[Replicas | None, SpecRes | None, dict[str, Any]]:
    """Number, resources and other fields of a role, in the words of the spec or of a job file, as the spec has them."""
    for word, value in (("replicas", n), ("resources", res)):
        if word in given and value is not None:
            raise BadInput(f"role {role!r}: {word} and {_ALSO[word]} are the same; give one of them")
    for word in (one for one in given if one in _RESOURCES):
        hint = f"write resources={{{word!r}: {given[word]!r}}}"
        raise BadInput(f"role {role!r} has no field {word!r}", hint=hint)
    _known(f"role {role!r}", given, {*_ROLE, *_ALSO})
    made = {word: _several(word, value) for word, value in given.items() if word not in _ALSO and value is not None}
    for word in ("limits", "model"):
        if word in made:
            made[word] = _part(role, word, given[word])
    if "collocate" in made:
        made["collocate"] = _all_near(role, "collocate", given["collocate"])
    if "replicas" in given:
        n = _replicas(role, "replicas", given["replicas"])
    elif n is not None:
        n = _replicas(role, "n", n)
    return n, _part(role, "resources", given.get("resources", res)), made


def _of_type(part: P, what: str = "") -> P:
    """The part, if each of its fields is of its type. Raises BadInput, which names field, value and rule."""
    for name, kind in get_type_hints(type(part)).items():
        value = getattr(part, name)
        try:
            codec.from_json_value(kind, codec.to_json_value(value))
        except (TypeError, ValueError):
            pairs = [pair for pair in value if not isinstance(pair[1], str)] if name == "env" else []
            if pairs:
                (key, wrong), *_ = pairs
                raise BadInput(
                    f"{what}env {key}={wrong!r} is not text", hint=f"write {key!r}: {str(wrong)!r}"
                ) from None
            raise BadInput(f"{what}{name}={value!r} is not {_expected(kind)}", hint=_better(name, value)) from None
    return part


def _expected(kind: Any) -> str:
    """A type in words."""
    parts = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(kind) in (tuple, list):
        return f"a list, each {_expected(parts[0])}"
    if parts and get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_expected, parts))
    return {float: "a number", int: "a whole number", str: "text", bool: "True or False"}.get(kind, str(kind))


def _better(name: str, value: object) -> str:
    """What to write in place of a text for a number."""
    if name == "restart" and value in ("never", "no"):
        return "for never write limit='0/10m', then=[]"
    if not isinstance(value, str):
        return ""
    with suppress(ValueError):
        float(value)
        return f"write {name}={value}"
    with suppress(ValueError):
        return f"write {name.removesuffix('_s')}={value!r}" if name.endswith("_s") and parse_duration(value) else ""
    return ""


def Res(
    *, cpus: float = 1.0, gpus: float = 0.0, gpu_type: str | None = None, memory: str = "0B", **wrong: Never
) -> SpecRes:
    """Resources of one instance; ``memory`` has a unit (``"2GiB"``).

    Raises ValueError for a bare number, BadInput for a value of another type and for what there is not.
    """
    _known("Res", wrong, _RESOURCES)
    return _of_type(SpecRes(cpus=cpus, gpus=gpus, gpu_type=gpu_type, memory_bytes=parse_size(str(memory))))


def Limits(*, processes: int = 0, files: int = 0, disk: str = "0B", **wrong: Never) -> SpecLimits:
    """What one instance may use at most; 0: no limit; ``disk`` has a unit. Raises as ``Res`` does."""
    _known("Limits", wrong, ("processes", "files", "disk"))
    return _of_type(SpecLimits(processes=processes, files=files, disk_bytes=parse_size(str(disk))))


def Fail(
    *,
    restart: model.Restart | None = None,
    limit: str = "3/10m",
    then: str | Sequence[str] = "node|job",
    state: str | Sequence[str] = "shadow",
    progress: str = "5m",
    backoff: str = "0s",
    **more: Any,
) -> model.Fail:
    """A failure contract as a job file writes it: ``limit`` is ``N/WINDOW``, lists may be joined by ``|``.

    Further fields are those of ``rota.spec.job.Fail``. Raises BadInput or ValueError for another form.
    """
    _known("a failure contract", more, {*_FAIL, *_FAIL_WORDS})
    count, sep, window = str(limit).partition("/")
    if not sep or not count.strip().isdigit():
        raise BadInput(f"limit {limit!r} is not N/WINDOW, for example 3/10m")
    made = model.Fail(
        restart=restart,
        limit_n=int(count),
        limit_window_s=parse_duration(window),
        then=_listed("then", then),  # pyright: ignore[reportArgumentType] - checked below
        state=_listed("state", state),  # pyright: ignore[reportArgumentType] - checked below
        progress_s=parse_duration(str(progress)),
        backoff_s=parse_duration(str(backoff)),
        **more,
    )
    return _of_type(made)


def _listed(field: str, value: str | Sequence[str]) -> tuple[str, ...]:
    parts = value.split("|") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise BadInput(f"{field}={value!r} is not a list of names, or a text of them with | between")
    return tuple(part.strip() for part in parts if part.strip())


_PARTS: Mapping[str, tuple[Callable[..., Any], type]] = {
    "resources": (Res, SpecRes),
    "limits": (Limits, SpecLimits),
    "fail": (Fail, model.Fail),
    "model": (model.TrainedModel, model.TrainedModel),
    "checkpoint": (model.Checkpoint, model.Checkpoint),
    "collocate": (model.Near, model.Near),
    "apart": (model.Near, model.Near),
}
"""Fields that a job file has as a mapping: what makes the part of a mapping, and its class."""


@dataclass(frozen=True, slots=True)
class Port:
    """One operation of a role: the end of an edge, ``role.op``; in the loop a call to the role."""

    role: str
    op: str
    rank: int | None = None
    """The one instance that a call is for; None: all of the role."""

    def __str__(self) -> str:
        return f"{self.role}.{self.op}"

    def __call__(self, *args: object, **kwargs: object) -> Any:
        role = _flow(str(self)).roles[self.role]
        return getattr(role if self.rank is None else role[self.rank], self.op)(*args, **kwargs)


class StreamName(str):
    """Name of a declared stream; in the loop also its handle: ``batches``, ``put``, ``close``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(_flow(f"{self}.{name}").streams[self], name)


def _flow(what: str) -> Any:
    flow = FLOW.get(None)
    if flow is None:
        raise AttributeError(f"{what} is for the loop of a job that runs; here it is only declared")
    return flow


class Role:
    """Handle of a declared role; an attribute is one of its operations, for edges and, in the loop, for calls.

    ``rollout[2].decode(x)`` calls one instance.
    """

    def __init__(self, spec: model.RoleSpec, rank: int | None = None) -> None:
        self.spec, self._rank = spec, rank

    def __getitem__(self, rank: int) -> Role:
        """One instance of the role, for calls in the loop."""
        return Role(self.spec, rank)

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
        return Port(self.spec.name, op, self._rank)


def _json_of(role: str, args: Mapping[str, object]) -> JsonObject:
    """The arguments as a job file would have them. Raises BadInput for a value that JSON does not have."""
    try:
        return json.loads(json.dumps(dict(args), allow_nan=False))
    except (TypeError, ValueError) as error:
        hint = "give numbers, texts, lists and mappings, and make the rest in the constructor"
        raise BadInput(f"role {role!r}: args are sent as JSON: {error}", hint=hint) from None


class Group:
    """Parts of one role under a common name: ``Group(job, "rollout").role("decode", ...)`` is ``rollout.decode``."""

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.name = name

    def role(self, part: str, workload: object = None, **fields: Any) -> Role:
        """A role of the group; arguments as for ``Job.role``."""
        return self.job.role(f"{self.name}.{part}", workload, **fields)


class Job:
    """Builds a JobSpec step by step; keyword arguments are the top-level fields of the job file.

    ``time_limit="2h"`` is ``time_limit_s=7200``. Raises BadInput for a field that a job does not have.
    """

    def __init__(self, name: str, *, backend: str = "ray", **fields: Any) -> None:
        if not NAME_PATTERN.match(name):
            raise BadInput(f"name {name!r} must begin with a letter and hold letters, digits, '_', '.', '-' only")
        if backend not in ("ray", "sim"):
            raise BadInput(f"backend {backend!r} is neither ray nor sim")
        for key in ("env", "labels"):
            if isinstance(fields.get(key), Mapping):
                fields[key] = tuple(sorted(fields[key].items()))
        fields = _job_fields(fields)
        given = fields.pop("after", ())
        after = [given] if isinstance(given, str) or hasattr(given, "id") else given
        self.backend = backend
        self._spec = _of_type(model.JobSpec(name=name, roles=(), after=tuple(map(_after, after)), **fields), "a job: ")

    def __repr__(self) -> str:
        roles = ", ".join(f"{one.name} x{one.replicas_min}" for one in self._spec.roles)
        return f"Job({self._spec.name!r}{', ' if roles else ''}{roles})"

    def role(
        self,
        name: str,
        workload: object = None,
        *,
        args: Mapping[str, object] | None = None,
        run: str | Sequence[str] | None = None,
        n: Replicas | None = None,
        mesh: Mapping[str, int | str] | None = None,
        res: SpecRes | None = None,
        fail: model.Fail | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        share: Role | None = None,
        apart: Role | str | Mapping[str, Any] | Sequence[Role | str | Mapping[str, Any]] = (),
        **fields: Any,
    ) -> Role:
        """Declare a role of a class, function or import path, or of a command (``run``).

        ``args`` are those of the constructor of the class, values of JSON by name. ``n`` is the number of instances or
        (min, max); ``mesh`` gives it by its product, but for the one axis of size ``"*"``, which changes with it.
        ``share`` is a device lease with another role, ``apart`` other devices than those of another role. The words of
        a job file mean the same: ``replicas`` is ``n``, ``resources`` is ``res``, and those, ``limits`` and ``fail``
        may be mappings. Raises BadInput for a contradiction.
        """
        if any(each.name == name for each in self._spec.roles):
            raise BadInput(f"role {name!r} is declared twice")
        n, res, fields = _role_fields(name, n, res, fields)
        contract = _part(name, "fail", fail)
        if env is not None and not isinstance(env, Mapping):
            raise BadInput(f"role {name!r}: env={env!r} is not a mapping", hint="write env={'NAME': 'text'}")
        if share is not None and n is None and not mesh:  # as many as the devices they take turns on
            n = (share.spec.replicas_min, share.spec.replicas_max)
        least, most, sizes, elastic = _sizes(name, n, mesh or {})
        values = _json_of(name, args or {})
        path, interface = self._workload(workload, values)
        if (path is None) is (run is None):
            raise BadInput(f"role {name!r}: give exactly one of workload and run")
        near = (model.Near(role=share.name, share="lease"),) if share is not None else ()
        spec = model.RoleSpec(
            name=RoleName(name),
            workload=path,
            args=values,
            run=(run,) if isinstance(run, str) else (tuple(run) if run is not None else None),
            shell=isinstance(run, str),
            replicas_min=least,
            replicas_max=most,
            mesh=sizes,
            elastic_axis=elastic,
            res=res or SpecRes(),
            fail=contract or model.Fail(),
            env=tuple(sorted((env or {}).items())),
            interface=interface,
            **({"collocate": near, "apart": _all_near(name, "apart", apart)} | fields),
        )
        _of_type(spec.res, f"role {name!r}: resources: ")
        _of_type(spec.fail, f"role {name!r}: fail: ")
        self._spec = replace(self._spec, roles=(*self._spec.roles, _of_type(spec, f"role {name!r}: ")))
        return Role(spec)

    def loop(self, function: F) -> F:
        """Decorator: this async function of one Flow is the loop of the job, role ``loop``."""
        if not inspect.iscoroutinefunction(function):
            raise BadInput(f"{function.__name__} must be an async function of one Flow argument")
        self.role(model.LOOP_ROLE, function)
        return function

    def source(self, name: str, source: object, *, key: str = "uid") -> StreamName:
        """A stream that a data set feeds: an import path, or what a module has under a name; returns the handle."""
        if not isinstance(source, str):
            frame = inspect.currentframe()
            source = self._path_of(source, frame.f_back.f_globals if frame and frame.f_back else {})
        return self._stream(model.StreamSpec(name=name, source=source, key=key))

    def stream(self, name: str, schema: object = None, **fields: Any) -> StreamName:
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
        """The finished value. Raises BadInput without a role or with more than one loop."""
        loops = [role.name for role in self._spec.roles if role.is_loop]
        if not self._spec.roles:
            raise BadInput(f"job {self._spec.name!r} has no role")
        if len(loops) > 1:
            raise BadInput(f"job {self._spec.name!r} has {len(loops)} loops: {', '.join(loops)}; one is allowed")
        return self._spec

    # The service lies above this package; its client is looked up by name because only these two need them.

    def plan(self, *, ignore_image: bool = False) -> Any:
        """What it would become on this machine: ``PlanReport`` as a dict; its ``show()`` prints it. Starts nothing.

        Raises what ``submit`` raises for the job itself.
        """
        not_while_imported()
        return importlib.import_module("rota.service.cli.verbs.run").PlanReport.of(self, ignore_image=ignore_image)

    def submit(self, client: Any = None, **options: Any) -> Any:
        """Hand the job to the service; ``options`` (``key``, ``ignore_image``) and result are those of ``Client.run``.

        A module that an instance imports ends here: what follows the submission at its top is not for instances.
        """
        not_while_imported()
        return (client or importlib.import_module("rota.service.client").Client()).run(self, **options)

    def _stream(self, stream: model.StreamSpec) -> StreamName:
        self._spec = replace(self._spec, streams=(*self._spec.streams, stream))
        return StreamName(stream.name)

    def _workload(self, workload: object, args: JsonObject) -> tuple[str | None, model.Interface | None]:
        if workload is None or isinstance(workload, str):
            return workload, None
        if not callable(workload):
            raise BadInput(f"{workload!r} is not a class, function or import path")
        return self._path_of(workload, {}), interface_of(workload, args)

    def _path_of(self, target: object, names: Mapping[str, Any]) -> str:
        """Import path of ``target``; the folder of its file becomes the job's workdir if it has none.

        A value that does not know its name is looked for in ``names``, those of a module.
        """
        module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
        # What a function defines, and a lambda, cannot be imported by name.
        if not module or not name or "<" in name:
            module = names.get("__name__", "")
            name = next((key for key, value in names.items() if value is target and key[:2] != "__"), "")
        if not name:
            hint = "instances import it: give it a name at the top of a module, or give an import path"
            raise BadInput(f"no import path leads to this {type(target).__name__}", hint=hint)
        file = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" and file is not None and not Path(file).is_file():
            file = None  # code of stdin or a notebook is in no file that an instance could read
        if file is not None and self._spec.workdir is None:
            depth = 0 if module == "__main__" else module.count(".")
            self._spec = replace(self._spec, workdir=str(Path(file).absolute().parents[depth]))
        if module == "__main__" and file is None:
            hint = "put it in a file and import it from there; in a notebook: %%writefile roles.py, then import roles"
            raise BadInput(f"{name} is defined in a notebook or on stdin, where no instance can import it", hint=hint)
        if module == "__main__" and file is not None:
            module = Path(file).stem
        return f"{module}:{name}"


def _after(given: Any) -> model.After:
    """One entry of ``after``: as it is in the spec, a text ``JOB`` or ``JOB:ended``, or the handle of a job."""
    if isinstance(given, model.After):
        return given
    job, colon, when = str(getattr(given, "id", given)).partition(":")
    if colon and when not in ("succeeded", "ended"):
        raise BadInput(f"after: {given!r} is not JOB, JOB:ended or JOB:succeeded")
    return model.After(job=job, when="ended" if when == "ended" else "succeeded")


def _sizes(name: str, n: Replicas | None, mesh: Mapping[str, int | str]) -> model.Sizes:
    least, most, sizes, elastic = found = model.sizes_of(mesh, n)
    size = math.prod(size for _, size in sizes)
    if mesh and n is not None and elastic is None and size != most:
        raise BadInput(f"role {name!r}: mesh {dict(mesh)} has {size} members but n is {n}")
    if not 1 <= least <= most:
        raise BadInput(f"role {name!r}: n must be at least 1, and (min, max) in order, not {n}")
    return found


def spmd(
    script: str,
    *args: str,
    nproc: int = 1,
    elastic: tuple[int, int] | None = None,
    check: str | None = None,
    name: str | None = None,
    res: SpecRes | None = None,
    fail: model.Fail | Mapping[str, Any] | None = None,
    **fields: Any,
) -> Job:
    """A job of one unmodified training script in ``nproc`` ranks, each an instance with torchrun's environment.

    ``elastic`` = (fewest, most) ranks, ``nproc`` or what it means among them: the world begins with what is free,
    shrinks and grows. ``check`` is the node check before the start. ``fields`` are those of a job, and of its role.
    """
    if "replicas" in fields:
        raise BadInput("spmd has no replicas", hint="give nproc, and elastic=(min, max) where that may change")
    own = {word: fields.pop(word) for word in {*_ROLE, *_ALSO} - _JOB if word in fields}
    job = Job(name or Path(script).stem.replace("_", "-"), **fields)
    least, most = elastic or (nproc, nproc)
    if not least <= nproc <= most and nproc != 1:
        raise BadInput(f"nproc {nproc} lies outside elastic {elastic}")
    contract = _part("main", "fail", fail) or model.Fail()
    if check is not None:
        contract = replace(contract, check=check)  # pyright: ignore[reportArgumentType] - checked by the service
    job.role(
        "main",
        run=("python", script, *args),
        n=(least, most),
        mesh={"dp": "*" if elastic else nproc},
        res=res,
        fail=contract,
        **own,
    )
    return job
