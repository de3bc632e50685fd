"""The fields of a job file, kind, default and meaning of each: the table behind reader, reference and JSON Schema."""

from __future__ import annotations

import re
from typing import Any, get_args

from rota.service.fieldkinds import (
    BAD,
    Bool,
    Either,
    Field,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Record,
    Text,
    duration,
    refuse,
    size,
)
from rota.service.yamltree import Node, Sink
from rota.spec.gang import CellLevel, Share
from rota.spec.job import EdgeKind, Fail, Restart, StaleBy, StreamSpec
from rota.spec.resources import counted, parse_duration


class Limit:
    """``3/10m``: so many failures within a sliding window; read as (count, seconds)."""

    words = "failures/window, for example `3/10m`"

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        """(count, seconds), or BAD."""
        count, slash, window = node.text.partition("/")
        if node.kind != "scalar" or not re.fullmatch(r"\s*\d{1,9}\s*", count):
            return refuse(node, loc, sink, "failures/window, for example 3/10m")
        if not slash:
            hint = f"{count}/10m heals {counted(count, 'failure')} within 10 minutes there; the next one goes to `then`"
            sink.add(node, loc, f"{counted(count, 'failure')} within which time?", hint=hint, code="BAD_UNIT")
            return BAD
        try:
            seconds = parse_duration(window)
        except ValueError as exc:
            message, _, hint = str(exc).partition("; ")
            sink.add(node, loc, message, hint=hint or "for example 3/10m", code="BAD_UNIT")
            return BAD
        if seconds <= 0:
            return refuse(node, loc, sink, "a window longer than nothing", code="OUT_OF_RANGE")
        return int(count), seconds

    def schema(self) -> dict[str, Any]:
        """A text of the form ``n/duration``."""
        return {"type": "string", "pattern": r"^\s*\d+\s*/.+$"}


class Every:
    """``auto``, ``<n> commits`` or a duration; read as the text itself."""

    words = "`auto`, `<n> commits` or a duration"

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        """The text without needless spaces, or BAD."""
        text = " ".join(node.text.split())
        if node.kind == "scalar" and (text == "auto" or re.fullmatch(r"[1-9]\d{0,8} commits?", text)):
            return text
        try:
            if node.kind == "scalar" and parse_duration(text) > 0:
                return text
        except ValueError:
            pass  # said below, with all three forms
        return refuse(node, loc, sink, "auto, '<n> commits' or a duration such as 90s")

    def schema(self) -> dict[str, Any]:
        """A text."""
        return {"type": "string"}


def _choices(literal: Any) -> tuple[str, ...]:
    return tuple(get_args(literal))


def _bound_fields() -> dict[str, Field]:
    return {
        "versions": Field(kind=Number(low=0), doc="how many model versions old at most", required=True),
        "by": Field(
            kind=OneOf(choices=_choices(StaleBy)), doc="wait, drop or abort what would be too old", default="pace"
        ),
        "seconds": Field(kind=duration(), doc="how old at most, for weights"),
    }


TEXT = Text()
PATH = Text(what="a path")
LITERALS = MapOf(value=Text(what="text", literal=True))
ONE_OR_MORE = Number(low=1)
ROLES_MAX = 64
BOUND = Record(fields=_bound_fields(), what="a mapping such as {versions: 2, by: pace}")
_FAIL_STATE = ("none", "shadow", "peer", "checkpoint")
_default_fail = Fail()

