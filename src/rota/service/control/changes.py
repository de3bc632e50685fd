"""Changes that callers ask for, checked before they become events: fields and sizes of a live job, the queue tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

from rota.cluster.core.quota import BrokenRule, broken_rules
from rota.cluster.live import Scheduler
from rota.job.core.resize import is_world, world_of
from rota.runtime import isolation
from rota.service.control.submission import closed_fault
from rota.service.jobfile.models import ResourcesPart
from rota.service.jobfile.nodes import MappingNode, SequenceNode, read_tree
from rota.service.jobfile.nodes import Node as FileNode
from rota.service.jobfile.problems import ErrorCollector
from rota.service.jobfile.reader import cut_fields
from rota.service.jobfile.validation import (
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
from rota.spec.check import SIZES_HINT, Finding, fixed_size
from rota.spec.errors import BadInput, Conflict, UnknownName, unknown
from rota.spec.job import CHANGEABLE, JobSpec, RoleSpec
from rota.spec.queue import OwnedCells, OwnedLevel, Queue, QueueState
from rota.spec.reasons import Reason
from rota.spec.resources import Node, Res, counted

PRIORITY_MIN, PRIORITY_MAX = -1, 100
RETRY_MAX = 1000
LABEL_CHARS_MAX = 200


def _priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not PRIORITY_MIN <= value <= PRIORITY_MAX:
        raise BadInput(f"priority={value!r}: a whole number from {PRIORITY_MIN} to {PRIORITY_MAX}")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise BadInput(f"{value!r} is not a number of seconds above 0")
    return float(value)


def _limit(value: object) -> float | None:
    return None if value is None else _seconds(value)


def _retry(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= RETRY_MAX:
        raise BadInput(f"retry={value!r}: a whole number from 0 to {RETRY_MAX}")
    return value


_PLAIN: Mapping[str, Callable[[object], float | None]] = {
    "priority": _priority,
    "time_limit_s": _limit,
    "grace_s": _seconds,
    "retry": _retry,
}


def queue_fault(scheduler: Scheduler, path: str) -> Finding | None:
    """Why no job may be submitted to a queue: it is not there, or no leaf, or it or one above it takes none now."""
    if (problem := scheduler.find_queue(path)) is not None:
        message, _, hint = problem.partition("; ")
        return Finding(path=("queue",), message=message, hint=hint, code=str(Reason.UNKNOWN_QUEUE))
    tree = scheduler.state.queues
    return closed_fault((tree.rows[row].path, tree.rows[row].state) for row in tree.line_of(path))


def check_queue(scheduler: Scheduler, path: str) -> None:
    """Raises UnknownName or Conflict for a queue that no job may be submitted to."""
    if (fault := queue_fault(scheduler, path)) is not None:
        kind = Conflict if fault.code == str(Reason.QUEUE_CLOSED) else UnknownName
        raise kind(fault.message, hint=fault.hint, code=fault.code)


_NAMES = ", ".join((*CHANGEABLE[:-1], "labels.NAME"))


def checked_changes(changes: Mapping[str, object], spec: JobSpec, scheduler: Scheduler) -> dict[str, object]:
    """The changes as they go into the event. Raises BadInput or UnknownName, naming field, value and rule."""
    if not changes:
        raise BadInput("there is nothing to change", hint=f"these fields can: {_NAMES}")
    checked: dict[str, object] = {}
    labels = dict(spec.labels)
    for path, value in changes.items():
        if path in _PLAIN:
            checked[path] = _PLAIN[path](value)
        elif path == "queue":
            if value != spec.queue:
                check_queue(scheduler, str(value))
            checked[path] = str(value)
        elif path.startswith("labels."):
            name = path.removeprefix("labels.")
            if not name or not isinstance(value, str) or len(value) > LABEL_CHARS_MAX:
                raise BadInput(f"{path}={value!r}: labels.NAME and a text of at most {LABEL_CHARS_MAX} characters")
            labels[name] = value
            checked["labels"] = [list(pair) for pair in sorted(labels.items())]
        else:
            raise BadInput(f"{path!r} cannot change after submit", hint=f"these can: {_NAMES}")
    return checked


def checked_size(spec: JobSpec, name: str, n: int) -> RoleSpec:
    """The role, if it may have ``n`` instances. Raises UnknownName or BadInput, naming role, number and rule."""
    role = next((role for role in spec.roles if role.name == name), None)
    if role is None:
        raise unknown(f"{spec.name} has no role {name!r}", name, [one.name for one in spec.roles], "roles")
    if n > role.replicas_max > role.replicas_min:
        hint = f"submit it with replicas: {{min: {role.replicas_min}, max: {n}}}"
        raise BadInput(
            f"{name}={n}: {name} has at most {counted(role.replicas_max, 'instance')} (replicas.max)", hint=hint
        )
    if is_world(role):
        if n < role.replicas_min or world_of(replace(role, replicas_max=max(n, role.replicas_max)), n) != n:
            rule = "a multiple of its fixed axes that divides the global batch"
            if role.plans:
                rule = f"one of {', '.join(str(one.replicas) for one in role.plans)}, which have plans"
            raise BadInput(f"{name}={n}: the world of {name} is at least {role.replicas_min}, {rule}")
    elif why := fixed_size(role):
        raise BadInput(f"{name} cannot change its size: {why}", hint=SIZES_HINT)
    return role


class AmountPart(ResourcesPart):
    """An amount of resources; what is left out is none of it."""

    def make(self) -> Res:
        """The amount."""
        given: dict[str, Any] = {"cpus": 0.0, **self.given()}
        return Res(**given)


class CellsPart(Part):
    """Cells that a queue owns."""

    what = "a mapping such as {level: rack, count: 1}"
    makes = OwnedCells
    level: Annotated[OwnedLevel, OneOf(OwnedLevel)] = required("rack, node or device")
    count: Annotated[int, Number(1)] = required("how many")
    gpu_type: Annotated[str, Text("a type such as A100")] = optional("of this type of device")


class QueuePart(Part):
    """One queue."""

    what = "a mapping such as {path: research/rl, guaranteed: {gpus: 8}}"
    makes = Queue
    path: Annotated[str, Text("a path such as research/rl")] = required("where in the tree")
    guaranteed: AmountPart = optional("promised to this queue")
    cells: Annotated[tuple[CellsPart, ...], Several()] = optional("hived: cells of its own, in place of the guarantee")
    pinned: Annotated[tuple[Annotated[str, Text("a name")], ...], Several(single=True)] = optional(
        "hived: nodes and racks of its own, by name"
    )
    limit: AmountPart = optional("at most for this queue")
    user_limit: AmountPart = optional("at most for the jobs of one user in it")
    min_user_percent: Annotated[float, Number(0, 100, whole=False)] = optional("yarn: percent that each user may have")
    user_limit_factor: Annotated[float, Number(0, whole=False)] = optional("yarn: a user's most, in guarantees")
    weight: Annotated[float, Number(0, whole=False)] = optional("share of what is left over")
    priority: Annotated[int, Number(0)] = optional("tier in which what is left over is divided")
    preemptible: Annotated[bool, Bool()] = optional("may jobs of it be preempted")
    state: Annotated[QueueState, OneOf(QueueState)] = optional("does it take jobs, and start them")
    run_as: Annotated[str, Text("a user of the operating system, or UID:GID")] = optional(
        "user of the commands of its jobs, where the service is root"
    )


class QueuesPart(Part):
    """The whole file."""

    queues: Annotated[tuple[QueuePart, ...], Several()] = required("a list of queues")

    @classmethod
    def long_form(cls, node: object) -> object:
        """A list is the one of the queues."""
        return {"queues": node} if isinstance(node, SequenceNode) else node


def broken_queues(queues: Sequence[Queue], nodes: Iterable[Node]) -> Iterator[BrokenRule]:
    """What is wrong with a tree, on these nodes and on this machine."""
    yield from broken_rules(queues, nodes)
    for index, queue in enumerate(queues):
        if queue.run_as is not None and (why := isolation.refusal(queue.run_as)):
            yield BrokenRule(index=index, field="run_as", message=why, hint="remove it: jobs run as the service does")


def read_queues(text: str, *, filename: str, nodes: Iterable[Node] = ()) -> tuple[Queue, ...]:
    """The queues of the file, checked against these nodes. Raises JobFileError with every mistake and its place."""
    errors = ErrorCollector(text, filename)
    root = read_tree(text, errors)
    read_part(QueuesPart, root, errors, () if isinstance(root, MappingNode) else ("queues",))
    wrong, kept = set(errors.paths), [*_readable_queues(root)]
    known = {queue.path for _, queue in kept}
    whole = len(kept) == len(_entries(root))
    for broken in broken_queues([queue for _, queue in kept], nodes):
        index, queue = kept[broken.index]
        orphan = broken.field == "path" and queue.parent is not None and queue.parent not in known
        path = ("queues", index, broken.field)
        _, place = place_of(root, path)
        if path not in wrong and (whole or not orphan):
            errors.add(place, path, broken.message, hint=broken.hint)
            wrong.add(path)
    errors.raise_if_any()
    return tuple(queue for _, queue in kept)


def _entries(root: FileNode) -> Sequence[FileNode]:
    entries = root.at("queues") if isinstance(root, MappingNode) else root
    return entries if isinstance(entries, SequenceNode) else ()


def _readable_queues(root: FileNode) -> Iterator[tuple[int, Queue]]:
    """Each queue with its number; without what is wrong in it, so that the rest can be checked as well."""
    for index, entry in enumerate(_entries(root)):
        errors = ErrorCollector("", "")
        part = read_part(QueuePart, entry, errors)
        if part is None:
            part = read_part(QueuePart, cut_fields(entry, errors.paths), ErrorCollector("", ""))
        if part is not None:
            yield index, cast("Queue", part.make())
