"""Problems of a job file: where each is, what it is, what to do; also what to do when a disk is full or read-only."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, NoReturn

from rota.spec.check import Path, dotted
from rota.spec.errors import BadInput, JobFileError

if TYPE_CHECKING:
    from rota.service.jobfile.nodes import Node

PROBLEMS_MAX = 100
"""Problems reported at once; a file with more is not a job file."""
DISK_REMEDIES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space: the quota on that disk is used up",
    errno.EROFS: "it is mounted read-only: mount it for writing, or choose another folder",
}
"""What to do when a disk takes nothing."""
LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
SOURCE_LINE_MAX = 160
"""Characters of a source line that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake and its place.

    ``loc`` is the dotted path of the field (empty for the file as a whole), ``line`` and ``col`` count from 1, ``file``
    is the name of the file or ``--set #n``, ``source`` the line as written.
    """

    loc: str = ""
    line: int = 0
    col: int = 0
    message: str = ""
    hint: str = ""
    code: str = "INVALID"
    file: str = ""
    source: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.col}" if self.line else self.file
        parts = [part for part in (place, self.loc) if part]
        hint = f"; {self.hint}" if self.hint else ""
        return ": ".join([*parts, self.message]) + hint

    def render(self) -> str:
        """The one-line form, then the source line with a caret under the place."""
        if not self.line or not self.source.strip():
            return str(self)
        start = max(0, self.col - 1 - SOURCE_LINE_MAX // 2)
        shown = self.source[start : start + SOURCE_LINE_MAX].replace("\t", " ")
        return f"{self}\n    {shown}\n    {' ' * (self.col - 1 - start)}^"

    def to_json(self) -> dict[str, str | int]:
        """The form of the REST interface and of ``--json``."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, str | int]) -> Problem:
        """Inverse of ``to_json``; unknown keys are ignored."""
        texts = {one.name: str(raw.get(one.name, one.default)) for one in fields(Problem) if one.type == "str"}
        return Problem(line=int(raw.get("line", 0)), col=int(raw.get("col", 0)), **texts)


def cannot_use(error: OSError) -> BadInput:
    """The ``BadInput`` for an OSError, with what to do about it."""
    hint = DISK_REMEDIES.get(error.errno or 0, "see: rota doctor")
    return BadInput(f"{error.filename or 'a file'}: {error.strerror or error}", hint=hint)


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Line and column, from 1. ``file`` and ``source`` are those of a ``--set``; ``loc`` overrides the dotted path."""

    line: int
    col: int
    file: str = ""
    source: str = ""
    loc: str = ""


class ErrorCollector:
    """The problems of one file. Raises JobFileError by itself once there are PROBLEMS_MAX."""

    def __init__(self, text: str, filename: str) -> None:
        self.filename = filename
        self.problems: list[Problem] = []
        self.paths: list[Path] = []
        """The path of each problem, as names and positions."""
        self.duplicates: list[tuple[Path, Node]] = []
        """The values of duplicate keys, which are not in the tree."""
        self._text = text
        self._lines: list[str] | None = None

    def source_line(self, line: int) -> str:
        """The text of a line, counted from 1; empty beyond the end."""
        if self._lines is None:
            self._lines = LINE_BREAK.split(self._text)
        return self._lines[line - 1] if 0 < line <= len(self._lines) else ""

    def add(self, place: TextPlace, path: Path, message: str, *, hint: str = "", code: str = "INVALID") -> None:
        """One more problem."""
        problem = Problem(
            loc=place.loc or dotted(path),
            line=place.line,
            col=place.col,
            message=message,
            hint=hint,
            code=code,
            file=place.file or self.filename,
            source=place.source or self.source_line(place.line),
        )
        self.problems.append(problem)
        self.paths.append(path)
        if len(self.problems) >= PROBLEMS_MAX:
            raise self.error()

    def fail(self, line: int, col: int, message: str, *, hint: str = "", code: str = "SYNTAX") -> NoReturn:
        """One more problem of the text itself, after which nothing can be read."""
        self.add(TextPlace(line, col), (), message, hint=hint, code=code)
        raise self.error()

    def error(self) -> JobFileError:
        """The exception with everything collected, in the order of the file."""
        ordered = sorted(self.problems, key=lambda p: (p.file != self.filename, p.file, p.line, p.col))
        return JobFileError(tuple(ordered))

    def raise_if_any(self) -> None:
        """Raises JobFileError when something was collected."""
        if self.problems:
            raise self.error()
