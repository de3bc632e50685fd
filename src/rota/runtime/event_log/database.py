"""SQL engine and transactions: SQLite or PostgreSQL, with the schema at the version of this program."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import DatabaseError, DBAPIError, SQLAlchemyError

from rota.runtime.environ import PRIVATE_FILE
from rota.spec.errors import MissingExtra, SchemaTooNew, StoreCorrupt, StoreUnavailable

SCHEMA_VERSION = "0002"
BUSY_TIMEOUT_S = 5.0
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
        # Alembic costs 0.1 s of imports and is needed only when the schema changes.
        from alembic import command  # noqa: PLC0415
        from alembic.config import Config  # noqa: PLC0415

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

    A file that another process uses, or that is no database, stays as it is.
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
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # the driver's own BEGIN would be a deferred one
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writing one fails at once when another process wrote meanwhile.
    write = connection.get_execution_options().get("rota_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


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
