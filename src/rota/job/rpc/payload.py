"""Payloads of calls: large results stay where they were made; a Ref travels, an array that is read on first use.

An instance puts large arrays of its answer into the tensor store, in one copy, and answers with their Refs. The loop
passes them on, cut and joined by rows without a byte moved; an instance that gets one as an argument sees the array, in
place. So bytes go from role to role and not through the loop, unless its code looks: numpy, torch, attributes, indices
and operators find an array.

A value lives as long as the loop holds a Ref to it; what it holds no more is given back at the next commit.
"""

from __future__ import annotations

import collections
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rota import tensors
from rota.runtime import environ
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import NotReachable
from rota.spec.ids import JobId
from rota.spec.user_code import UserCode
from rota.tensors import transport
from rota.tensors.api.store import Plane
from rota.tensors.arrays import is_torch
from rota.tensors.core import ITEM_BYTES, Tensor
from rota.tensors.errors import OutOfMemory

T = TypeVar("T")
REF_BYTES_MIN = "ROTA_REF_BYTES_MIN"
"""Variable of a role: arrays of answers of at least this size in bytes stay where they were made."""
BYTES_MIN = 65_536
"""Its default; fewer bytes are faster in the answer than behind a name."""
UNPICKLABLE_DEPTH_MAX = 20
RELEASED_MAX = 1_000_000
"""Names that wait to be given back; beyond it the oldest stay until the loop is entered again, or the job ends."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``start`` to ``stop``, exclusive, along dim 0 of a named tensor; ``store`` is the server of the machine
    that made it."""

    name: str
    start: int
    stop: int
    store: str = ""


class _Name:
    """A name that Refs of this process hold."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Holdings:
    """The names that the Refs of this process hold."""

    owner: bool = False
    """True in the process of the loop: a name that it lets go is given back."""
    arrived: bool = False
    """A Ref has come into this process: from then on arguments are looked through."""
    released: collections.deque[tuple[str, str]] = field(default_factory=lambda: collections.deque(maxlen=RELEASED_MAX))
    """Each with the tensor server of the machine that made it."""
    _alive: weakref.WeakValueDictionary[str, _Name] = field(default_factory=weakref.WeakValueDictionary)
    _lock: AbstractContextManager[bool] = field(default_factory=threading.RLock)

    def hold(self, pieces: Iterable[RowRange]) -> tuple[_Name, ...]:
        """What keeps the names of ``pieces``, for as long as it lives; nothing in a process that owns none."""
        if not self.owner:
            return ()
        with self._lock:
            return tuple(self._one(*one) for one in dict.fromkeys((piece.name, piece.store) for piece in pieces))

    def _one(self, name: str, store: str) -> _Name:
        held = self._alive.get(name)
        if held is None:
            held = self._alive[name] = _Name()
            weakref.finalize(held, self.released.append, (name, store)).atexit = False
        return held

    def give_back(self, plane: Plane) -> None:
        """Delete what no Ref holds any more, on all machines that have it.

        Raises TensorError when this machine could not; the next call tries it again.
        """
        gone = [self.released.popleft() for _ in range(len(self.released))]
        # The next call gives them back: else they are held as long as the process lives.
        with undone_if_raised(self.released.extend, gone):
            transport.delete(plane, [(name, store) for name, store in gone if name not in self._alive])


HELD = Holdings()


class Ref:
    """An array of ``shape`` and ``dtype`` that lies in the tensor store, in pieces of rows.

    A slice, a list of rows, and ``join`` of several are Refs again; anything else reads the array by ``value()``.
    """

    __slots__ = ("_held", "_value", "dtype", "pieces", "shape", "torch")

    def __init__(self, pieces: tuple[RowRange, ...], shape: tuple[int, ...], dtype: str, torch: bool) -> None:
        self.pieces, self.shape, self.dtype, self.torch = pieces, shape, dtype, torch
        self._held = HELD.hold(pieces)
        self._value: Tensor = None

    def __reduce__(self) -> Any:
        return _arrive, (self.pieces, self.shape, self.dtype, self.torch)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Ref({'x'.join(map(str, self.shape))} {self.dtype} in {len(self.pieces)})"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(self.shape[0])
            return self._rows([(start, max(start, stop))])
        if isinstance(index, list) and all(type(row) is int and 0 <= row < self.shape[0] for row in index):
            return self._rows([(row, row + 1) for row in index])
        return self.value()[opened(index)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.value(), dtype=dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*opened(args), **opened(dict(kwargs or {})))

    @property
    def ndim(self) -> int:
        """Number of dimensions, at least one."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape)) * ITEM_BYTES[self.dtype]

    def value(self) -> Tensor:
        """The array, not to be written to: a torch tensor if it was one and this process has torch, else of numpy.

        In place when it is one piece, else a copy, pieces below one another. Raises TensorError when it is gone,
        NotReachable when the machine that has it does not answer.
        """
        if self._value is None:
            torch = sys.modules.get("torch") if self.torch else None
            plane = tensors.connect(keep=True)
            as_ = "torch" if torch is not None else "numpy"
            own = transport.own_store(plane) if any(one.store for one in self.pieces) else ""
            parts = [
                plane.get(one.name, as_=as_)[one.start : one.stop]
                if one.store in ("", own)
                else transport.pull(plane, one.name, near=one.store, as_=as_)[one.name][one.start : one.stop]
                for one in self.pieces
            ]
            joined = torch.cat if torch is not None else np.concatenate
            self._value = parts[0] if len(parts) == 1 else joined(parts)
        return self._value

    def _rows(self, runs: Sequence[tuple[int, int]]) -> Ref:
        found: list[RowRange] = []
        for start, stop in runs:
            at = 0
            for one in self.pieces:
                low, high = max(start - at, 0), min(stop - at, one.stop - one.start)
                if low < high:
                    found.append(replace(one, start=one.start + low, stop=one.start + high))
                at += one.stop - one.start
        rows = sum(stop - start for start, stop in runs)
        empty = (replace(self.pieces[0], start=0, stop=0),)
        return Ref(tuple(found) or empty, (rows, *self.shape[1:]), self.dtype, self.torch)


