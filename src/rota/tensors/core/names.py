"""Names, labels, namespaces and dtypes: what each may be, and how near two names are."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import Any, Final

from rota.spec.errors import BadInput

NAME_BYTES_MAX: Final = 240
NAMESPACE: Final = re.compile(r"(?!\.)[a-z0-9._-]{1,64}")
PAYLOAD_BYTES_MAX: Final = 1 << 46
STEP_MAX: Final = 1 << 53
"""The registry's scripts count in doubles."""
EPOCH_MAX: Final = (1 << 32) - 1
WORLD_MAX: Final = (1 << 16) - 1
SLOTS_MAX: Final = 65_535
_SHARD: Final = re.compile(r"\[shard=(\d+)-of-(\d+)\]$")
_LABEL_BYTES_MAX: Final = 240
_NO_UTF8: Final = re.compile("[\ud800-\udfff]")
_CONTROL: Final = re.compile("[\0-\x1f\x7f]")

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Every dtype that can be shared, by its torch name (numpy names are the same where both have it), with its bytes."""

_SHORT: Final = {"bfloat16": "bf16", "bool": "bool"}


def short_dtype(dtype: str) -> str:
    """``float32`` as ``f32``, ``int8`` as ``i8``, ``bfloat16`` as ``bf16``: how tables show a dtype."""
    if dtype in _SHORT:
        return _SHORT[dtype]
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if dtype.startswith(long):
            return short + dtype[len(long) :]
    return dtype


def describe(tensors: Sequence[Sequence[Any]], device: str) -> dict[str, Any]:
    """What the registry keeps of the shape of tensors (name, dtype, shape, ...): all of one, the number of several."""
    where = {"device": device} if device else {}
    if len(tensors) != 1:
        return {"tensors": len(tensors), **where}
    return {"dtype": short_dtype(tensors[0][1]), "shape": list(tensors[0][2]), **where}


def long_dtype(dtype: str) -> str:
    """``f32`` as ``float32``: what ``short_dtype`` shortened. Raises BadInput for an unknown dtype."""
    for long in ITEM_BYTES:
        if dtype in (long, short_dtype(long)):
            return long
    raise BadInput(f"dtype {dtype!r} is none of {', '.join(map(short_dtype, ITEM_BYTES))}")


def payload_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor. Raises BadInput for an unknown dtype, a negative dimension, or more than 64 TiB (the
    registry's scripts count in doubles)."""
    if dtype not in ITEM_BYTES:
        raise BadInput(f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    total = ITEM_BYTES[dtype]
    for size in shape:
        if size < 0:
            raise BadInput(f"shape has the negative dimension {size}")
        total *= size
    if total > PAYLOAD_BYTES_MAX:
        raise BadInput(
            f"a tensor of shape {[*shape]} and {dtype} takes {total} bytes, the limit is {PAYLOAD_BYTES_MAX}"
        )
    return total


def check_count(what: str, value: int, least: int, most: int = STEP_MAX) -> int:
    """``value`` as an int. Raises BadInput, which begins with ``what``, unless it is a whole number in that range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise BadInput(f"{what}={value!r}: a whole number") from None
    if not least <= number <= most:
        raise BadInput(f"{what}={number}: {least} to {most}")
    return number


def check_only(what: str, value: str, only: str, remedy: str) -> None:
    """Raise BadInput, with what to do instead, for any ``value`` but the one that is supported."""
    if value != only:
        raise BadInput(f"{what}={value!r} is not supported, {only!r} is: {remedy}")


def count_of(what: str, text: str, least: int, most: int) -> int:
    """The whole number that a setting writes. Raises BadInput as ``check_count``."""
    if not text.isdecimal():
        raise BadInput(f"{what}={text!r}: a whole number, {least} to {most}")
    return check_count(what, int(text), least, most)


def check_seconds(what: str, value: float) -> float:
    """``value`` itself. Raises BadInput unless it is a number: every wait has a limit."""
    try:
        if not math.isnan(value):
            return value
    except TypeError:
        pass
    raise BadInput(f"{what}={value!r}: a number of seconds")


def check_shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    """``shape`` as a tuple of ints. Raises BadInput."""
    try:
        return tuple(operator.index(size) for size in ((shape,) if isinstance(shape, int) else shape))
    except TypeError:
        raise BadInput(f"shape={shape!r}: whole numbers") from None


def check_name(name: str) -> str:
    """``name`` itself. Raises BadInput when empty, over 240 bytes, with control characters or what no UTF-8 says, a
    level ``.`` or ``..``, or a bad shard suffix."""
    if not isinstance(name, str) or _NO_UTF8.search(name):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise BadInput(f"tensor name {name!r}: text")
    if {".", ".."} & set(name.split("/")):
        raise BadInput(f"tensor name {name!r}: no level may be . or ..")
    if not name or name.startswith("/") or name.endswith("/") or "//" in name:
        raise BadInput(f"tensor name {name!r}: levels between / must not be empty")
    size = len(name.encode())
    if size > NAME_BYTES_MAX:
        raise BadInput(f"tensor name {name[:40]!r}...: {size} bytes, the limit is {NAME_BYTES_MAX}")
    if _CONTROL.search(name):
        raise BadInput(f"tensor name {name!r}: control characters are not allowed")
    if "[shard=" in name:
        shard_of(name)
    return name


def check_namespace(namespace: str) -> str:
    """``namespace`` itself. Raises BadInput unless it is 1 to 64 of ``a-z 0-9 . _ -``, the first no dot (a folder)."""
    if not isinstance(namespace, str) or not NAMESPACE.fullmatch(namespace):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise BadInput(f"namespace {namespace!r}: 1 to 64 characters of a-z 0-9 . _ -, the first no dot")
    return namespace


def check_label(label: str) -> str:
    """``label`` itself: who publishes, a job or ``job/role/rank``. Raises BadInput over 240 bytes or with spaces."""
    text = isinstance(label, str) and label.isprintable()  # pyright: ignore[reportUnnecessaryIsInstance]  # as above
    if not text or " " in label or len(label.encode()) > _LABEL_BYTES_MAX:
        raise BadInput(f"label {label!r}: at most {_LABEL_BYTES_MAX} bytes, no spaces")
    return label


def label_covers(prefix: str, label: str) -> bool:
    """True when ``label`` is ``prefix`` or lies below it: ``job`` covers ``job/actor/0`` but not ``job2``."""
    return label == prefix or label.startswith(prefix + "/")


def shard_of(name: str) -> tuple[int, int] | None:
    """``(i, n)`` of a ``[shard=i-of-n]`` suffix, None without one. Raises BadInput for a malformed one."""
    if "[shard=" not in name:
        return None
    found = _SHARD.search(name)
    if not found or not int(found[1]) < int(found[2]):
        raise BadInput(f"tensor name {name!r}: a shard suffix reads [shard=i-of-n] with i < n, at the end")
    return int(found[1]), int(found[2])
