"""Times, amounts and lists as people read them in tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypedDict

from rota.service.user_process import now
from rota.spec.errors import BadInput, did_you_mean
from rota.spec.resources import counted, format_duration, format_size, parse_duration

if TYPE_CHECKING:
    from rota.service.models.base import Resources


def moment(at: str | float | None) -> datetime | None:
    """A time of a document, ISO 8601 or seconds since 1970; None stays None."""
    if isinstance(at, int | float):
        return datetime.fromtimestamp(at, UTC)
    return None if not at else datetime.fromisoformat(at)


def clock_time(text: str | float | None) -> str:
    """Local time with its zone: of today only the hour, else the date too."""
    at = moment(text)
    if at is None:
        return ""
    local = at.astimezone()
    return local.strftime("%H:%M:%S %Z" if local.date() == now().astimezone().date() else "%Y-%m-%d %H:%M %Z")


def age(text: str | None) -> str:
    """How long ago: ``12s``, ``5m``, ``3h``, ``2d``."""
    at = moment(text)
    return "" if at is None else lasting((now() - at).total_seconds())


def lasting(seconds: float | None) -> str:
    """A duration as ``format_duration`` writes it; nothing for None."""
    return "" if seconds is None else format_duration(seconds)


def amount(value: float | None) -> str:
    """A number without a needless ``.0``."""
    return "" if value is None else f"{value:g}"


def promise(gpus: float | None, cpus: float | None, memory_bytes: int | None = None) -> str:
    """A guarantee or limit: devices, cores by name, and memory; nothing where none is stated."""
    return ", ".join(
        [amount(gpus)] * bool(gpus)
        + [counted(cpus or 0, "CPU")] * bool(cpus)
        + [size(memory_bytes)] * bool(memory_bytes)
    )


def size(size_bytes: int | None) -> str:
    """Bytes with a unit; nothing for none."""
    return format_size(size_bytes) if size_bytes else ""


def labels(raw: Mapping[str, object]) -> str:
    """``k=v, k=v``."""
    return ", ".join(f"{key}={value}" for key, value in raw.items())


class ReplicaRange(TypedDict):
    """The part of a role that says how many instances it may have."""

    replicas: int
    replicas_max: int


def replicas(role: ReplicaRange, *, now: bool = False) -> str:
    """How many instances a role has, or ``MIN..MAX`` where that may change and it has none yet."""
    least, most = role["replicas"], role.get("replicas_max") or role["replicas"]
    return f"{least}..{most}" if most > least and not now else f"{least}"


def resources(raw: Resources) -> str:
    """``1 cpu, 2 gpu H100, 4GiB`` of a role."""
    parts = [f"{amount(raw.get('cpus'))} cpu"]
    if raw.get("gpus"):
        parts.append(f"{amount(raw['gpus'])} gpu {raw.get('gpu_type') or ''}".rstrip())
    if raw.get("memory_bytes"):
        parts.append(size(raw["memory_bytes"]))
    return ", ".join(parts)


_SAME = (
    {"", "ls", "list", "get", "all"},
    {"rm", "remove", "delete", "del", "revoke"},
    {"create", "add", "new", "set", "put", "make"},
    {"show", "describe", "info", "get"},
    {"undrain", "uncordon", "resume", "enable", "return"},
    {"drain", "disable", "down", "evict", "bad", "suspect", "fail", "mark", "taint", "exclude"},
    {"apply", "set", "edit", "update", "replace", "create"},
    {"ack", "acknowledge", "silence", "resolve"},
)
"""Words that mean the same to users of other tools."""


def not_understood(words: Sequence[str], usage: Mapping[str, str]) -> BadInput:
    """The error for an action that a verb does not have, or that lacks its argument: ``words`` as typed after ``rota``.

    ``usage`` has what may follow each action. The hint is the action that was meant, else all of them.
    """
    verb, action = words[:2]
    lines = {one: " ".join(filter(None, ("rota", verb, one, rest))) for one, rest in usage.items()}
    meant = [one for one in usage if one == action] or [
        one for one in usage if any({one, action} <= same for same in _SAME)
    ]
    meant = meant or [one for one in usage if f"'{one}'" in did_you_mean(action, usage)]
    hint = f"use: {lines[meant[0]]}" if meant else f"there is: {', '.join(lines.values())}"
    return BadInput(f"rota {' '.join(filter(None, words))}: not understood", hint=hint)


def since_s(text: str) -> float | None:
    """Unix seconds of ``--since`` and ``--until``: a duration before now, or a time. Raises BadInput."""
    if not text:
        return None
    try:
        return (now() - timedelta(seconds=parse_duration(text))).timestamp()
    except ValueError:
        pass  # perhaps a time
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(
            f"{text!r} is neither a duration nor a time", hint="for example 10m or 2026-01-31T12:00"
        ) from None
    return (at if at.tzinfo else at.astimezone()).timestamp()


def ago_s(text: str) -> float | None:
    """Seconds of a duration flag such as ``--since 7d``. Raises BadInput."""
    if not text:
        return None
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise BadInput(str(exc)) from None


def shortened(values: Iterable[str], most: int = 4) -> str:
    """The first few, and how many more."""
    items = list(values)
    more = f" +{len(items) - most}" if len(items) > most else ""
    return ", ".join(items[:most]) + more
