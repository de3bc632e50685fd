"""Where a job lives: its home, working folder and launcher, and the folders of its logs and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rota.runtime.environ import Home
from rota.runtime.output import log_name
from rota.spec.codec import JsonValue
from rota.spec.ids import Epoch, InstanceId, JobId
from rota.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace(JsonValue):
    """Where a job lives, as its master and every instance get it.

    ``launcher`` is the import path of a function that opens the launcher inside a process of the job.
    """

    home: str
    job: JobId
    workdir: str
    launcher: str
    owner: str = ""
    """Who submitted the job: whose secrets it may open."""

    def log_path(self, instance: InstanceId) -> str:
        """The log of one instance."""
        return str(Home.of(self.home).job(self.job).logs / log_name(instance.role, instance.rank))


def checkpoint_dir(spec: JobSpec, place: JobPlace) -> str:
    """Where the checkpoints of a job go."""
    given = spec.checkpoint.dir if spec.checkpoint else None
    return given or str(Path(place.home) / "checkpoints" / place.job)


def folder_of(root: Path, n: int, epoch: Epoch) -> Path:
    """Where the checkpoint of commit ``n`` by a loop epoch lies; no two epochs write into one folder."""
    return root / f"step-{n}.e{epoch}"
