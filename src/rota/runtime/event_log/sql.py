"""The event log on SQL (SQLite, PostgreSQL): many writers, each record once, in one order, fenced and checksummed."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, cast

from sqlalchemy import Connection, Engine, Row, bindparam, create_engine, inspect, make_url, text
from sqlalchemy import event as engine_event
from sqlalchemy.exc import DatabaseError, DBAPIError, SQLAlchemyError

from rota.runtime.clock import Clock, SystemClock
from rota.runtime.environ import PRIVATE_FILE
from rota.runtime.event_log.interface import CONTEXTS_KEPT, KeptContext, Writer, check_fence, check_job, check_seq, ends
from rota.spec import codec
from rota.spec.errors import MissingExtra, SchemaTooNew, SeqConflict, StoreCorrupt, StoreUnavailable
from rota.spec.events import Event, Record, event_from_json, event_to_json
from rota.spec.ids import Epoch, JobId

SCHEMA_VERSION = "0002"
BUSY_TIMEOUT_S = 5.0
_LOOKS_MS = 20
"""SQLite looks for a lock after 1, 2, 5 ... 100 ms; over and over up to this, it meets the gaps of a busy writer."""
FOLD_TIMEOUT_S = 1.0
POOL_MAX = 8
# one number for all Rota installations of one PostgreSQL database: "rota" in ASCII
_ADVISORY_LOCK = 0x726F7461


class Database:
    """A pool of connections with two kinds of transactions: ``reading`` and ``writing`` (one writer at a time).

    Every failure of the store leaves as StoreUnavailable, a damaged file as StoreCorrupt.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.sqlite_path = _sqlite_path(url)
        self._engine = _make_engine(url, self.sqlite_path)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view."""
        with _translated(self.url), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that no other writer of the store overlaps; durable when the block is left."""
        writer = self._engine.execution_options(rota_write=True)
        with _translated(self.url), writer.begin() as connection:
            if self.sqlite_path is None:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            yield connection

    def open_schema(self, *, migrate: bool) -> None:
        """Check that the schema is the one of this program; with ``migrate`` bring it there (SQLite: after a copy).

        Raises SchemaTooNew for a schema of a newer program, StoreUnavailable for an older or absent one without
        ``migrate``.
        """
        found = self._schema_version()
        if found == SCHEMA_VERSION:
            return
        if found is not None and found > SCHEMA_VERSION:
            raise SchemaTooNew(
                f"the schema of {self.shown_url} is {found}, this version of Rota knows up to {SCHEMA_VERSION}",
                hint="start the newer version of Rota, or restore a back-up made before the upgrade",
                found=found,
                known=SCHEMA_VERSION,
            )
        if not migrate:
            raise StoreUnavailable(f"{self.shown_url} has schema {found}; needs {SCHEMA_VERSION}", hint="run: rota up")
        self._migrate(found)

    @property
    def shown_url(self) -> str:
        """The address without its password."""
        return make_url(self.url).render_as_string(hide_password=True)

    def close(self) -> None:
        """Close every pooled connection."""
        self._engine.dispose()

    def _schema_version(self) -> str | None:
        with self.reading() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()

    def _migrate(self, found: str | None) -> None:
        from alembic import command  # noqa: PLC0415 - 0.1 s of imports, needed only when the schema changes
        from alembic.config import Config  # noqa: PLC0415 - the same

        if found is not None and self.sqlite_path is not None:
            self._copy(self.sqlite_path, found)
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        with self.writing() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def _copy(self, path: Path, found: str) -> None:
        target = path.with_name(f"{path.name}.before-{SCHEMA_VERSION}-from-{found}")
        with sqlite3.connect(path) as source, sqlite3.connect(target) as copy:
            source.backup(copy)
        shutil.copymode(path, target)


def fold_journal(path: Path) -> None:
    """Write what SQLite keeps beside a file into it, as the last process that closes it does unless it is killed.

    A file that another process uses, or that is not a database, stays as it is.
    """
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(path, timeout=FOLD_TIMEOUT_S)) as connection,
    ):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _sqlite_path(url: str) -> Path | None:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise ValueError("the event log needs a SQLite file: another process could not see one in memory")
    return Path(parsed.database)


