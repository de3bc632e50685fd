"""Spill to disk, mapped back on read: the file of a segment for which shared memory had no room.

A link to it stands where the segment would, so that whoever opens, maps or scans segments needs to know nothing. The
link is made before the file and taken after it: a file without a link is what a killed process left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rota.runtime import environ
from rota.spec.errors import BadInput
from rota.tensors import errors

DIR: Final = "ROTA_SPILL_DIR"
BYTES_MAX: Final = "ROTA_SPILL_BYTES_MAX"
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_NO_PLACE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)
_SHARE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Where segments of ``links`` (a namespace's folder in shared memory) go when that is full, and how many bytes
    all that spill into ``folder`` may take there."""

    links: Path
    folder: Path
    bytes_max: int

    @staticmethod
    def of(links: Path) -> Spill | None:
        """As ``ROTA_SPILL_DIR`` and ``ROTA_SPILL_BYTES_MAX`` (bytes; default: half of its file system) say; None
        without a folder. Raises BadInput."""
        if not (name := environ.get(DIR)):
            return None
        folder, limit = Path(name), environ.get(BYTES_MAX, "0")
        if not folder.is_absolute() or not limit.isdigit():
            raise BadInput(f"{DIR}={name!r}, {BYTES_MAX}={limit!r}: an absolute folder, and a number of bytes")
        folder.mkdir(mode=environ.PRIVATE_DIR, parents=True, exist_ok=True)
        own = folder.stat()
        if own.st_uid != os.getuid() or own.st_mode & 0o077:
            raise BadInput(f"{DIR}={name!r}: others may read or change what lies there", hint=f"chmod 700 {name}")
        facts = os.statvfs(folder)
        return Spill(links=links, folder=folder, bytes_max=int(limit) or facts.f_blocks * facts.f_frsize // _SHARE)

    def make(self, seg: str, file_bytes: int) -> None:
        """Make the file of a segment, with its memory, and the link to it. Raises OutOfMemory, then neither is left."""
        lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two that look at the same sum would both find room
            used = sum(_size(path) for path in self.folder.glob("*+*+seg-*"))
            if used + file_bytes > self.bytes_max:
                self._refuse(f"{used} of at most {self.bytes_max} bytes are taken", file_bytes)
            link, file = self.links / seg, self._file(seg)
            link.unlink(missing_ok=True)
            link.symlink_to(file)
            file.unlink(missing_ok=True)
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, environ.PRIVATE_FILE)
            try:
                os.posix_fallocate(fd, 0, file_bytes)
            except OSError as error:
                remove(link)
                if error.errno not in FULL:
                    raise
                self._refuse(os.strerror(error.errno), file_bytes)
            finally:
                os.close(fd)
        finally:
            os.close(lock)

    def sweep(self) -> list[tuple[str, int]]:
        """Remove the strays; name and bytes of each."""
        gone: list[tuple[str, int]] = []
        for path in self.strays():
            with contextlib.suppress(FileNotFoundError):  # another sweeps, too
                gone.append((path.name, path.stat().st_size))
                path.unlink()
        return gone

    def strays(self) -> Iterator[Path]:
        """Files of this namespace to which no link leads: left by a process killed in between, or by another boot."""
        for file in list(self.folder.glob(self._file("seg-*").name)):
            if not (self.links / file.name.rpartition("+")[2]).is_symlink():
                yield file

    def _file(self, seg: str) -> Path:
        return self.folder / f"{self.links.parent.name}+{self.links.name}+{seg}"  # no plus sign is in any of them

    def _refuse(self, why: str, file_bytes: int) -> None:
        text = f"{self.folder}: shared memory is full, and {file_bytes} bytes do not fit here either: {why}"
        raise errors.OutOfMemory(text, hint=f"free names, or raise {BYTES_MAX}", bytes=file_bytes)


@contextlib.contextmanager
def making_files() -> Iterator[None]:
    """Say as an error of ours that the small files of a client have no room, or no folder to lie in.

    Raises OutOfMemory, BadInput.
    """
    try:
        yield
    except OSError as error:
        text = f"{error.filename or 'shared memory'}: {error.strerror}"
        if error.errno in FULL:
            raise errors.OutOfMemory(text, hint="give names or other files back", bytes=0) from None
        if error.errno not in _NO_PLACE:
            raise
        raise BadInput(text, hint=f"ROTA_HOME, ROTA_SHM_DIR and {DIR} must name folders of one's own") from None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # somebody removed it meanwhile, without the lock
        return 0


def remove(segment: Path) -> None:
    """Remove a segment's file wherever it lies; harmless when it is gone."""
    if segment.is_symlink():
        segment.readlink().unlink(missing_ok=True)
    segment.unlink(missing_ok=True)