def _operator(name: str) -> Any:
    def apply(self: Ref, *others: Any) -> Any:
        return getattr(self.value(), name)(*opened(others))

    return apply


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]:
    setattr(Ref, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Ref, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ["lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "iter", "bool", "float", "int"]:
    setattr(Ref, f"__{_name}__", _operator(f"__{_name}__"))


def _arrive(pieces: tuple[RowRange, ...], shape: tuple[int, ...], dtype: str, torch: bool) -> Ref:
    HELD.arrived = True
    return Ref(pieces, shape, dtype, torch)


def join(refs: Sequence[Ref]) -> Ref:
    """Refs below one another along dim 0: of one dtype, and of one shape but for their rows. None is read.

    Raises IndexError for no Refs. That shapes agree is for the caller to know: ``value()`` fails where they do not.
    """
    first = refs[0]
    rows = sum(len(ref) for ref in refs)
    return Ref(tuple(one for ref in refs for one in ref.pieces), (rows, *first.shape[1:]), first.dtype, first.torch)


def opened(value: Any, seen: dict[int, Ref] | None = None) -> Any:
    """``value`` with arrays in the place of the Refs in it; ``seen`` gets the Ref of each by the id of its array."""
    if isinstance(value, Ref):
        found = value.value()
        if seen is not None:
            seen[id(found)] = value
        return found
    if isinstance(value, dict):
        return {key: opened(one, seen) for key, one in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(one, Ref | dict | list | tuple) for one in value):
        return _like(value, [opened(one, seen) for one in value])
    return value


class Box:
    """One call in an instance: arrays for its arguments, Refs for its answer, whose names begin with ``prefix``."""

    def __init__(self, connect: Callable[[], Plane], prefix: str, bytes_min: int | None = None) -> None:
        self._connect, self._prefix, self._count = connect, prefix, 0
        self._bytes_min = int(environ.get(REF_BYTES_MIN) or BYTES_MIN) if bytes_min is None else bytes_min
        self._seen: dict[int, Ref] = {}

    def open(self, value: T) -> T:
        """Arguments with arrays in the place of Refs, each of its shape. Raises as ``Ref.value``."""
        return opened(value, self._seen) if HELD.arrived else value

    def close(self, value: Any) -> object:
        """``value`` with Refs in the place of large arrays; what is none of dict, list, tuple and array stays.

        An array is large from ``bytes_min`` bytes on, of any shape with rows. One that the store has no room for, or
        whose store is away, stays as it is. Raises TensorError for what the store refuses.
        """
        if isinstance(value, np.ndarray) or is_torch(value):
            return self._put(value) if value.ndim > 0 and value.nbytes >= self._bytes_min else value
        if isinstance(value, dict):
            return {key: self.close(one) for key, one in value.items()}
        if isinstance(value, list | tuple) and not all(isinstance(one, str | int | float) for one in value):
            return _like(value, [self.close(one) for one in value])
        return value

    def _put(self, array: Tensor) -> Tensor:
        if id(array) in self._seen:
            return self._seen[id(array)]  # it came in an argument: it is in the store already
        dtype = str(array.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES or 0 in array.shape:
            return array
        name = f"{self._prefix}/{self._count}"
        try:
            plane = self._connect()
            store = transport.own_store(plane)
            plane.put(name, array)
        except (OutOfMemory, NotReachable):
            return array  # the call must not fail for want of room: the bytes travel in its answer
        self._count += 1
        return Ref((RowRange(name, 0, array.shape[0], store),), tuple(array.shape), dtype, is_torch(array))


def unpicklable_at(value: object, path: str, text: str, depth: int = UNPICKLABLE_DEPTH_MAX) -> str:
    """Where in ``value`` the part is that pickle refuses with ``text``: ``args[0]['lock']``; empty if there is none."""
    if _refused(value) != text:
        return ""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, Mapping):
        parts = ((f"{path}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"{path}[{index}]", one) for index, one in enumerate(value))
    elif hasattr(value, "__dict__"):
        parts = ((f"{path}.{name}", one) for name, one in vars(value).items())
    found = (unpicklable_at(one, where, text, depth - 1) for where, one in (parts if depth else ()))
    return next(filter(None, found), path)


def _refused(value: object) -> str:
    """What pickle says of a value that it refuses."""
    with UserCode() as pickling:
        pickle.dumps(value, protocol=5, buffer_callback=lambda _: None)
    return str(pickling.take()) if pickling.failed else ""


def _like(value: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def prefix_of(job: JobId, loop_epoch: int, rest: str = "") -> str:
    """Where the values made for a loop of ``loop_epoch`` are; those of older loops have no owner."""
    return f"call/{job}/{loop_epoch}/{rest}"


def sweep(plane: Plane, job: JobId, loop_epoch: int) -> None:
    """Delete what older loops held; the loop of ``loop_epoch`` is entered. Raises TensorError as the store does."""
    own = prefix_of(job, loop_epoch)
    transport.everywhere({"op": "sweep", "prefix": f"call/{job}/", "keep": own})
    for row in plane.ls(f"call/{job}/"):
        if not row.name.startswith(own):
            plane.delete(row.name, missing_ok=True)
