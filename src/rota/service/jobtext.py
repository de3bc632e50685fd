"""JobSpec back to the text of a job file, YAML or JSON; reading it again gives the same value."""

from __future__ import annotations

import dataclasses
import io
import json
from decimal import Decimal
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from rota.spec.job import Bound, Checkpoint, Edge, Fail, JobSpec, Near, RoleSpec, StreamSpec, TrainedModel, WeightsEdge
from rota.spec.resources import Res

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def job_text(spec: JobSpec, form: Literal["yaml", "json"] = "yaml") -> str:
    """The job file of ``spec``. Fields at their default and what inspecting a workload found are left out."""
    fields = job_fields(spec)
    if form == "json":
        return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return yaml_text(fields)


def yaml_text(value: Any) -> str:
    """Plain values as YAML, in their order."""
    out = io.StringIO()
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 120
    yaml.dump(_quoted(value), out)
    return out.getvalue()


def job_fields(spec: JobSpec) -> dict[str, Any]:
    """The fields of the job file as plain values."""
    fields = _changed(spec, JobSpec(name="x", roles=()), skip=("name", "roles", "spec_version"))
    renamed = {"time_limit_s": "time_limit", "grace_s": "grace"}
    fields = {renamed.get(name, name): value for name, value in fields.items()}
    for name in ("time_limit", "grace"):
        if name in fields:
            fields[name] = duration_text(fields[name])
    makers: dict[str, Any] = {"env": dict, "labels": dict, "secrets": list, "checkpoint": _checkpoint}
    for name, make in makers.items():
        if name in fields:
            fields[name] = make(fields[name])
    if isinstance(fields.get("success_when"), tuple):
        fields["success_when"] = list(fields["success_when"])
    if spec.streams:
        fields["streams"] = {stream.name: _stream(stream) for stream in spec.streams}
    if spec.edges:
        fields["edges"] = [_edge(edge) for edge in spec.edges]
    if spec.weights:
        fields["weights"] = [_weights(edge) for edge in spec.weights]
    return {"name": spec.name, "roles": {role.name: _role(role) for role in spec.roles}, **fields}


def duration_text(seconds: float) -> str:
    """A duration that reads back as exactly ``seconds``: ``90s``, ``0.5s``."""
    return f"{_plain(seconds)}s"


def size_text(size_bytes: int) -> str:
    """A size that reads back as exactly ``size_bytes``: ``2GiB``, ``1500B``."""
    for unit, name in _UNITS:
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"


def _plain(number: float) -> str:
    """Decimal digits without an exponent."""
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _changed(value: Any, default: Any, *, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value) if field.name not in skip]
    return {name: getattr(value, name) for name in names if getattr(value, name) != getattr(default, name)}


def _role(role: RoleSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if role.workload is not None:
        fields["workload"] = role.workload
    if role.run is not None:
        fields["run"] = role.run[0] if role.shell else list(role.run)
    if role.setup is not None:
        fields["setup"] = role.setup
    if role.replicas_max != role.replicas_min:
        fields["replicas"] = {"min": role.replicas_min, "max": role.replicas_max}
    elif role.mesh or role.replicas_min != 1:
        fields["replicas"] = role.replicas_min
    if role.mesh:
        fields["mesh"] = {axis: "*" if axis == role.elastic_axis else size for axis, size in role.mesh}
    if role.plan is not None:
        fields["plan"] = role.plan
    if role.model is not None:
        defaults = {one.name: one.default for one in dataclasses.fields(TrainedModel)}
        given = dataclasses.asdict(role.model)
        fields["model"] = {name: value for name, value in given.items() if value != defaults[name]}
    if role.res != Res():
        fields["resources"] = _res(role.res)
    if role.env:
        fields["env"] = dict(role.env)
    if role.fail != Fail():
        fields["fail"] = _fail(role.fail)
    for name, entries in (("collocate", role.collocate), ("apart", role.apart)):
        if entries:
            fields[name] = [_near(near) for near in entries]
    if role.start_after:
        fields["start_after"] = list(role.start_after)
    return fields


def _res(res: Res) -> dict[str, Any]:
    fields = _changed(res, Res(), skip=("memory_bytes",))
    fields |= {name: _number(fields[name]) for name in ("cpus", "gpus") if name in fields}
    return fields | ({"memory": size_text(res.memory_bytes)} if res.memory_bytes else {})


def _fail(fail: Fail) -> dict[str, Any]:
    default = Fail()
    fields = _changed(fail, default, skip=("limit_n", "limit_window_s", "progress_s", "backoff_s"))
    for name in ("then", "state"):
        if name in fields:
            fields[name] = list(fields[name])
    if (fail.limit_n, fail.limit_window_s) != (default.limit_n, default.limit_window_s):
        fields["limit"] = f"{fail.limit_n}/{duration_text(fail.limit_window_s)}"
    if fail.progress_s != default.progress_s:
        fields["progress"] = duration_text(fail.progress_s)
    if fail.backoff_s != default.backoff_s:
        fields["backoff"] = duration_text(fail.backoff_s)
    return fields


def _near(near: Near) -> dict[str, Any]:
    return {"role": near.role, "level": near.level} | ({"share": near.share} if near.share else {})


def _bound(bound: Bound) -> dict[str, Any]:
    fields: dict[str, Any] = {"versions": bound.versions, "by": bound.by}
    return fields | ({"seconds": duration_text(bound.seconds)} if bound.seconds is not None else {})


def _stream(stream: StreamSpec) -> dict[str, Any]:
    fields = _changed(stream, StreamSpec(name=stream.name), skip=("stale",))
    return fields | ({"stale": _bound(stream.stale)} if stream.stale is not None else {})


def _edge(edge: Edge) -> dict[str, Any]:
    fields = {"from": edge.source, "to": edge.target, "kind": edge.kind}
    return fields | _changed(edge, Edge(source="", target=""), skip=("source", "target", "kind"))


def _weights(edge: WeightsEdge) -> dict[str, Any]:
    default = WeightsEdge(source=edge.source, target=edge.target)
    fields = {"from": edge.source, "to": edge.target} | _changed(edge, default, skip=("lag",))
    return fields | ({"lag": _bound(edge.lag)} if edge.lag is not None else {})


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return _changed(checkpoint, Checkpoint())


def _quoted(value: Any) -> Any:
    """Plain values with every text that YAML could read as something else in quotes."""
    if isinstance(value, dict):
        return {_quoted(key): _quoted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, str) and not (value.replace("_", "").isalnum() and value[0].isalpha() and value.isascii()):
        return DoubleQuotedScalarString(value)
    return value
