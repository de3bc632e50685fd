"""Back up an installation into one file and restore it elsewhere, on the same kind of store or the other one."""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rota.runtime.environ import PRIVATE_FILE, Home
from rota.runtime.sql_log import SqlLog
from rota.service.assembly import db_url
from rota.service.config import Settings
from rota.service.daemon import find_service
from rota.spec.errors import BadInput, Conflict

FORM = 1
EVENTS, FENCES, ABOUT = "events.jsonl", "fences.json", "about.json"
KEPT = ("token", "config.toml", "secret.key", "audit.jsonl", "audit.jsonl.1")
"""Files of the home that go with the log; ``secret.key`` and ``token`` make the file as precious as the home."""
KEPT_OF_JOBS = ("spec.json", "logs", "output")


def back_up(settings: Settings, out: Path, *, jobs: bool = True) -> dict[str, Any]:
    """Write ``out``: the event log, token, settings, secrets, and with ``jobs`` their logs and output folders.

    The service may run meanwhile: the log only grows, and what is appended after the start is not part of the file.
    Checkpoints and tensors are not part of it. Raises BadInput, StoreUnavailable, StoreCorrupt.
    """
    home = Home.of(settings.home)
    if out.exists():
        raise BadInput(f"{out} is there already", hint="choose another name")
    log = SqlLog(db_url(settings))
    try:
        last = log.last_number()
        partial = out.with_name(f".{out.name}.partial")
        with tarfile.open(fileobj=_private(partial), mode="w:gz", compresslevel=3) as tar:
            _add(tar, ABOUT, [json.dumps({"form": FORM, "records": last})])
            _add(tar, EVENTS, (f"{json.dumps(row)}\n" for row in log.rows(last)))
            _add(tar, FENCES, [json.dumps(log.fences())])
            files = list(_files(home, jobs))
            for path in files:
                tar.add(path, arcname=f"home/{path.relative_to(home.root)}", recursive=False)
    finally:
        log.close()
    partial.replace(out)
    size = out.stat().st_size
    return {"kind": "Backup", "file": str(out), "records": last, "files": len(files), "size_bytes": size}


def restore(settings: Settings, source: Path) -> dict[str, Any]:
    """Fill an empty home and an empty store from a file of ``back_up``.

    Raises Conflict when there is an installation already, BadInput for another file or one that is damaged.
    """
    home = Home.of(settings.home)
    if find_service(home) is not None:
        raise Conflict(f"a service runs in {home.root}", hint="rota down, then restore into another ROTA_HOME")
    try:
        with tarfile.open(source) as tar:
            about = json.load(_open(tar, ABOUT))
            if about.get("form") != FORM:
                raise BadInput(f"{source} has form {about.get('form')}; this version knows {FORM}")
            home.make()
            log = SqlLog(db_url(settings), migrate=True)
            try:
                if log.last_number():
                    raise Conflict(
                        f"the store of {home.root} is not empty", hint="set ROTA_HOME or ROTA_DB_URL to another"
                    )
                last = log.load(map(json.loads, _open(tar, EVENTS)), json.load(_open(tar, FENCES)))
            finally:
                log.close()
            files = _unpack(tar, home)
    except FileNotFoundError as error:
        raise BadInput(f"{source}: no such file") from error
    except (tarfile.TarError, KeyError, ValueError, EOFError) as error:
        raise BadInput(f"{source} is not a back-up of Rota, or is damaged: {error}") from error
    return {"kind": "Restore", "file": str(source), "home": str(home.root), "records": last, "files": files}


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


def _add(tar: tarfile.TarFile, name: str, texts: Iterable[str]) -> None:
    with tempfile.TemporaryFile() as file:  # the size stands before the bytes
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


def _unpack(tar: tarfile.TarFile, home: Home) -> int:
    """Lay the files of the home; the filter refuses whatever would leave it."""
    count = 0
    for member in tar.getmembers():
        path = PurePosixPath(member.name)
        if path.parts[0] == "home" and member.isfile():
            member.name = str(PurePosixPath(*path.parts[1:]))
            tar.extract(member, home.root, filter="data")
            (home.root / member.name).chmod(member.mode & 0o700)
            count += 1
    return count
