"""What a user submits: roles, edges, resources, failure contracts; frozen, with one canonical JSON form."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, cast

from rota.spec import codec
from rota.spec.codec import JsonObject, JsonValue
from rota.spec.dispatch import OpSpec
from rota.spec.gang import CellLevel, Share
from rota.spec.ids import RoleName
from rota.spec.queue import DEFAULT_QUEUE
from rota.spec.resources import Limits, Res
from rota.spec.torchrun import is_torchrun

SPEC_VERSION = 2
"""Before 2, images were not used: a job named one only to run without it."""
LOOP_ROLE = RoleName("loop")
STREAM_LOOP = "rota.job.streams:drain"
"""Import path of the loop of a job that has streams and no loop of its own."""
AUTO_PLAN = "auto"
BATCH_VARIABLE = "ROTA_GLOBAL_BATCH"
CHANGEABLE = ("queue", "priority", "time_limit_s", "grace_s", "retry", "labels")
"""Fields of a job that may change after submit without a new attempt."""

Restart = Literal["process", "role", "node", "job"]
EdgeKind = Literal["call", "stream", "grad", "handoff"]
StaleBy = Literal["pace", "drop", "abort"]
WorkloadKind = Literal["class", "loop", "function"]
AfterWhen = Literal["succeeded", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The failure contract of a role.

    ``restart`` is the narrowest scope; ``limit_n`` failures within ``limit_window_s`` are absorbed there, the next one
    widens to ``then`` (tried in order). ``state`` lists where state may come back from, cheapest first. ``degrade`` is
    the fewest instances the job may continue with, ``standby`` how many warm spares are kept. ``progress_s`` is the
    longest legal silence. ``same`` failures in a row with the same error of the code and no commit between end the job,
    whatever the window; 0: they do not. ``bad_data`` items may fail before the job does.
    """

    restart: Restart | None = None
    """None: ``process`` for independent roles, ``role`` for meshed ones."""
    limit_n: int = 3
    limit_window_s: float = 600.0
    same: int = 3
    then: tuple[Restart, ...] = ("node", "job")
    state: tuple[Literal["none", "shadow", "peer", "checkpoint"], ...] = ("shadow",)
    degrade: int | None = None
    standby: int = 0
    progress_s: float = 300.0
    bad_data: int = 0
    nan: Literal["ignore", "rollback"] = "ignore"
    backoff_s: float = 0.0
    check: Literal["none", "quick", "full"] = "quick"
    """``quick``: folders, space, memory, devices; ``full``: also arithmetic, sums of pairs and of the whole mesh."""
    slow: Literal["report", "exclude"] = "report"
    """What ``check: full`` does with a member that is much slower than its mesh: a line in its log, or another node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """One entry of ``collocate`` or ``apart``: the other role (``self`` = members of this one) and the cell level."""

    role: str
    level: CellLevel = "device"
    share: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What the workload of a role declares; found by importing it once, in a child process, before any start."""

    kind: WorkloadKind
    ops: tuple[OpSpec, ...] = ()
    has_state: bool = False
    loads_weights: bool = False
    publishes_weights: bool = False

    def op(self, name: str) -> OpSpec | None:
        """The operation of that name, or None."""
        return next((op for op in self.ops if op.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """What ``plan: auto`` is searched for: a transformer, the sequences of one step, and the hardware.

    Fields of the shape are those of a model file of ``rota plan search``; 0 is its default. ``hardware`` is a
    shipped name or a file; empty follows from the devices that the role asks for.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = True
    experts: int = 0
    top_k: int = 1
    hardware: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPlan:
    """The parallel plan of a role of ``replicas`` instances as canonical JSON, and why it was chosen.

    ``together`` consecutive instances must be on one node, as they share tensor-parallel groups, or context-parallel
    ones that were priced there; ``close`` consecutive ones should be, as they are neighbours in the mesh. 1 = no rule.
    Predicted, 0 = unknown: ``step_s`` seconds a step, ``device_bytes`` on the fullest device, ``memory_bytes`` of the
    host for one instance. ``steps`` has the seconds a step by device type, where the role may get several.
    """

    replicas: int
    plan: str
    why: str
    together: int = 1
    close: int = 1
    step_s: float = 0.0
    device_bytes: int = 0
    memory_bytes: int = 0
    steps: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStart:
    """With how many instances of a role an attempt starts, and on which type of device (None: any that it takes)."""

    role: RoleName
    replicas: int
    gpu_type: str | None = None


Sizes = tuple[int, int, tuple[tuple[str, int], ...], str | None]


def sizes_of(mesh: Mapping[str, int | str], replicas: int | tuple[int, int] | None) -> Sizes:
    """Fewest and most instances, mesh and elastic axis (``"*"``); the mesh is that of the fewest."""
    elastic = next((axis for axis, size in mesh.items() if size == "*"), None)
    rest = prod(int(size) for size in mesh.values() if size != "*")
    least, most = replicas if isinstance(replicas, tuple) else (rest if replicas is None else replicas,) * 2
    sizes = tuple((axis, max(1, least // max(1, rest)) if size == "*" else int(size)) for axis, size in mesh.items())
    return least, most, sizes, elastic


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A named group of identical instances. Exactly one of ``workload`` (import path) and ``run`` (command) is set.

    ``replicas_min`` instances start with the gang unless an admission chose more, up to ``replicas_max`` may be added.
    ``mesh`` maps axis to size in declaration order; the product is the number of instances. ``interface`` is None until
    the workload was inspected (always None for ``run``). ``plan`` is ``auto`` or a plan file; ``plans``, one for each
    size that the role may then have, is filled in when the job is admitted.
    """

    name: RoleName
    workload: str | None = None
    args: JsonObject = field(default_factory=JsonObject, hash=False)
    """Arguments of the constructor of the class that ``workload`` is, by name."""
    run: tuple[str, ...] | None = None
    shell: bool = False
    """``run`` was one text: it goes through ``/bin/sh -c`` unless it is a torchrun line."""
    setup: str | None = None
    replicas_min: int = 1
    replicas_max: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    elastic_axis: str | None = None
    res: Res = field(default_factory=Res)
    limits: Limits = field(default_factory=Limits)
    packages: tuple[str, ...] = ()
    """Requirements of pip, and files of them, on top of the environment of the service."""
    ports: tuple[str, ...] = ()
    """Names of ports that its commands listen at, each under a number that is free where the instance runs."""
    env: tuple[tuple[str, str], ...] = ()
    fail: Fail = field(default_factory=Fail)
    collocate: tuple[Near, ...] = ()
    apart: tuple[Near, ...] = ()
    start_after: tuple[str, ...] = ()
    interface: Interface | None = None
    plan: str | None = None
    model: TrainedModel | None = None
    plans: tuple[SizedPlan, ...] = ()
    start: RoleStart | None = None
    """What the scheduler chose for this attempt; None: ``replicas_min`` instances."""

    @property
    def torchrun(self) -> bool:
        """True when the command is a torchrun line: all ranks of all its instances are one world."""
        return self.run is not None and is_torchrun(self.run, shell=self.shell)

    @property
    def ranked(self) -> bool:
        """True when the processes of a command have ranks: a torchrun line, a mesh, or more than one instance."""
        return self.torchrun or bool(self.mesh) or self.replicas_max > 1

    @property
    def meshed(self) -> bool:
        """True when the members form one process group and fail together."""
        one_world = self.elastic_axis is not None or self.torchrun
        return any(size > 1 for _, size in self.mesh) or (one_world and self.replicas_max > 1)

    @property
    def stateful(self) -> bool:
        """True when the members hold state that must go back to a commit together with the loop."""
        if self.interface is None or self.fail.state == ("none",):
            return False
        return self.interface.has_state or any(op.retry == "commit" for op in self.interface.ops)

    @property
    def splits(self) -> bool:
        """True for a class whose number of members the scheduler chooses at each start, beside that of other roles."""
        return self.plan == AUTO_PLAN and self.workload is not None

    def divides_batch(self, members: int) -> bool:
        """Whether this number of members have equal parts of the global batch; true where the role names none."""
        batch = dict(self.env).get(BATCH_VARIABLE, "")
        return not batch.isdigit() or int(batch) % members == 0

    @property
    def serves(self) -> bool:
        """True when each member answers calls by itself and any of them can take the place of another."""
        return self.interface is not None and self.interface.kind == "class" and not (self.meshed or self.stateful)

    @property
    def starts(self) -> int:
        """Members that start with the gang, warm spares aside."""
        return self.start.replicas if self.start is not None else self.replicas_min

    @property
    def spares(self) -> int:
        """Warm spares, which start with the gang too."""
        return self.fail.standby if self.serves else 0

    @property
    def gang_size(self) -> int:
        """Members that start with the gang, and the warm spares."""
        return self.starts + self.spares

    @property
    def resizes(self) -> bool:
        """True when members may come and go while the job runs."""
        return self.replicas_max > self.replicas_min and (self.serves or (self.meshed and self.run is not None))

    @property
    def seats(self) -> int:
        """Members that there may be at once; those above ``gang_size`` come and go."""
        return self.spares + (self.replicas_max if self.resizes else self.starts)

    @property
    def gpu_type(self) -> str | None:
        """The types of device that an instance takes: that of this attempt, else those that the role asks."""
        return (self.start and self.start.gpu_type) or self.res.gpu_type

    @property
    def memory_ask(self) -> int:
        """Host memory to place an instance by, in bytes: what the role says, which is a limit too, else its plans."""
        return self.res.memory_bytes or max((plan.memory_bytes for plan in self.plans), default=0)

    @property
    def restart(self) -> Restart:
        """The narrowest recovery scope, with the default filled in."""
        return self.fail.restart or ("role" if self.meshed else "process")

    @property
    def is_loop(self) -> bool:
        """True for the role that runs the user's async loop."""
        return self.interface is not None and self.interface.kind == "loop"

    @property
    def finite(self) -> bool:
        """True when the role ends by itself: a command, the loop, or a plain function."""
        return self.run is not None or (self.interface is not None and self.interface.kind != "class")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """``a.op -> b.op``; ``source`` and ``target`` are ``role.op``, or the name of a stream."""

    source: str
    target: str
    kind: EdgeKind = "call"
    micro: int = 1
    inflight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How old what a reader uses may be: in model versions and, for weights, in seconds."""

    versions: int
    by: StaleBy = "pace"
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """A bounded queue of leased items. ``source`` is an import path for streams that a data set feeds."""

    name: str
    source: str | None = None
    key: str = "uid"
    cap: int = 64
    stale: Bound | None = None
    full: Literal["block", "drop_oldest", "spill"] = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsEdge:
    """Versioned weights from one role to another, published every ``every`` commits."""

    source: RoleName
    target: RoleName
    every: int = 1
    via: Literal["auto", "shm", "object", "collective", "ipc", "disk", "delta"] = "auto"
    lag: Bound | None = None

    @property
    def name(self) -> str:
        """``actor-rollout``: the name under which versions are published."""
        return f"{self.source}-{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where and how often durable checkpoints are written. ``every`` is ``auto``, ``<n> commits`` or seconds."""

    dir: str | None = None
    every: str = "auto"
    keep: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """One entry of ``after``: another job by its id, or by its name until the job is submitted, and how it must end.

    A job that has to succeed and does not ends this one with ``DEPENDENCY_FAILED``.
    """

    job: str
    when: AfterWhen = "succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(JsonValue):
    """A whole job. Made by the job-file reader or the Python builder; both give the same value."""

    name: str
    roles: tuple[RoleSpec, ...]
    queue: str = DEFAULT_QUEUE
    priority: int = 50
    after: tuple[After, ...] = ()
    """Jobs that must end before this one starts for the first time."""
    edges: tuple[Edge, ...] = ()
    streams: tuple[StreamSpec, ...] = ()
    weights: tuple[WeightsEdge, ...] = ()
    gang: Literal["all", "subgraph"] = "all"
    retry: int = 0
    time_limit_s: float | None = None
    idle_limit_s: float | None = None
    """The job ends when for this time its ports were not used and its processes did no work."""
    grace_s: float = 30.0
    checkpoint: Checkpoint | None = None
    workdir: str | None = None
    data: str | None = None
    output: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    """Those of every role, before its own."""
    secrets: tuple[str, ...] = ()
    image: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    run_as: str | None = None
    """User of the operating system that its commands run as: that of its queue, taken when the job is submitted."""
    success_when: tuple[str, ...] | Literal["all", "loop"] | None = None
    seed: int = 0
    spec_version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        """A job of an older log runs as it did: without its image."""
        if self.spec_version < 2:
            object.__setattr__(self, "image", None)

    @property
    def data_url(self) -> str | None:
        """The URL that ``data`` is, of which each machine has a copy; None for a path, which is there."""
        return self.data if self.data and "://" in self.data else None

    @property
    def output_url(self) -> str | None:
        """The URL that ``output`` is, to which its folder is copied when the job ends; None for a path."""
        return self.output if self.output and "://" in self.output else None

    @property
    def output_dir(self) -> str | None:
        """The path that ``output`` is; None where instances write into a folder of the job."""
        return None if self.output_url else self.output

    def role(self, name: str) -> RoleSpec:
        """The role of that name. Raises KeyError."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(name)

    def packages_of(self, role: RoleSpec) -> tuple[str, ...]:
        """What pip installs for the instances of a role."""
        return (*self.packages, *role.packages)

    @property
    def loop(self) -> RoleSpec | None:
        """The loop role, if the job has one."""
        return next((role for role in self.roles if role.is_loop), None)

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(codec.dumps(self).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of an edge as written: an operation of a role, or a stream (``role`` is then None)."""

    text: str
    role: RoleName | None = None
    op: str = ""

    @property
    def vertex(self) -> str:
        """Name of its vertex in the data flow: the role or the stream."""
        return self.role or self.text


def endpoint(spec: JobSpec, text: str) -> Endpoint:
    """Read one end of an edge: the longest role name that fits, else the name of a stream or of a bare role."""
    if any(stream.name == text for stream in spec.streams):
        return Endpoint(text)
    fits = [role.name for role in spec.roles if text == role.name or text.startswith(role.name + ".")]
    if not fits:
        return Endpoint(text)
    role = max(fits, key=len)
    return Endpoint(text, role, text[len(role) + 1 :])


def arrow_of(spec: JobSpec, edge: Edge) -> tuple[str, str]:
    """The vertices of the data flow that an edge joins."""
    return endpoint(spec, edge.source).vertex, endpoint(spec, edge.target).vertex


def started_spec(spec: JobSpec, starts: tuple[RoleStart, ...]) -> JobSpec:
    """The spec of an attempt: the roles that are named start as it says, the others with their fewest instances."""
    by_role = {one.role: one for one in starts}
    if all(role.start == by_role.get(role.name) for role in spec.roles):
        return spec
    return replace(spec, roles=tuple(_started(role, by_role.get(role.name)) for role in spec.roles))


def _started(role: RoleSpec, start: RoleStart | None) -> RoleSpec:
    """A class has the mesh of its present members; the ranks of a command find theirs by themselves."""
    mesh = ((role.elastic_axis or "", (start.replicas if start else role.replicas_min)),) if role.splits else role.mesh
    return replace(role, start=start, mesh=mesh)


def changed_spec(spec: JobSpec, changes: JsonObject) -> JobSpec:
    """The spec with dotted paths replaced (roles by name).

    Paths that do not exist, or values that do not fit, are left out: whoever appended the change has checked it, and a
    replay of the log must never fail on one.
    """
    raw = spec.to_json()
    for path, value in changes.items():
        *parents, last = path.split(".")
        target: object = raw
        for part in parents:
            target = _child(target, part)
        if isinstance(target, dict) and last in target:
            target[last] = value
        elif isinstance(target, dict) and last == "replicas" and "replicas_min" in target:
            target["replicas_min"] = target["replicas_max"] = value
    try:
        return JobSpec.from_json(raw)
    except (TypeError, ValueError):
        return spec


def _child(value: object, part: str) -> object:
    if isinstance(value, list):
        rows = cast("list[JsonObject]", value)
        return next((row for row in rows if row.get("name") == part), None)
    if isinstance(value, dict):
        return cast("JsonObject", value).get("res" if part == "resources" else part)
    return None
