"""Small makers of nodes, asks and states, one line an object; the states that a test makes, checked at its end."""

from __future__ import annotations

from collections import deque

from rota.cluster.core.guarded import violations
from rota.cluster.core.jobs import JobAsk, Shape, Slot
from rota.cluster.core.state import State
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.resources import Device, Node


def node(name: str, gpus: int = 4, *, rack: str = "", type: str = "A", cpus: float = 16, gib: int = 64) -> Node:
    return Node(
        id=NodeId(name),
        host="host",
        cpus=cpus,
        memory_bytes=gib * 2**30,
        devices=tuple(Device(index=i, type=type) for i in range(gpus)),
        cells=(rack,) if rack else (),
    )


def slot(gpus: float = 1, *, cpus: float = 0, gib: int = 0, type: str | None = None) -> Slot:
    whole = int(gpus) if gpus >= 1 else 0
    milli = 0 if gpus >= 1 else round(gpus * 1000)
    return Slot(gpus=whole, milli=milli, cpu_milli=round(cpus * 1000), mem=gib * 2**30, type=type)


def shape(*slots: Slot, together: tuple = (), apart: tuple = ()) -> Shape:
    return Shape(slots=tuple(slots), together=together, apart=apart)


def ask(name: str, *slots: Slot, queue: str = "default", priority: int = 50, at: float = 0.0, **more: object) -> JobAsk:
    return JobAsk(
        id=JobId(name),
        shape=shape(*(slots or (slot(),))),
        queue=queue,
        priority=priority,
        queued_at=at,
        **more,  # type: ignore[arg-type]
    )


def state(*nodes: Node, queues: tuple[Queue, ...] = ()) -> State:
    return State(nodes, queues)


KEPT_MAX = 50
"""States of one test that are kept to its end; of more than these (properties) the oldest is checked and let go."""


class StatesMade:
    """The states that a test makes, each checked once: at the end, since a state is only whole between two steps."""

    def __init__(self) -> None:
        self._kept: deque[State] = deque()
        self.broken: list[str] = []

    def add(self, state: State) -> None:
        """A new state; nothing else would hold those of local variables until the end of the test."""
        self._kept.append(state)
        if len(self._kept) > KEPT_MAX:
            self.broken += violations(self._kept.popleft())

    def check(self) -> list[str]:
        """Every broken rule of every state."""
        while self._kept:
            self.broken += violations(self._kept.popleft())
        return self.broken
