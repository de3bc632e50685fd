"""What a caller sends for a job, and the job with what its workloads declare."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rota.service.control.inspection import Refused, inspect_workloads
from rota.service.jobfile import placed
from rota.spec.check import image_refused
from rota.spec.errors import JobFileError
from rota.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a caller sends: the text of a job file with its name and ``--set`` values, or a finished ``spec``.

    ``workdir`` is the folder that the file's relative paths start from. ``ignore_image`` takes a job that names
    an image, which nothing uses.
    """

    source: str = ""
    filename: str = "job.yaml"
    sets: tuple[str, ...] = ()
    workdir: str = ""
    spec: dict[str, Any] | None = None
    ignore_image: bool = False

    @property
    def digest(self) -> str:
        """What tells two submissions apart under one idempotency key."""
        parts = [
            self.source,
            self.filename,
            list(self.sets),
            self.workdir,
            self.spec,
            *([True] if self.ignore_image else []),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def workdir_of(spec: JobSpec, given: Submission) -> str:
    """The folder that the job starts in and imports from; empty where nobody said one that is absolute."""
    base = Path(given.workdir) if given.workdir else Path(given.filename).parent
    if not base.is_absolute():
        return spec.workdir if spec.workdir and Path(spec.workdir).is_absolute() else ""
    return str(base / spec.workdir) if spec.workdir else str(base)


def check_image(spec: JobSpec, given: Submission) -> None:
    """Raises JobFileError for an image that was not said to be ignored."""
    if not given.ignore_image and (found := image_refused(spec)):
        raise JobFileError(placed(found, given.source, filename=given.filename, sets=given.sets))


async def with_interfaces(spec: JobSpec, given: Submission) -> JobSpec:
    """The job with what its workloads declare.

    Raises JobFileError, at the places in the job file, for workloads that cannot be imported or do not fit together.
    """
    found = await inspect_workloads(spec, workdir_of(spec, given))
    if isinstance(found, Refused):
        problems = placed(found.faults, given.source, filename=given.filename, sets=given.sets)
        raise JobFileError(problems, hint=found.hint, code=str(found.reason), traceback=found.traceback)
    return found
