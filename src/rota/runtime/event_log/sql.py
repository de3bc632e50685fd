"""The event log on SQL: many processes write, each record once, in one order, fenced and checksummed."""

from __future__ import annotations

import errno
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, text

from rota.runtime.clock import Clock, SystemClock
from rota.runtime.environ import PRIVATE_FILE
from rota.runtime.event_log.database import Database
from rota.runtime.event_log.interface import CONTEXTS_KEPT, KeptContext, Writer, check_fence, check_job, check_seq, ends
from rota.spec import codec
from rota.spec.errors import SeqConflict, StoreCorrupt
from rota.spec.events import Event, Record, event_from_json, event_to_json
from rota.spec.ids import Epoch, JobId

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
        """Give every connection back; the log may not be used afterwards."""
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
        values: dict[str, Any] = {"after": after, "limit": limit}
        if job is not None:
            values["job"] = job
        with self._db.reading() as connection:
            rows = connection.execute(_READ[which], values).all()
        records = tuple(_record(row) for row in rows)
        _check_complete([record.number for record in records] if which == "all" else [], after + 1)
        if job is not None and records:
            _check_complete([record.seq for record in records], records[0].seq)
        return records

    def rows(self, last: int) -> Iterator[dict[str, Any]]:
        """Every record up to ``last`` as it is stored, checked; for a back-up."""
        after = 0
        while after < last:
            with self._db.reading() as connection:
                found = connection.execute(_READ["all"], {"after": after, "limit": _ROWS}).all()
            _check_complete([row.number for row in found], after + 1)
            for row in found:
                if row.number <= last:
                    _record(row)
                    yield dict(row._mapping)
            after = found[-1].number

    def fences(self) -> dict[str, int]:
        """The newest epoch of every scope."""
        with self._db.reading() as connection:
            return {row.scope: row.epoch for row in connection.execute(_FENCES)}

    def load(self, rows: Iterable[dict[str, Any]], fences: Mapping[str, int]) -> int:
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


def _row(record: Record, body: str, writer: Writer) -> dict[str, Any]:
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

    A cut write-ahead log looks to SQLite like a transaction that never was; this mark tells the difference. Writers
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

        When that fails an older number stays, which is true as well; what is no full disk is told, once.
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
