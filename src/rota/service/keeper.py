"""The keeper of the service: starts it again when it hangs or died; ``python -m rota.service.keeper FLAGS-AS-JSON``.

``rota up`` starts it beside the service, which in turn starts the keeper again. It ends with the record of the service:
one that ends in order removes that, one that was killed leaves it behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import sys
from typing import Any
from urllib.parse import urlsplit

from rota.runtime import process
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.environ import Home
from rota.runtime.hang import LOOK_S, HangWatch, end_hung, note_replaced
from rota.runtime.process import KEEPER, ProcessId, RunFolder
from rota.service.config import Settings, load_settings
from rota.service.daemon import identity_of, last_service, start_service
from rota.spec.errors import NotReachable, RotaError, StoreCorrupt

PULSE_MAX_S = 3 * LOOK_S
"""A service whose loop has not touched its pulse for this time gives no answer."""
GRACE_S = 5.0
"""A service that died is started again after this time, by the keeper unless ``rota up`` was faster."""
STARTS_MAX = 5
"""Starts in a row that fail before the keeper gives up."""
END_S = 5.0

_log = logging.getLogger("rota.service")


class Keeper:
    """Watches the service of one home."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._home = settings, Home.of(settings.home)
        self._clock = SystemClock()
        self._looks: HangWatch | None = None
        self._hung: ProcessId | None = None
        self._died_s: float | None = None
        self._failures = 0
        self._taken = False
        """The last start failed as another process has its port."""

    def run(self) -> None:
        """Until there is no record of a service, or it cannot be started again."""
        while self._failures < STARTS_MAX:
            process.reap_adopted()
            with contextlib.suppress(StoreCorrupt):  # written over: the next start writes a whole one
                record = last_service(self._home)
                if record is None:
                    return
                if process.is_alive(which := identity_of(record)):
                    self._died_s = None
                    self._look(which)
                else:
                    self._start_again(record, which)
            blocking_sleep(LOOK_S)

    def _look(self, which: ProcessId) -> None:
        if self._looks is None or self._looks.which != which:
            self._looks = HangWatch(which)
        if why := self._looks.look(answers=self._pulse_age_s() < PULSE_MAX_S):
            _log.error("the service, process %s, %s: it is started again", which.pid, why)
            end_hung(which, self._home.run, "service", why)
            process.wait_gone((which,), END_S)
            self._hung = which

    def _pulse_age_s(self) -> float:
        try:
            return self._clock.wall_s() - self._home.service_pulse.stat().st_mtime
        except OSError:  # it has not begun yet, or the disk does not answer
            return 0.0

    def _start_again(self, record: dict[str, Any], which: ProcessId) -> None:
        self._died_s = self._died_s or self._clock.monotonic_s()
        grace_s = 0.0 if which == self._hung else GRACE_S * 2**self._failures
        if self._clock.monotonic_s() - self._died_s < grace_s:
            return
        with process.locked(self._home.up_lock):
            if last_service(self._home) != record:  # rota up was faster
                return
            # at the address that clients know; where any port would do, at another one when that is taken meanwhile
            port = self._settings.port if self._taken else urlsplit(record["url"]).port
            try:
                start_service(load_settings(_flags(self._settings) | {"port": port}), self._home)
                self._failures, self._taken = 0, False
                if which != self._hung:
                    note_replaced(self._home.run, "service", which.pid, "ended")
            except (RotaError, OSError) as error:
                self._failures += 1
                self._taken = isinstance(error, RotaError) and error.code == NotReachable.code
                _log.error("the service does not start: %s", error)


def _flags(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name, origin in settings.origins.items() if origin == "flag"}


def main(arguments: list[str]) -> int:
    """Keep the service of the home that the flags name; 0 when another keeper does."""
    settings = load_settings(json.loads(arguments[0]))
    home = Home.of(settings.home)
    run = RunFolder(home.run)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with contextlib.suppress(BlockingIOError), (home.run / "keeper.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run.write(KEEPER, process.own_id(), sys.orig_argv)
        Keeper(settings).run()
        if last_service(home) is None:
            run.forget(KEEPER)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
