"""The file of rota queues apply: a list of queues, read as strictly as a job file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from rota.cluster.core.quota import broken_rules
from rota.service.jobfile.fields import (
    Bool,
    Number,
    OneOf,
    Part,
    Several,
    Text,
    optional,
    place_of,
    read_part,
    required,
)
from rota.service.jobfile.models import ResourcesPart
from rota.service.jobfile.nodes import ErrorCollector, SequenceNode, read_tree
from rota.spec.queue import Queue
from rota.spec.resources import Node, Res

State = Literal["open", "closed", "draining"]


class AmountPart(ResourcesPart):
    """An amount of resources; what is left out is none of it."""

    def make(self) -> Res:
        """The amount."""
        return Res(**{"cpus": 0.0, **self.given()})


class QueuePart(Part):
    """One queue."""

    what = "a mapping such as {path: research/rl, guaranteed: {gpus: 8}}"
    makes = Queue
    path: Annotated[str, Text("a path such as research/rl")] = required("where in the tree")
    guaranteed: AmountPart = optional("promised to this queue")
    limit: AmountPart = optional("at most for this queue")
    user_limit: AmountPart = optional("at most for the jobs of one user in it")
    weight: Annotated[float, Number(0, whole=False)] = optional("share of what is left over")
    priority: Annotated[int, Number(0)] = optional("tier in which what is left over is divided")
    preemptible: Annotated[bool, Bool()] = optional("may jobs of it be preempted")
    state: Annotated[State, OneOf(State)] = optional("does it take jobs")


class QueuesPart(Part):
    """The whole file."""

    queues: Annotated[tuple[QueuePart, ...], Several()] = required("a list of queues")

    @classmethod
    def long_form(cls, node: Any) -> Any:
        """A list is the one of the queues."""
        return {"queues": node} if isinstance(node, SequenceNode) else node


def read_queues(text: str, *, filename: str, nodes: Iterable[Node] = ()) -> tuple[Queue, ...]:
    """The queues of the file, checked against these nodes. Raises JobFileError with every mistake and its place."""
    errors = ErrorCollector(text, filename)
    root = read_tree(text, errors)
    found = read_part(QueuesPart, root, errors)
    errors.raise_if_any()
    queues: tuple[Queue, ...] = found.given()["queues"]
    for broken in broken_rules(queues, nodes):
        path = ("queues", broken.index, broken.field)
        _, place = place_of(root, path)
        errors.add(place, path, broken.message, hint=broken.hint)
    errors.raise_if_any()
    return queues
