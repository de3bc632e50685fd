"""The file of rota queues apply: a list of queues, read as strictly as a job file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rota.cluster.core.quota import broken_rules
from rota.service.fieldkinds import BAD, Bool, Field, ListOf, Number, OneOf, Record, Text
from rota.service.jobschema import RESOURCES
from rota.service.yamltree import Sink, read_tree
from rota.spec.queue import Queue
from rota.spec.resources import Node, Res

QUEUE = Record(
    what="a mapping such as {path: research/rl, guaranteed: {gpus: 8}}",
    fields={
        "path": Field(kind=Text(what="a path such as research/rl"), doc="where in the tree", required=True),
        "guaranteed": Field(kind=RESOURCES, doc="promised to this queue"),
        "limit": Field(kind=RESOURCES, doc="at most for this queue"),
        "user_limit": Field(kind=RESOURCES, doc="at most for the jobs of one user in it"),
        "weight": Field(kind=Number(low=0, whole=False), doc="share of what is left over", default="1"),
        "priority": Field(kind=Number(low=0), doc="tier in which what is left over is divided", default="100"),
        "preemptible": Field(kind=Bool(), doc="may jobs of it be preempted", default="true"),
        "state": Field(kind=OneOf(choices=("open", "closed", "draining")), doc="does it take jobs", default="open"),
    },
)
FILE = Record(fields={"queues": Field(kind=ListOf(item=QUEUE), doc="a list of queues", required=True)})


def read_queues(text: str, *, filename: str, nodes: Iterable[Node] = ()) -> tuple[Queue, ...]:
    """The queues of the file, checked against these nodes. Raises JobFileError with every mistake and its place."""
    sink = Sink(text, filename)
    root = read_tree(text, sink)
    found = FILE.fields["queues"].kind.read(root, "", sink) if root.kind == "list" else FILE.read(root, "", sink)
    sink.raise_if_any()
    if found is BAD:
        raise sink.error()
    queues = tuple(_queue(fields) for fields in (found if isinstance(found, tuple) else found["queues"]))
    rows = root if root.kind == "list" else root.get("queues") or root
    for broken in broken_rules(queues, nodes):
        row = rows.items[broken.index]
        place = f"queues[{broken.index}].{broken.field}"
        sink.add(row.get(broken.field) or row, place, broken.message, hint=broken.hint)
    sink.raise_if_any()
    return queues


def _queue(fields: dict[str, Any]) -> Queue:
    sizes = ("guaranteed", "limit", "user_limit")
    made = {**fields, **{name: _res(fields[name]) for name in sizes if name in fields}}
    return Queue(**made)


def _res(fields: dict[str, Any]) -> Res:
    renamed = {"memory": "memory_bytes"}
    given = {renamed.get(name, name): value for name, value in fields.items()}
    return Res(**{"cpus": 0.0, **given})
