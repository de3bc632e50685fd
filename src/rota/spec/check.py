"""Validation across the fields of a job: names that exist, sizes that multiply, orders without a circle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rota.spec.errors import nearest
from rota.spec.gang import CELL_LEVELS, CellLevel
from rota.spec.ids import NAME_PATTERN
from rota.spec.job import AUTO_PLAN, BATCH_VARIABLE, STREAM_LOOP, Edge, JobSpec, Near, RoleSpec, arrow_of, endpoint
from rota.spec.resources import types_of
from rota.spec.torchrun import problem_of

SELF = "self"
ROLES_MAX = 64
AFTER_MAX = 100
INSTANCES_MAX = 100_000
PORT_NAME, PORTS_MAX = re.compile(r"^[a-z][a-z0-9-]{0,30}$"), 8
ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
QUEUE_PATH = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]{0,62}(/[A-Za-z][A-Za-z0-9_.-]{0,62}){0,7}$")
IMPORT_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
IMAGE = re.compile(
    r"/[^\x00-\x1f]*|(?!.*\.sif\Z)([a-z][a-z0-9+-]*://)?\w[\w.-]*(:\d+(?=/))?(/\w[\w.-]*)*"
    r"(:\w[\w.-]{0,127})?(@[\w+.-]+:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
"""A reference as podman and docker take it, one with a scheme of apptainer, or an absolute path."""
_NAME_RULE = "a name begins with a letter and holds at most 63 letters, digits, '_', '.' and '-'"
SIZES_HINT = "roles that serve calls can, and commands with replicas: {min, max} and mesh: {dp: '*'}"
"""Which roles may change their size."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that a job breaks. ``path`` leads to the field as the job file names it; ``code`` is stable.

    An edge is counted in ``JobSpec.edges``, after chains were taken apart.
    """

    path: Path
    message: str
    hint: str = ""
    code: str = "INVALID"

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return f"{dotted(self.path)}: {self.message}{hint}"


def dotted(path: Path) -> str:
    """``roles.actor.mesh`` or ``weights[0].from``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def check(spec: JobSpec) -> tuple[Finding, ...]:
    """Every rule that ``spec`` breaks, in the order of its fields; empty when it can be run.

    Rules about operations and states of workloads apply once ``interface`` is filled in.
    """
    return (
        *_check_names(spec),
        *_check_labels(spec),
        *_check_after(spec),
        *(finding for role in spec.roles for finding in _check_role(role)),
        *_check_order(spec),
        *_check_near(spec),
        *_check_streams(spec),
        *_check_edges(spec),
        *_check_weights(spec),
        *_check_success(spec),
        *_check_loops(spec),
        *_check_folders(spec),
    )


def _check_folders(spec: JobSpec) -> Iterator[Finding]:
    """Checkpoints are written to a folder: only ``data`` and ``output`` may be URLs."""
    if spec.checkpoint and (folder := spec.checkpoint.dir) and "://" in folder:
        hint = "name a folder that is mounted on every machine; output may be a URL"
        message = f"{folder!r} is a URL, and checkpoints are not written to one"
        yield Finding(path=("checkpoint", "dir"), message=message, hint=hint, code="NOT_SUPPORTED")


def image_refused(spec: JobSpec) -> Iterator[Finding]:
    """What of a job with an image would not run in it: Rota starts commands in images, and no processes of its own."""
    why = f"the job runs in the image {spec.image}"
    if spec.image is not None:
        command = "start it as a command (run:), or submit with --ignore-image (ignore_image)"
        yield from _not_of_service(
            spec,
            (f"{why}, and a workload needs the Python, Ray and Rota of the service", command),
            (f"{why}, and packages are installed for the Python of the service", "put them into the image"),
        )


