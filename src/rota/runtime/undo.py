"""Undo what was begun when the code after it raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec

P = ParamSpec("P")


class undone_if_raised:
    """``with undone_if_raised(undo, *arguments):`` calls ``undo`` when the block raises, Ctrl-C and cancellation too.

    What the block raised is raised on, unless ``undo`` raises.
    """

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._undo = partial(undo, *args, **kwargs)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._undo()
