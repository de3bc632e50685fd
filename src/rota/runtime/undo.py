"""Undo what was begun when the code after it raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self

P = ParamSpec("P")


class undone_if_raised(partial[object]):
    """``with undone_if_raised(undo, *arguments):`` calls ``undo`` when the block raises, Ctrl-C and cancellation too.

    What the block raised is raised on, unless ``undo`` raises. What a handler of a signal raises before the block
    begins undoes nothing: where that matters, let the block hold the beginning too, and ``undo`` find what there is.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # the arguments are those of ``undo``; at run time the one of ``partial`` is faster

        def __new__(cls, undo: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Self: ...

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self()
