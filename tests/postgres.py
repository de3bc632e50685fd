"""A PostgreSQL server of the tests' own: another user when they run as root, a private socket, a password."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import ProgrammingError

PASSWORD = "pg-password-of-the-tests"
USER = "rota"
WANTED = os.environ.get("ROTA_TEST_DB", "") == "postgres"
"""Set to run whole suites of the service on PostgreSQL in place of SQLite."""


def why_not() -> str:
    """Why no server can be started here; empty when one can."""
    missing = [name for name in ("initdb", "postgres") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not on PATH"
    if find_spec("psycopg") is None:
        return "the driver is not installed: pip install 'rota[postgres]'"
    if os.geteuid() == 0 and not _other_user():
        return "PostgreSQL does not run as root, and there is no user 'nobody'"
    return ""


def _other_user() -> dict[str, int]:
    """For subprocess: who the server runs as."""
    if os.geteuid() != 0:
        return {}
    with contextlib.suppress(KeyError):
        found = pwd.getpwnam("nobody")
        return {"user": found.pw_uid, "group": found.pw_gid}
    return {}


@functools.cache
def folder() -> Path:
    """Start the server, once a process; its folder with the socket. It ends with the process."""
    place = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    other = _other_user()
    (place / "password").write_text(PASSWORD)
    if other:
        for path in (place, place / "password"):
            os.chown(path, other["user"], other["group"])
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "cwd": place, **other}
    words = ["initdb", "-D", "data", "-U", USER, "-A", "scram-sha-256", "--pwfile", "password", "-N", "-E", "UTF8"]
    subprocess.run([*words, "--locale", "C"], check=True, timeout=60, **quiet)
    options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=100", "-k", str(place)]
    silent: dict[str, Any] = {**quiet, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(["postgres", "-D", "data", *options], **silent)
    atexit.register(_end, server, place)
    _wait(place)
    return place


def _wait(place: Path) -> None:
    engine = create_engine(_url(place, "postgres").replace("postgresql:", "postgresql+psycopg:"))
    for left in reversed(range(200)):
        try:
            engine.connect().close()
            break
        except Exception:
            if not left:
                raise
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["sleep", "0.1"], timeout=1, check=True)
    engine.dispose()


def _end(server: subprocess.Popen[Any], place: Path) -> None:
    server.send_signal(signal.SIGINT)  # its fast way: SIGTERM would wait for open connections
    server.wait(30)
    shutil.rmtree(place, ignore_errors=True)


def _url(place: Path, database: str) -> str:
    return f"postgresql://{USER}:{PASSWORD}@/{database}?host={place}"


def database(of: Path) -> str:
    """The address of a database that belongs to a folder; empty at first, the same one when asked again."""
    name = f"t{hashlib.sha256(str(of).encode()).hexdigest()[:16]}"
    engine = create_engine(_url(folder(), "postgres").replace("postgresql:", "postgresql+psycopg:"))
    with contextlib.suppress(ProgrammingError), engine.connect() as connection:  # it may be there already
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text(f'CREATE DATABASE "{name}"'))
    engine.dispose()
    return _url(folder(), name)