FAIL = Record(
    what="a mapping such as {restart: process, limit: 3/10m}",
    fields={
        "restart": Field(
            kind=OneOf(choices=_choices(Restart)),
            doc="narrowest scope that is restarted",
            default="`process`; `role` for meshed roles",
        ),
        "limit": Field(
            kind=Limit(),
            doc="failures healed at that scope within a window; the next one goes to `then`: 3 are 4 runs",
            default="3/10m",
        ),
        "then": Field(
            kind=ListOf(item=OneOf(choices=_choices(Restart)), bars=True),
            doc="wider scopes, tried in order when the limit is used up",
            default="node\\|job",
        ),
        "state": Field(
            kind=ListOf(item=OneOf(choices=_FAIL_STATE), bars=True),
            doc="where state may come back from, cheapest first; `peer` is accepted and not built",
            default="shadow",
        ),
        "degrade": Field(kind=ONE_OR_MORE, doc="fewest instances the job may go on with"),
        "standby": Field(kind=Number(low=0), doc="warm spare instances", default="0"),
        "progress": Field(kind=duration(0.001), doc="longest legal silence", default="5m"),
        "bad_data": Field(kind=Number(low=0), doc="items that may fail before the job does", default="0"),
        "nan": Field(
            kind=OneOf(choices=("ignore", "rollback")), doc="what a loss that is not finite does", default="ignore"
        ),
        "backoff": Field(kind=duration(), doc="pause before a restart", default="0s"),
        "check": Field(
            kind=OneOf(choices=("none", "quick", "full")), doc="node check before a start", default=_default_fail.check
        ),
        "slow": Field(
            kind=OneOf(choices=("report", "exclude")),
            doc="what `check: full` does with a member much slower than its mesh: a line in its log, or another node",
            default=_default_fail.slow,
        ),
    },
)

RESOURCES = Record(
    what="a mapping such as {cpus: 1, gpus: 1, memory: 4GiB}",
    fields={
        "cpus": Field(kind=Number(low=0, whole=False), doc="logical cores, fractions allowed", default="1"),
        "gpus": Field(kind=Number(low=0, whole=False), doc="whole devices, or a fraction below 1", default="0"),
        "gpu_type": Field(kind=Text(), doc="type of device: H100, or several to choose from: A100|H100", default="any"),
        "memory": Field(kind=size(), doc="host memory: counted for placement, not enforced", default="0B"),
    },
)

NEAR = Either(
    words="role name or `{role, level, share}`",
    expected="a role name, or {role: NAME, level: device}",
    by={
        "scalar": Text(what="a role name"),
        "map": Record(
            fields={
                "role": Field(kind=Text(what="a role name"), doc="the other role, or `self` in `apart`", required=True),
                "level": Field(kind=OneOf(choices=_choices(CellLevel)), doc="which cell", default="device"),
                "share": Field(kind=OneOf(choices=_choices(Share)), doc="take turns (lease) or be resident together"),
            }
        ),
    },
)

REPLICAS = Either(
    words="n or `{min, max}`",
    expected="a whole number, or {min: 1, max: 4}",
    by={
        "scalar": Number(low=1, high=100_000),
        "map": Record(
            fields={
                "min": Field(kind=Number(low=1, high=100_000), doc="start with the gang", required=True),
                "max": Field(kind=Number(low=1, high=100_000), doc="may be added", required=True),
            }
        ),
    },
)


class AxisSize:
    """The size of a mesh axis, or ``*`` for the axis that grows and shrinks."""

    words = 'whole number, or `"*"`'

    def read(self, node: Node, loc: str, sink: Sink) -> Any:
        """The size, ``"*"``, or BAD."""
        return "*" if node.kind == "scalar" and node.text == "*" else Number(low=1, high=100_000).read(node, loc, sink)

    def schema(self) -> dict[str, Any]:
        """A number or a star."""
        return {"oneOf": [{"type": "integer", "minimum": 1}, {"const": "*"}]}


