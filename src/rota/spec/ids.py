"""Typed identifiers: JobId, NodeId, RoleName, Epoch, and the name of one instance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from rota.spec.errors import BadInput

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
RoleName = NewType("RoleName", str)
GangId = NewType("GangId", str)
Epoch = NewType("Epoch", int)
NO_EPOCH = Epoch(0)
"""Before the first start."""

NAME_PATTERN = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]{0,62}$")
NAME_RULE = "a name is a letter, then up to 62 letters, digits, '_', '.', '-'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of a machine for itself alone."""


@dataclass(frozen=True, slots=True, order=True)
class InstanceId:
    """One member of a role; written ``role/rank`` everywhere people see it."""

    role: RoleName
    rank: int

    def __str__(self) -> str:
        return f"{self.role}/{self.rank}"

    @staticmethod
    def parse(text: str) -> InstanceId:
        """Read ``role/rank``. Raises ValueError for any other form."""
        role, sep, rank = text.rpartition("/")
        if not sep or not rank.isdigit() or not NAME_PATTERN.match(role):
            raise ValueError(f"{text!r} is not ROLE/RANK, for example rollout/0")
        return InstanceId(RoleName(role), int(rank))


def parts_of(path: str) -> tuple[str, ...]:
    """Parts of a path below the output folder of a job. Raises BadInput for one that is absolute or has ``..``."""
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise BadInput(f"path {path!r}: must lie below the output folder", hint="a relative path without '..'")
    return parts
