"""Models of the job file: type, name and meaning of every field, for reader, writer, reference and JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import GetJsonSchemaHandler, model_serializer
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from rota.service.jobfile.nodes import MappingNode, ScalarNode, yaml_text
from rota.service.jobfile.validation import (
    SIZE,
    AxisSize,
    Bool,
    Every,
    Limit,
    Names,
    Number,
    OneOf,
    Part,
    Several,
    Text,
    Value,
    Values,
    duration,
    optional,
    refused,
    required,
    unexpected,
)
from rota.spec.check import ROLES_MAX
from rota.spec.gang import CellLevel, Share
from rota.spec.ids import RoleName
from rota.spec.job import (
    After,
    AfterWhen,
    Bound,
    Checkpoint,
    Edge,
    EdgeKind,
    Fail,
    JobSpec,
    Near,
    Restart,
    RoleSpec,
    StaleBy,
    StreamSpec,
    TrainedModel,
    WeightsEdge,
    sizes_of,
)
from rota.spec.resources import Limits, Res
from rota.spec.torchrun import is_torchrun, plain_words

ARROW = "->"
INSTANCES = Number(1, 100_000)

Word = Annotated[str, Text()]
RoleWord = Annotated[str, Text("a role name")]
PathWord = Annotated[str, Text("a path")]
Literals = Annotated[dict[str, Annotated[str, Text(literal=True)]], Names()]
Packages = Annotated[tuple[Annotated[str, Text("a requirement such as numpy>=2")], ...], Several(single=True)]
Count = Annotated[int, Number(1)]
CountOrNone = Annotated[int, Number(0)]
Flag = Annotated[bool, Bool()]
Seconds = Annotated[float, duration()]
SomeSeconds = Annotated[float, duration(0.001)]

State = Literal["none", "shadow", "peer", "checkpoint"]
Nan = Literal["ignore", "rollback"]
Check = Literal["none", "quick", "full"]
Slow = Literal["report", "exclude"]
Full = Literal["block", "drop_oldest", "spill"]
Via = Literal["auto", "shm", "object", "collective", "ipc", "disk", "delta"]
Gang = Literal["all", "subgraph"]
When = Literal["all", "loop"]


class BoundPart(Part):
    """How old what a reader uses may be."""

    what = "a mapping such as {versions: 2, by: pace}"
    makes = Bound
    always = ("by",)
    versions: CountOrNone = required("how many model versions old at most")
    by: Annotated[StaleBy, OneOf(StaleBy)] = optional("wait, drop or abort what would be too old")
    seconds: Seconds = optional("how old at most, for weights")


_NEVER, _PROCESS = "for never write 'limit: 0/10m, then: []'", "did you mean 'process'?"
_SCOPE = OneOf(
    Restart, {"never": _NEVER, "no": _NEVER, "always": _PROCESS, "onfailure": _PROCESS, "on-failure": _PROCESS}
)
"""What is restarted, and what to write for a restart policy of other systems."""


class FailPart(Part):
    """The failure contract of a role."""

    what = "a mapping such as {restart: process, limit: 3/10m}"
    makes = Fail
    restart: Annotated[Restart, _SCOPE] = optional(
        "narrowest scope that is restarted", default="`process`; `role` for meshed roles"
    )
    limit: Annotated[tuple[int, float], Limit()] = optional(
        "failures absorbed at that scope within a window; the next one within it goes to `then`", default="3/10m"
    )
    same: CountOrNone = optional(
        "tries after which the job ends FAILED when the code fails with the same error at the same line each time and"
        " no commit came between, whatever `limit` says; 0: never"
    )
    then: Annotated[tuple[Annotated[Restart, _SCOPE], ...], Several(bars=True)] = optional(
        "wider scopes, tried in order when the limit is used up"
    )
    state: Annotated[tuple[Annotated[State, OneOf(State)], ...], Several(bars=True)] = optional(
        "where state may come back from: always the memory of its host, and the newest checkpoint; with `peer` also"
        " another machine, which gets each commit; `none`: it has no state"
    )
    degrade: Count = optional("fewest instances with which the job continues")
    standby: CountOrNone = optional("warm spare instances")
    progress_s: SomeSeconds = optional(
        "longest time without a sign of progress: a returned operation, a commit, `ctx.progress(n)`; of a command an"
        " optimiser step, a collective or an import of Python. A command without an optimiser step so far is replaced"
        " only where this is given and not 5m",
        alias="progress",
    )
    bad_data: CountOrNone = optional("items that may fail before the job does")
    nan: Annotated[Nan, OneOf(Nan)] = optional("what a loss that is not finite does")
    backoff_s: Seconds = optional("pause before a restart", alias="backoff")
    check: Annotated[Check, OneOf(Check)] = optional("node check before a start")
    slow: Annotated[Slow, OneOf(Slow)] = optional(
        "what `check: full` does with a member much slower than its mesh: a line in its log, or another node"
    )

    def given(self) -> Values:
        """The limit as its two attributes."""
        values = super().given()
        if "limit" in values:
            values["limit_n"], values["limit_window_s"] = values.pop("limit")
        return values

    @classmethod
    def attributes(cls, value: Fail) -> Values:
        """The two attributes of the limit as one."""
        limit, default = ((one.limit_n, one.limit_window_s) for one in (value, Fail()))
        return super().attributes(value) | ({"limit": limit} if limit != default else {})


class ResourcesPart(Part):
    """What one instance asks for."""

    what = "a mapping such as {cpus: 1, gpus: 1, memory: 4GiB}"
    makes = Res
    cpus: Annotated[float, Number(0, whole=False)] = optional("logical cores, fractions allowed")
    gpus: Annotated[float, Number(0, whole=False)] = optional("whole devices, or a fraction below 1")
    gpu_type: Word = optional("type of device: H100, or several to choose from: A100|H100", default="any")
    memory_bytes: Annotated[int, SIZE] = optional(
        "host memory, for placement and as limit: an instance that uses more ends with `OOM_KILLED`", alias="memory"
    )


class LimitsPart(Part):
    """What one instance may use at most, beside its memory."""

    what = "a mapping such as {processes: 64, files: 1024, disk: 10GiB}"
    makes = Limits
    processes: Count = optional("processes of one instance, its own included", default="no limit")
    files: Annotated[int, Number(256)] = optional("open files and sockets of one process", default="no limit")
    disk_bytes: Annotated[int, SIZE] = optional(
        "what the folder of the job, its logs and output may hold on a machine", alias="disk", default="no limit"
    )


class NearPart(Part):
    """One entry of ``collocate`` or ``apart``."""

    what = "a role name, or {role: NAME, level: device}"
    words = "role name or `{role, level, share}`"
    makes = Near
    short = Text("a role name")
    always = ("level",)
    role: RoleWord = required("the other role, or `self` in `apart`")
    level: Annotated[CellLevel, OneOf(CellLevel)] = optional("which cell")
    share: Annotated[Share, OneOf(Share)] = optional("take turns (lease) or be resident together")

    @classmethod
    def long_form(cls, node: object) -> object:
        """A name alone is the role."""
        return {"role": node} if isinstance(node, ScalarNode) and not node.is_null else node


class AfterPart(Part):
    """One entry of ``after``."""

    what = "a job, JOB:ended, or {job: JOB, when: ended}"
    words = "`JOB`, `JOB:ended` or `{job, when}`"
    makes = After
    short = Text("a job, or JOB:ended")
    job: Annotated[str, Text("the id of a job, or its name")] = required("id, or the name of the newest job of yours")
    when: Annotated[AfterWhen, OneOf(AfterWhen)] = optional("how it has to end; `ended`: in any way")

    @classmethod
    def long_form(cls, node: object) -> object:
        """A text is the job, and after a colon how it has to end."""
        if not isinstance(node, ScalarNode) or node.is_null:
            return node
        job, colon, when = cls.short.read(node).partition(":")
        parts = {"job": job, **({"when": when} if colon else {})}
        return {name: ScalarNode(text, node.place, plain=False) for name, text in parts.items()}


class ReplicasPart(Part):
    """How many instances of a role there are."""

    what = "a whole number, or {min: 1, max: 4}"
    words = "n or `{min, max}`"
    makes = tuple
    short = INSTANCES
    min: Annotated[int, INSTANCES] = required("start with the gang")
    max: Annotated[int, INSTANCES] = required("may be added")

    @classmethod
    def long_form(cls, node: object) -> object:
        """One number is both."""
        if not isinstance(node, ScalarNode) or node.is_null:
            return node
        cls.short.read(node)
        return {"min": node, "max": node}

    def make(self) -> tuple[int, int]:
        """Fewest and most."""
        return self.min, self.max

    @model_serializer
    def _written(self) -> int | dict[str, int]:
        return self.min if self.min == self.max else {"min": self.min, "max": self.max}


class ModelPart(Part):
    """What ``plan: auto`` is searched for."""

    what = "a mapping such as {layers: 4, hidden: 64, heads: 4, seq: 128, vocab: 256, batch: 16}"
    makes = TrainedModel
    layers: Count = required("transformer layers")
    hidden: Count = required("width")
    heads: Count = required("attention heads")
    seq: Count = required("tokens of a sequence")
    vocab: Count = required("tokens there are")
    batch: Count = required("sequences of one optimizer step")
    kv_heads: CountOrNone = optional("heads of keys and values", default="`heads`")
    ffn: CountOrNone = optional("inner width of the MLP", default="4 * `hidden`")
    gated: Flag = optional("three matrices in the MLP instead of two")
    tied: Flag = optional("embedding and head are one")
    experts: CountOrNone = optional("experts of a layer")
    top_k: Count = optional("experts that a token goes to")
    hardware: Word = optional("shipped name or hardware file", default="by the devices asked for")


class RolePart(Part):
    """A named group of identical instances."""

    what = "a mapping with 'workload' or 'run'"
    makes = RoleSpec
    workload: Annotated[str, Text("an import path such as module:Class")] = optional(
        "`module:Class` or `module:function`"
    )
    args: Annotated[dict[str, Annotated[Any, Value()]], Names("a mapping such as {lr: 1e-4}")] = optional(
        "arguments of the constructor of the class, by name"
    )
    run: Annotated[tuple[Annotated[str, Text(literal=True)], ...], Several(single=True, kept=True)] = optional(
        "a command: a text goes through `sh` (`[bash, -c, ...]` for another shell), a list does not; a torchrun line"
        " becomes its ranks"
    )
    setup: Word = optional("shell command before the first start of an instance on a node")
    replicas: ReplicasPart = optional("instances; elastic if min < max", default="1, or product of `mesh`")
    mesh: Annotated[dict[str, Annotated[int | str, AxisSize()]], Names("a mapping such as {dp: 2}")] = optional(
        "axes and sizes; the product is the number of instances"
    )
    plan: PathWord = optional("`auto`, or a plan file: how torchrun's ranks split the model; gives the size")
    model: ModelPart = optional("what `plan: auto` is searched for")
    res: ResourcesPart = optional("what one instance asks for", alias="resources")
    limits: LimitsPart = optional("what one instance may use at most")
    packages: Packages = optional("what pip installs for it, once a machine: requirements, or `FILE.txt` of them")
    ports: Annotated[tuple[Annotated[str, Text("a name such as notebook")], ...], Several(single=True)] = optional(
        "names of ports that it listens at; each is `$ROTA_PORT_NAME`, and the page opens it"
    )
    env: Literals = optional("environment variables")
    fail: FailPart = optional("the failure contract")
    collocate: Annotated[tuple[NearPart, ...], Several(single=True)] = optional("in the same cell as the other role")
    apart: Annotated[tuple[NearPart, ...], Several(single=True)] = optional("in another cell than the other role")
    start_after: Annotated[tuple[RoleWord, ...], Several(single=True)] = optional("start when these are ready")

    def role(self, name: str) -> RoleSpec:
        """The role of that name."""
        values = self.given()
        low, high, mesh, elastic = sizes_of(values.pop("mesh", {}), values.pop("replicas", None))
        run, shell = _command(values.pop("run", None))
        sizes = {"replicas_min": low, "replicas_max": high, "mesh": mesh, "elastic_axis": elastic}
        env = tuple(values.pop("env", {}).items())
        return RoleSpec(name=RoleName(name), run=run, shell=shell, env=env, **sizes, **values)

    @classmethod
    def attributes(cls, value: RoleSpec) -> Values:
        """The size, the mesh and the command as the file has them."""
        fields = super().attributes(value)
        mesh = {axis: "*" if axis == value.elastic_axis else size for axis, size in value.mesh}
        if mesh or (value.replicas_min, value.replicas_max) != (1, 1):
            fields["replicas"] = ReplicasPart.model_construct(min=value.replicas_min, max=value.replicas_max)
        if value.run is not None and value.shell:
            fields["run"] = value.run[0]
        return fields | ({"mesh": mesh} if mesh else {}) | ({"env": dict(value.env)} if value.env else {})


def _command(run: str | tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, bool]:
    """The command and whether it goes through the shell: a text does, unless it is a plain torchrun line."""
    if not isinstance(run, str):
        return run, False
    words = plain_words(run) if is_torchrun((run,), shell=True) else None
    return (tuple(words), False) if words else ((run,), True)


class StreamPart(Part):
    """A bounded queue of leased items."""

    what = "a mapping such as {key: uid, cap: 64}"
    words = "stream"
    makes = StreamSpec
    source: Word = optional("import path of a data set that feeds it")
    key: Word = optional("field that identifies an item")
    cap: Count = optional("items at most")
    stale: BoundPart = optional("how old items may be")
    full: Annotated[Full, OneOf(Full)] = optional("what a full stream does")


class EdgePart(Part):
    """Who calls or feeds whom: one edge, or a chain of them as one text."""

    what = "'role.op -> role.op', or {from: role.op, to: role.op, kind: call}"
    words = "`a.op -> b.op` or mapping"
    makes = Edge
    short = Text("an edge such as role.op -> role.op")
    always = ("kind",)
    source: Word = required("`role.op` or a stream", alias="from")
    target: Word = required("`role.op` or a stream", alias="to")
    kind: Annotated[EdgeKind, OneOf(EdgeKind)] = optional(
        "what goes along it", default="`stream` at a stream, else `call`"
    )
    micro: Count = optional("micro-batches of a gradient edge")
    inflight: Count = optional("micro-batches not yet acknowledged")

    @classmethod
    def long_form(cls, node: object) -> object:
        """A chain keeps its first end as ``from`` and the rest as ``to``."""
        if not isinstance(node, ScalarNode) or node.is_null:
            return node
        first, _, rest = cls.short.read(node).partition(ARROW)
        if not all(end.strip() for end in (first, *rest.split(ARROW))):
            raise refused(f"{str(node)!r} is not an edge", hint="write role.op -> role.op")
        return {"from": ScalarNode(first, node.place, plain=False), "to": ScalarNode(rest, node.place, plain=False)}

    def edges(self, streams: set[str]) -> list[Edge]:
        """One edge, or those of a chain."""
        values = self.given()
        ends = [end.strip() for end in (values.pop("source"), *values.pop("target").split(ARROW))]
        made: list[Edge] = []
        for source, target in pairwise(ends):
            kind = "stream" if source in streams or target in streams else "call"
            made.append(Edge(**{"source": source, "target": target, "kind": kind, **values}))
        return made


class WeightsPart(Part):
    """Versioned weights from one role to another."""

    what = "a mapping such as {from: actor, to: rollout}"
    makes = WeightsEdge
    source: RoleWord = required("role that publishes", alias="from")
    target: RoleWord = required("role that loads", alias="to")
    every: Count = optional("commits between versions")
    via: Annotated[Via, OneOf(Via)] = optional("transport")
    lag: BoundPart = optional("how old the reader's version may be")


class CheckpointPart(Part):
    """Durable checkpoints."""

    what = "a mapping such as {dir: PATH, every: auto, keep: 3}"
    makes = Checkpoint
    dir: PathWord = optional("where checkpoints are written", default="below the job's folder")
    every: Annotated[str, Every()] = optional("how often")
    keep: Count = optional("newest ones kept")


class Success(Several):
    """``all``, ``loop`` or a list of roles."""

    words = "`all`, `loop` or list of roles"

    def read(self, node: object, handler: Callable[[object], Sequence[object]]) -> object:
        """The word, or the names of the roles as a tuple."""
        if isinstance(node, ScalarNode) and not node.is_null:
            return OneOf(When).read(node)
        if isinstance(node, ScalarNode | MappingNode):
            raise unexpected("all, loop, or a list of role names", node)
        return super().read(node, handler)

    def __get_pydantic_json_schema__(self, source: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"oneOf": [OneOf(When).schema(), handler(source["schema"])]}


class JobPart(Part):
    """A whole job."""

    what = "a mapping with 'name' and 'roles'"
    makes = JobSpec
    editor: Word = optional("for editors; ignored", alias="$schema")
    name: Word = required("the id of the job becomes NAME-<n>")
    queue: Word = optional("leaf of the tenant tree")
    priority: Annotated[int, Number(-1, 100)] = optional("higher first; -1 opportunistic, 100 not preemptible")
    after: Annotated[tuple[AfterPart, ...], Several(single=True)] = optional(
        "jobs that must end before this one starts; one that does not succeed ends it"
    )
    roles: Annotated[dict[str, RolePart], Names("a mapping of role names", ROLES_MAX)] = required(
        f"role name to role, 1 to {ROLES_MAX}"
    )
    edges: Annotated[tuple[EdgePart, ...], Several(single=True)] = optional("who calls or feeds whom; chains allowed")
    streams: Annotated[dict[str, StreamPart], Names("a mapping of stream names")] = optional(
        "bounded streams of leased items"
    )
    weights: Annotated[tuple[WeightsPart, ...], Several(single=True)] = optional("versioned weights from role to role")
    gang: Annotated[Gang, OneOf(Gang)] = optional("what starts together")
    retry: Annotated[int, Number(0, 1_000)] = optional(
        "restarts of the whole job for faults of its own; those of the platform have a rate of theirs"
    )
    time_limit_s: SomeSeconds = optional(
        "hard end, counted while it has devices: starts count, time in the queue does not",
        alias="time_limit",
        default="none",
    )
    idle_limit_s: SomeSeconds = optional(
        "it ends when for this time its ports were not used and it did no work", alias="idle_limit", default="none"
    )
    grace_s: Seconds = optional(
        "for a stop: to the next commit and the disk, then from SIGTERM to SIGKILL", alias="grace"
    )
    checkpoint: CheckpointPart = optional("durable checkpoints")
    workdir: PathWord = optional("where the code is", default="folder of the file")
    data: PathWord = optional(
        "`$ROTA_DATA_DIR`: a path, or a URL (`s3://`, `hf://`) or `STORE:/path` that each machine copies"
    )
    output: PathWord = optional(
        "`$ROTA_OUTPUT_DIR`: a path, or a URL or `STORE:/path` to which what was written is copied when the job ends"
    )
    env: Literals = optional("environment variables of every role; for what pip installs see `packages`")
    packages: Packages = optional("those of every role, before its own")
    secrets: Annotated[tuple[Word, ...], Several()] = optional("names of secrets that become variables")
    image: Word = optional("image of a container, in which the commands run: `python:3.12`, or a path for apptainer")
    labels: Literals = optional("for filters and groups")
    success_when: Annotated[tuple[RoleWord, ...], Success(kept=True)] = optional(
        "which ends make the job succeed", default="`loop` if there is one, else `all`"
    )
    seed: Annotated[int, Number(0, 2**63 - 1)] = optional("seed of everything random in the job")

    def make(self) -> JobSpec:
        """The job."""
        values = {
            name: value for name, value in self.given().items() if name not in ("editor", "roles", "edges", "streams")
        }
        pairs = {name: tuple(values.pop(name, {}).items()) for name in ("env", "labels")}
        return JobSpec(
            roles=tuple(role.role(name) for name, role in self.roles.items()),
            streams=tuple(StreamSpec(name=name, **one.given()) for name, one in (self.streams or {}).items()),
            edges=tuple(edge for _, edge in self.all_edges()),
            **pairs,
            **values,
        )

    def all_edges(self) -> list[tuple[int, Edge]]:
        """Every edge and the entry that it comes from."""
        streams = set(self.streams or ())
        return [(index, edge) for index, entry in enumerate(self.edges or ()) for edge in entry.edges(streams)]

    @classmethod
    def attributes(cls, value: JobSpec) -> Values:
        """Roles and streams by their names."""
        found = super().attributes(value)
        named = {"roles": {one.name: RolePart.of(one) for one in value.roles}}
        if value.streams:
            named |= {"streams": {one.name: StreamPart.of(one) for one in value.streams}}
        return found | named | {name: dict(found[name]) for name in ("env", "labels") if name in found}


class _WithoutDefaults(GenerateJsonSchema):
    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def json_schema() -> JsonSchemaValue:
    """JSON Schema of the job file, for editors."""
    made = _shown(JobPart.model_json_schema(schema_generator=_WithoutDefaults))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Rota job", **made}


def _shown(schema: Any) -> Any:
    """The schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_shown(one) for one in schema]
    hidden = ("title", "x-default")
    return (
        {name: _shown(one) for name, one in schema.items() if name not in hidden}
        if isinstance(schema, dict)
        else schema
    )


def job_text(spec: JobSpec, form: Literal["yaml", "json"] = "yaml") -> str:
    """The job file of ``spec``. Fields at their default and what inspecting a workload found are left out."""
    fields: dict[str, object] = JobPart.of(spec).model_dump(mode="json", by_alias=True, exclude_unset=True)
    if form == "json":
        return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return yaml_text(fields)
