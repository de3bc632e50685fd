"""Training data: a static order whose cursor survives a resize, shards leased by a journal, a cache of files of a node.

The journal is a file in a folder that all workers see. Every change of the table is one line of JSON, appended under a
lock and replayed by the next worker, so any worker may die at any instruction: a partly written last line is truncated.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Final, Literal, Protocol, TypedDict

from rota.runtime import cache
from rota.runtime.clock import Clock, SystemClock, blocking_sleep
from rota.runtime.file_locks import locked, take_lock, try_lock
from rota.spec.errors import BadInput, Fenced, NotReachable, StoreUnavailable, TimedOut
from rota.spec.mixing import GOLDEN, MASK64, mix64
from rota.train.plan.hardware import Json

LOOK_S: Final = 0.05


class Cursor(TypedDict):
    """What a checkpoint keeps of a ``ShardTable``: counted samples stay counted, leased ones are given out again."""

    epoch: int
    fresh: int
    counted: int
    next_number: int
    returned: list[list[int]]
    worker_epochs: dict[str, int]


class StaticOrder:
    """Order of samples as a function of the global sample index, so the world may change at any step.

    ``rows`` serves ``fit``: what a step trains depends on the step alone, and a run that continues from a checkpoint
    continues its data, each sample once an epoch. ``take`` serves a loop of one's own, which keeps ``cursor`` = (epoch,
    index of the next global batch) in its checkpoint.
    """

    def __init__(self, samples: int, *, seed: int = 0, cursor: tuple[int, int] = (0, 0)) -> None:
        if samples < 1:
            raise BadInput(f"samples: {samples} is below 1")
        self._samples, self._seed, self.cursor = samples, seed, cursor

    def rows(self, step: int, batch: int, rows: slice) -> list[int]:
        """The samples of ``rows`` of the global batch of ``batch`` samples that ``step`` (from 0) trains."""
        return [self._sample(step * batch + row) for row in range(batch)[rows]]

    def take(self, global_batch: int, rank: int, world: int) -> list[int]:
        """This rank's samples of the next global batch; the cursor moves. Batches run over the end of an epoch."""
        epoch, index = self.cursor
        first = epoch * self._samples + index
        self.cursor = divmod(first + global_batch, self._samples)
        return [
            self._sample(first + at) for at in range(global_batch * rank // world, global_batch * (rank + 1) // world)
        ]

    def _sample(self, at: int) -> int:
        epoch, index = divmod(at, self._samples)
        return sample_at(index, self._samples, self._seed, epoch)


class ShardJournal:
    """A worker's access to the shard table in a folder. Raises Fenced when the worker was replaced.

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
        """Count the samples before ``offset``. Raises BadInput for one outside the lease, Fenced when the lease is
        over: these samples are not counted."""
        if not lease.offset <= offset <= lease.end:
            raise BadInput(f"offset: {offset} is not in {lease.offset} to {lease.end} of lease {lease.number}")
        moved = self._do({"do": "advance", "number": lease.number, "offset": offset})
        if not isinstance(moved, Lease):
            text = (
                f"lease {lease.number} of worker {lease.worker} is over: from sample {lease.offset} on it is another's"
            )
            raise Fenced(text, hint="drop what was computed from them and lease again")
        return moved

    def samples(self, lease: Lease, begin: int, end: int) -> list[int]:
        """The samples at positions ``[begin, end)`` of a lease. Raises BadInput for positions that it does not have."""
        if not lease.begin <= begin <= end <= lease.end:
            raise BadInput(
                f"positions: {begin} to {end} are not in {lease.begin} to {lease.end} of lease {lease.number}"
            )
        return [sample_at(at, self._spec.samples, self._spec.seed, lease.epoch) for at in range(begin, end)]

    def snapshot(self) -> Cursor:
        """The cursor of all workers, for a checkpoint."""
        with self._locked():
            return self._table.snapshot()

    def restore(self, kept: Cursor) -> None:
        """Roll all workers back to a snapshot, with the model: leases end, samples after it are trained again."""
        self._do({"do": "restore", "kept": kept})

    def _do(self, record: Json) -> object:
        with self._locked() as fd:
            return self._append(fd, {**record, "at": self._clock.wall_s()})

    def _append(self, fd: int, record: Json) -> object:
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
            take_lock(self._path, lambda: try_lock(fd))
            self._replay(fd)
            yield fd
        finally:
            os.close(fd)

    def _replay(self, fd: int) -> None:
        with open(fd, "rb", closefd=False) as file:
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    os.ftruncate(fd, self._read_to)  # its writer died in the middle and got no answer
                    return
                self._apply(json.loads(line))
                self._read_to += len(line)

    def _apply(self, record: Json) -> object:
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
                raise BadInput(f"{self._path}: not a record of a shard journal: {record}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What is dealt out: ``samples`` in shards of ``shard_size``, ``epochs`` times, in an order that ``seed`` gives.

    A lease ends ``lease_s`` seconds after it was last advanced.
    """

    samples: int
    shard_size: int
    epochs: int = 1
    seed: int = 0
    lease_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Positions ``[offset, end)`` of the order of data epoch ``epoch``; ``number`` is never used twice."""

    number: int
    epoch: int
    begin: int
    end: int
    offset: int
    worker: int
    worker_epoch: int
    deadline_s: float


@dataclass(slots=True, kw_only=True)
class ShardTable:
    """The shards of one data set. Methods that return None or False changed nothing; all times are given."""

    spec: DataSpec
    epoch: int = 0
    fresh: int = 0
    """Positions from here on were never leased in this epoch."""
    returned: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Rests ``(offset, end)`` of shards that came back."""
    leases: dict[int, Lease] = field(default_factory=dict[int, Lease])
    worker_epochs: dict[int, int] = field(default_factory=dict[int, int])
    counted: int = 0
    """Samples of this epoch that were counted."""
    next_number: int = 1

    def lease(self, worker: int, worker_epoch: int, now_s: float) -> Lease | Literal["WAIT", "END", "FENCED"]:
        """The next shard for a worker; WAIT while others hold the last ones, END after the last epoch."""
        if not self.join(worker, worker_epoch):
            return "FENCED"
        self.expire(now_s)
        if self.counted == self.spec.samples and self.epoch + 1 < self.spec.epochs:
            self.epoch, self.fresh, self.counted = self.epoch + 1, 0, 0
        if self.returned:
            begin, end = self.returned.pop(0)
        elif self.fresh < self.spec.samples:
            begin, end = self.fresh, min(self.fresh + self.spec.shard_size, self.spec.samples)
            self.fresh = end
        else:
            return "END" if self.counted == self.spec.samples else "WAIT"
        lease = Lease(
            number=self.next_number, epoch=self.epoch, begin=begin, end=end, offset=begin, worker=worker,
            worker_epoch=worker_epoch, deadline_s=now_s + self.spec.lease_s,
        )  # fmt: skip
        self.next_number += 1
        self.leases[lease.number] = lease
        return lease

    def advance(self, number: int, offset: int, now_s: float) -> Lease | None:
        """Count the samples up to ``offset``; the moved lease (perhaps complete), None when its holder lost it."""
        lease = self.leases.get(number)
        if lease is None or not lease.offset <= offset <= lease.end:
            return None
        self.counted += offset - lease.offset
        moved = replace(lease, offset=offset, deadline_s=now_s + self.spec.lease_s)
        if offset == lease.end:
            del self.leases[number]
        else:
            self.leases[number] = moved
        return moved

    def join(self, worker: int, worker_epoch: int) -> bool:
        """A worker came under an epoch: what it held under older ones comes back. False for an old epoch."""
        known = self.worker_epochs.get(worker, 0)
        if worker_epoch < known:
            return False
        self.worker_epochs[worker] = worker_epoch
        if worker_epoch > known:
            self._give_back([one for one in self.leases.values() if one.worker == worker])
        return True

    def expire(self, now_s: float) -> None:
        """Take back the leases that ran out."""
        self._give_back([one for one in self.leases.values() if one.deadline_s < now_s])

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            del self.leases[lease.number]
            self.returned.append((lease.offset, lease.end))

    def snapshot(self) -> Cursor:
        """The cursor, for a checkpoint."""
        rests = sorted([*self.returned, *((one.offset, one.end) for one in self.leases.values())])
        return {
            "epoch": self.epoch, "fresh": self.fresh, "counted": self.counted, "next_number": self.next_number,
            "returned": [list(one) for one in rests],
            "worker_epochs": {str(worker): epoch for worker, epoch in self.worker_epochs.items()},
        }  # fmt: skip

    def restore(self, kept: Cursor) -> None:
        """Roll back to a snapshot: every lease ends. Numbers and worker epochs never go back: old leases stay dead."""
        self.epoch, self.fresh, self.counted = kept["epoch"], kept["fresh"], kept["counted"]
        self.next_number = max(self.next_number, kept["next_number"])
        self.returned = [(begin, end) for begin, end in kept["returned"]]
        self.leases.clear()
        for worker, epoch in kept["worker_epochs"].items():
            self.worker_epochs[int(worker)] = max(self.worker_epochs.get(int(worker), 0), epoch)


def sample_at(position: int, samples: int, seed: int, epoch: int) -> int:
    """The sample at a position of the order of an epoch: a permutation of ``range(samples)`` in constant memory.

    Four rounds of a Feistel network over the next even power of two, walked until it falls inside (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3).
    """
    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    mask, key = (1 << half) - 1, mix(seed ^ mix(epoch + 1))
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            left, right = right, left ^ (mix(right ^ key ^ (turn << 60)) & mask)
        position = left << half | right
        if position < samples:
            return position


def mix(value: int) -> int:
    """A step of SplitMix64; the seed of a sample is ``mix(seed ^ mix(epoch ^ mix(index)))``."""
    return mix64((value + GOLDEN) & MASK64)


DEFAULT_BYTES_MAX: Final = 20 * 2**30
_PART: Final = ".part"


class FileSystem(Protocol):
    """What the cache needs of a file system of fsspec."""

    def open(self, path: str, mode: str) -> IO[bytes]:
        """A file to read."""
        ...


class DataCache:
    """Files of one node under ``folder``, addressed by source and version; at most ``bytes_max`` bytes are kept.

    A file in use by an open descriptor or mapping stays readable when it is evicted. Processes share the folder: one
    fetches, the others wait for its lock for up to ``lock_s``; its death frees it.
    """

    def __init__(self, folder: Path, *, bytes_max: int = DEFAULT_BYTES_MAX, lock_s: float = 3600.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._bytes_max, self._lock_s = folder, bytes_max, lock_s

    def fetch(self, uri: str) -> Path:
        """The local file of what ``uri`` (any fsspec URL, or a path) holds now; the newest one had, if unreachable.

        Raises BadInput for a file above ``bytes_max``, NotReachable when neither source nor copy can be read,
        TimedOut when another process fetches it for more than ``lock_s`` seconds.
        """
        source = hashlib.sha256(uri.encode()).hexdigest()[:24]
        try:
            files, path = importlib.import_module("fsspec.core").url_to_fs(uri)  # which comes with torch
            facts = files.info(path)
        except OSError as error:
            return self._newest(source, uri, error)
        size = int(facts.get("size") or 0)
        if size > self._bytes_max:
            raise BadInput(f"{uri}: {size} bytes, the cache holds {self._bytes_max}", hint="raise bytes_max")
        mark = str(facts.get("ETag") or facts.get("etag") or (size, facts.get("mtime") or facts.get("LastModified")))
        wanted = self._folder / f"{source}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"
        with self._locked(source):
            try:
                if not wanted.exists():
                    self._download(files, path, wanted, size)
                os.utime(wanted)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):  # of this node, not of the source
                    raise
                return self._newest(source, uri, error)
        self._evict(keep=wanted)
        return wanted

    def _newest(self, source: str, uri: str, error: OSError) -> Path:
        copies = [one for one in cache.files(self._folder, f"{source}-*") if one[2].suffix != _PART]
        if not copies:
            raise NotReachable(f"{uri}: {error}, and this node has no copy") from error
        return max(copies)[2]

    def _download(self, files: FileSystem, path: str, wanted: Path, size: int) -> None:
        part = wanted.with_suffix(_PART)  # of a dead process, if it exists: written anew
        with files.open(path, "rb") as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        if size and part.stat().st_size != size:
            raise NotReachable(f"{path}: {part.stat().st_size} of {size} bytes came", hint="fetch it again")
        part.replace(wanted)

    def _evict(self, keep: Path) -> None:
        with self._locked("evict"):
            there = [one for one in cache.files(self._folder) if one[2].suffix not in (_PART, ".lock")]
            cache.remove_oldest(there, self._bytes_max, lambda path: path != keep and cache.removed(path))

    def _locked(self, name: str) -> AbstractContextManager[None]:
        return locked(self._folder / f"{name}.lock", wait_s=self._lock_s)
