"""Checkpoints of commits: state in shared memory outside the process that made it, and in durable files.

In memory it is one group of tensors a commit, the rest as JSON. A checkpoint of commit n is the folder
``step-<n>.e<loop epoch>`` with a file ``<role>-<rank>.state`` of every stateful instance. It counts once
``CheckpointSaved`` is in the log; a folder without it is garbage and is removed with the old ones. Restoring prefers
the state in memory: files are read when that is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rota import tensors
from rota.runtime import directory, environ
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.directory import Directory
from rota.runtime.environ import Home
from rota.runtime.redis import server
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, NotReachable, TensorError
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.job import Checkpoint
from rota.spec.reasons import Reason
from rota.spec.resources import parse_duration
from rota.tensors import transport
from rota.tensors.api.store import Plane
from rota.tensors.arrays import is_torch
from rota.tensors.core import Tensor
from rota.tensors.reader import Snapshot
from rota.tensors.session import shm_root

Outline = None | str | int | float | bool | JsonObject
"""What ``flatten`` leaves of a state: a value as it is, or a JSON object in the place of what holds others."""
WEIGHTS_KEPT = 3
WAIT_S = 20.0
SERVER_START_S = 8.0
"""A copy waits for this long until a machine of the job has a tensor server, which takes some seconds to start."""
_SERVER_LOOK_S = 0.1


class StateLost(TensorError):
    """The state of a commit is in no memory any more."""

    reason = Reason.STATE_LOST


def connect(job: JobId, instance: InstanceId, epoch: Epoch) -> Plane:
    """The tensor store as this instance; publishers of the same instance under older epochs are fenced from here on.

    The registry is kept, since the state in it must survive every process of the job.
    """
    label = f"{job}/{instance}"
    plane = tensors.connect(label=label, epoch=epoch, keep=True)
    plane.fence(label, epoch)
    if directory.current() is not None:  # other machines will ask; its start takes a while
        threading.Thread(target=_serve, args=(plane,), name="rota-store", daemon=True).start()
    return plane


def _serve(plane: Plane) -> None:
    """Start the tensor server of this machine unless it runs; who needs it tries again."""
    try:
        transport.own_store(plane)
    except (NotReachable, OSError) as error:
        sys.stderr.write(f"{error}\n")


def serve() -> None:
    """Let this machine take copies of the state of other ones; harmless when it does already. Blocks."""
    if directory.current() is not None:
        _serve(opened())


def opened() -> Plane:
    """The tensor store of this process, to read what others have published; who publishes here stays as it is."""
    return tensors.connect(keep=True)


def in_use(home: str) -> bool:
    """True when processes of this home may share tensors: there is memory of a registry, or one was named."""
    socket = server.RegistryAddress(path=str(server.socket_path(Home.of(home))))
    return bool(environ.get(environ.REDIS_URL)) or shm_root(socket.url).exists()


def give_back(job: JobId, home: str) -> None:
    """Free everything the job has published, at its end, on every machine.

    Those that do not answer, or are away, are noted: the gateway asks them again (``give_back_here``).
    """
    silent, known = transport.everywhere({"op": "drop", "label": job}), directory.current()
    try:
        if known is not None:
            known.note_left(job, silent)
        give_back_here(job, home)
    except (NotReachable, TensorError) as error:
        sys.stderr.write(f"tensors of {job} were not given back: {error}\n")


def give_back_here(job: JobId, home: str) -> None:
    """Free what the job has published on this machine; a no-op when this home has no tensors in use.

    Raises NotReachable, TensorError.
    """
    if in_use(home):
        with tensors.connect(home=home) as plane:
            plane.drop_label(job)


def shadow_name(job: JobId, instance: InstanceId) -> str:
    """Name of the group that holds the state of one instance."""
    return f"shadow/{job}/{instance.role}/{instance.rank}"


def weights_name(job: JobId, edge: str) -> str:
    """Name of the group of a weights edge."""
    return f"weights/{job}/{edge}"


def flatten(state: object) -> tuple[Outline, dict[str, Tensor]]:
    """``(outline, tensors)`` of nested dicts, lists and tuples.

    The outline is JSON: a tensor or array is ``{"t": name}``, a dict ``{"d": [[key, outline], ...]}`` (keys may be
    numbers, as in an optimiser's state), a list ``{"l": [...]}``, a tuple ``{"u": [...]}``, anything else itself.
    Raises BadInput for a value that is none of these.
    """
    found: dict[str, Tensor] = {}

    def outline(value: object, path: str) -> Outline:
        if isinstance(value, np.ndarray) or is_torch(value):
            name = str(len(found))
            found[name] = _detached(value)
            return {"t": name, "torch": is_torch(value)}
        if isinstance(value, Mapping):
            return {"d": [[_key(key, path), outline(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [outline(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return {"l" if isinstance(value, list) else "u": items}
        if value is None or isinstance(value, str | int | float | bool):
            return value
        if isinstance(value, np.generic):
            return value.item()
        raise BadInput(
            f"{path} is a {type(value).__name__}; state holds dicts, lists, tensors, arrays, numbers and texts only"
        )

    return outline(state, "state"), found


def tensors_of(state: object, path: str = "") -> dict[str, Tensor]:
    """The tensors and arrays of a state by the way to them: ``net.0.weight``."""
    if isinstance(state, np.ndarray) or is_torch(state):
        return {path: state}
    items = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    ways = ((f"{path}.{key}" if path else str(key), item) for key, item in items)
    return {name: tensor for way, item in ways for name, tensor in tensors_of(item, way).items()}


def rebuild(outline: Outline, held: Mapping[str, Tensor]) -> object:
    """Inverse of ``flatten``; tensors are copies that their owner may change."""
    if not isinstance(outline, dict):
        return outline
    if "t" in outline:
        return _own(held[outline["t"]], torch=outline["torch"])
    if "d" in outline:
        return {key: rebuild(item, held) for key, item in outline["d"]}
    if "l" in outline:
        return [rebuild(item, held) for item in outline["l"]]
    return tuple(rebuild(item, held) for item in outline["u"])


def save(plane: Plane, job: JobId, instance: InstanceId, n: int, epoch: Epoch, state: object, kept: int = 2) -> int:
    """Publish the state of commit ``n``, of which the ``kept`` newest stay; returns its bytes."""
    outline, parts = flatten(state)
    plane.publish_group(
        shadow_name(job, instance),
        parts,
        step=n,
        retain=kept,
        epoch=epoch,
        meta={"outline": outline, "torch": any(is_torch(part) for part in parts.values())},
    )
    return sum(int(tensor.nbytes) for tensor in parts.values())


def epoch_of(plane: Plane, name: str, n: int) -> int:
    """The epoch under which step ``n`` of a group was put into the memory of this machine; 0 when it is not there."""
    try:
        return int(plane.get_group(name, step=n, as_="numpy").epoch)
    except TensorError:
        return 0


def copy(plane: Plane, job: JobId, owner: InstanceId | str, n: int, hosts: Sequence[str]) -> tuple[str, int]:
    """Let another machine, one of ``hosts`` if it can, have the state of commit ``n`` or version ``n`` of an edge.

    Returns its host and the epoch under which it was made.

    Those of ``hosts`` are tried first, in ring order of names after this machine, so that copies
    are spread over the machines.
    Raises StateLost when memory does not have it, NotReachable when no machine takes it.
    """
    name, known = weights_name(job, owner) if isinstance(owner, str) else shadow_name(job, owner), directory.current()
    if (epoch := epoch_of(plane, name, n)) == 0:
        raise StateLost(f"{owner} at commit {n} is gone")
    others = _others(known, hosts) if known is not None else set[str]()
    said: list[str] = []
    for host in sorted(others, key=lambda one: (one not in hosts, known is not None and one < known.host, one)):
        try:
            transport.replicate(plane, name, host, step=n, epoch=epoch, wait_s=WAIT_S)
        except (OSError, NotReachable, TensorError) as error:
            said.append(f"{host}: {error}")
        else:
            return host, epoch
    raise NotReachable("; ".join(said) or "no other machine has a tensor server")


def _others(known: Directory, hosts: Sequence[str]) -> set[str]:
    """Other machines with a tensor server; at the start of a job those of its ``hosts`` may be about to have one."""
    clock = SystemClock()
    until_s = clock.monotonic_s() + SERVER_START_S
    while True:
        found = {one for one in known.stores(fresh=True) if one != known.host}
        if found or set(hosts) <= {known.host} or clock.monotonic_s() >= until_s:
            return found
        blocking_sleep(_SERVER_LOOK_S)


def load(plane: Plane, job: JobId, instance: InstanceId, n: int, source: tuple[str, int] = ("", 0)) -> object:
    """The state of commit ``n``, from another machine if ``source`` (host, epoch) names one. Raises StateLost."""
    (host, epoch), name = source, shadow_name(job, instance)

    def get(form: str) -> Snapshot:
        if not host:
            return plane.get_group(name, step=n, as_=form)
        return transport.pull(plane, name, step=n, epoch_min=epoch, near=host, wait_s=WAIT_S, as_=form)

    try:
        if host:  # by the tensor server: what this instance publishes itself must not be of an older epoch
            transport.bring(plane, name, step=n, epoch=epoch, near=host, wait_s=WAIT_S)
        found = get(_form())
        if found.meta["torch"] and _form() != "torch":
            importlib.import_module("torch")
            found = get("torch")
    except (TensorError, NotReachable, OSError) as error:
        raise StateLost(f"the state of {instance} at commit {n} is gone: {error}") from error
    return rebuild(found.meta["outline"], found)


def publish(plane: Plane, job: JobId, edge: str, n: int, epoch: Epoch, weights: Mapping[str, Tensor]) -> None:
    """Publish version ``n`` of a weights edge as one group: readers see all of it or none."""
    owned = {name: _detached(tensor) for name, tensor in weights.items()}
    plane.publish_group(weights_name(job, edge), owned, step=n, retain=WEIGHTS_KEPT, epoch=epoch)
    transport.own_store(plane)


def find_weights(plane: Plane, job: JobId, edge: str, n: int) -> Mapping[str, Tensor] | None:
    """What was published with commit ``n``, if the memory of any machine has it."""
    try:
        return transport.pull(plane, weights_name(job, edge), step=n, wait_s=0.0, as_=_form())
    except (TensorError, NotReachable, OSError):
        return None


def fetch(plane: Plane, job: JobId, edge: str, version: tuple[int, int], host: str = "") -> Mapping[str, Tensor]:
    """The tensors of (epoch of the writer, n), read in place, from machine ``host`` if they are not on this one.

    A newer epoch that published step ``n`` did so again, after a rollback to it. Raises TensorError when they do not
    come in time.
    """
    epoch, n = version
    try:
        name = weights_name(job, edge)
        return transport.pull(plane, name, step=n, epoch_min=epoch, near=host, wait_s=WAIT_S, as_=_form())
    except (NotReachable, OSError) as error:
        raise TensorError(f"{weights_name(job, edge)} step {n}: {error}") from error


def _form() -> str:
    """Tensors for a process that has torch loaded, arrays for one that has not: reading never loads it."""
    return "torch" if "torch" in sys.modules else "numpy"


def _detached(value: Tensor) -> Tensor:
    return value.detach() if is_torch(value) else value


def _key(key: object, path: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise BadInput(f"{path} has a key of type {type(key).__name__}; keys are texts or whole numbers")


def _own(tensor: Tensor, *, torch: bool) -> Tensor:
    if torch:
        return tensor.clone()
    return np.array(tensor.numpy() if is_torch(tensor) else tensor)


AUTO_MIN_S, AUTO_MAX_S = 60.0, 3600.0
MTBF_S = 4 * 3600.0
"""Mean time between failures assumed for ``auto``; large clusters of the literature see one failure in 2 to 8 hours."""
_COMMITS = re.compile(r"^\s*(\d+)\s+commits?\s*$")
_FOLDER = re.compile(r"^step-(\d+)\.e(\d+)$")


@dataclass(slots=True)
class CheckpointTimer:
    """When the next checkpoint is due: after a number of commits or seconds; without a spec only when it is hurried.

    ``auto`` is sqrt(2 * cost * MTBF), clamped to 60 s ... 1 h (J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", 2006, equation 1), with the cost of the last save.
    """

    commits: int | None
    seconds: float | None
    cost_s: float = 0.0
    last_s: float = 0.0
    hurried: bool = False

    @staticmethod
    def of(spec: Checkpoint | None, now_s: float) -> CheckpointTimer:
        """Read ``every``. Raises BadInput for another form."""
        if spec is None:
            return CheckpointTimer(commits=None, seconds=math.inf, last_s=now_s)
        text = str(spec.every)
        if match := _COMMITS.match(text):
            if int(match.group(1)) < 1:
                raise BadInput("checkpoint.every must be at least 1 commit")
            return CheckpointTimer(commits=int(match.group(1)), seconds=None, last_s=now_s)
        if text == "auto":
            return CheckpointTimer(commits=None, seconds=None, last_s=now_s)
        try:
            seconds = float(text) if text.replace(".", "", 1).isdigit() else parse_duration(text)
        except ValueError as error:
            raise BadInput(f"checkpoint.every {text!r} is none of: auto, '10 commits', '5m'") from error
        return CheckpointTimer(commits=None, seconds=seconds, last_s=now_s)

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


def file_of(folder: Path, owner: InstanceId | str) -> Path:
    """The file of one instance, or of what is kept of a weights edge."""
    stem = f"{owner.role}-{owner.rank}" if isinstance(owner, InstanceId) else f"weights.{owner}"
    return folder / f"{stem}.state"


def write(folder: Path, owner: InstanceId | str, state: object) -> int:
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
    files = (file_of(folder, owner) for number, _, folder in reversed(_folders(root)) if number == n)
    return next((file for file in files if file.exists()), None)


def _folders(root: Path) -> list[tuple[int, int, Path]]:
    """Commit, loop epoch and folder of the checkpoints in ``root``, in order."""
    found = ((_FOLDER.match(path.name), path) for path in (root.iterdir() if root.is_dir() else ()))
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)


def link(source: Path, target: Path, n: int) -> None:
    """Let ``target`` have the files of commit ``n`` of ``source``, too: the same files, which never change. Blocks."""
    for folder in (path for path in source.iterdir() if (match := _FOLDER.match(path.name)) and int(match[1]) == n):
        there = target / folder.name
        there.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.state"):
            with contextlib.suppress(FileExistsError):
                os.link(file, there / file.name)


def read(path: Path) -> object:
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


def restored(
    plane: Plane,
    root: Path,
    job: JobId,
    instance: InstanceId,
    n: int,
    *,
    source: tuple[str, int] = ("", 0),
    twin: InstanceId | None = None,
) -> object:
    """The state of commit ``n``: from memory, else from a checkpoint. Raises StateLost when neither has it.

    ``source`` is the machine whose memory has it, and the epoch of it there; default: this machine.

    ``twin`` is another instance with the same state, for one that was not there at that commit.

    What lies in memory since before a rollback has the number of a later commit, but an older epoch: then the file.
    """
    path = find(root, instance, n)
    if path is not None and epoch_of(plane, shadow_name(job, instance), n) < _epoch_of(path):
        return read(path)
    try:
        return load(plane, job, instance, n, source)
    except StateLost:
        if path is not None:
            return read(path)
        if twin is None or twin == instance:
            raise
        return restored(plane, root, job, twin, n)


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
    kept: list[int] = []
    for n, _, path in reversed(_folders(root)):
        if n <= newest and n not in kept and len(kept) < keep:
            kept.append(n)
        else:
            shutil.rmtree(path, ignore_errors=True)
