"""Undo what was begun when the code after it raises."""

from __future__ import annotations

from functools import partial
from types import TracebackType


class undone_if_raised(partial[object]):
    """``with undone_if_raised(undo, *arguments):`` calls ``undo`` when the block raises, Ctrl-C and cancellation too.

    What the block raised is raised on, unless ``undo`` raises. What a handler of a signal raises before the block
    begins undoes nothing: where that matters, let the block hold the beginning too, and ``undo`` find what there is.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self()
