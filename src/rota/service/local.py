"""Local service control: what verbs do to the process and files of this machine's service, which no client can ask for.

Start and end it, join this machine to another one, copy and fill an installation, examine it, play the demonstration.
Each function loads its part when called: ``rota --help`` needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.service.config import Settings
    from rota.service.demo import Outcome
    from rota.service.doctor import DoctorReport
    from rota.service.process.backup import BackupDocument, RestoreDocument
    from rota.service.process.daemon import DownDocument, IdleStatus, LocalStatus, UpDocument
    from rota.service.process.joined import JoinDocument
    from rota.spec.codec import JsonObject


def up(settings: Settings) -> UpDocument:
    """Start the service unless it runs. Raises as ``up`` of ``daemon``."""
    from rota.service.process.daemon import up

    return up(settings)


def serve(settings: Settings) -> None:
    """Be the service until a signal. Raises Conflict where one runs for this home, NotReachable for a taken port."""
    from rota.service.process.serve import run

    run(settings)


def status(settings: Settings) -> LocalStatus | IdleStatus:
    """The Status document, also of a service that does not run."""
    from rota.service.process.daemon import status

    return status(settings)


def live_by_user(settings: Settings) -> dict[str, int]:
    """How many live jobs each user has; empty where no service runs. Raises what a request raises."""
    from rota.service.process.daemon import live_by_user

    return live_by_user(settings)


def live_in_log(settings: Settings) -> dict[str, int]:
    """How many live jobs the event log has in each state, read without a service."""
    from rota.service.process.daemon import live_in_log

    return live_in_log(settings)


def down(settings: Settings, *, cancel: bool, force: bool) -> DownDocument:
    """End the service and all that it started; ``cancel`` ends its jobs too, ``force`` waits for none."""
    from rota.service.process.daemon import down

    return down(settings, jobs="cancel" if cancel else "leave", force=force)


def join(
    settings: Settings, address: str, *, name: str, cpus: int | None, gpus: int | None, labels: Sequence[str], at: str
) -> JoinDocument:
    """Make this machine a node of the installation at ``address``. Raises as ``join`` of ``joined``."""
    from rota.service.process.joined import join

    return join(settings, address, token=settings.token, name=name, cpus=cpus, gpus=gpus, labels=labels, at=at)


def leave(settings: Settings, *, force: bool) -> JoinDocument:
    """End what ``join`` started on this machine; ``force`` does not ask the service."""
    from rota.service.process.joined import leave

    return leave(settings, force=force)


def has_joined(settings: Settings) -> bool:
    """True when this machine joined an installation elsewhere, by this home."""
    from rota.service.process.joined import has_joined

    return has_joined(settings)


def back_up(settings: Settings, out: Path, *, jobs: bool) -> BackupDocument:
    """Write everything that the installation knows into one file. Raises as ``back_up`` of ``backup``."""
    from rota.service.process.backup import back_up

    return back_up(settings, out, jobs=jobs)


def restore(settings: Settings, source: Path) -> RestoreDocument:
    """Fill an empty installation from a file of ``back_up``. Raises as ``restore`` of ``backup``."""
    from rota.service.process.backup import restore

    return restore(settings, source)


def examine(settings: Settings, *, fix: bool) -> DoctorReport:
    """The findings about this machine and installation; ``fix`` repairs what can be repaired without harm first."""
    from rota.service.doctor import examine

    return examine(settings, fix=fix)


def play_demo(out: Path, say: Callable[[str], None], *, keep: bool) -> tuple[Outcome, JsonObject]:
    """Play the demonstration in a home of its own; its outcome, and that as a document."""
    from rota.service.demo import document, play

    outcome = play(out, say, keep=keep)
    return outcome, document(outcome)


def clean_demos() -> JsonObject:
    """End and remove what earlier demonstrations left; the document names each home."""
    from rota.service.demo import clean

    return clean()
