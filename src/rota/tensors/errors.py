"""Failures of the tensor store: what it raises, with names and numbers that say what to do, and where a test kills it.

::

    TensorError
    +-- NotFound              no such name (the hint has the nearest names)
    |   +-- VersionGone       that version or step was reclaimed
    +-- WaitTimeout           nothing new enough came in ``wait_s``
    +-- PublishRefused
    |   +-- LostRace          a newer version of the same epoch and step won
    |   +-- StaleStep         a lower step in the same epoch
    |   +-- StaleEpoch        an older epoch, or a fenced label (also a spec.errors.Fenced)
    |   +-- Aborted           the pending version was swept or given up
    |   +-- PublishBlocked    another process holds the lock of the name
    +-- OutOfMemory           neither free, nor trimmed, nor evicted bytes suffice
    |   +-- QuotaExceeded     the namespace's ``bytes_max``
    +-- TransferFailed        the machine that has it stopped answering in the middle of it
    +-- OwnerLost             the keeper of the device died, and its memory with it
    +-- WrongDevice           this process does not see the device a tensor is on
    +-- IpcUnavailable        memory of another process cannot be opened
    +-- BackPressure          a channel is full, or readers lag too far behind
    +-- UnsupportedTensor     sparse, quantised, unknown dtype or layout
    +-- Corrupt               a header or a record contradicts itself
    |   +-- TornRead          payload CRC differs at a read (with ROTA_TENSORS_CHECK=1)
    +-- EpochChanged          the registry was rebuilt (caught and retried inside)
    +-- ForkedClient          a forked child used its parent's connection
    +-- ClosedPlane           the connection was closed
    +-- ProtocolBreach        a rule of a backend was broken
"""

from __future__ import annotations

import contextlib
import errno
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Final

from rota.runtime import environ
from rota.spec.errors import BadInput, Fenced, TensorError

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_NO_PLACE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)


class NotFound(TensorError):
    """No such name; ``hint`` has the nearest names."""

    code, http, exit = "TENSOR_NOT_FOUND", 404, 2


class VersionGone(NotFound):
    """The name exists, but that version or step of it was reclaimed; fields: name, wanted, kept."""

    code = "TENSOR_VERSION_GONE"


class WaitTimeout(TensorError):
    """Nothing new enough came in ``wait_s``; fields: name, step (the newest there is), owner."""

    code, http, exit = "TENSOR_WAIT_TIMEOUT", 504, 5


class PublishRefused(TensorError):
    """A publish did not become visible; nothing of it remains."""

    code, http = "TENSOR_PUBLISH_REFUSED", 409


class LostRace(PublishRefused):
    """A newer version with the same epoch and step became current first."""

    code = "TENSOR_LOST_RACE"


class StaleStep(PublishRefused):
    """The step is lower than the current one of the same epoch; fields: name, step, current."""

    code = "TENSOR_STALE_STEP"


class StaleEpoch(PublishRefused, Fenced):
    """The writer's epoch is older than the current version's or its label's fence; fields: name, epoch, current."""

    code = "TENSOR_FENCED"


class Aborted(PublishRefused):
    """The pending version was swept or given up before its commit."""

    code = "TENSOR_ABORTED"


class PublishBlocked(PublishRefused):
    """Another process has held the lock of this name for too long; fields: name, pid."""

    code, http = "TENSOR_PUBLISH_BLOCKED", 503


class OutOfMemory(TensorError):
    """The shared memory is full and nothing can be freed; fields: bytes, holders."""

    code, http = "TENSOR_OUT_OF_MEMORY", 507


class QuotaExceeded(OutOfMemory):
    """The namespace's ``bytes_max`` would be exceeded; fields: bytes, used, bytes_max."""

    code = "TENSOR_QUOTA_EXCEEDED"


class BackPressure(TensorError):
    """A channel is full, or readers hold too many old versions of a group; fields: name, depth."""

    code, http, exit = "TENSOR_BACK_PRESSURE", 503, 5


class TransferFailed(TensorError):
    """A version was on its way from another machine, which stopped answering; nothing of it is here; fields: name."""

    code, http = "TENSOR_TRANSFER_FAILED", 503


class OwnerLost(TensorError):
    """The keeper of a device died and the tensor with it; publish it again; fields: name, device."""

    code, http = "TENSOR_OWNER_LOST", 410


class WrongDevice(TensorError):
    """The tensor is on a device that this process does not see; fields: name, wanted, visible."""

    code, http, exit = "TENSOR_WRONG_DEVICE", 422, 2


class IpcUnavailable(TensorError):
    """Device memory of another process cannot be opened, or the driver is missing; the message quotes the driver."""

    code, http = "TENSOR_IPC_UNAVAILABLE", 503


class UnsupportedTensor(TensorError):
    """A layout or dtype that cannot be shared; fields: dtype, layout."""

    code, http, exit = "TENSOR_UNSUPPORTED", 422, 2


class Corrupt(TensorError):
    """A segment header contradicts itself or its registry record; fields: file, field."""

    code = "TENSOR_CORRUPT"


class TornRead(Corrupt):
    """The payload differs from what was published: a process wrote into a read-only view; fields: name, version."""

    code = "TENSOR_TORN_READ"


class EpochChanged(TensorError):
    """The registry was rebuilt since this client joined; it joins again and retries by itself."""

    code = "TENSOR_EPOCH_CHANGED"


class ForkedClient(TensorError):
    """A forked child may not use its parent's connection; call ``rota.tensors.connect()`` in the child."""

    code = "TENSOR_FORKED_CLIENT"


class ClosedPlane(TensorError):
    """The connection was closed; call ``rota.tensors.connect()`` again."""

    code = "TENSOR_CLOSED_PLANE"


class ProtocolBreach(TensorError):
    """A rule that keeps memory safe was broken; fields: rule."""

    code = "TENSOR_PROTOCOL_BREACH"


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Say as an error of ours that the small files of a client have no room, or no folder to lie in.

    Raises OutOfMemory, BadInput.
    """
    try:
        yield
    except OSError as error:
        text = f"{error.filename or 'shared memory'}: {error.strerror}"
        if error.errno in FULL:
            raise OutOfMemory(text, hint="give names or other files back", bytes=0) from None
        if error.errno not in _NO_PLACE:
            raise
        raise BadInput(text, hint="ROTA_HOME, ROTA_SHM_DIR and ROTA_SPILL_DIR must name folders of your own") from None


_WANTED, _NTH, _HOW = (environ.get("ROTA_TENSORS_DIE_AT") + "::").split(":")[:3]
_seen: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here by SIGKILL when ``ROTA_TENSORS_DIE_AT`` is ``name`` or ``name:n`` (the n-th passage); ``name:n:stop``
    stops."""
    if name != _WANTED:
        return
    _seen[name] += 1
    if _seen[name] == int(_NTH or 1):
        # Sent to this thread: one for the process may go to another, and this one would continue until that wakes up.
        signal.raise_signal(signal.SIGSTOP if _HOW == "stop" else signal.SIGKILL)
