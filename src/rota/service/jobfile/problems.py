"""Problems of a job file: where each is, what it is, what to do; as lines with a caret and as JSON."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rota.spec.errors import BadInput

PROBLEMS_MAX = 100
"""Problems reported at once; a file with more is not a job file."""
DISK_REMEDIES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space: the quota on that disk is used up",
    errno.EROFS: "it is mounted read-only: mount it for writing, or choose another folder",
}
"""What to do when a disk takes nothing."""
SOURCE_LINE_MAX = 160
"""Characters of a source line that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake and its place.

    ``loc`` is the dotted path of the field (empty for the file as a whole), ``line`` and ``col`` count from 1, ``file``
    is the name of the file or ``--set #n``, ``source`` the line as written.
    """

    loc: str
    line: int
    col: int
    message: str
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

    def to_json(self) -> dict[str, Any]:
        """The form of the REST interface and of ``--json``."""
        return {
            name: getattr(self, name) for name in ("loc", "line", "col", "message", "hint", "code", "file", "source")
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Problem:
        """Inverse of ``to_json``; unknown keys are ignored."""
        return Problem(
            loc=str(raw.get("loc", "")),
            line=int(raw.get("line", 0)),
            col=int(raw.get("col", 0)),
            message=str(raw.get("message", "")),
            hint=str(raw.get("hint", "")),
            code=str(raw.get("code", "INVALID")),
            file=str(raw.get("file", "")),
            source=str(raw.get("source", "")),
        )


def cannot_use(error: OSError) -> BadInput:
    """The error for a file that the system refuses."""
    hint = DISK_REMEDIES.get(error.errno or 0, "see: rota doctor")
    return BadInput(f"{error.filename or 'a file'}: {error.strerror or error}", hint=hint)
