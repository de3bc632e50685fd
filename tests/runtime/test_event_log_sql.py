"""The store below the event log: how SQLite is opened, and what its failures say."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import ArgumentError, OperationalError

from rota.runtime.event_log import sql
from rota.runtime.event_log.interface import KeptContext, Writer
from rota.runtime.event_log.sql import SqlLog
from rota.spec.errors import MissingExtra, StoreCorrupt, StoreUnavailable
from rota.spec.events import JobQueued
from rota.spec.ids import Epoch, JobId
from rota.testing.memory import VirtualClock

SECRET = "postgresql://me:hidden@host/base"


def failed(cause: str, url: str = SECRET) -> StoreUnavailable | StoreCorrupt:
    with pytest.raises((StoreUnavailable, StoreCorrupt)) as caught, sql._translated(url):
        raise OperationalError("SELECT 1", {}, sqlite3.OperationalError(cause))
    return caught.value


@pytest.mark.parametrize(
    ("cause", "kind", "hint"),
    (
        ("database disk image is malformed", StoreCorrupt, "restore a back-up; nothing was changed"),
        ("file is not a database", StoreCorrupt, "restore a back-up; nothing was changed"),
        ("Disk I/O error: short read", StoreCorrupt, "restore a back-up; nothing was changed"),
        ("database or disk is full", StoreUnavailable, "free space on that disk; nothing was written"),
        ("No space left on device", StoreUnavailable, "free space on that disk; nothing was written"),
        ("database is locked", StoreUnavailable, "see rota doctor"),
    ),
)
def test_a_failure_of_the_store_says_what_to_do_and_shows_no_password(cause: str, kind: type, hint: str) -> None:
    error = failed(cause)
    assert (type(error), error.hint) == (kind, hint)
    assert str(error).startswith("postgresql://me:***@host/base: ") and cause in str(error)


def test_an_error_of_the_library_is_one_of_the_store_and_shows_no_password() -> None:
    with pytest.raises(StoreUnavailable) as caught, sql._translated(SECRET):
        raise ArgumentError("wrong")
    assert str(caught.value).startswith("postgresql://me:***@host/base: wrong")


def test_a_log_in_memory_is_refused_since_no_other_process_could_see_it() -> None:
    for url in ("sqlite://", "sqlite:///:memory:"):
        with pytest.raises(ValueError, match="needs a SQLite file"):
            sql.Database(url)


def test_sqlite_keeps_a_write_ahead_log_that_is_on_disk_at_each_commit_and_waits_for_others(tmp_path: Path) -> None:
    base = sql.Database(f"sqlite:///{tmp_path}/deep/log.db")
    with base.reading() as connection:
        found = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")]
        assert (found, connection.execute(text("PRAGMA busy_timeout")).scalar()) == (["wal", 2], 5000)
    assert stat.S_IMODE((tmp_path / "deep" / "log.db").stat().st_mode) == 0o600
    assert base.sqlite_path == tmp_path / "deep" / "log.db"
    base.close()


def test_a_writer_keeps_other_writers_out_and_a_reader_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "BUSY_TIMEOUT_S", 0.05)
    base = sql.Database(f"sqlite:///{tmp_path}/log.db")
    with base.writing() as writing:
        writing.execute(text("CREATE TABLE one (n INTEGER)"))
    with base.reading() as reading:
        assert reading.execute(text("SELECT count(*) FROM one")).scalar() == 0
        with base.writing() as writing:
            writing.execute(text("INSERT INTO one VALUES (1)"))
            with pytest.raises(StoreUnavailable, match="locked"), base.writing():
                pass
        assert reading.execute(text("SELECT count(*) FROM one")).scalar() == 0, "one consistent view"
    base.close()


def test_postgresql_is_opened_by_its_newer_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(sql, "create_engine", lambda url, **more: opened.append((url.drivername, more)))
    for url in ("postgresql://host/base", "postgres://host/base", "postgresql+other://host/base"):
        sql._make_engine(url, None)
    more = {"pool_size": sql.POOL_MAX, "pool_pre_ping": True}
    newer = "postgresql+psycopg"
    assert opened == [(newer, more), (newer, more), ("postgresql+other", more)]

    def missing(url: object, **more: object) -> None:
        raise ImportError("no driver")

    monkeypatch.setattr(sql, "create_engine", missing)
    with pytest.raises(MissingExtra, match="no driver") as caught:
        sql._make_engine("postgresql://host/base", None)
    assert caught.value.hint == "pip install 'rota[postgres]'"


def test_without_migration_an_absent_schema_is_refused_with_the_next_step(tmp_path: Path) -> None:
    base = sql.Database(f"sqlite:///{tmp_path}/log.db")
    with pytest.raises(StoreUnavailable, match="has schema None; needs 0002") as caught:
        base.open_schema(migrate=False)
    assert caught.value.hint == "run: rota up"
    base.open_schema(migrate=True)
    base.open_schema(migrate=False)
    base.close()


@pytest.fixture
def log(tmp_path: Path) -> SqlLog:
    made = SqlLog(f"sqlite:///{tmp_path}/log.db", clock=VirtualClock(wall_start_s=5.0), migrate=True)
    made.take_epoch("install")
    for _ in range(3):
        made.append([JobQueued()], writer=Writer(scope="install", epoch=Epoch(1)), job=JobId("j"))
    return made


def test_a_record_has_the_time_of_the_clock_that_was_given(log: SqlLog) -> None:
    assert [(one.number, one.seq, one.at) for one in log.read()] == [(1, 1, 5.0), (2, 2, 5.0), (3, 3, 5.0)]


def test_rows_for_a_back_up_are_checked_one_by_one(log: SqlLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_ROWS", 2)
    rows = list(log.rows(2))
    assert [row["number"] for row in rows] == [1, 2]
    assert (rows[0]["job"], rows[0]["scope"], rows[0]["epoch"], log.fences()) == ("j", "install", 1, {"install": 1})
    with log._db.writing() as connection:
        connection.execute(text("UPDATE events SET at = 6 WHERE number = 2"))
    with pytest.raises(StoreCorrupt, match="record 2 of the event log fails its checksum"):
        list(log.rows(3))


def test_a_gap_is_found_by_readers_and_back_ups(log: SqlLog) -> None:
    with log._db.writing() as connection:
        connection.execute(text("DELETE FROM events WHERE number = 2"))
    for read in (lambda: log.read(), lambda: log.read(job=JobId("j")), lambda: list(log.rows(3))):
        with pytest.raises(StoreCorrupt, match="goes from 1 to 3"):
            read()
    assert [one.number for one in log.read(after=2)] == [3]


def test_a_restored_log_has_the_records_the_fences_and_the_mark_of_the_first(log: SqlLog, tmp_path: Path) -> None:
    other = SqlLog(f"sqlite:///{tmp_path}/other.db", migrate=True)
    assert other.load(log.rows(3), log.fences()) == 3
    assert (other.read(), other.fences(), other.last_number()) == (log.read(), {"install": 1}, 3)
    assert (tmp_path / "other.db-mark").read_text() == "0" * 19 + "3"
    broken = SqlLog(f"sqlite:///{tmp_path}/broken.db", migrate=True)
    with pytest.raises(StoreCorrupt, match="from 0 to 2"):
        broken.load([row for row in log.rows(3) if row["number"] > 1], {})
    assert broken.last_number() == 0


def test_a_kept_context_that_was_changed_behind_the_log_is_not_given(log: SqlLog) -> None:
    writer, job = Writer(scope="install", epoch=Epoch(1)), JobId("j")
    for seq in (1, 2, 3):
        log.keep_context(job, KeptContext(seq=seq, number=seq, body=f"body {seq}"), writer=writer)
    assert [(one.seq, one.number, one.body) for one in log.contexts(job)] == [(3, 3, "body 3"), (2, 2, "body 2")]
    with log._db.writing() as connection:
        connection.execute(text("UPDATE contexts SET body = 'other' WHERE seq = 3"))
    assert [one.seq for one in log.contexts(job)] == [2]