def _not_of_service(spec: JobSpec, workload: tuple[str, str], packages: tuple[str, str]) -> Iterator[Finding]:
    """Roles that are a workload, and roles with packages, each with what is wrong with it and a hint."""
    for role in spec.roles:
        at: Path = ("roles", role.name)
        if role.run is None:
            yield Finding(path=(*at, "workload"), message=workload[0], hint=workload[1], code="NOT_SUPPORTED")
        if spec.packages_of(role):
            path = (*at, "packages") if role.packages else ("packages",)
            yield Finding(path=path, message=packages[0], hint=packages[1], code="NOT_SUPPORTED")


ACTED_ON = ("LD_", "GLIBC_", "MALLOC_", "GCONV_", "PYTHON", "RAY_", "ROTA_")
"""Beginnings of names of variables on which the loader, an interpreter or a process of the service acts."""


def tenant_refused(spec: JobSpec) -> Iterator[Finding]:
    """What of a job whose commands run as a user of their own would run as the service does: root."""
    why = f"jobs of queue {spec.queue} run as {spec.run_as}"
    for index, name in enumerate(spec.secrets):
        if name.startswith(ACTED_ON) or name in ("PATH", "IFS", "ENV", "BASH_ENV", "TMPDIR"):
            message = f"{why}, and {name} would act on the process of the service that opens it"
            hint = "store the secret under another name, and set the variable in the command"
            yield Finding(path=("secrets", index), message=message, hint=hint, code="NOT_SUPPORTED")
    if spec.image is not None:
        message, hint = f"{why}, and images run as the service", "use another queue, or packages and setup"
        yield Finding(path=("image",), message=message, hint=hint, code="NOT_SUPPORTED")
    for field, url in (("data", spec.data_url), ("output", spec.output_url)):
        if url:
            message, hint = f"{why}, and {field} by URL is copied as the service", "mount it, and name the path"
            yield Finding(path=(field,), message=message, hint=hint, code="NOT_SUPPORTED")
    own_python = "install them in an environment of that user, and name its Python by the path: /opt/v/bin/python"
    yield from _not_of_service(
        spec,
        (f"{why}, and a workload runs in a process of the service", "start it as a command: run: [python, train.py]"),
        (f"{why}, and packages are installed as the service", own_python),
    )


def unenforced(spec: JobSpec) -> tuple[str, ...]:
    """What a job that ignores its image asks for and nothing enforces, a sentence each."""
    image = f"image {spec.image}: ignored; processes start in the environment of the service, in no container"
    return (image,) if spec.image is not None else ()


def fixed_size(role: RoleSpec) -> str:
    """Why a role can never have more or fewer instances than it starts with; empty when it can."""
    if role.serves or (role.meshed and role.run is not None and role.replicas_max > role.replicas_min):
        return ""
    reasons = (
        (role.meshed, "its members are one mesh"),
        (role.is_loop, "it is the loop"),
        (role.finite, "it runs to its end"),
        (role.stateful, "it keeps state"),
        (True, "its workload is not known yet"),
    )
    return next(text for holds, text in reasons if holds)


def _check_labels(spec: JobSpec) -> Iterator[Finding]:
    steps = dict(spec.labels).get("rota.steps", "1")
    if not re.fullmatch(r"0*[1-9][0-9]{0,14}", steps):
        message = f"{steps!r} is not a whole number above 0"
        yield Finding(path=("labels", "rota.steps"), message=message, hint="say how many commits the job makes in all")


