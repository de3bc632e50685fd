"""Snapshot of the log, made in a process of its own; ``python -m rota.service.process.snapshot SETTINGS-AS-JSON``.

In the service it would pause the event loop for a second with 10,000 jobs.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys

from rota.runtime.event_log.sql import SqlLog
from rota.service.config import Settings, load_settings
from rota.service.control.loop import PAGE
from rota.service.control.snapshot import SnapshotFile, Views, fold
from rota.service.process.assembly import db_url, make_scheduler, snapshot_file

NICE = 10


def make_snapshot(settings: Settings) -> int:
    """Bring the snapshot of an installation up to its log; the number of the last record in it."""
    file: SnapshotFile = snapshot_file(settings)
    views = Views(scheduler=make_scheduler(settings))
    with contextlib.closing(SqlLog(db_url(settings))) as log:
        file.restore(views, log)
        if (last := fold(views, log, PAGE)) is not None:
            file.write(views, last)
    return views.installation.number


def main(arguments: list[str]) -> int:
    """Errors are the log's of the service, and the exit status."""
    gc.disable()  # what is read stays
    os.nice(NICE)
    os.umask(0o077)
    make_snapshot(load_settings(json.loads(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
