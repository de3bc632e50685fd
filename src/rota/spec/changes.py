"""A job with some of its fields changed: the one reading of JobChanged for scheduler, master and views."""

from __future__ import annotations

from typing import Any, cast

from rota.spec.job import JobSpec


def changed_spec(spec: JobSpec, changes: dict[str, Any]) -> JobSpec:
    """The spec with dotted paths replaced (roles by name).

    Paths that do not exist, or values that do not fit, are left out: whoever appended the change has checked it, and a
    replay of the log must never fail on one.
    """
    raw = spec.to_json()
    for path, value in changes.items():
        *parents, last = path.split(".")
        target: Any = raw
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


def _child(value: Any, part: str) -> Any:
    if isinstance(value, list):
        rows = cast("list[dict[str, Any]]", value)
        return next((row for row in rows if row.get("name") == part), None)
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).get("res" if part == "resources" else part)
    return None
