"""Files of jobs on one machine: where its home is, and logs, spans and outputs listed and read by range.

A machine that does not see the home of the service keeps what its instances write in a home of its own. Reading never
leaves the folder that was asked for: no ``..``, no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from rota.runtime import environ
from rota.runtime.environ import Home
from rota.spec.errors import BadInput, LimitExceeded, UnknownName
from rota.spec.ids import parts_of

INSTALLATION = "installation"
"""File in the home of a service with the id of that installation: a machine that sees it sees the home."""
FILES_LABEL, OWN_FILES = "rota-files", "own"
"""Label of a node whose machine does not see the home of the service."""
FILES_MAX = 20_000
LISTED_MAX = 2000
READ_BYTES_MAX = 512 * 1024
AREAS = ("logs", "spans", "output")
READ_S, FIRST_READ_S = 5.0, 20.0
"""Limit of a request for files of another machine, and of the first one there, which starts the process that reads."""


class FileEntry(TypedDict):
    """One entry below a folder of a job. ``kind``: ``file``, ``folder`` or ``other`` (links, sockets, what has a name
    that is not UTF-8), never followed.

    ``mark`` is equal for one file that two machines see.
    """

    path: str
    kind: str
    bytes: int
    mark: NotRequired[str]


class FileEntries(TypedDict):
    """Entries sorted by path, and where to continue; ``next`` is None after the last."""

    items: list[FileEntry]
    next: str | None


def installation_of(home: Path) -> str:
    """The id of the installation whose home this is; empty for any other folder."""
    try:
        return (home / INSTALLATION).read_text(encoding="utf-8")
    except OSError:
        return ""


def machine_home(service_home: str, installation: str) -> Home:
    """The home that processes of this machine use: that of the service where it is seen, else one of this machine.

    That is ``ROTA_HOME`` as the engine of this machine has it; without it the path is the same as the service's.
    """
    own = environ.get(environ.HOME)
    return Home.of(own if own and not sees(service_home, installation) else service_home)


def sees(service_home: str, installation: str) -> bool:
    """True on the machine of the service and on those that share its home."""
    return not installation or installation_of(Path(service_home)) == installation


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files of jobs in one home."""

    home: Home

    def root(self, job: str, area: str) -> Path:
        """Folder of an area of a job; an absolute path is itself. Raises ValueError for anything else.

        Raises BadInput for a path at, above or below the home: keys and the files of other jobs are there.
        """
        dirs = self.home.job(job)
        if area.startswith("/"):
            root, home = Path(area).resolve(), self.home.root.resolve()
            if home.is_relative_to(root) or root.is_relative_to(home):
                text = f"output {area} has the files of the installation: it is not shown or copied"
                raise BadInput(text, hint="set output to a folder of its own, or leave it out")
            return Path(area)
        if area not in AREAS:
            raise ValueError(f"{area!r} is not one of {', '.join(AREAS)}")
        return {"logs": dirs.logs, "spans": dirs.spans, "output": dirs.output}[area]

    def listed(self, job: str, area: str, path: str = "", after: str = "") -> FileEntries:
        """What is at ``path`` and below, up to ``LISTED_MAX`` rows after a path. Raises UnknownName if it is not there.

        Raises LimitExceeded over ``FILES_MAX`` entries, BadInput for a path that leaves the folder.
        """
        root = self.root(job, area)
        parts = parts_of(path)
        rows = list[FileEntry]()
        with _opened(root, parts) as (fd, status):
            if stat.S_ISDIR(status.st_mode):
                for row in _below(os.dup(fd), "/".join(parts)):
                    rows.append(row)
                    if len(rows) > FILES_MAX:
                        text = f"{path or 'the output folder'} has more than {FILES_MAX:,} files"
                        raise LimitExceeded(text, hint="name a part of it")
            else:
                rows.append(_row("/".join(parts), status))
        left = sorted((row for row in rows if row["path"] > after), key=lambda row: row["path"])
        return {"items": left[:LISTED_MAX], "next": left[LISTED_MAX - 1]["path"] if len(left) > LISTED_MAX else None}

    def read(self, job: str, area: str, path: str, offset: int, count: int) -> bytes:
        """A range of a file, shorter at its end. Raises UnknownName, and BadInput for a path that leaves the folder."""
        with _opened(self.root(job, area), parts_of(path)) as (fd, status):
            if not stat.S_ISREG(status.st_mode):
                raise BadInput(f"{path} is not a file", hint="list it: it is a folder or a device")
            return os.pread(fd, min(count, READ_BYTES_MAX), offset)


@contextlib.contextmanager
def _opened(root: Path, parts: tuple[str, ...]) -> Iterator[tuple[int, os.stat_result]]:
    """A file or folder below ``root``, opened part by part, so that no link on the way is followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    shown, fd = "/".join(parts) or str(root), -1
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            inner = os.open(part, flags, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, os.fstat(fd)
    except (FileNotFoundError, NotADirectoryError):
        raise UnknownName(f"no file or folder {shown}", hint="list what is there: rota cp JOB: --list") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UnknownName(f"no file or folder {shown}", hint="a part of the path is too long") from None
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EACCES):
            raise
        why = "may not be read" if error.errno == errno.EACCES else "is a link or a socket, which is not followed"
        raise BadInput(f"{shown} {why}", hint="copy it into a file in the output folder") from None
    finally:
        if fd >= 0:
            os.close(fd)


def _below(fd: int, path: str) -> Iterator[FileEntry]:
    """Rows of what is in an open folder, and below it; takes over ``fd``."""
    try:
        with os.scandir(fd) as listed:
            names = sorted(one.name for one in listed)
        for name in names:
            inner = f"{path}/{name}" if path else name
            if (shown := inner.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")) != inner:
                yield {"path": shown, "kind": "other", "bytes": 0}  # JSON cannot carry the name
                continue
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                yield _row(inner, status)
                if stat.S_ISDIR(status.st_mode):
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    yield from _below(os.open(name, flags, dir_fd=fd), inner)
            except OSError:  # it went meanwhile, or may not be read
                continue
    finally:
        os.close(fd)


def _row(path: str, status: os.stat_result) -> FileEntry:
    if stat.S_ISDIR(status.st_mode):
        return {"path": path, "kind": "folder", "bytes": 0}
    if not stat.S_ISREG(status.st_mode):
        return {"path": path, "kind": "other", "bytes": 0}
    mark = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
    return {"path": path, "kind": "file", "bytes": status.st_size, "mark": mark}