def _check_names(spec: JobSpec) -> Iterator[Finding]:
    if not NAME_PATTERN.match(spec.name):
        yield Finding(path=("name",), message=f"{spec.name!r} is not a name", hint=_NAME_RULE, code="BAD_NAME")
    if not spec.roles:
        yield Finding(path=("roles",), message="a job needs at least one role", code="MISSING")
    count = sum(role.workload != STREAM_LOOP for role in spec.roles)
    if count > ROLES_MAX:
        yield Finding(path=("roles",), message=f"{count} roles; at most {ROLES_MAX}", code="OUT_OF_RANGE")
    for index, role in enumerate(spec.roles):
        if any(role.name == other.name for other in spec.roles[:index]):
            message, hint = "a second role of this name", "rename one"
            yield Finding(path=("roles", role.name), message=message, hint=hint, code="DUPLICATE_NAME")
        if not NAME_PATTERN.match(role.name):
            path: Path = ("roles", role.name)
            yield Finding(path=path, message=f"{role.name!r} is not a name", hint=_NAME_RULE, code="BAD_NAME")
        elif role.name == SELF:
            message = "'self' is kept for members of the same role"
            yield Finding(path=("roles", role.name), message=message, hint="choose another name", code="BAD_NAME")
    if not QUEUE_PATH.match(spec.queue):
        hint = "a queue is a path such as research/rl"
        yield Finding(path=("queue",), message=f"{spec.queue!r} is not a queue", hint=hint, code="BAD_NAME")
    yield from _check_env(("env",), spec.env)
    yield from _check_packages(("packages",), spec.packages)
    if spec.image is not None and not IMAGE.fullmatch(spec.image):
        message = f"{spec.image!r} is neither the reference of an image nor an absolute path"
        hint = "for example docker.io/library/python:3.12, or /data/env.sif"
        yield Finding(path=("image",), message=message, hint=hint, code="BAD_NAME")
    for index, name in enumerate(spec.secrets):
        if not ENV_NAME.match(name):
            path = ("secrets", index)
            yield Finding(path=path, message=f"{name!r} cannot name a variable", code="BAD_NAME")