def _make_engine(url: str, path: Path | None) -> Engine:
    if path is None:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):  # without a driver SQLAlchemy would want an older one
            parsed = parsed.set(drivername="postgresql+psycopg")
        try:
            return create_engine(parsed, pool_size=POOL_MAX, pool_pre_ping=True)
        except ImportError as error:
            raise MissingExtra(f"{error}", hint="pip install 'rota[postgres]'") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    # SQLite would make the file with the umask; it holds everything users submit.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, PRIVATE_FILE))
    engine = create_engine(url, pool_size=POOL_MAX, connect_args={"timeout": BUSY_TIMEOUT_S})
    engine_event.listen(engine, "connect", _configure_sqlite)
    engine_event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver's own BEGIN would be a deferred one
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writing one fails at once when another process wrote meanwhile.
    if not connection.get_execution_options().get("rota_write"):
        connection.exec_driver_sql("BEGIN")
        return
    raw = cast("sqlite3.Connection", connection.connection.driver_connection)
    until_s = time.monotonic() + BUSY_TIMEOUT_S
    raw.execute(f"PRAGMA busy_timeout = {_LOOKS_MS}")
    try:
        with contextlib.suppress(sqlite3.Error):  # it fails again below, as an error of SQLAlchemy
            while not _begun(raw) and time.monotonic() < until_s:
                pass
        if not raw.in_transaction:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
    finally:
        raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")


def _begun(raw: sqlite3.Connection) -> bool:
    try:
        raw.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


_CORRUPT = ("malformed", "not a database", "disk i/o error: short read")


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        shown = make_url(url).render_as_string(hide_password=True)
        cause = str(error.orig)
        if isinstance(error, DatabaseError) and any(word in cause.lower() for word in _CORRUPT):
            raise StoreCorrupt(f"{shown}: {cause}", hint="restore a back-up; nothing was changed") from error
        full = "disk is full" in cause or "No space left" in cause
        hint = "free space on that disk; nothing was written" if full else "see rota doctor"
        raise StoreUnavailable(f"{shown}: {cause}", hint=hint) from error
    except SQLAlchemyError as error:
        raise StoreUnavailable(f"{make_url(url).render_as_string(hide_password=True)}: {error}") from error


_FENCES = text("SELECT scope, epoch FROM fences")
_ROWS = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger("rota.runtime")
_FENCE = text("SELECT epoch FROM fences WHERE scope = :scope")
_RAISE = text(
    "INSERT INTO fences (scope, epoch) VALUES (:scope, :epoch) ON CONFLICT (scope) DO UPDATE SET epoch = excluded.epoch"
)
_LAST = text("SELECT max(number) FROM events")
_LAST_SEQ = text("SELECT max(seq) FROM events WHERE job = :job")
_INSERT = text(
    "INSERT INTO events (number, job, seq, at, scope, epoch, body, crc) "
    "VALUES (:number, :job, :seq, :at, :scope, :epoch, :body, :crc)"
)
_KEEP = text(
    "INSERT INTO contexts (job, seq, number, body, crc) VALUES (:job, :seq, :number, :body, :crc) "
    "ON CONFLICT (job, seq) DO UPDATE SET number = excluded.number, body = excluded.body, crc = excluded.crc"
)
_DROP_OLDER = text(
    "DELETE FROM contexts WHERE job = :job AND seq NOT IN "
    "(SELECT seq FROM contexts WHERE job = :job ORDER BY seq DESC LIMIT :kept)"
)
_DROP = text("DELETE FROM contexts WHERE job = :job")
_CONTEXTS = text("SELECT seq, number, body, crc FROM contexts WHERE job = :job ORDER BY seq DESC")
_COLUMNS = "SELECT number, job, seq, at, scope, epoch, body, crc FROM events WHERE number > :after"
_READ = {
    "all": text(f"{_COLUMNS} ORDER BY number LIMIT :limit"),
    "job": text(f"{_COLUMNS} AND job = :job ORDER BY number LIMIT :limit"),
    "cluster": text(f"{_COLUMNS} AND job IS NULL ORDER BY number LIMIT :limit"),
}

_OF_KIND = text(
    "SELECT seq FROM events WHERE job = :job AND seq > :after AND seq <= :last AND body LIKE :kind ORDER BY seq"
)
_OF_SEQS = text(f"{_COLUMNS} AND job = :job AND seq IN :seqs ORDER BY seq").bindparams(
    bindparam("seqs", expanding=True)
)
_PLACES_MAX = 16
"""Jobs, with a kind of record each, of which it is remembered where these records are: 8 bytes a record."""


class LogRow(TypedDict):
    """One record as the table ``events`` has it; ``crc`` is over all the others."""

    number: int
    job: str | None
    seq: int
    at: float
    scope: str
    epoch: int
    body: str
    crc: int


