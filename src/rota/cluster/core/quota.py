"""Queue tree: guarantee, limit, use; which queue of the line binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.asks import Shape
from rota.spec.queue import DEFAULT_QUEUE, Queue
from rota.spec.resources import Res

Vector = NDArray[np.int64]
UNLIMITED = np.int64(2**62)
GPU, CPU, MEM = 0, 1, 2
"""Dimensions of every quota vector: thousandths of devices of any type, thousandths of cores, bytes; then one dimension
a device type in thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLimit:
    """The queue and dimension that stop a start, with what is used, asked and allowed; of a ``user`` there, if any."""

    queue: str
    dim: str
    used: int
    asked: int
    allowed: int
    user: str | None = None


class QueueTree:
    """The queues in rows, parents included, sorted by path; a queue that is only named as a parent promises nothing.

    In a guarantee or limit a dimension of zero is "not stated". ``born`` has per row its place in the order given.
    """

    def __init__(self, queues: Sequence[Queue], types: Sequence[str]) -> None:
        given = {queue.path: queue for queue in queues}
        born: dict[str, int] = {}
        if not given:
            given = {DEFAULT_QUEUE: Queue(path=DEFAULT_QUEUE)}
        for position, path in enumerate(list(given)):
            born.setdefault(path, position)
            while (parent := path.rpartition("/")[0]) and parent not in given:
                given[parent] = Queue(path=parent)
                born[parent] = position
                path = parent
        self.rows: tuple[Queue, ...] = tuple(given[path] for path in sorted(given))
        self.row: dict[str, int] = {queue.path: i for i, queue in enumerate(self.rows)}
        self.born: list[int] = [born[queue.path] for queue in self.rows]
        self.types: tuple[str, ...] = tuple(types)
        self.dims: tuple[str, ...] = ("gpu", "cpu", "mem", *(f"gpu:{t}" for t in types))
        self._needs: dict[Shape, Vector] = {}
        self.line: list[list[int]] = [self._line(queue.path) for queue in self.rows]
        self.guaranteed: Vector = np.array([self._vector(q.guaranteed, 0) for q in self.rows], dtype=np.int64)
        self.limit: Vector = np.array([self._vector(q.limit, int(UNLIMITED)) for q in self.rows], dtype=np.int64)
        self.user_limit: Vector = np.array([self._vector(q.user_limit, int(UNLIMITED)) for q in self.rows], np.int64)
        self.limited: list[bool] = [bool(row.any()) for row in self.limit < UNLIMITED]
        self.user_limited: list[bool] = [bool(row.any()) for row in self.user_limit < UNLIMITED]
        self.unlimited = not any(self.limited) and not any(self.user_limited)
        self.leaf = np.array([not any(q.parent == r.path for q in self.rows) for r in self.rows])

    def _line(self, path: str) -> list[int]:
        line: list[int] = []
        while path:
            line.append(self.row[path])
            path = path.rpartition("/")[0]
        return line

    def line_of(self, path: str) -> list[int]:
        """Rows of the queue and of all above it; nothing for a queue that does not exist (any more)."""
        return self.line[self.row[path]] if path in self.row else []

    def gives_back(self, path: str) -> bool:
        """Whether jobs of a queue may be stopped for those of another: it and all above it are preemptible."""
        return all(self.rows[row].preemptible for row in self.line_of(path))

    def _vector(self, res: Res | None, empty: int) -> list[int]:
        values = [empty] * len(self.dims)
        if res is None:
            return values
        stated = [(CPU, round(res.cpus * 1000)), (MEM, res.memory_bytes)]
        gpu = GPU if res.gpu_type is None else self._type_dim(res.gpu_type)
        stated += [(gpu, round(res.gpus * 1000))] if gpu is not None else []
        for dim, value in stated:
            if value > 0:
                values[dim] = value
        return values

    def _type_dim(self, name: str) -> int | None:
        return 3 + self.types.index(name) if name in self.types else None

    def need(self, shape: Shape) -> Vector:
        """The quota vector of a shape. Devices of any type, or of one of several, count in the sum over types only."""
        known = self._needs.get(shape)
        if known is None:
            known = self._needs[shape] = self._need(shape)
        return known

    def _need(self, shape: Shape) -> Vector:
        vector = np.zeros(len(self.dims), dtype=np.int64)
        for slot in shape.slots:
            milli = slot.gpus * 1000 + slot.milli
            vector[GPU] += milli
            vector[CPU] += slot.cpu_milli
            vector[MEM] += slot.mem
            if slot.type is not None and (dim := self._type_dim(slot.type)) is not None:
                vector[dim] += milli
        return vector

    def over_limit(
        self, used: Vector, by_user: Mapping[tuple[int, str], Vector], path: str, user: str, need: Vector
    ) -> OverLimit | None:
        """The first limit from the leaf up that ``need`` would pass, or None: of a queue, then of the user in one."""
        if self.unlimited:
            return None
        line = self.line_of(path)
        limits = [(row, used[row], self.limit[row], None) for row in line if self.limited[row]]
        nothing = np.zeros_like(need)
        limits += [
            (row, by_user.get((row, user), nothing), self.user_limit[row], user)
            for row in line
            if self.user_limited[row]
        ]
        for row, has, limit, whose in limits:
            over = np.flatnonzero((has + need > limit) & (need > 0))
            if len(over):
                dim = int(over[0])
                return OverLimit(
                    queue=self.rows[row].path,
                    dim=self.dims[dim],
                    used=int(has[dim]),
                    asked=int(need[dim]),
                    allowed=int(limit[dim]),
                    user=whose,
                )
        return None

    def passed(self, used: Vector, by_user: Mapping[tuple[int, str], Vector]) -> list[OverLimit]:
        """Limits that are below what is in use, as one that was lowered may be: of queues, then of users in them."""
        rows = [(row, has, self.limit[row], None) for row, has in enumerate(used)]
        rows += [(row, by_user[row, user], self.user_limit[row], user) for row, user in sorted(by_user)]
        return [
            OverLimit(
                queue=self.rows[row].path,
                dim=self.dims[dim],
                used=int(has[dim]),
                asked=0,
                allowed=int(limit[dim]),
                user=user,
            )
            for row, has, limit, user in rows
            for dim in np.flatnonzero(has > limit).tolist()
        ]

    def leaves_under(self, path: str) -> list[str]:
        """Paths of the leaves below a queue."""
        return [q.path for i, q in enumerate(self.rows) if self.leaf[i] and q.path.startswith(f"{path}/")]