def _check_env(path: Path, env: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    for name, _ in env:
        if not ENV_NAME.match(name):
            hint = "letters, digits and '_', not beginning with a digit"
            yield Finding(path=(*path, name), message=f"{name!r} cannot name a variable", hint=hint, code="BAD_NAME")


def _check_after(spec: JobSpec) -> Iterator[Finding]:
    jobs = [one.job for one in spec.after]
    if len(jobs) > AFTER_MAX:
        yield Finding(path=("after",), message=f"{len(jobs)} jobs; at most {AFTER_MAX}", code="OUT_OF_RANGE")
    for index, job in enumerate(jobs):
        if job in jobs[:index]:
            yield Finding(path=("after", index), message=f"{job!r} is there twice", code="DUPLICATE_NAME")


def _check_packages(path: Path, packages: Sequence[str]) -> Iterator[Finding]:
    for index, one in enumerate(packages):
        if not one.strip() or one.startswith("-") or len(one.splitlines()) != 1:
            message = f"{one!r} is not a requirement such as numpy>=2, and not a file such as requirements.txt"
            hint = "options of pip are variables in env: PIP_INDEX_URL, PIP_FIND_LINKS"
            yield Finding(path=(*path, index), message=message, hint=hint, code="BAD_VALUE")


def _check_args(at: Path, role: RoleSpec) -> Iterator[Finding]:
    if role.args and role.run is not None:
        message = "a command has no constructor, and args are for the class of a workload"
        yield Finding(path=at, message=message, hint="write them into run", code="CONTRADICTION")
    for name in role.args:
        if not name.isidentifier():
            message = f"{name!r} cannot name an argument"
            yield Finding(path=(*at, name), message=message, hint="write it as in the code", code="BAD_NAME")


def _check_role(role: RoleSpec) -> Iterator[Finding]:
    at: Path = ("roles", role.name)
    yield from _check_workload(at, role)
    yield from _check_args((*at, "args"), role)
    yield from _check_env((*at, "env"), role.env)
    yield from _check_packages((*at, "packages"), role.packages)
    for index, name in enumerate(role.ports):
        if not PORT_NAME.match(name) or name in role.ports[:index]:
            hint = "lower-case letters, digits and '-', each name once, for example notebook"
            where = (*at, "ports", index)
            yield Finding(path=where, message=f"{name!r} cannot name a port here", hint=hint, code="BAD_NAME")
    if len(role.ports) > PORTS_MAX:
        message = f"{len(role.ports)} ports; at most {PORTS_MAX}"
        yield Finding(path=(*at, "ports"), message=message, code="OUT_OF_RANGE")
    low, high = role.replicas_min, role.replicas_max
    if low < 1 or high < low or high > INSTANCES_MAX:
        rule = f"1 <= min <= max <= {INSTANCES_MAX} must hold"
        yield Finding(path=(*at, "replicas"), message=f"min {low}, max {high}: {rule}", code="OUT_OF_RANGE")
    yield from _check_mesh(at, role)
    yield from _check_plan(at, role)
    degrade = role.fail.degrade
    if degrade is not None and not 1 <= degrade <= low:
        message = f"{degrade} is not between 1 and {low}, the instances that start"
        yield Finding(path=(*at, "fail", "degrade"), message=message, code="OUT_OF_RANGE")
    if "none" in role.fail.state and len(role.fail.state) > 1:
        message = "'none' cannot be combined with other state sources"
        yield Finding(path=(*at, "fail", "state"), message=message, code="CONTRADICTION")
    gpus = role.res.gpus
    if gpus > 1 and gpus != int(gpus):
        message = f"{gpus:g} is neither a whole number of devices nor a fraction of one"
        yield Finding(path=(*at, "resources", "gpus"), message=message, code="OUT_OF_RANGE")


def _check_workload(at: Path, role: RoleSpec) -> Iterator[Finding]:
    if (role.workload is None) == (role.run is None):
        both = role.workload is not None
        message = "has both 'workload' and 'run'" if both else "needs 'workload' or 'run'"
        hint = "keep one" if both else "for example workload: module:Class, or run: python train.py"
        yield Finding(path=at, message=message, hint=hint, code="CONTRADICTION" if both else "MISSING")
    elif role.workload is not None and not IMPORT_PATH.match(role.workload):
        hint = "write module:Class or module:function"
        message = f"{role.workload!r} is not an import path"
        yield Finding(path=(*at, "workload"), message=message, hint=hint, code="BAD_NAME")
    elif role.run is not None and not any(part.strip() for part in role.run):
        yield Finding(path=(*at, "run"), message="the command is empty", code="MISSING")
    elif role.run is not None:
        found = problem_of(role.run, shell=role.shell, instances=role.replicas_max, meshed=bool(role.mesh))
        if found[0]:
            yield Finding(path=(*at, "run"), message=found[0], hint=found[1], code="BAD_COMMAND")


def _check_plan(at: Path, role: RoleSpec) -> Iterator[Finding]:
    auto = role.plan == AUTO_PLAN
    if auto and role.workload is not None:
        yield from _check_split(at, role)
    elif role.plan is not None and not role.torchrun:
        message, hint = "a plan is for the ranks that torchrun starts", "for example run: torchrun train.py"
        yield Finding(path=(*at, "plan"), message=message, hint=hint, code="CONTRADICTION")
    elif role.plan is not None and role.mesh:
        hint = "leave the mesh out: the plan gives it"
        yield Finding(path=(*at, "mesh"), message="there is a plan, too", hint=hint, code="CONTRADICTION")
    if auto and role.model is None and role.workload is None:
        hint = "add model: {layers: ..., hidden: ..., heads: ..., seq: ..., vocab: ..., batch: ...}"
        yield Finding(path=(*at, "plan"), message="auto needs 'model'", hint=hint, code="MISSING")
    elif role.model is not None and not auto:
        hint = "say plan: auto, or leave it out"
        yield Finding(path=(*at, "model"), message="it is for 'plan: auto' only", hint=hint, code="CONTRADICTION")


def _check_split(at: Path, role: RoleSpec) -> Iterator[Finding]:
    """A class whose size is chosen: its members are copies along one axis, so that one more takes over their state."""
    if len(role.mesh) != 1 or role.elastic_axis is None or role.replicas_max == role.replicas_min:
        message, hint = "auto needs a range of members along one axis", 'mesh: {dp: "*"}, replicas: {min: 1, max: 4}'
        yield Finding(path=(*at, "plan"), message=message, hint=hint, code="CONTRADICTION")
    if not role.divides_batch(role.replicas_min):
        message = f"{role.replicas_min} members do not divide {BATCH_VARIABLE} {dict(role.env)[BATCH_VARIABLE]}"
        yield Finding(path=(*at, "replicas"), message=message, hint="another min", code="OUT_OF_RANGE")
    if role.model is not None:
        message, hint = "a class has no plan of its layers: its time is measured", "leave model out"
        yield Finding(path=(*at, "model"), message=message, hint=hint, code="CONTRADICTION")


def _check_mesh(at: Path, role: RoleSpec) -> Iterator[Finding]:
    if not role.mesh:
        return
    sizes = " * ".join(f"{axis} {size}" for axis, size in role.mesh)
    product = prod(size for _, size in role.mesh)
    path = (*at, "mesh")
    if product != role.replicas_min:
        message = f"{sizes} = {product}, but {role.replicas_min} instances start"
        hint = f"set replicas to {product}, or leave it out"
        yield Finding(path=path, message=message, hint=hint, code="MESH")
    elif role.replicas_max > role.replicas_min and role.elastic_axis is None:
        message = "the role is elastic, but no axis of its mesh is"
        yield Finding(path=path, message=message, hint='give one axis the size "*"', code="MESH")
    elif role.elastic_axis is not None:
        rest = prod(size for axis, size in role.mesh if axis != role.elastic_axis)
        if role.replicas_max % rest:
            message = f"the other axes multiply to {rest}, which does not divide max {role.replicas_max}"
            yield Finding(path=path, message=message, code="MESH")


def _check_order(spec: JobSpec) -> Iterator[Finding]:
    names = [role.name for role in spec.roles]
    for role in spec.roles:
        for index, other in enumerate(role.start_after):
            path: Path = ("roles", role.name, "start_after", index)
            if other not in names:
                yield Finding(path=path, message=f"no role {other!r}", hint=nearest(other, names), code="UNKNOWN_ROLE")
            elif other == role.name:
                yield Finding(path=path, message="a role cannot start after itself", code="CYCLE")
    after: dict[str, tuple[str, ...]] = {
        role.name: tuple(other for other in role.start_after if other in names and other != role.name)
        for role in spec.roles
    }
    circle = find_circle(after)
    if circle:
        way = " after ".join(circle)
        yield Finding(path=("roles", circle[0], "start_after"), message=f"a circle: {way}", code="CYCLE")


def find_circle(arrows: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The names of one circle of ``arrows``, the first repeated at the end; empty when there is none."""
    left = {name: set(targets) for name, targets in arrows.items()}
    while True:
        ends = [name for name, targets in left.items() if not any(target in left for target in targets)]
        if not ends:
            break
        for name in ends:
            del left[name]
    if not left:
        return ()
    path = [min(left)]
    while True:  # every name that is left has an arrow to another one that is left, so this walk must meet itself
        step = next(target for target in arrows[path[-1]] if target in left)
        if step in path:
            return (*path[path.index(step) :], step)
        path.append(step)


def _check_near(spec: JobSpec) -> Iterator[Finding]:
    names = [role.name for role in spec.roles]
    for role in spec.roles:
        for word, entries in (("collocate", role.collocate), ("apart", role.apart)):
            for index, near in enumerate(entries):
                path: Path = ("roles", role.name, word, index)
                yield from _check_near_entry(path, role, near, names)
    for role in spec.roles:
        for index, near in enumerate(role.apart):
            if near.role not in names:
                continue
            same = _same_cell(spec, near.level)
            if near.role != role.name and same[role.name] == same[near.role]:
                message = f"apart from {near.role!r} at level {near.level}, but collocated with it there"
                hint = "drop one of the two"
                path = ("roles", role.name, "apart", index)
                yield Finding(path=path, message=message, hint=hint, code="CONTRADICTION")
    yield from _check_fractions(spec)
    yield from _check_types(spec)


def _check_near_entry(path: Path, role: RoleSpec, near: Near, names: Sequence[str]) -> Iterator[Finding]:
    word = path[2]
    if near.role == SELF and word == "apart":
        return
    if near.role not in names:
        hint = nearest(near.role, names)
        yield Finding(path=path, message=f"no role {near.role!r}", hint=hint, code="UNKNOWN_ROLE")
    elif near.role == role.name:
        hint = "write 'self' for other members of the same role" if word == "apart" else ""
        yield Finding(path=path, message="names the role itself", hint=hint, code="CONTRADICTION")
    elif near.share is not None and (word == "apart" or near.level != "device"):
        message = "'share' is for roles collocated at level device"
        yield Finding(path=path, message=message, code="CONTRADICTION")


def _same_cell(spec: JobSpec, level: CellLevel) -> dict[str, str]:
    """Representative of the class of each role: collocated, directly or not, in one cell of ``level`` or closer."""
    root = {str(role.name): str(role.name) for role in spec.roles}
    for role in spec.roles:
        for near in role.collocate:
            if near.role in root and CELL_LEVELS.index(near.level) <= CELL_LEVELS.index(level):
                old, new = root[str(role.name)], root[near.role]
                root = {name: new if top == old else top for name, top in root.items()}
    return root


def _check_fractions(spec: JobSpec) -> Iterator[Finding]:
    for role in spec.roles:
        for index, near in enumerate(role.collocate):
            other = next((known for known in spec.roles if known.name == near.role), None)
            if near.share != "fraction" or other is None:
                continue
            total = role.res.gpus + other.res.gpus
            if total > 1:
                message = f"{role.res.gpus:g} + {other.res.gpus:g} of a device is more than one"
                hint = "lower 'gpus', or take turns with share: lease"
                path: Path = ("roles", role.name, "collocate", index)
                yield Finding(path=path, message=message, hint=hint, code="OUT_OF_RANGE")


def _check_types(spec: JobSpec) -> Iterator[Finding]:
    """Roles that share a device ask for types that one device can be."""
    same = _same_cell(spec, "device")
    left: dict[str, tuple[str, set[str]]] = {}
    for role in spec.roles:
        names = types_of(role.res.gpu_type)
        path: Path = ("roles", role.name, "resources", "gpu_type")
        if "" in names:
            hint = "write A100, or A100|H100 where either will do"
            yield Finding(path=path, message=f"{role.res.gpu_type!r} has a type without a name", hint=hint)
        if not names:
            continue
        other, kinds = left.get(same[role.name], (role.name, set(names)))
        left[same[role.name]] = (other, kinds & set(names))
        if not kinds & set(names):
            message = f"{role.res.gpu_type} here, {' or '.join(sorted(kinds))} for role {other!r} on the same device"
            yield Finding(path=path, message=message, hint="name one type for both", code="CONTRADICTION")


def _check_streams(spec: JobSpec) -> Iterator[Finding]:
    names = {role.name for role in spec.roles}
    for stream in spec.streams:
        at: Path = ("streams", stream.name)
        if not NAME_PATTERN.match(stream.name):
            yield Finding(path=at, message=f"{stream.name!r} is not a name", hint=_NAME_RULE, code="BAD_NAME")
        if stream.name in names:
            yield Finding(path=at, message="a role has the same name", hint="rename one", code="DUPLICATE_NAME")
        if stream.source is not None and not IMPORT_PATH.match(stream.source):
            message, hint = f"{stream.source!r} is not an import path", "write module:name"
            yield Finding(path=(*at, "source"), message=message, hint=hint, code="BAD_NAME")
        if stream.stale is not None and not spec.weights:
            message = "'stale' counts model versions, but no weights edge makes any"
            yield Finding(path=(*at, "stale"), message=message, hint="add 'weights:'", code="CONTRADICTION")


def _check_edges(spec: JobSpec) -> Iterator[Finding]:
    flow: dict[str, list[str]] = {}
    for index, edge in enumerate(spec.edges):
        at: Path = ("edges", index)
        found = list(_check_ends(spec, at, edge))
        yield from found
        if not found:
            source, target = arrow_of(spec, edge)
            flow.setdefault(source, []).append(target)
            flow.setdefault(target, [])
    circle = find_circle(flow)
    if circle:
        hint = "feedback goes by 'weights:' or through the loop"
        message = f"the data flow is a circle: {' -> '.join(circle)}"
        last = next(index for index, edge in enumerate(spec.edges) if arrow_of(spec, edge) == circle[-2:])
        yield Finding(path=("edges", last), message=message, hint=hint, code="CYCLE")


def _check_ends(spec: JobSpec, at: Path, edge: Edge) -> Iterator[Finding]:
    streams = [stream.name for stream in spec.streams]
    roles = [str(role.name) for role in spec.roles]
    for end in (edge.source, edge.target):
        if end in streams:
            if edge.kind in ("grad", "handoff"):
                message = f"a {edge.kind} edge joins operations, {end!r} is a stream"
                yield Finding(path=at, message=message, code="CONTRADICTION")
            continue
        found = endpoint(spec, end)
        if found.role is None:
            word = end.rpartition(".")[0] or end
            hint = nearest(word, [*roles, *streams])
            yield Finding(path=at, message=f"no role or stream {word!r}", hint=hint, code="UNKNOWN_ROLE")
        elif not found.op:
            yield Finding(path=at, message=f"{end!r} names no operation", hint=f"write {end}.OP", code="MISSING")
        elif (interface := spec.role(found.role).interface) is not None and interface.op(found.op) is None:
            message = f"role {found.role!r} has no operation {found.op!r}"
            hint = nearest(found.op, [known.name for known in interface.ops])
            yield Finding(path=at, message=message, hint=hint, code="UNKNOWN_OP")


def _check_weights(spec: JobSpec) -> Iterator[Finding]:
    names = [role.name for role in spec.roles]
    seen: set[tuple[str, str]] = set()
    for index, edge in enumerate(spec.weights):
        at: Path = ("weights", index)
        for word, name in (("from", edge.source), ("to", edge.target)):
            if name not in names:
                hint = nearest(name, names)
                yield Finding(path=(*at, word), message=f"no role {name!r}", hint=hint, code="UNKNOWN_ROLE")
        if edge.source == edge.target:
            yield Finding(path=at, message="a role cannot send weights to itself", code="CYCLE")
        elif (edge.source, edge.target) in seen:
            message = f"a second weights edge from {edge.source!r} to {edge.target!r}"
            yield Finding(path=at, message=message, code="DUPLICATE_NAME")
        seen.add((edge.source, edge.target))


def _check_success(spec: JobSpec) -> Iterator[Finding]:
    when = spec.success_when
    known = all(role.run is not None or role.interface is not None for role in spec.roles)
    at: Path = ("success_when",)
    if when == "loop" and known and spec.loop is None:
        yield Finding(path=at, message="no role is a loop", hint="name roles, or say all", code="UNREACHABLE")
    if when == "all" and known and spec.roles and not any(role.finite for role in spec.roles):
        message = "no role ever ends, so the job cannot succeed"
        yield Finding(path=at, message=message, hint="add a loop role or a command", code="UNREACHABLE")
    if when is None or when == "all" or when == "loop":
        return
    names = {str(role.name): role for role in spec.roles}
    if not when:
        yield Finding(path=at, message="names no role", code="UNREACHABLE")
    for index, name in enumerate(when):
        role = names.get(name)
        if role is None:
            hint = nearest(name, names)
            yield Finding(path=(*at, index), message=f"no role {name!r}", hint=hint, code="UNKNOWN_ROLE")
        elif role.interface is not None and not role.finite:
            message = f"role {name!r} serves calls and never ends by itself"
            yield Finding(path=(*at, index), message=message, code="UNREACHABLE")


def _check_loops(spec: JobSpec) -> Iterator[Finding]:
    loops = [role for role in spec.roles if role.is_loop]
    for extra in loops[1:]:
        message = f"a second loop; {loops[0].name!r} is the first"
        yield Finding(path=("roles", extra.name), message=message, hint="a job has one loop", code="CONTRADICTION")
    if loops and loops[0].replicas_max > 1:
        message = "the loop runs once"
        yield Finding(path=("roles", loops[0].name, "replicas"), message=message, code="OUT_OF_RANGE")
