"""The older single-list job form (``jobName``, ``taskRoles``) turned into the present one, key by key."""

from __future__ import annotations

from dataclasses import replace

from rota.service.fieldkinds import child
from rota.service.yamltree import Node, Sink
from rota.spec.errors import nearest

_TOP = {"jobName": "name", "image": "image", "dataDir": "data", "outputDir": "output"}
_ROLE = {"taskNumber": "replicas", "command": "run", "name": ""}
_RESOURCES = {"cpuNumber": "cpus", "memoryMB": "memory", "gpuNumber": "gpus"}


def is_older_form(root: Node) -> bool:
    """True for a mapping with both ``jobName`` and ``taskRoles``."""
    return root.kind == "map" and root.get("jobName") is not None and root.get("taskRoles") is not None


def convert_older_form(root: Node, sink: Sink) -> Node:
    """The same job in the present form; every node keeps its place and its old name in messages.

    Unknown keys go into ``sink``. ``memoryMB`` is in MiB. An entry without ``name`` becomes role ``task<index>``.
    """
    job = Node("map", root.line, root.col)
    for key, value in root.entries:
        if key.text in _TOP:
            job.entries.append((_named(key, _TOP[key.text]), replace(value, loc=key.text)))
        elif key.text == "taskRoles":
            job.entries.append((_named(key, "roles"), _roles(value, sink)))
        else:
            _unknown(key, key.text, [*_TOP, "taskRoles"], sink)
    return job


def _named(key: Node, text: str) -> Node:
    return replace(key, text=text, loc=key.loc or key.text)


def _unknown(key: Node, loc: str, known: list[str], sink: Sink) -> None:
    sink.add(key, loc, "unknown field", hint=nearest(key.text, [*known], "fields"), code="UNKNOWN_FIELD")


def _roles(node: Node, sink: Sink) -> Node:
    roles = Node("map", node.line, node.col, loc="taskRoles")
    if node.kind != "list":
        sink.add(node, "taskRoles", "expected a list of task roles", code="BAD_TYPE")
        return roles
    for index, item in enumerate(node.items):
        loc = f"taskRoles[{index}]"
        name = item.get("name") if item.kind == "map" else None
        text = name.text if name is not None and name.kind == "scalar" else f"task{index}"
        key = replace(name or item, kind="scalar", text=text, entries=[], items=[], loc=loc)
        if roles.get(text) is not None:
            sink.add(key, child(loc, "name"), "duplicate name", hint="every role needs its own", code="DUPLICATE_KEY")
        roles.entries.append((key, _role(item, loc, sink)))
    return roles


def _role(node: Node, loc: str, sink: Sink) -> Node:
    role = Node("map", node.line, node.col, loc=loc)
    if node.kind != "map":
        sink.add(node, loc, "expected a mapping with 'command'", code="BAD_TYPE")
        return role
    resources = Node("map", node.line, node.col, loc=loc)
    for key, value in node.entries:
        old = replace(value, loc=child(loc, key.text))
        if key.text in _RESOURCES:
            if key.text == "memoryMB" and old.kind == "scalar":
                old.text = f"{old.text}MiB"
            resources.entries.append((_named(key, _RESOURCES[key.text]), old))
        elif key.text not in _ROLE:
            _unknown(key, child(loc, key.text), [*_ROLE, *_RESOURCES], sink)
        elif _ROLE[key.text]:
            role.entries.append((_named(key, _ROLE[key.text]), old))
    if resources.entries:
        role.entries.append((Node("scalar", node.line, node.col, text="resources", loc=loc), resources))
    return role
