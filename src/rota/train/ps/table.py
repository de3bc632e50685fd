"""Parameters of one server shard with their optimizer state: a dense range, and sparse rows made when first asked for.

Updates are those of torch.optim with equal arguments (Adam without amsgrad, Adagrad without decay); rows that a push
does not name stay as they are, so moments and step counts of Adam are per row. FTRL: McMahan et al., "Ad Click
Prediction: a View from the Trenches" (KDD 2013), algorithm 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rota.spec.errors import BadInput, TrainError
from rota.spec.mixing import GOLDEN, mix64

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
State: TypeAlias = "dict[str, Any]"
"""A snapshot: numbers, arrays or tensors by name, and snapshots in it."""
Array: TypeAlias = "np.ndarray[Any, Any]"
"""An array whose dtype is that which was sent."""
_GROW: Final = 1024


class TableFull(TrainError):
    """A table would take more than its ``bytes_max``; nothing of the request was done. Fields: table, bytes, limit."""

    code, http = "PS_TABLE_FULL", 507


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizer:
    """How gradients change weights. ``l1`` and ``l2`` are of FTRL, where ``lr`` is alpha and beta is 1."""

    kind: Literal["sgd", "adagrad", "adam", "ftrl"] = "sgd"
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float | None = None
    l1: float = 0.0
    l2: float = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state arrays, each of the shape of the weights."""
        return {"sgd": (), "adagrad": ("sum",), "adam": ("mean", "square"), "ftrl": ("z", "n")}[self.kind]

    def update(self, weights: Floats, state: Mapping[str, Floats], grads: Floats, steps: int | Ids) -> None:
        """Change weights and state in place; ``steps`` counts updates from 1, per row or for all."""
        match self.kind:
            case "sgd":
                weights -= self.lr * grads
            case "adagrad":
                state["sum"][:] += grads * grads
                weights -= self.lr * grads / (np.sqrt(state["sum"]) + (1e-10 if self.eps is None else self.eps))
            case "adam":
                self._adam(weights, state["mean"], state["square"], grads, steps)
            case "ftrl":
                self._ftrl(weights, state["z"], state["n"], grads)

    def _adam(self, weights: Floats, mean: Floats, square: Floats, grads: Floats, steps: int | Ids) -> None:
        first, second = self.betas
        mean += (1 - first) * (grads - mean)
        square *= second
        square += (1 - second) * grads * grads
        root = np.sqrt(square) / np.sqrt(1 - second**steps)
        weights -= (self.lr / (1 - first**steps) * mean / (root + (1e-8 if self.eps is None else self.eps))).astype(
            "f4"
        )

    def _ftrl(self, weights: Floats, z: Floats, n: Floats, grads: Floats) -> None:
        grown = n + grads * grads
        z += grads - (np.sqrt(grown) - np.sqrt(n)) / self.lr * weights
        n[:] = grown
        shrunk = np.sign(z) * self.l1 - z
        weights[:] = np.where(np.abs(z) <= self.l1, 0.0, shrunk / ((1 + np.sqrt(n)) / self.lr + self.l2))


SGD: Final = RowOptimizer()


