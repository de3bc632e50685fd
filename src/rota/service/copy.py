"""Copies of a job's output files into a folder of the user: what goes where, safely, and the bytes part by part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rota.spec.errors import BadInput, Conflict, UnknownName
from rota.spec.ids import parts_of

if TYPE_CHECKING:
    from rota.service.models.jobs import FileRow

CONFLICTS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy did: files with where they went, what was left out (links, sockets), machines that do not answer."""

    files: tuple[tuple[FileRow, Path], ...]
    left_out: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(row["bytes"] for row, _ in self.files)


def split_source(source: str) -> tuple[str, str]:
    """Job and path of ``JOB:PATH``. Raises BadInput."""
    job, colon, path = source.partition(":")
    if not colon or not job:
        raise BadInput(f"{source!r} names no file of a job", hint="JOB:PATH, or JOB: for all of its output folder")
    return job, "/".join(parts_of(path))


def chosen(rows: Iterable[FileRow]) -> list[FileRow]:
    """One row for each path, of several machines. Raises Conflict for files that differ between machines."""
    found: dict[str, FileRow] = {}
    bad: dict[str, list[str]] = {}
    for row in rows:
        known = found.setdefault(row["path"], row)
        same = known["kind"] == row["kind"] and (row["kind"] != "file" or known["mark"] == row["mark"])
        if known is not row and not same:
            bad.setdefault(row["path"], [known["node"]]).append(row["node"])
    if bad:
        shown = [f"{path} (on {', '.join(map(node_name, nodes))})" for path, nodes in [*bad.items()][:CONFLICTS_SHOWN]]
        more = f" and {len(bad) - CONFLICTS_SHOWN} more" if len(bad) > CONFLICTS_SHOWN else ""
        raise Conflict(
            f"several machines have a file of their own at {'; '.join(shown)}{more}",
            hint="choose one: rota cp --node NAME; and let each instance write to a name of its own",
        )
    return list(found.values())


def node_name(node: str) -> str:
    """A machine in words."""
    return node or "the machine of the service"


def targets(rows: Sequence[FileRow], path: str, target: Path) -> list[tuple[FileRow, Path]]:
    """Where each file and folder goes, as ``cp -r`` does: into ``target`` if that is a folder, else under that name.

    Raises UnknownName when nothing is found, BadInput for a row outside the output folder.
    """
    if not rows:
        what = f"no file or folder {path}" if path else "the job has no output"
        raise UnknownName(what, hint="list what is there: rota cp JOB: --list" if path else "")
    root = target / Path(path).name if path and target.is_dir() else target
    found: list[tuple[FileRow, Path]] = []
    for row in rows:
        inner = "/".join(parts_of(row["path"]))
        if inner != path and not inner.startswith(f"{path}/" if path else ""):
            raise BadInput(f"{row['path']!r} does not lie below {path!r}", hint="the service is of another version")
        found.append((row, root / inner.removeprefix(path).lstrip("/") if inner != path else root))
    return found


@contextlib.contextmanager
def incoming(path: Path, root: Path, size: int) -> Iterator[BinaryIO]:
    """A file that is at ``path`` once the block has written it whole; no link below ``root`` is followed.

    Raises Conflict when it got fewer bytes than ``size``, which is what the file had when it was listed.
    """
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise BadInput(f"{path.parent} is a link that leaves {root}", hint="copy into another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            written = file.tell()
        if written < size:
            raise Conflict(f"{path.name} had {size:,} bytes and then {written:,}", hint="copy it again")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
