"""Checkpoints: saved in the background, committed by one rename, resharded on load; copies of steps in shared memory.

A checkpoint is the folder ``step-<step>.<try>`` with what PyTorch's distributed checkpoint wrote and ``manifest.json``:
size and SHA-256 of every file, and what the caller adds. Files are written into a draft, synced, named in the manifest,
and the draft is renamed: a folder without a draft's name is complete; the checksums show later damage.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypedDict, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rota.spec.errors import BadInput, TensorError, first_of
from rota.tensors.api.store import Plane
from rota.train.parallel.mesh import local
from rota.train.plan.hardware import Json

MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 20
WAIT_S = 600.0
"""After this time without an answer of the others a rank gives a save up."""
_FOLDER = re.compile(r"^step-(\d+)\.(\d+)$")
_DRAFT = ".draft-"
_PROBE = ".probe-"

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")


class FileSum(TypedDict):
    """Size and SHA-256 of one file of a checkpoint."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """What ``manifest.json`` says, beside its own SHA-256."""

    api: str
    kind: str
    step: int
    files: dict[str, FileSum]
    extra: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """The newest good checkpoint: its step, what the caller had added, and why newer ones were refused."""

    path: Path
    step: int
    extra: Json
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class _Save:
    thread: threading.Thread
    errors: list[BaseException] = field(default_factory=list[BaseException])


class Checkpoints:
    """The checkpoints of one training run in one folder that all ranks see.

    Methods are collective when there is a process group; they use one of their own, so that a save may run while
    the model trains. One save at a time: the next one waits for it. As a context it is closed at the end.
    Raises BadInput for a folder in which some rank cannot write, before anything is trained for it.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise BadInput(f"keep: {keep} is below 1, so that no checkpoint would stay")
        self.folder, self.keep = folder, keep
        self._group = own_group()
        self._rank = self._group.rank() if self._group else 0
        self._staged: Tensors = {}
        self._saving: _Save | None = None
        try:
            self._agree(lambda: _remove_drafts(folder))
            self._gather(lambda: _try_to_write(folder / f"{_PROBE}{self._rank}"))
        except OSError as error:
            raise BadInput(
                f"checkpoint: {folder} cannot be written: {error}",
                hint="give a folder that all ranks may write, with room for checkpoints",
            ) from error

    def save(self, tensors: Tensors, *, step: int, extra: Json, wait: bool = False) -> None:
        """Copy ``tensors`` (the only part that blocks), then write and commit them in the background.

        ``extra`` is JSON. Raises what an earlier save failed with, once: the older checkpoints are still there.
        """
        self.wait()
        self._stage(tensors)
        errors: list[BaseException] = []

        def write() -> None:
            try:
                self._write(step, dict(extra))
            except Exception as error:  # noqa: BLE001 - the edge of this thread: raised by the next save or wait
                errors.append(error)

        self._saving = _Save(threading.Thread(target=write, name="checkpoint", daemon=True), errors)
        self._saving.thread.start()
        if wait:
            self.wait()

    @property
    def busy(self) -> bool:
        """True while a save is being written."""
        return self._saving is not None and self._saving.thread.is_alive()

    def wait(self) -> None:
        """Until the save that runs is committed. Raises OSError or what else it failed with."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.thread.join()
            if saving.errors:
                raise saving.errors[0]

    def close(self) -> None:
        """Wait for the save that runs, then give its process group back."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except (OSError, RuntimeError):
            if kind is None:  # else the error that ended training is the one raised
                raise

    def find(self) -> SavedCheckpoint | None:
        """The newest checkpoint whose files are all as the manifest says; all ranks get the same. None in a folder
        without any.

        Raises BadInput when there are some and all are damaged: the caller decides to begin anew, not this reader.
        """
        paths = self._agree(lambda: candidates(self.folder))
        return newest(self.folder, paths, lambda path: [
            fault for share in self._gather(functools.partial(verify, path, self._rank, self._size)) for fault in share
        ])  # fmt: skip

    def load(self, found: SavedCheckpoint, tensors: Tensors) -> None:
        """Fill ``tensors`` in place, each with the part of the saved one that it is a shard of.

        Raises BadInput, on every rank, for a tensor that the checkpoint lacks or that has another shape, and for
        weights in it (``model.<name>``) that no rank has: it is of another model.
        """
        reader = FileSystemReader(found.path)
        saved = reader.read_metadata().state_dict_metadata
        shares = self._gather(lambda: (list(tensors), _unlike(saved, tensors)))
        if faults := [fault for _, share in shares for fault in share]:
            raise BadInput(
                f"checkpoint {found.path.name}: {first_of(faults, 1)}",
                hint="build the model that the checkpoint was written from, or give an empty folder",
            )
        wanted = {name for names, _ in shares for name in names}
        if unknown := sorted(name for name in saved if name.startswith("model.") and name not in wanted):
            raise BadInput(
                f"checkpoint {found.path.name}: this model has no {first_of(unknown)}",
                hint="build the model that the checkpoint was written from, or give an empty folder",
            )
        with _as_os_error(f"checkpoint {found.path.name}"):
            load(dict(tensors), storage_reader=reader, process_group=self._group, no_dist=self._group is None)

    def find_bytes(self, found: SavedCheckpoint, name: str) -> torch.Tensor | None:
        """The flat tensor of bytes that was saved as ``name``, of any length; None without one. Not collective."""
        reader = FileSystemReader(found.path)
        kept = reader.read_metadata().state_dict_metadata.get(name)
        if not isinstance(kept, TensorStorageMetadata):
            return None
        wanted = torch.empty(kept.size, dtype=torch.uint8)
        with _as_os_error(f"checkpoint {found.path.name}"):
            load({name: wanted}, storage_reader=reader, no_dist=True)
        return wanted

    @property
    def _size(self) -> int:
        return self._group.size() if self._group else 1

    def _stage(self, tensors: Tensors) -> None:
        """Copy into buffers that are kept from save to save."""
        if {name: one.shape for name, one in self._staged.items()} != {
            name: one.shape for name, one in tensors.items()
        }:
            self._staged = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            local(self._staged[name]).copy_(local(tensor.detach()))

    def _write(self, step: int, extra: Json) -> None:
        draft = self.folder / f"{_DRAFT}{step}"
        self._agree(lambda: _fresh(draft))
        with _as_os_error(f"{self.folder}: step {step}", self.folder):
            save(
                self._staged,
                storage_writer=FileSystemWriter(draft, sync_files=True),
                process_group=self._group,
                no_dist=self._group is None,
            )
        mine = sorted(draft.glob(f"__{self._rank}_*")) + ([draft / ".metadata"] if self._rank == 0 else [])
        shares = self._gather(lambda: {path.name: _sum(path) for path in mine})
        sums = {name: entry for share in shares for name, entry in share.items()}
        self._agree(lambda: commit(self.folder, draft, step=step, files=sums, extra=extra, keep=self.keep))

    def _agree(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on all ranks; its OSError too."""
        box: list[T | OSError | None] = [None, None]
        if self._rank == 0:
            try:
                box[0] = decide()
            except OSError as error:
                box[1] = error
        if self._group is not None:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        if isinstance(box[1], OSError):
            raise box[1]
        return cast("T", box[0])

    def _gather(self, compute: Callable[[], T]) -> list[T]:
        """What each rank computes, on all ranks; the first OSError of any."""
        mine: tuple[T | None, OSError | None]
        try:
            mine = compute(), None
        except OSError as error:
            mine = None, error
        parts = [mine] * self._size
        if self._group is not None:
            dist.all_gather_object(parts, mine, group=self._group)
        for _, error in parts:
            if error is not None:
                raise error
        return [cast("T", value) for value, _ in parts]


def _unlike(saved: Mapping[str, object], tensors: Tensors) -> list[str]:
    """Tensors that are not in a checkpoint, or there with another shape."""
    faults: list[str] = []
    for name, tensor in tensors.items():
        shape = getattr(saved.get(name), "size", None)
        if shape != tensor.shape:
            was = "is not in it" if shape is None else f"has shape {tuple(shape)} in it"
            faults.append(f"{name} of shape {tuple(tensor.shape)} {was}")
    return faults


def own_group() -> dist.ProcessGroup | None:
    """A group of all ranks for saves alone; None in a world of one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
    assert isinstance(made, dist.ProcessGroup)
    return made


def candidates(folder: Path) -> list[Path]:
    """Committed checkpoints, newest first."""
    found = [((int(match[1]), int(match[2])), path) for path in folder.iterdir() if (match := _FOLDER.match(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def newest(folder: Path, paths: Sequence[Path], faults_of: Callable[[Path], Sequence[str]]) -> SavedCheckpoint | None:
    """The first of ``paths`` without faults; None without paths. Raises BadInput when all are damaged."""
    refused: list[str] = []
    for path in paths:
        if not (faults := faults_of(path)):
            manifest = _manifest(path)
            return SavedCheckpoint(path=path, step=manifest["step"], extra=manifest["extra"], refused=tuple(refused))
        refused.append(f"{path.name}: {faults[0]}")
    if refused:
        raise BadInput(
            f"checkpoint: all {len(refused)} in {folder} are damaged: {'; '.join(refused)}",
            hint="restore their files from a copy; to begin at step 0, give an empty folder or move these away",
        )
    return None


def verify(path: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """Faults of a checkpoint; each rank reads its share of the files."""
    try:
        files = _manifest(path)["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    faults: list[str] = []
    for name, entry in sorted(files.items())[rank::ranks]:
        try:
            found = _sum(path / name)
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != entry:
            faults.append(
                f"{name} has {found['bytes']} bytes with SHA-256 {found['sha256'][:12]}, "
                f"the manifest says {entry['bytes']} with {entry['sha256'][:12]}"
            )
    return faults


def _manifest(path: Path) -> Manifest:
    """Raises ValueError for one that is not as it was written, and what json and its shape do."""
    kept = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if kept.pop("sha256") != _text_sum(kept):
        raise ValueError("its own SHA-256 is another")
    return kept


def _text_sum(kept: Json) -> str:
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def commit(folder: Path, draft: Path, *, step: int, files: Mapping[str, FileSum], extra: Json, keep: int) -> Path:
    """Write the manifest of a complete draft, rename it, and remove all but the ``keep`` newest."""
    kept = {"api": "rota/v1", "kind": "TrainCheckpoint", "step": step, "files": files, "extra": extra}
    kept = json.loads(json.dumps(kept))
    with (draft / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**kept, "sha256": _text_sum(kept)}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(draft)
    tries = [
        int(match[2]) for path in folder.iterdir() if (match := _FOLDER.match(path.name)) and int(match[1]) == step
    ]
    path = folder / f"step-{step:08d}.{max(tries, default=0) + 1}"
    draft.rename(path)
    _sync(folder)
    for old in candidates(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return path


@contextmanager
def _as_os_error(what: str, written: Path | None = None) -> Iterator[None]:
    """torch's CheckpointException is not an Exception: it would pass every ``except Exception`` unseen.

    What it says of a full disk is a position in a file: an error of ``written`` has the room that is left there.
    """
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in error.failures.items())
        room = f" ({shutil.disk_usage(written).free / 2**20:.1f} MiB free)" if written else ""
        raise OSError(f"{what}{room}: {causes}") from error


def _remove_drafts(folder: Path) -> None:
    """Make the folder, without what a save left that did not end."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{_DRAFT}*"):
        shutil.rmtree(old, ignore_errors=True)


def _try_to_write(path: Path) -> None:
    try:
        path.write_bytes(b"rota")
    finally:
        path.unlink(missing_ok=True)


def _fresh(draft: Path) -> None:
    """An empty draft; those of saves that failed give their room back."""
    _remove_drafts(draft.parent)
    draft.mkdir()


def _sync(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(path: Path) -> FileSum:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


KEPT = 2
"""The step being copied and the one before it: until every rank has copied, the older is the truth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheckpoint:
    """The newest step of which every rank's part is in memory."""

    step: int
    extra: Json


class MemoryCheckpoints:
    """The shards of one run on this machine as one group of the tensor store: a step is visible with its last part.

    ``rank`` is this process in the world, ``part`` = (place, processes) on this machine.

    Shards stay as they lie, so only the same plan finds them; for another one the copy on disk is resharded.
    """

    def __init__(self, plane: Plane, run: str, *, plan: str, rank: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        self._plane, self._group, self._plan = plane, f"ckpt/{run}", plan
        self._rank, self._part = rank, part

    def save(self, tensors: Tensors, *, step: int, extra: Json) -> None:
        """Copy this rank's tensors; blocks for the copy alone. Raises TensorError when memory is full."""
        self._plane.publish_group(
            self._group,
            {f"{self._rank}/{name}": local(tensor) for name, tensor in tensors.items()},
            step=step,
            part=self._part,
            retain=KEPT,
            meta={"plan": self._plan, "extra": dict(extra)},
        )

    def find(self) -> MemoryCheckpoint | None:
        """The newest whole step that was copied under the same plan; None without one."""
        try:
            found = self._plane.get_group(self._group)
        except TensorError:
            return None
        metas = found.meta if isinstance(found.meta, list) else [found.meta]  # one part alone comes without a list
        mine = any(name.startswith(f"{self._rank}/") for name in found)
        if not mine or {meta["plan"] for meta in metas} != {self._plan}:
            return None
        return MemoryCheckpoint(step=found.step, extra=metas[0]["extra"])

    def load(self, held: MemoryCheckpoint, tensors: Tensors) -> None:
        """Fill ``tensors`` in place. Raises TensorError when the step is gone, BadInput when it is of another model."""
        found, mine = self._plane.get_group(self._group, step=held.step), f"{self._rank}/"
        kept = {name.removeprefix(mine): tuple(found[name].shape) for name in found if name.startswith(mine)}
        unlike = [name for name, one in tensors.items() if kept.get(name) != tuple(local(one).shape)]
        if unlike := unlike + [name for name in kept if name.startswith("model.") and name not in tensors]:
            raise BadInput(
                f"memory: the copy of step {held.step} is of another model: {first_of(unlike, 1)}",
                hint="give the run another name, fit(memory=...), or build the model that was copied",
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                local(tensor).copy_(found[f"{self._rank}/{name}"])

    def find_tensor(self, held: MemoryCheckpoint, name: str) -> torch.Tensor | None:
        """What this rank kept as ``name``; None without it. Raises TensorError when the step is gone."""
        found = self._plane.get_group(self._group, step=held.step)
        full = f"{self._rank}/{name}"
        return found[full].clone() if full in found else None

    def drop(self) -> None:
        """Forget everything: the run continues from an older step."""
        self._plane.delete(self._group, missing_ok=True)
