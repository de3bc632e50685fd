"""Sources of streams: a data set or an iterator behind one method, read by growing index, again after a recovery."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rota.job.inspect import import_target
from rota.spec.errors import BadInput, DataError


class Source(Protocol):
    """Where items come from: ``read(i)`` for growing ``i``. Raises IndexError behind the last one."""

    def read(self, index: int) -> Any:
        """Item ``index``."""
        ...


class Indexed:
    """A data set with ``dataset[i]``: every item may be read again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def read(self, index: int) -> Any:
        """``dataset[index]``; a length, where there is one, is the end.

        Raises DataError when an item before that end raises IndexError: that is a fault of the data set, not its end.
        """
        size = len(self._data) if hasattr(self._data, "__len__") else None
        if size is not None and index >= size:
            raise IndexError(index)
        try:
            return self._data[index]
        except IndexError as error:
            if size is None:
                raise
            raise DataError(
                f"item {index} of a data set of {size} raised IndexError: {error}",
                hint="mend the data set, or let its __len__ tell how many items it has",
                traceback=traceback.format_exc(),
            ) from error


class Iterated:
    """An iterator, whose cursor is a count: made anew after a recovery, it is moved forward to the first item needed.

    It moves by ``seek(i)`` if it has that method, else by passing over items; so it must give the same items again.
    """

    def __init__(self, items: Any) -> None:
        self._items, self._next = iter(items), 0
        self._seek: Callable[[int], None] | None = getattr(items, "seek", None)

    def read(self, index: int) -> Any:
        """Item ``index``, which is not before the one read last."""
        if index > self._next and self._seek is not None:
            self._seek(index)
            self._next = index
        for value in self._items:
            self._next += 1
            if self._next == index + 1:
                return value
        raise IndexError(index)


def open_source(path: str, seed: int) -> Source:
    """The source of an import path: a data set, an iterable, or what makes one (from ``seed``, if it takes that).

    Raises BadInput for anything else, and for an iterator that is not made here: opened again, it would lack items.
    """
    found: Any = import_target(path)
    made = callable(found)
    if made:
        found = found(seed=seed) if "seed" in inspect.signature(found).parameters else found()
    if hasattr(found, "__getitem__") and not isinstance(found, Mapping):
        return Indexed(found)
    if hasattr(found, "__iter__"):
        if not made and iter(found) is found:
            raise BadInput(
                f"source {path!r} is a {type(found).__name__}: an iterator can be read once, and a stream reads again",
                hint="give the function that makes it",
            )
        return Iterated(found)
    raise BadInput(
        f"source {path!r} is a {type(found).__name__}, neither a data set nor an iterator",
        hint="give dataset[i], an iterable, or a function that returns one",
    )
