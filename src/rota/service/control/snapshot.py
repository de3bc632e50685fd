"""Snapshots of what the service folded from the log, so that a start reads only the records after them.

A snapshot is never the truth: one that is missing, damaged, of another log or of another version of the program is not
used, and the log is read from its first record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

import rota
from rota.cluster.live import Scheduler
from rota.runtime.environ import PRIVATE_DIR, PRIVATE_FILE
from rota.runtime.event_log.interface import EventLog
from rota.service.accounts import AccountBook
from rota.service.metrics import Counts
from rota.service.views.installation import Installation
from rota.spec import codec
from rota.spec.events import Record

HEAD_MAX = 1000
"""Bytes of the first line of a snapshot."""

_log = logging.getLogger("rota.service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """Everything in the service that is folded from the log."""

    scheduler: Scheduler
    installation: Installation = field(default_factory=Installation)
    counts: Counts = field(default_factory=Counts)
    accounts: AccountBook = field(default_factory=AccountBook)

    def apply(self, records: Iterable[Record]) -> None:
        """Take in records, in order."""
        for record in records:
            self.installation.apply(record)
            self.scheduler.apply(record)
            self.counts.apply(record, self.installation)
            self.accounts.apply(record)

    def _parts(self) -> tuple[object, ...]:
        return (self.installation, self.scheduler, self.counts, self.accounts)

    def dump(self) -> bytes:
        """All of it; values that the parts share are shared again after ``load``."""
        return pickle.dumps([_fields(part) for part in self._parts()], protocol=5)

    def load(self, body: bytes) -> None:
        """Restore a dump. Raises any error for a damaged ``body``, and has changed nothing then."""
        found = pickle.loads(body)  # noqa: S301 - a private file of this user with its digest, see ``restore``
        parts = [(part, dict(fields)) for part, fields in zip(self._parts(), found, strict=True)]
        if any(fields.keys() != _fields(part).keys() for part, fields in parts):
            raise ValueError("it has other fields")
        for part, fields in parts:
            for name, value in fields.items():
                setattr(part, name, value)


def _fields(part: Any) -> dict[str, Any]:
    """What records may change: all attributes, without those that a part was made with."""
    names = cast("Iterable[str]", getattr(part, "__slots__", None) or vars(part))
    return {name: getattr(part, name) for name in names if name not in getattr(part, "GIVEN", ())}


@cache
def program(profile: str) -> str:
    """A digest of the program and of the scheduling ``profile`` by its settings: what a snapshot depends on.

    Computed once a process, early, so that the files are those that it imported.
    """
    root = Path(rota.__file__).parent
    digest = hashlib.sha256(f"{sys.version} {np.__version__} {profile}".encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def digest_of(record: Record) -> str:
    """A digest of one record: it differs between logs."""
    return hashlib.sha256(codec.dumps(record).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """The snapshot file of an installation: one JSON line (program, number, digests), then the dump."""

    path: Path
    program: str

    def write(self, views: Views, last: Record) -> None:
        """Replace the snapshot by one of ``views`` as of the record ``last``, in one step. Raises OSError."""
        body = views.dump()
        head = {"program": self.program, "number": last.number, "record": digest_of(last), "sha256": _sha256(body)}
        self.path.parent.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        for left in self.path.parent.glob(f".{self.path.name}.*"):
            left.unlink(missing_ok=True)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def number(self) -> int:
        """The last record in the snapshot; 0 without one."""
        with contextlib.suppress(OSError, ValueError, KeyError), self.path.open("rb") as file:
            return int(json.loads(file.readline(HEAD_MAX))["number"])
        return 0

    def restore(self, views: Views, log: EventLog) -> int:
        """Let ``views`` become the snapshot; the number of its last record, 0 when there is none that can be used."""
        try:
            with self.path.open("rb") as file:
                head, body = json.loads(file.readline(HEAD_MAX)), file.read()
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    raise ValueError("it belongs to another user")
            if head["program"] != self.program:
                raise ValueError("it was made by another version of the program or under other settings")
            if _sha256(body) != head["sha256"]:
                raise ValueError("it is damaged")
            found = log.read(after=head["number"] - 1, limit=1)
            if not found or digest_of(found[0]) != head["record"]:
                raise ValueError("it is of another log")
            views.load(body)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError) as error:
            _log.warning("the snapshot %s is not used, the whole log is read: %s", self.path, error)
            return 0
        return views.installation.number


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def fold(views: Views, log: EventLog, page: int) -> Record | None:
    """Take in every record after what ``views`` know; the last of them."""
    last = None
    while records := log.read(after=views.installation.number, limit=page):
        views.apply(records)
        last = records[-1]
    return last
