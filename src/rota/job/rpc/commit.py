"""What a master answers to a commit of the loop, and the checkpoint that goes with one."""

from __future__ import annotations

from typing import Literal, TypedDict

from rota.spec.codec import JsonObject


class CommitCheckpoint(TypedDict):
    """Folder of a complete checkpoint, and how long it took."""

    path: str
    seconds: float


class CommitDone(TypedDict):
    """The master's answer to a durable commit; ``save``: the next one goes to disk, ``stop``: it was the last one."""

    answer: Literal["done"]
    table: JsonObject
    save: bool
    stop: bool


class CommitRefused(TypedDict):
    """The master's answer to a commit of a loop that is over."""

    answer: Literal["refused"]
    text: str


class CommitAgain(TypedDict):
    """The answer of a master that fails before the commit is in its log: the next master is asked the same."""

    answer: Literal["again"]
    text: str
