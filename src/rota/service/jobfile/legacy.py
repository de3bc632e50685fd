"""The older single-list job form (``jobName``, ``taskRoles``) turned into the present one, key by key."""

from __future__ import annotations

from dataclasses import replace

from rota.service.jobfile.nodes import ErrorCollector, MappingNode, Node, ScalarNode, SequenceNode, moved
from rota.spec.errors import nearest

_TOP = {"jobName": "name", "image": "image", "dataDir": "data", "outputDir": "output"}
_ROLE = {"taskNumber": "replicas", "command": "run", "name": ""}
_RESOURCES = {"cpuNumber": "cpus", "memoryMB": "memory", "gpuNumber": "gpus"}


def is_older_form(root: Node) -> bool:
    """True for a mapping with both ``jobName`` and ``taskRoles``."""
    return isinstance(root, MappingNode) and "jobName" in root and "taskRoles" in root


def convert_older_form(root: Node, errors: ErrorCollector) -> MappingNode:
    """The same job in the present form; every node keeps its place and its old name in messages.

    Unknown keys go into ``errors``. ``memoryMB`` is in MiB. An entry without ``name`` becomes role ``task<index>``.
    """
    assert isinstance(root, MappingNode)
    job = MappingNode({}, root.place)
    for key, value in root.items():
        if key in _TOP:
            job[_named(key, _TOP[key], key)] = _known_as(value, key)
        elif key == "taskRoles":
            job[_named(key, "roles", key)] = _roles(value, errors)
        else:
            _unknown(key, key, [*_TOP, "taskRoles"], errors)
    return job


def _known_as(node: Node, loc: str) -> Node:
    return moved(node, replace(node.place, loc=str(loc)))


def _named(node: Node, text: str, loc: str) -> ScalarNode:
    return ScalarNode(text, replace(node.place, loc=str(loc)))


def _unknown(key: ScalarNode, loc: str, known: list[str], errors: ErrorCollector) -> None:
    hint = nearest(key, known, "fields")
    errors.add(replace(key.place, loc=str(loc)), (), "unknown field", hint=hint, code="UNKNOWN_FIELD")


def _roles(node: Node, errors: ErrorCollector) -> MappingNode:
    roles = MappingNode({}, replace(node.place, loc="taskRoles"))
    if not isinstance(node, SequenceNode):
        errors.add(roles.place, (), "expected a list of task roles", code="BAD_TYPE")
        return roles
    for index, item in enumerate(node):
        loc = f"taskRoles[{index}]"
        name = item.at("name") if isinstance(item, MappingNode) else None
        text = str(name) if isinstance(name, ScalarNode) else f"task{index}"
        key = _named(item if name is None else name, text, loc)
        if text in roles:
            place = replace(key.place, loc=f"{loc}.name")
            errors.add(place, (), "duplicate name", hint="every role needs its own", code="DUPLICATE_KEY")
        roles[key] = _role(item, loc, errors)
    return roles


def _role(node: Node, loc: str, errors: ErrorCollector) -> MappingNode:
    role = MappingNode({}, replace(node.place, loc=loc))
    if not isinstance(node, MappingNode):
        errors.add(role.place, (), "expected a mapping with 'command'", code="BAD_TYPE")
        return role
    resources = MappingNode({}, role.place)
    for key, value in node.items():
        name = f"{loc}.{key}"
        old = _known_as(value, name)
        if key in _RESOURCES:
            if key == "memoryMB" and isinstance(old, ScalarNode):
                old = ScalarNode(f"{old}MiB", old.place, plain=old.plain)
            resources[_named(key, _RESOURCES[key], name)] = old
        elif key not in _ROLE:
            _unknown(key, name, [*_ROLE, *_RESOURCES], errors)
        elif _ROLE[key]:
            role[_named(key, _ROLE[key], name)] = old
    if resources:
        role[_named(node, "resources", loc)] = resources
    return role