class Dense:
    """A contiguous range of the flat parameter vector."""

    def __init__(self, weights: Floats, optimizer: RowOptimizer) -> None:
        self.weights, self._optimizer, self.steps = weights.astype(np.float32), optimizer, 0
        self._state = {name: np.zeros_like(self.weights) for name in optimizer.states}

    def apply(self, grads: Floats) -> None:
        """One update of the whole range."""
        self.steps += 1
        self._optimizer.update(self.weights, self._state, grads, self.steps)

    def snapshot(self) -> State:
        """Copies of all arrays."""
        return {"weights": self.weights.copy(), "steps": self.steps, **{k: v.copy() for k, v in self._state.items()}}

    def restore(self, kept: State) -> None:
        """Inverse of ``snapshot``."""
        self.weights, self.steps = np.array(kept["weights"], np.float32), int(kept["steps"])
        self._state = {name: np.array(kept[name], np.float32) for name in self._optimizer.states}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A sparse table: rows of ``dim`` float32, first values uniform in +-``scale`` and a function of (seed, name, id).

    A row is trained from its ``min_count``-th gradient on, and forgotten when ``ttl_steps`` updates of the shard did
    not touch it (0: never). ``bytes_max`` bounds weights and state (0: no bound).
    """

    name: str
    dim: int
    optimizer: RowOptimizer = SGD
    scale: float = 0.01
    seed: int = 0
    min_count: int = 1
    ttl_steps: int = 0
    bytes_max: int = 0


class ParameterTable:
    """The live rows of one table on one shard."""

    def __init__(self, spec: TableSpec) -> None:
        if spec.dim < 1:
            raise BadInput(f"table {spec.name!r}: dim {spec.dim} is below 1")
        self.spec, self.clock = spec, 0
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._arrays: dict[str, Floats] = {n: np.zeros((0, spec.dim), "f4") for n in ("w", *spec.optimizer.states)}
        self._steps, self._seen, self._used = (np.zeros(0, np.int64) for _ in range(3))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Bytes that live rows take, weights and optimizer state."""
        return len(self._rows) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return 4 * self.spec.dim * len(self._arrays) + 24

    def pull(self, ids: Ids) -> Floats:
        """The rows of ``ids`` [N, dim]; new ones are made. Raises TableFull."""
        at = self._find(ids)  # first: it may replace the arrays
        return self._arrays["w"][at]

    def push(self, ids: Ids, grads: Floats) -> None:
        """Apply gradients [N, dim]; those of equal ids are summed first."""
        self.clock += 1
        if len(ids):
            distinct, back = np.unique(ids, return_inverse=True)
            summed = np.zeros((len(distinct), self.spec.dim), np.float32)
            np.add.at(summed, back, grads)
            self._update(self._find(distinct, limited=False), summed)  # a pull has let them in
        if self.spec.ttl_steps and self.clock % self.spec.ttl_steps == 0:
            self._expire()

    def _update(self, at: NDArray[np.int64], grads: Floats) -> None:
        self._seen[at] += 1
        self._used[at] = self.clock
        admitted = self._seen[at] >= self.spec.min_count
        at, grads = at[admitted], grads[admitted]
        self._steps[at] += 1
        picked = {name: array[at] for name, array in self._arrays.items()}
        weights = picked.pop("w")
        self.spec.optimizer.update(weights, picked, grads, self._steps[at][:, None])
        for name, array in {"w": weights, **picked}.items():
            self._arrays[name][at] = array

    def _find(self, ids: Ids, *, limited: bool = True) -> NDArray[np.int64]:
        known = self._rows
        new = [one for one in dict.fromkeys(ids.tolist()) if one not in known]
        if new:
            self._make(new, self.spec.bytes_max if limited else 0)
        return np.fromiter((known[one] for one in ids.tolist()), np.int64, len(ids))

    def _make(self, new: list[int], limit: int) -> None:
        needed = (len(self._rows) + len(new)) * self._row_bytes
        if limit and needed > limit:
            text = f"table {self.spec.name!r}: {len(new)} more rows need {needed} bytes, bytes_max is {limit}"
            hint = "raise bytes_max, add servers, or set min_count or ttl_steps"
            raise TableFull(text, hint=hint, table=self.spec.name, bytes=needed, limit=limit)
        short = len(new) - len(self._free)
        if short > 0:
            self._grow(max(short, _GROW, len(self._seen)))
        at = np.array([self._free.pop() for _ in new], np.int64)
        self._rows.update(zip(new, at.tolist(), strict=True))
        for array in (*self._arrays.values(), self._steps, self._seen):
            array[at] = 0
        self._used[at] = self.clock
        self._arrays["w"][at] = first_rows(self.spec, np.array(new, np.int64))

    def _grow(self, more: int) -> None:
        size = len(self._seen)
        self._free.extend(range(size + more - 1, size - 1, -1))
        blank = np.zeros((more, self.spec.dim), np.float32)
        self._arrays = {name: np.concatenate([array, blank]) for name, array in self._arrays.items()}
        self._steps, self._seen, self._used = (
            np.concatenate([one, np.zeros(more, np.int64)]) for one in (self._steps, self._seen, self._used)
        )

    def _expire(self) -> None:
        old = [one for one, at in self._rows.items() if self.clock - self._used[at] >= self.spec.ttl_steps]
        self._free.extend(self._rows.pop(one) for one in old)

    def snapshot(self) -> State:
        """Live rows in order of their ids; also what ``export`` writes."""
        ids = np.array(sorted(self._rows), np.int64)
        at = np.fromiter((self._rows[one] for one in ids.tolist()), np.int64, len(ids))
        arrays = {name: array[at] for name, array in self._arrays.items()}
        return {
            "ids": ids, "clock": self.clock, "steps": self._steps[at], "seen": self._seen[at], "used": self._used[at],
            **arrays,
        }  # fmt: skip

    def restore(self, kept: State) -> None:
        """Inverse of ``snapshot``."""
        self.__init__(self.spec)
        ids = np.asarray(kept["ids"], np.int64)
        self.clock = int(kept["clock"])
        at = self._find(ids, limited=False)
        for name, array in self._arrays.items():
            array[at] = np.asarray(kept[name])
        self._steps[at], self._seen[at], self._used[at] = (np.asarray(kept[k]) for k in ("steps", "seen", "used"))


def first_rows(spec: TableSpec, ids: Ids) -> Floats:
    """First values [N, dim] of rows: the same on any server at any time.

    Uniform numbers by SplitMix64 of (seed and name, id, column).
    """
    start = np.uint64((zlib.crc32(spec.name.encode()) << 32 | (spec.seed & 0xFFFFFFFF)) & (2**64 - 1))
    of_row = mix64(ids.astype(np.uint64) + start)
    of_cell = mix64(of_row[:, None] + np.uint64(GOLDEN) * np.arange(1, spec.dim + 1, dtype=np.uint64))
    uniform = (of_cell >> np.uint64(40)).astype(np.float32) / 2**23 - 1
    return uniform.astype(np.float32) * np.float32(spec.scale)


VIRTUAL_SHARDS: Final = 256


def owners(ids: Ids, servers: int) -> NDArray[np.int64]:
    """The server of each id: hash to 256 virtual shards, dealt in ranges, so that a new server moves whole ones."""
    shard = (mix64(ids.astype(np.uint64) + np.uint64(GOLDEN)) % np.uint64(VIRTUAL_SHARDS)).astype(np.int64)
    return shard * servers // VIRTUAL_SHARDS


def dense_range(total: int, servers: int, server: int) -> tuple[int, int]:
    """``[begin, end)`` of the flat parameter vector that a server keeps."""
    return total * server // servers, total * (server + 1) // servers