class SqlLog:
    """The ``EventLog`` on SQLite or PostgreSQL; may be used by many threads and processes at once.

    ``migrate`` is for the service alone; everybody else finds the schema in place or gets StoreUnavailable. Raises
    SchemaTooNew, and StoreCorrupt when the log lost records that were acknowledged.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, migrate: bool = False) -> None:
        self._clock: Clock = clock or SystemClock()
        self._db = Database(url)
        self._db.open_schema(migrate=migrate)
        self._mark = _Mark(self._db.sqlite_path)
        self._places: dict[tuple[JobId, str], tuple[int, array[int]]] = {}
        """Of a job and a kind: the last record that was looked at, and where those of the kind are."""
        self._places_lock = threading.Lock()
        acknowledged = self._mark.read()  # before the log: other processes append meanwhile
        last = self.last_number()
        if acknowledged > last:
            raise StoreCorrupt(
                f"{self._db.shown_url} ends at record {last}, but record {acknowledged} was acknowledged",
                hint="restore a back-up; to accept the loss, delete the file whose name ends in -mark",
                last=last,
                acknowledged=acknowledged,
            )

    @property
    def url(self) -> str:
        """The address another process opens the same log by."""
        return self._db.url

    def close(self) -> None:
        """Close every connection; the log may not be used afterwards."""
        self._mark.close()
        self._db.close()

    def take_epoch(self, scope: str, *, expected: Epoch | None = None) -> Epoch:
        with self._db.writing() as connection:
            current = _fence(connection, scope)
            if expected is not None and expected != current:
                raise SeqConflict(f"{scope}: epoch {current} was taken since {expected}", scope=scope, fence=current)
            connection.execute(_RAISE, {"scope": scope, "epoch": current + 1})
        return Epoch(current + 1)

    def fence(self, scope: str) -> Epoch:
        with self._db.reading() as connection:
            return _fence(connection, scope)

    def append(
        self, events: Sequence[Event], *, writer: Writer, job: JobId | None = None, expected_seq: int | None = None
    ) -> tuple[Record, ...]:
        check_job(events, job)
        bodies = [codec.dumps(event_to_json(event)) for event in events]
        with self._db.writing() as connection:
            check_fence(writer, _fence(connection, writer.scope))
            seq = 0 if job is None else connection.execute(_LAST_SEQ, {"job": job}).scalar() or 0
            if job is not None:
                check_seq(job, seq, expected_seq)
            last = connection.execute(_LAST).scalar() or 0
            at = self._clock.wall_s()
            records = tuple(
                Record(number=last + i, job=job, seq=0 if job is None else seq + i, at=at, event=event)
                for i, event in enumerate(events, start=1)
            )
            if records:
                connection.execute(_INSERT, [_row(r, body, writer) for r, body in zip(records, bodies, strict=True)])
            if ends(events):
                connection.execute(_DROP, {"job": job})
        if records:
            self._mark.advance(records[-1].number)
        return records

    def read(
        self, *, after: int = 0, job: JobId | None = None, limit: int = 10_000, cluster: bool = False
    ) -> tuple[Record, ...]:
        which = "job" if job is not None else "cluster" if cluster else "all"
        values: dict[str, object] = {"after": after, "limit": limit}
        if job is not None:
            values["job"] = job
        with self._db.reading() as connection:
            rows = connection.execute(_READ[which], values).all()
        records = tuple(_record(row) for row in rows)
        _check_complete([record.number for record in records] if which == "all" else [], after + 1)
        if job is not None and records:
            _check_complete([record.seq for record in records], records[0].seq)
        return records

    def sample(self, job: JobId, kind: str, points: int) -> tuple[Record, ...]:
        with self._places_lock, self._db.reading() as connection:
            looked, seqs = self._places.pop((job, kind), (0, array("q")))
            last = connection.execute(_LAST_SEQ, {"job": job}).scalar() or 0
            given = {"job": job, "after": looked, "last": last, "kind": f'%"kind":"{kind}"%'}
            seqs.extend(connection.execute(_OF_KIND, given).scalars())
            self._places[job, kind] = last, seqs
            if len(self._places) > _PLACES_MAX:
                del self._places[next(iter(self._places))]
            step = -(-len(seqs) // points) or 1
            wanted = {"after": 0, "job": job, "seqs": seqs[::-1][::step].tolist()}
            rows = connection.execute(_OF_SEQS, wanted).all() if seqs else ()
        return tuple(_record(row) for row in rows)

    def rows(self, last: int) -> Iterator[LogRow]:
        """Every record up to ``last`` as it is stored, checked; for a back-up."""
        after = 0
        while after < last:
            with self._db.reading() as connection:
                found = connection.execute(_READ["all"], {"after": after, "limit": _ROWS}).all()
            _check_complete([row.number for row in found], after + 1)
            for row in found:
                if row.number <= last:
                    _record(row)
                    yield cast("LogRow", dict(row._mapping))
            after = found[-1].number

    def fences(self) -> dict[str, int]:
        """The newest epoch of every scope."""
        with self._db.reading() as connection:
            return {row.scope: row.epoch for row in connection.execute(_FENCES)}

    def load(self, rows: Iterable[LogRow], fences: Mapping[str, int]) -> int:
        """Fill an empty log with what ``rows`` and ``fences`` gave, all or nothing; the last number.

        Raises StoreCorrupt for rows that are damaged or have a gap.
        """
        source, last = iter(rows), 0
        with self._db.writing() as connection:
            while batch := list(islice(source, _ROWS)):
                connection.execute(_INSERT, batch)
                found = connection.execute(_READ["all"], {"after": last, "limit": _ROWS}).all()
                _check_complete([_record(row).number for row in found], last + 1)
                last = found[-1].number
            for scope, epoch in fences.items():
                connection.execute(_RAISE, {"scope": scope, "epoch": epoch})
        self._mark.advance(last)
        return last

    def last_number(self) -> int:
        with self._db.reading() as connection:
            return connection.execute(_LAST).scalar() or 0

    def keep_context(self, job: JobId, kept: KeptContext, *, writer: Writer) -> None:
        row = {"job": job, "seq": kept.seq, "number": kept.number, "body": kept.body}
        with self._db.writing() as connection:
            check_fence(writer, _fence(connection, writer.scope))
            connection.execute(_KEEP, {**row, "crc": _crc(*row.values())})
            connection.execute(_DROP_OLDER, {"job": job, "kept": CONTEXTS_KEPT})

    def contexts(self, job: JobId) -> tuple[KeptContext, ...]:
        with self._db.reading() as connection:
            rows = connection.execute(_CONTEXTS, {"job": job}).all()
        return tuple(
            KeptContext(seq=seq, number=number, body=body)
            for seq, number, body, crc in rows
            if _crc(job, seq, number, body) == crc
        )


def _fence(connection: Connection, scope: str) -> Epoch:
    return Epoch(connection.execute(_FENCE, {"scope": scope}).scalar() or 0)


def _crc(*values: object) -> int:
    return zlib.crc32("\x00".join(str(value) for value in values).encode())


def _row(record: Record, body: str, writer: Writer) -> LogRow:
    return {
        "number": record.number,
        "job": record.job,
        "seq": record.seq,
        "at": record.at,
        "scope": writer.scope,
        "epoch": writer.epoch,
        "body": body,
        "crc": _crc(record.number, record.job, record.seq, repr(record.at), writer.scope, writer.epoch, body),
    }


def _record(row: Row[Any]) -> Record:
    number, job, seq, at, scope, epoch, body, crc = tuple[Any, ...](row)
    if _crc(number, job, seq, repr(at), scope, epoch, body) != crc:
        raise StoreCorrupt(f"record {number} of the event log fails its checksum", hint="restore a back-up")
    event = event_from_json(json.loads(body))
    return Record(number=number, job=None if job is None else JobId(job), seq=seq, at=at, event=event)


def _check_complete(numbers: Sequence[int], first: int) -> None:
    for expected, number in enumerate(numbers, start=first):
        if number != expected:
            raise StoreCorrupt(f"the event log goes from {expected - 1} to {number}", hint="restore a back-up")


class _Mark:
    """The newest acknowledged number, beside a SQLite file.

    A cut write-ahead log looks to SQLite like a transaction that never was; this mark shows the difference. Writers
    race to set it, so it may lag by the writes in flight: it never claims a record that was not acknowledged.
    """

    def __init__(self, database: Path | None) -> None:
        self._file, self._told, self._path = -1, False, database
        if database is not None:
            self._path = database.with_name(f"{database.name}-mark")
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)

    def read(self) -> int:
        """The newest number that was acknowledged, as far as it is known. Raises StoreCorrupt if damaged."""
        raw = os.pread(self._file, 21, 0) if self._file >= 0 else b""
        if raw and not (raw.isdigit() and len(raw) <= 20):
            raise StoreCorrupt(
                f"{self._path} holds no number but {raw!r}: what was acknowledged is not known",
                hint="restore a back-up; or delete that file, and the event log is taken as it is",
            )
        return int(raw or b"0")

    def advance(self, number: int) -> None:
        """Remember that ``number`` was acknowledged.

        When that fails an older number stays, which is true as well; an error other than a full disk is logged, once.
        """
        if self._file < 0:
            return
        try:
            os.pwrite(self._file, f"{number:020d}".encode(), 0)
        except OSError as error:
            if error.errno not in _FULL and not self._told:
                self._told = True
                _log.error("the mark of the event log stays behind, and a cut log may go unseen: %s", error)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