_SIZES = {
    "layers": "transformer layers",
    "hidden": "width",
    "heads": "attention heads",
    "seq": "tokens of a sequence",
    "vocab": "tokens there are",
    "batch": "sequences of one optimizer step",
}
MODEL = Record(
    what="a mapping such as {layers: 4, hidden: 64, heads: 4, seq: 128, vocab: 256, batch: 16}",
    fields={
        **{name: Field(kind=ONE_OR_MORE, doc=doc, required=True) for name, doc in _SIZES.items()},
        "kv_heads": Field(kind=Number(low=0), doc="heads of keys and values", default="`heads`"),
        "ffn": Field(kind=Number(low=0), doc="inner width of the MLP", default="4 * `hidden`"),
        "gated": Field(kind=Bool(), doc="three matrices in the MLP instead of two", default="false"),
        "tied": Field(kind=Bool(), doc="embedding and head are one", default="true"),
        "experts": Field(kind=Number(low=0), doc="experts of a layer", default="0"),
        "top_k": Field(kind=ONE_OR_MORE, doc="experts that a token goes to", default="1"),
        "hardware": Field(kind=TEXT, doc="shipped name or hardware file", default="by the devices asked for"),
    },
)

ROLE = Record(
    what="a mapping with 'workload' or 'run'",
    fields={
        "workload": Field(
            kind=Text(what="an import path such as module:Class"), doc="`module:Class` or `module:function`"
        ),
        "run": Field(
            kind=ListOf(item=Text(what="text", literal=True), single=True),
            doc="a command: a text goes through the shell, a list does not; a torchrun line becomes its ranks",
        ),
        "setup": Field(kind=TEXT, doc="shell command before the first start of an instance on a node"),
        "replicas": Field(kind=REPLICAS, doc="instances; elastic if min < max", default="1, or product of `mesh`"),
        "mesh": Field(
            kind=MapOf(value=AxisSize(), what="a mapping such as {dp: 2}"),
            doc="axes and sizes; the product is the number of instances",
        ),
        "plan": Field(kind=PATH, doc="`auto`, or a plan file: how torchrun's ranks split the model; gives the size"),
        "model": Field(kind=MODEL, doc="what `plan: auto` is searched for"),
        "resources": Field(kind=RESOURCES, doc="what one instance asks for"),
        "env": Field(kind=LITERALS, doc="environment variables"),
        "fail": Field(kind=FAIL, doc="the failure contract"),
        "collocate": Field(kind=ListOf(item=NEAR, single=True), doc="in the same cell as the other role"),
        "apart": Field(kind=ListOf(item=NEAR, single=True), doc="in another cell than the other role"),
        "start_after": Field(kind=ListOf(item=Text(what="a role name"), single=True), doc="start when these are ready"),
    },
)

STREAM = Either(
    words="stream",
    expected="a mapping such as {key: uid, cap: 64}",
    by={
        "map": Record(
            fields={
                "source": Field(kind=TEXT, doc="import path of a data set that feeds it"),
                "key": Field(kind=TEXT, doc="field that identifies an item", default=StreamSpec(name="x").key),
                "cap": Field(kind=ONE_OR_MORE, doc="items at most", default=str(StreamSpec(name="x").cap)),
                "stale": Field(kind=BOUND, doc="how old items may be"),
                "full": Field(
                    kind=OneOf(choices=("block", "drop_oldest", "spill")),
                    doc="what a full stream does",
                    default="block",
                ),
            }
        )
    },
)

EDGE = Either(
    words="`a.op -> b.op` or mapping",
    expected="'role.op -> role.op', or {from: role.op, to: role.op, kind: call}",
    by={
        "scalar": Text(what="an edge such as role.op -> role.op"),
        "map": Record(
            fields={
                "from": Field(kind=TEXT, doc="`role.op` or a stream", required=True),
                "to": Field(kind=TEXT, doc="`role.op` or a stream", required=True),
                "kind": Field(
                    kind=OneOf(choices=_choices(EdgeKind)),
                    doc="what goes along it",
                    default="`stream` at a stream, else `call`",
                ),
                "micro": Field(kind=ONE_OR_MORE, doc="micro-batches of a gradient edge", default="1"),
                "inflight": Field(kind=ONE_OR_MORE, doc="micro-batches not yet acknowledged", default="1"),
            }
        ),
    },
)

