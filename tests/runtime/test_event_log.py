"""Every event log passes the same contract; the SQL ones survive kills, cuts, flips and newer schemas."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from log_contract import LogContract, kept, service, tick
from sqlalchemy import create_engine, text
from tests import postgres

from rota.runtime.event_log import sql
from rota.runtime.event_log.interface import EventLog
from rota.runtime.event_log.sql import SqlLog, _Mark
from rota.spec.errors import MissingExtra, SchemaTooNew, StoreCorrupt, StoreUnavailable
from rota.spec.ids import JobId
from rota.testing.memory import MemoryLog, VirtualClock


class TestMemoryLog(LogContract):
    @pytest.fixture
    def log(self) -> EventLog:
        return MemoryLog(VirtualClock())


class TestSqliteLog(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[EventLog]:
        log = SqlLog(f"sqlite:///{tmp_path}/rota.db", migrate=True)
        yield log
        log.close()


@pytest.mark.slow
@pytest.mark.skipif(bool(postgres.why_not()), reason=postgres.why_not())
class TestPostgresLog(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[EventLog]:
        log = SqlLog(postgres.database(tmp_path), migrate=True)
        yield log
        log.close()


def open_log(folder: Path, *, migrate: bool = True) -> SqlLog:
    return SqlLog(f"sqlite:///{folder}/rota.db", migrate=migrate)


def test_the_files_of_the_log_are_private(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([tick("x")], writer=service(log), job=JobId("a-1"))
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("rota.db", "rota.db-wal", "rota.db-shm", "rota.db-mark"), "0o600")
    log.close()


@pytest.mark.skipif(find_spec("psycopg") is not None, reason="the driver of PostgreSQL is installed")
def test_without_the_driver_of_postgresql_the_extra_is_named() -> None:
    with pytest.raises(MissingExtra) as missing:
        SqlLog("postgresql://nobody@127.0.0.1:1/nothing")
    assert "rota[postgres]" in missing.value.hint


def test_only_who_migrates_may_open_an_empty_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="needs 0002"):
        open_log(tmp_path, migrate=False)
    open_log(tmp_path).close()
    open_log(tmp_path, migrate=False).close()


def test_a_store_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    open_log(tmp_path).close()
    engine = create_engine(f"sqlite:///{tmp_path}/rota.db")
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaTooNew, match="9999"):
        open_log(tmp_path)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()


def test_a_store_of_the_first_version_is_brought_up_to_date_beside_a_copy(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = log.append([tick("x")], writer=service(log), job=JobId("a-1"))
    log.close()
    engine = create_engine(f"sqlite:///{tmp_path}/rota.db")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE contexts"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    engine.dispose()
    log = open_log(tmp_path)
    log.keep_context(JobId("a-1"), kept(1), writer=service(log))
    assert (log.read(), log.contexts(JobId("a-1"))) == (written, (kept(1),))
    assert (tmp_path / "rota.db.before-0002-from-0001").exists()
    log.close()


def test_a_changed_byte_of_a_kept_context_leaves_the_one_before(tmp_path: Path) -> None:
    log, job = open_log(tmp_path), JobId("a-1")
    me = service(log)
    for seq in (1, 2):
        log.keep_context(job, kept(seq, '{"apple": 1}'), writer=me)
    engine = create_engine(f"sqlite:///{tmp_path}/rota.db")
    with engine.begin() as connection:
        connection.execute(text("UPDATE contexts SET body = replace(body, 'apple', 'apply') WHERE seq = 2"))
    engine.dispose()
    assert [one.seq for one in log.contexts(job)] == [1]
    log.close()


def test_a_changed_byte_of_a_record_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([tick("apple")], writer=service(log), job=JobId("a-1"))
    engine = create_engine(f"sqlite:///{tmp_path}/rota.db")
    with engine.begin() as connection:
        connection.execute(text("UPDATE events SET body = replace(body, 'apple', 'apply')"))
    engine.dispose()
    with pytest.raises(StoreCorrupt, match="record 1"):
        log.read()
    log.close()


def test_a_missing_record_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([tick(str(i)) for i in range(5)], writer=service(log), job=JobId("a-1"))
    engine = create_engine(f"sqlite:///{tmp_path}/rota.db")
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM events WHERE number = 3"))
    engine.dispose()
    with pytest.raises(StoreCorrupt):
        log.read()
    with pytest.raises(StoreCorrupt):
        log.read(job=JobId("a-1"))
    log.close()


WRITER = """
import sys
from rota.runtime.event_log.interface import Writer
from rota.runtime.event_log.sql import SqlLog, _Mark
from rota.spec.events import TimerFired
log = SqlLog(sys.argv[1])
writer = Writer(scope="install", epoch=int(sys.argv[2]))
for i in range(1_000_000):
    record, = log.append([TimerFired(timer="x" * (i % 3000))], writer=writer, job=sys.argv[3])
    print(record.number, flush=True)
