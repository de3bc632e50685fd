"""Transactions of the scheduling state: every write records what it replaced, and undo is exact."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_ABSENT = object()
_INDEXED: Any = (np.ndarray, list)
K = TypeVar("K")
V = TypeVar("V")
Index = int | slice | tuple[int, int]
Value = int | NDArray[np.integer]


class Scope:
    """A nested scope of a Txn; a class of its own because a generator costs three times as much."""

    __slots__ = ("_mark", "_outer", "_txn")

    def __init__(self, txn: Txn) -> None:
        self._txn = txn

    @property
    def kept(self) -> bool:
        """Whether ``keep`` was called in it."""
        return self._txn.kept

    def __enter__(self) -> Txn:
        txn = self._txn
        self._mark, self._outer = txn.changes, txn.kept
        txn.kept = False
        return txn

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        txn = self._txn
        if kind is not None or not txn.kept:
            txn.undo(self._mark)
        txn.kept = self._outer


class Txn:
    """An undo log over arrays and mappings: every write records what it replaced.

    Only a Txn writes to a scheduling state. ``trial`` opens a nested scope that is undone unless ``keep`` was called in
    it, also when an exception leaves it. Undo is exact: every array element and mapping entry gets its old value back.
    A mapping may come back in another order, so nothing may depend on the order of a mapping.
    """

    __slots__ = ("_undo", "kept", "notes", "writes")

    def __init__(self) -> None:
        self._undo: list[tuple[Any, Any, Any]] = []
        self.kept = False
        self.writes = 0
        """Writes so far, also those that were undone, and undoings: while it stays, nothing has changed."""
        self.notes: dict[tuple[object, ...], object] = {}
        """What was worked out and stays true until the Txn ends."""

    def set(self, array: NDArray[np.generic], index: Index, value: Value) -> None:
        """``array[index] = value``; ``index`` may be anything numpy accepts."""
        old: Any = array[index]
        # A slice or index list gives an array (a view for a slice), so it is copied; one element gives a scalar.
        self.writes += 1
        self._undo.append((array, index, old.copy() if isinstance(old, _INDEXED) else old))
        array[index] = value

    def set_item(self, items: list[V], index: int, value: V) -> None:
        """``items[index] = value`` for a plain list."""
        self.writes += 1
        self._undo.append((items, index, items[index]))
        items[index] = value

    def add(self, array: NDArray[np.integer], index: int | tuple[int, int], delta: int) -> None:
        """``array[index] += delta`` for an index without repeated elements."""
        self.set(array, index, array[index] + delta)

    def put(self, mapping: MutableMapping[K, V], key: K, value: V) -> None:
        """``mapping[key] = value``."""
        self.writes += 1
        self._undo.append((mapping, key, mapping.get(key, _ABSENT)))
        mapping[key] = value

    def drop(self, mapping: MutableMapping[K, V], key: K) -> None:
        """Remove a key that must be there. Raises KeyError."""
        self.writes += 1
        self._undo.append((mapping, key, mapping.pop(key)))

    def did(self, undo: Callable[[], object]) -> None:
        """Record a change made elsewhere, with what takes it back."""
        self.writes += 1
        self._undo.append((undo, None, None))

    def keep(self) -> None:
        """Keep the changes of the innermost open scope when it closes."""
        self.kept = True

    def trial(self) -> Scope:
        """A nested scope, undone at its end unless ``keep`` was called in it."""
        return Scope(self)

    @contextmanager
    def meanwhile(self, array: NDArray[np.integer], values: Mapping[int, int]) -> Generator[None]:
        """These elements have these values meanwhile; other writes made in it stay. Scopes nest."""
        before = {index: int(array[index]) for index in values}
        for index, value in values.items():
            self.set(array, index, value)
        try:
            yield
        finally:
            for index, value in before.items():
                self.set(array, index, value)

    @property
    def changes(self) -> int:
        """How many writes can be undone; also a mark for ``undo``."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Take back, newest first, every write after ``mark``."""
        self.writes += len(self._undo) > mark
        while len(self._undo) > mark:
            target, key, old = self._undo.pop()
            if isinstance(target, _INDEXED):
                target[key] = old
            elif callable(target):
                target()
            elif old is _ABSENT:
                del target[key]
            else:
                target[key] = old
