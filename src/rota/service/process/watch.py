"""What the service does once a second about its own parts: shows that it turns, watches its keeper, notes what hung."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from rota.runtime import process
from rota.runtime.hang import LOOK_S, HangWatch, end_hung, note_replaced, noted
from rota.runtime.process import KEEPER, RunFolder
from rota.service.process.daemon import ensure_keeper
from rota.service.rest.deps import AppState
from rota.spec.errors import RotaError
from rota.spec.events import PartReplaced

END_S = 5.0
SAME_S = 60.0
"""Notes of one process within this time are of one death."""

_log = logging.getLogger("rota.service")


async def show_life(app: AppState) -> None:
    """Until cancelled: touch the pulse, which the keeper looks at. Does nothing else, so that nothing holds it up."""
    while True:
        with contextlib.suppress(OSError):
            app.home.service_pulse.touch(mode=0o600)
        await app.clock.sleep(LOOK_S)


async def watch_parts(app: AppState) -> None:
    """Until cancelled: keep the keeper, and put into the log what the watchers noted."""
    looks: HangWatch | None = None
    while True:
        try:
            looks = await asyncio.to_thread(_watch_keeper, app, looks)
            await _log_replaced(app)
        except (OSError, RotaError) as error:  # the disk or the store is away: looked at again
            _log.warning("the parts of the installation: %s", error)
        await app.clock.sleep(LOOK_S)


def _watch_keeper(app: AppState, looks: HangWatch | None) -> HangWatch | None:
    """Start the keeper again when it is gone or hangs; a service that was started without one has none."""
    run = RunFolder(app.home.run)
    record = run.read(KEEPER)
    if record is None:
        return None
    if not process.is_alive(record.id):
        if looks is not None and looks.which == record.id:
            note_replaced(run.path, KEEPER, record.pid, "ended")
        ensure_keeper(app.settings, app.home)
        return None
    looks = looks if looks is not None and looks.which == record.id else HangWatch(record.id)
    if why := looks.look():
        end_hung(record.id, run.path, KEEPER, why)
        process.wait_gone((record.id,), END_S)
    return looks


async def _log_replaced(app: AppState) -> None:
    """Put what the watchers noted into the log, each death once: a crash leaves its note, and two may see it."""
    known = {(one.part, one.pid): one.found_at for one in app.loop.installation.replaced}
    for path, one in (await asyncio.to_thread(noted, app.home.run)).items():
        if abs(one.at - known.get((one.part, one.pid), -SAME_S)) >= SAME_S:
            known[one.part, one.pid] = one.at
            text = f"{one.part}, process {one.pid}, {one.why}"
            await app.loop.append([PartReplaced(part=one.part, pid=one.pid, text=text, found_at=one.at)])
        path.unlink(missing_ok=True)