VIA = ("auto", "shm", "object", "collective", "ipc", "disk", "delta")
WEIGHTS = Record(
    what="a mapping such as {from: actor, to: rollout}",
    fields={
        "from": Field(kind=Text(what="a role name"), doc="role that publishes", required=True),
        "to": Field(kind=Text(what="a role name"), doc="role that loads", required=True),
        "every": Field(kind=ONE_OR_MORE, doc="commits between versions", default="1"),
        "via": Field(kind=OneOf(choices=VIA), doc="transport", default="auto"),
        "lag": Field(kind=BOUND, doc="how old the reader's version may be"),
    },
)

CHECKPOINT = Record(
    what="a mapping such as {dir: PATH, every: auto, keep: 3}",
    fields={
        "dir": Field(kind=PATH, doc="where checkpoints are written", default="below the job's folder"),
        "every": Field(kind=Every(), doc="how often", default="auto"),
        "keep": Field(kind=ONE_OR_MORE, doc="newest ones kept", default="3"),
    },
)

SUCCESS = Either(
    words="`all`, `loop` or list of roles",
    expected="all, loop, or a list of role names",
    by={"scalar": OneOf(choices=("all", "loop")), "list": ListOf(item=Text(what="a role name"))},
)

JOB = Record(
    what="a mapping with 'name' and 'roles'",
    fields={
        "$schema": Field(kind=TEXT, doc="for editors; ignored"),
        "name": Field(kind=TEXT, doc="the id of the job becomes NAME-<n>", required=True),
        "queue": Field(kind=TEXT, doc="leaf of the tenant tree", default="default"),
        "priority": Field(
            kind=Number(low=-1, high=100), doc="higher first; -1 opportunistic, 100 not preemptible", default="50"
        ),
        "roles": Field(
            kind=MapOf(value=ROLE, what="a mapping of role names", len_max=ROLES_MAX),
            doc=f"role name to role, 1 to {ROLES_MAX}",
            required=True,
        ),
        "edges": Field(kind=ListOf(item=EDGE, single=True), doc="who calls or feeds whom; chains allowed"),
        "streams": Field(
            kind=MapOf(value=STREAM, what="a mapping of stream names"), doc="bounded streams of leased items"
        ),
        "weights": Field(kind=ListOf(item=WEIGHTS, single=True), doc="versioned weights from role to role"),
        "gang": Field(kind=OneOf(choices=("all", "subgraph")), doc="what starts together", default="all"),
        "retry": Field(
            kind=Number(low=0, high=1_000),
            doc="restarts of the whole job for faults of its own; those of the platform have a rate of theirs",
            default="0",
        ),
        "time_limit": Field(kind=duration(0.001), doc="hard end; time in the queue does not count", default="none"),
        "grace": Field(
            kind=duration(),
            doc="for a stop: to the next commit and the disk, then from SIGTERM to SIGKILL",
            default="30s",
        ),
        "checkpoint": Field(kind=CHECKPOINT, doc="durable checkpoints"),
        "workdir": Field(kind=PATH, doc="where the code is", default="folder of the file"),
        "data": Field(kind=PATH, doc="`$ROTA_DATA_DIR`"),
        "output": Field(kind=PATH, doc="`$ROTA_OUTPUT_DIR` is a folder for this job below it"),
        "env": Field(kind=LITERALS, doc="environment variables of every role"),
        "secrets": Field(kind=ListOf(item=TEXT), doc="names of secrets that become variables"),
        "image": Field(
            kind=TEXT, doc="not used: nothing is started in a container; refused unless submitted with `--ignore-image`"
        ),
        "labels": Field(kind=LITERALS, doc="for filters and groups"),
        "success_when": Field(
            kind=SUCCESS, doc="which ends make the job succeed", default="`loop` if there is one, else `all`"
        ),
        "seed": Field(kind=Number(low=0, high=2**63 - 1), doc="seed of everything random in the job", default="0"),
    },
)


def json_schema() -> dict[str, Any]:
    """JSON Schema of the job file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Rota job", **JOB.schema()}
