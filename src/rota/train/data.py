"""Data for training: a static order whose cursor survives a resize, and shards by lease through a shared journal.

The journal is a file in a folder that all workers see. Every change of the table is one line of JSON, appended under a
lock and replayed by whoever comes next, so any worker may die at any instruction: a line that was cut is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rota.runtime.clock import Clock, SystemClock, blocking_sleep
from rota.spec.errors import BadInput, Fenced, StoreUnavailable, TimedOut
from rota.train.shards import DataSpec, Lease, ShardTable, sample_at

LOOK_S: Final = 0.05


class StaticOrder:
    """The samples of a step are a function of the global sample index, so the world may change at any step.

    ``cursor`` = (epoch, index) says where the next global batch starts; keep it in the checkpoint.
    """

    def __init__(self, samples: int, *, seed: int = 0, cursor: tuple[int, int] = (0, 0)) -> None:
        if samples < 1:
            raise BadInput(f"samples: {samples} is below 1")
        self._samples, self._seed, self.cursor = samples, seed, cursor

    def take(self, global_batch: int, rank: int, world: int) -> list[int]:
        """This rank's samples of the next global batch; the cursor moves. Batches run over the end of an epoch."""
        epoch, first = self.cursor
        mine = range(first + global_batch * rank // world, first + global_batch * (rank + 1) // world)
        after = first + global_batch
        self.cursor = epoch + after // self._samples, after % self._samples
        places = [(epoch + at // self._samples, at % self._samples) for at in mine]
        return [sample_at(at, self._samples, self._seed, in_epoch) for in_epoch, at in places]


class ShardJournal:
    """One worker's door to the shard table of a folder. Raises Fenced when the worker was replaced.

    ``durable`` makes each change survive a power cut (fsync); without it, changes survive the death of any process.
    """

    def __init__(
        self, folder: Path, spec: DataSpec, *, worker: int, epoch: int = 1, durable: bool = False,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        if spec.samples < 1 or spec.shard_size < 1:
            raise BadInput(f"data: {spec.samples} samples in shards of {spec.shard_size}: both are at least 1")
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._spec = folder / "shards.jsonl", spec
        self._worker, self._epoch, self._durable = worker, epoch, durable
        self._clock = clock or SystemClock()
        self._table, self._read_to = ShardTable(spec=spec), 0
        with self._locked() as fd:
            if self._read_to == 0:
                self._append(fd, {"spec": asdict(spec)})
            self._append(fd, {"do": "join", "worker": worker, "epoch": epoch})

    def lease(self, timeout_s: float = 600.0) -> Lease | None:
        """The next shard, None after the last epoch; waits while others hold the last ones. Raises TimedOut, Fenced."""
        end_s = self._clock.monotonic_s() + timeout_s
        while True:
            found = self._do({"do": "lease", "worker": self._worker, "epoch": self._epoch})
            if isinstance(found, Lease):
                return found
            if found == "END":
                return None
            if found == "FENCED":
                raise Fenced(f"worker {self._worker}: epoch {self._epoch} was replaced", hint="leave")
            if self._clock.monotonic_s() > end_s:
                held = {one.worker for one in self._table.leases.values()}
                raise TimedOut(f"no shard in {timeout_s:g} s: workers {sorted(held)} hold the last ones")
            blocking_sleep(LOOK_S)

    def advance(self, lease: Lease, offset: int) -> Lease:
        """Count the samples before ``offset``. Raises Fenced when the lease ran out: these samples are not counted."""
        moved = self._do({"do": "advance", "number": lease.number, "offset": offset})
        if not isinstance(moved, Lease):
            text = (
                f"lease {lease.number} of worker {lease.worker} is over: from sample {lease.offset} on it is another's"
            )
            raise Fenced(text, hint="drop what was computed from them and lease again")
        return moved

    def samples(self, lease: Lease, begin: int, end: int) -> list[int]:
        """The samples at positions ``[begin, end)`` of a lease."""
        return [sample_at(at, self._spec.samples, self._spec.seed, lease.epoch) for at in range(begin, end)]

    def snapshot(self) -> dict[str, Any]:
        """The cursor of all workers, for a checkpoint."""
        with self._locked():
            return self._table.snapshot()

    def restore(self, kept: dict[str, Any]) -> None:
        """Roll all workers back to a snapshot, with the model: leases end, samples after it are trained again."""
        self._do({"do": "restore", "kept": kept})

    def _do(self, record: dict[str, Any]) -> Any:
        with self._locked() as fd:
            return self._append(fd, {**record, "at": self._clock.wall_s()})

    def _append(self, fd: int, record: dict[str, Any]) -> Any:
        """Write the record, then act on it; a record that changes nothing is not kept."""
        before = self._table.snapshot(), dict(self._table.leases)
        found = self._apply(record)
        if record.get("do") in ("lease", "advance") and before == (self._table.snapshot(), self._table.leases):
            return found
        line = json.dumps(record).encode() + b"\n"
        try:
            if os.pwrite(fd, line, self._read_to) != len(line):
                raise OSError("no room for another record")
            if self._durable:
                os.fsync(fd)
        except OSError as error:
            with suppress(OSError):  # a part of a line is also cut off by the next reader
                os.ftruncate(fd, self._read_to)
            self._table, self._read_to = ShardTable(spec=self._spec), 0  # what was decided does not hold
            raise StoreUnavailable(f"{self._path}: {error}") from error
        self._read_to += len(line)
        return found

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the journal alone, with this worker's table up to date."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._replay(fd)
            yield fd
        finally:
            os.close(fd)

    def _replay(self, fd: int) -> None:
        with open(fd, "rb", closefd=False) as file:
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    os.ftruncate(fd, self._read_to)  # its writer died in the middle and was told nothing
                    return
                self._apply(json.loads(line))
                self._read_to += len(line)

    def _apply(self, record: dict[str, Any]) -> Any:
        table = self._table
        match record:
            case {"spec": given}:
                if DataSpec(**given) != self._spec:
                    hint = "use another folder for another data set"
                    raise BadInput(f"{self._path} is of {given}, not of {asdict(self._spec)}", hint=hint)
                return None
            case {"do": "join", "worker": worker, "epoch": epoch}:
                return table.join(worker, epoch)
            case {"do": "lease", "worker": worker, "epoch": epoch, "at": now_s}:
                return table.lease(worker, epoch, now_s)
            case {"do": "advance", "number": number, "offset": offset, "at": now_s}:
                return table.advance(number, offset, now_s)
            case {"do": "restore", "kept": kept}:
                return table.restore(kept)
            case _:
                raise BadInput(f"{self._path}: no record of a shard journal: {record}")