"""


def start_writer(log: SqlLog, epoch: int, job: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, log.url, str(epoch), job]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_some(writer: subprocess.Popen[str], lines: int) -> list[int]:
    assert writer.stdout is not None
    return [int(writer.stdout.readline()) for _ in range(lines)]


def kill_and_drain(writer: subprocess.Popen[str]) -> list[int]:
    writer.send_signal(signal.SIGKILL)
    assert writer.stdout is not None
    rest = writer.stdout.read()  # communicate() would pass over what readline() has read ahead
    writer.wait(60)
    return [int(line) for line in rest.splitlines()]


@pytest.mark.slow
def test_what_a_killed_writer_was_told_is_durable_is_there(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    epoch = service(log).epoch
    for round_ in range(5):
        before = log.last_number()
        writer = start_writer(log, epoch, f"job-{round_}")
        told = read_some(writer, 20 + 7 * round_) + kill_and_drain(writer)
        found = [record.number for record in log.read(after=before)]
        assert found[: len(told)] == told
        assert len(found) - len(told) <= 1, "at most the append in flight may be there unacknowledged"
    log.close()


@pytest.mark.slow
def test_two_processes_write_at_once_without_a_gap_or_an_error(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    epoch = service(log).epoch
    writers = [start_writer(log, epoch, f"job-{i}") for i in range(2)]
    told: list[int] = []
    try:
        for _ in range(5):
            for writer in writers:
                told += read_some(writer, 20)
    finally:
        for writer in writers:
            told += kill_and_drain(writer)
    numbers = [record.number for record in log.read()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert set(told) <= set(numbers)
    log.close()


def test_a_lock_that_is_never_given_up_and_a_file_that_is_damaged_under_an_open_log_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "BUSY_TIMEOUT_S", 0.05)
    log, path = open_log(tmp_path), tmp_path / "rota.db"
    writer = service(log)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            log.append([tick("a")], writer=writer, job=JobId("a-1"))
        other.execute("ROLLBACK")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.write(b"x" * 200)
    with pytest.raises(StoreCorrupt, match="not a database"):
        log.append([tick("b")], writer=writer, job=JobId("a-1"))


@pytest.mark.slow
def test_a_writer_gets_in_between_the_transactions_of_another_that_hardly_pauses(tmp_path: Path) -> None:
    """SQLite by itself looks ten times a second, which misses nine of ten pauses of 10 ms."""
    log, taken, done = open_log(tmp_path), threading.Event(), threading.Event()
    epoch, turns = service(log), 0

    def occupy() -> None:
        nonlocal turns
        with contextlib.closing(sqlite3.connect(tmp_path / "rota.db", timeout=60, isolation_level=None)) as other:
            while not done.is_set():
                other.execute("BEGIN IMMEDIATE")
                turns += 1
                taken.set()
                time.sleep(0.54)
                other.execute("ROLLBACK")
                time.sleep(0.01)

    thread = threading.Thread(target=occupy)
    thread.start()
    try:
        assert taken.wait(60)
        for i in range(3):
            log.append([tick(str(i))], writer=epoch, job=JobId("a-1"))
    finally:
        done.set()
        thread.join()
    assert turns <= 9
    log.close()


def crashed_copy(source: Path, target: Path, *, wal_bytes: int, database_bytes: int | None = None) -> Path:
    target.mkdir()
    for name in ("rota.db", "rota.db-wal", "rota.db-mark"):
        (target / name).write_bytes((source / name).read_bytes())
    os.truncate(target / "rota.db-wal", wal_bytes)
    if database_bytes is not None:
        os.truncate(target / "rota.db", database_bytes)
    return target


@pytest.mark.slow
def test_a_cut_tail_is_refused_and_never_read_as_a_shorter_history(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    log = open_log(source)
    me = service(log)
    for i in range(30):
        log.append([tick(str(i) * 200)], writer=me, job=JobId("a-1"))
    size = (source / "rota.db-wal").stat().st_size
    refused = 0
    for cut in range(1, size, size // 40):
        folder = crashed_copy(source, tmp_path / f"cut-{cut}", wal_bytes=size - cut)
        try:
            copy = open_log(folder, migrate=False)
        except (StoreCorrupt, StoreUnavailable):
            refused += 1
            continue
        assert len(copy.read()) == 30
        copy.close()
    assert refused >= 38
    whole = open_log(crashed_copy(source, tmp_path / "whole", wal_bytes=size))
    assert len(whole.read()) == 30
    whole.close()
    log.close()


def test_a_cut_database_file_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([tick("x" * 3000) for _ in range(30)], writer=service(log), job=JobId("a-1"))
    log.close()  # the write-ahead log is folded into the file
    size = (tmp_path / "rota.db").stat().st_size
    os.truncate(tmp_path / "rota.db", size - 4096)
    with pytest.raises((StoreCorrupt, StoreUnavailable)):
        open_log(tmp_path, migrate=False).read()


def test_a_mark_that_cannot_be_written_is_told_once_and_a_full_disk_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = _Mark(tmp_path / "rota.db")
    mark.advance(1)
    whole, told = mark._file, list[int]()
    for path in ("/dev/full", str(tmp_path / "rota.db-mark"), str(tmp_path / "rota.db-mark")):
        mark._file = os.open(path, os.O_WRONLY if path == "/dev/full" else os.O_RDONLY)
        mark.advance(2)
        mark.close()
        told.append(caplog.text.count("stays behind"))
    mark._file = whole
    assert (told, mark.read()) == ([0, 1, 1], 1)
    mark.close()
