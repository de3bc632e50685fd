"""Backup of an installation in one file, and its restore elsewhere, on the same kind of store or the other one."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TypedDict

from rota.runtime.clock import SystemClock
from rota.runtime.environ import PRIVATE_FILE, Home
from rota.runtime.event_log.sql import SqlLog
from rota.runtime.process import write_private
from rota.runtime.undo import undone_if_raised
from rota.service.config import Settings
from rota.service.process.assembly import db_url
from rota.service.process.daemon import as_before, find_service, live_in_log
from rota.spec.errors import BadInput, Conflict
from rota.spec.states import JobState

FORM = 1
EVENTS, FENCES, ABOUT = "events.jsonl", "fences.json", "about.json"
_AUDIT = ("audit.jsonl", "audit.jsonl.1", "strangers-audit.jsonl", "strangers-audit.jsonl.1")
KEPT = ("token", "config.toml", "secret.key", *_AUDIT)
"""Files of the home that go with the log; ``secret.key`` and ``token`` make the file as precious as the home."""
OWN = "config.toml"
"""Not overwritten by a restore: it may name the store to fill."""
KEPT_OF_JOBS = ("logs", "output")


class BackupDocument(TypedDict):
    """Result of ``back_up``."""

    kind: str
    file: str
    records: int
    files: int
    size_bytes: int


class RestoreDocument(TypedDict):
    """Result of ``restore``; ``pretend`` are the pretended nodes that the next ``up`` takes again.

    ``jobs`` are those that the next ``up`` continues: they had not ended, and were not paused.
    """

    kind: str
    file: str
    home: str
    records: int
    files: int
    jobs: int
    pretend: str


def back_up(settings: Settings, out: Path, *, jobs: bool = True) -> BackupDocument:
    """Write ``out``: the event log, token, settings, secrets, and with ``jobs`` their logs and output folders.

    The service may run meanwhile: the log only grows, and what is appended after the start is not part of the file.
    Checkpoints and tensors are not part of it. Raises BadInput, also when the file cannot be written, StoreUnavailable,
    StoreCorrupt; then no file is left.
    """
    home = Home.of(settings.home)
    if out.exists():
        raise BadInput(f"{out} is there already", hint="choose another name")
    log = SqlLog(db_url(settings))
    partial = out.with_name(f".{out.name}.partial")
    try:
        told = _cursors(home)  # before the end of the log: a webhook may be sent twice, and never skips
        last = log.last_number()
        with tarfile.open(fileobj=_private(partial), mode="w:gz", compresslevel=3) as tar:
            about = {"form": FORM, "records": last, "pretend": as_before(settings, home).pretend}
            _add(tar, ABOUT, [json.dumps(about)])
            _add(tar, EVENTS, (f"{json.dumps(row)}\n" for row in log.rows(last)))
            _add(tar, FENCES, [json.dumps(log.fences())])
            for name, number in told.items():
                _add(tar, name, [number])
            files = sum(_add_file(tar, home, path) for path in _files(home, jobs))
        partial.replace(out)
    except OSError as error:
        raise BadInput(f"{out} cannot be written: {error}", hint="free space, or choose another folder") from error
    finally:
        partial.unlink(missing_ok=True)
        log.close()
    size = out.stat().st_size
    return {"kind": "Backup", "file": str(out), "records": last, "files": files, "size_bytes": size}


def restore(settings: Settings, source: Path) -> RestoreDocument:
    """Fill an empty home and an empty store from a file of ``back_up``: all of it or nothing.

    One that was killed can be begun again; until then no service starts there. Raises Conflict when there is an
    installation already, BadInput for another file or one that is damaged, StoreCorrupt for records that are.
    """
    home = Home.of(settings.home)
    if find_service(home) is not None:
        raise Conflict(f"a service runs in {home.root}", hint="rota down, then restore into another ROTA_HOME")
    again, fresh, new_db = home.restoring.is_dir(), not home.root.exists(), not home.db.exists()
    there = [path.name for path in _files(home, jobs=True) if path.name != OWN]
    if there and not again:
        raise Conflict(f"{home.root} is not empty: it has {there[0]}", hint="set ROTA_HOME to another")
    laid: list[Path] = []

    def take_back() -> None:
        for path in laid:
            path.unlink(missing_ok=True)
        if not again:  # else what the killed one laid is still there
            shutil.rmtree(home.root if fresh else home.restoring, ignore_errors=True)
        for path in home.root.glob(f"{home.db.name}*") if new_db and not fresh else ():
            path.unlink(missing_ok=True)

    try:
        with undone_if_raised(take_back):
            with tarfile.open(source) as tar:
                records, pretend = _fill(tar, settings, home, laid, again)
            jobs = sum(count for state, count in live_in_log(settings).items() if state != JobState.PAUSED)
    except (tarfile.TarError, KeyError, ValueError, EOFError) as error:
        raise BadInput(f"{source} is not a back-up of Rota, or is damaged: {error}") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not source.exists():
            raise BadInput(f"{source}: no such file", hint="rota backup FILE makes one") from error
        raise BadInput(f"{source} cannot be restored into {home.root}: {error}") from error
    write_private(home.restored, json.dumps({"at": SystemClock().wall_s(), "file": source.name}))
    shutil.rmtree(home.restoring)
    return {
        "kind": "Restore",
        "file": str(source),
        "home": str(home.root),
        "records": records,
        "files": len(laid),
        "jobs": jobs,
        "pretend": pretend,
    }


def _fill(tar: tarfile.TarFile, settings: Settings, home: Home, laid: list[Path], again: bool) -> tuple[int, str]:
    """Unpack beside, put in place (``laid``), then fill the store; the number of records, and the pretended nodes."""
    about = json.load(_open(tar, ABOUT))
    if about.get("form") != FORM:
        raise BadInput(f"this back-up has form {about.get('form')}; this version knows {FORM}")
    home.make()
    log = SqlLog(db_url(settings), migrate=True)
    try:
        if (last := log.last_number()) and not (again and last == about["records"]):
            raise Conflict(f"the store of {home.root} is not empty", hint="set ROTA_HOME or ROTA_DB_URL to another")
        _unpack(tar, home.restoring)
        for path in sorted(path for path in home.restoring.rglob("*") if path.is_file()):
            place = path.relative_to(home.restoring)
            target = home.root / place
            if target.name != OWN or not target.exists():
                for folder in reversed(place.parents):  # mkdir(parents=True) would leave those above open to all
                    (home.root / folder).mkdir(mode=0o700, exist_ok=True)
                laid.append(path.replace(target))
        records = last or log.load(map(json.loads, _open(tar, EVENTS)), json.load(_open(tar, FENCES)))
    finally:
        log.close()
    if pretend := about.get("pretend", ""):
        write_private(home.last_up, json.dumps({"pretend": pretend}))
    return records, pretend


def _private(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)
    path.touch(mode=PRIVATE_FILE)
    return path.open("wb")


def _files(home: Home, jobs: bool) -> Iterator[Path]:
    yield from (path for name in KEPT if (path := home.root / name).is_file())
    yield from (path for path in (home.root / "secrets").rglob("*") if path.is_file())
    for job in home.jobs.iterdir() if jobs and home.jobs.is_dir() else ():
        for name in KEPT_OF_JOBS:
            found = job / name
            yield from [found] if found.is_file() else (path for path in found.rglob("*") if path.is_file())


def _cursors(home: Home) -> dict[str, str]:
    """Cursor of each webhook in the log, by its name in the archive."""
    files = home.webhooks.iterdir() if home.webhooks.is_dir() else ()
    return {f"home/{path.relative_to(home.root)}": path.read_text(encoding="utf-8") for path in files}


def _add_file(tar: tarfile.TarFile, home: Home, path: Path) -> int:
    """1, or 0 for a file that went away meanwhile."""
    try:
        tar.add(path, arcname=f"home/{path.relative_to(home.root)}", recursive=False)
    except FileNotFoundError:
        return 0
    return 1


def _add(tar: tarfile.TarFile, name: str, texts: Iterable[str]) -> None:
    with tempfile.TemporaryFile() as file:  # the size comes before the bytes
        for text in texts:
            file.write(text.encode())
        info = tarfile.TarInfo(name)
        info.size, info.mode = file.tell(), PRIVATE_FILE
        file.seek(0)
        tar.addfile(info, file)


def _open(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    found = tar.extractfile(name)
    if found is None:
        raise BadInput(f"{name} is missing")
    return found


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """Lay the files of the home; the filter refuses whatever would leave the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for member in tar.getmembers():
        path = PurePosixPath(member.name)
        if path.parts[:1] == ("home",) and member.isfile():
            member.name = str(PurePosixPath(*path.parts[1:]))
            tar.extract(member, folder, filter="data")
            (folder / member.name).chmod(member.mode & 0o700)
