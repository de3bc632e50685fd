"""Durable checkpoints of a job: when one is due, one file an instance, how many are kept.

A checkpoint of commit n is the folder ``step-<n>.e<loop epoch>`` with a file ``<role>-<rank>.state`` of every stateful
instance. It counts once ``CheckpointSaved`` is in the log; a folder without it is garbage and is removed with the old
ones. Restoring prefers the state in memory: files are read when that is gone.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rota.job.shadow import StateLost, epoch_of, find_weights, flatten, load, rebuild
from rota.spec.errors import BadInput
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.job import Checkpoint
from rota.spec.resources import parse_duration
from rota.tensors.arrays import is_torch
from rota.tensors.plane import Plane

AUTO_MIN_S, AUTO_MAX_S = 60.0, 3600.0
MTBF_S = 4 * 3600.0
"""Mean time between failures assumed for ``auto``; large clusters of the literature see one failure in 2 to 8 hours."""
_COMMITS = re.compile(r"^\s*(\d+)\s+commits?\s*$")
_FOLDER = re.compile(r"^step-(\d+)\.e(\d+)$")


@dataclass(slots=True)
class Cadence:
    """When the next checkpoint is due: every so many commits or seconds; without a spec only when it is hurried.

    ``auto`` is sqrt(2 * cost * MTBF), clamped to 60 s ... 1 h (J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", 2006, equation 1), with the cost of the last save.
    """

    commits: int | None
    seconds: float | None
    cost_s: float = 0.0
    last_s: float = 0.0
    hurried: bool = False

    @staticmethod
    def of(spec: Checkpoint | None, now_s: float) -> Cadence:
        """Read ``every``. Raises BadInput for another form."""
        if spec is None:
            return Cadence(commits=None, seconds=math.inf, last_s=now_s)
        text = str(spec.every)
        if match := _COMMITS.match(text):
            if int(match.group(1)) < 1:
                raise BadInput("checkpoint.every must be at least 1 commit")
            return Cadence(commits=int(match.group(1)), seconds=None, last_s=now_s)
        if text == "auto":
            return Cadence(commits=None, seconds=None, last_s=now_s)
        try:
            seconds = float(text) if text.replace(".", "", 1).isdigit() else parse_duration(text)
        except ValueError as error:
            raise BadInput(f"checkpoint.every {text!r} is none of: auto, '10 commits', '5m'") from error
        return Cadence(commits=None, seconds=seconds, last_s=now_s)

    def due(self, n: int, now_s: float) -> bool:
        """True when commit ``n`` at ``now_s`` should be written to disk too."""
        if self.hurried:
            return now_s - self.last_s >= self.cost_s
        if self.commits is not None:
            return n % self.commits == 0
        return now_s - self.last_s >= self.period_s

    @property
    def period_s(self) -> float:
        """Seconds between two checkpoints."""
        if self.seconds is not None:
            return self.seconds
        return min(AUTO_MAX_S, max(AUTO_MIN_S, math.sqrt(2 * self.cost_s * MTBF_S)))

    def saved(self, now_s: float, cost_s: float) -> None:
        """Note that one was written."""
        self.last_s, self.cost_s, self.hurried = now_s, cost_s, False

    def hurry(self) -> None:
        """The next commit is written to disk, whatever the period; at most half of the time goes into that."""
        self.hurried = True


def folder_of(root: Path, n: int, epoch: Epoch) -> Path:
    """Where the checkpoint of commit ``n`` by a loop epoch lies; no two epochs write into one folder."""
    return root / f"step-{n}.e{epoch}"


def file_of(folder: Path, owner: InstanceId | str) -> Path:
    """The file of one instance, or of what is kept of a weights edge."""
    stem = f"{owner.role}-{owner.rank}" if isinstance(owner, InstanceId) else f"weights.{owner}"
    return folder / f"{stem}.state"


def write(folder: Path, owner: InstanceId | str, state: Any) -> int:
    """Write the state of one instance or the weights of an edge, whole or not at all; returns its bytes."""
    outline, parts = flatten(state)
    folder.mkdir(parents=True, exist_ok=True)
    body = io.BytesIO()
    tensors = any(is_torch(part) for part in parts.values())
    if tensors:
        torch: Any = importlib.import_module("torch")
        torch.save(
            {"outline": json.dumps(outline), "parts": {name: torch.as_tensor(p) for name, p in parts.items()}}, body
        )
    else:
        np.savez(body, outline=np.array(json.dumps(outline)), **{f"p{name}": part for name, part in parts.items()})
    path = file_of(folder, owner)
    # Another writer may be at the same file: one that was given up while it wrote, or was asked by the master before.
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.draft")
    try:
        with draft.open("wb") as file:
            file.write(b"T" if tensors else b"N")
            file.write(body.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return body.tell()


def find(root: Path, owner: InstanceId | str, n: int) -> Path | None:
    """The file of an instance or a weights edge at commit ``n``, of the newest epoch that has one."""
    found = [
        (int(match.group(2)), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := _FOLDER.match(path.name)) and int(match.group(1)) == n and file_of(path, owner).exists()
    ]
    return file_of(max(found)[1], owner) if found else None


def read(path: Path) -> Any:
    """The state that ``write`` wrote. Never unpickles objects."""
    raw = path.read_bytes()
    body = io.BytesIO(raw[1:])
    if raw[:1] == b"T":
        torch: Any = importlib.import_module("torch")
        kept = torch.load(body, weights_only=True)
        return rebuild(json.loads(kept["outline"]), kept["parts"])
    with np.load(body, allow_pickle=False) as kept:
        parts = {name[1:]: kept[name] for name in kept.files if name != "outline"}
        return rebuild(json.loads(str(kept["outline"])), parts)


def restored(plane: Plane, root: Path, job: JobId, instance: InstanceId, n: int) -> Any:
    """The state of commit ``n``: from memory, else from a checkpoint. Raises StateLost when neither has it.

    What lies in memory since before a rollback has the number of a later commit, but an older epoch: then the file.
    """
    path = find(root, instance, n)
    if path is not None and epoch_of(plane, job, instance, n) < _epoch_of(path):
        return read(path)
    try:
        return load(plane, job, instance, n)
    except StateLost:
        if path is None:
            raise
        return read(path)


def _epoch_of(path: Path) -> int:
    match = _FOLDER.match(path.parent.name)
    return int(match.group(2)) if match else 0


def keep(plane: Plane, job: JobId, owner: InstanceId | str, n: int, folder: Path) -> None:
    """Write commit ``n`` of an instance, or version ``n`` of a weights edge, from memory into a checkpoint.

    Raises StateLost when memory does not have it, OSError when it cannot be written.
    """
    if isinstance(owner, InstanceId):
        write(folder, owner, load(plane, job, owner, n))
    elif (found := find_weights(plane, job, owner, n)) is not None:
        write(folder, owner, dict(found))
    else:
        raise StateLost(f"version {n} of the weights {owner} is gone")


def prune(root: Path, keep: int, newest: int) -> None:
    """Remove all but the ``keep`` newest checkpoints up to commit ``newest``, and those that a rollback took back."""
    found = sorted(
        (
            (int(match.group(1)), int(match.group(2)), path)
            for path in root.iterdir()
            if (match := _FOLDER.match(path.name))
        ),
        reverse=True,
    )
    kept: list[int] = []
    for n, _, path in found:
        if n <= newest and n not in kept and len(kept) < keep:
            kept.append(n)
        else:
            shutil.rmtree(path, ignore_errors=True)
