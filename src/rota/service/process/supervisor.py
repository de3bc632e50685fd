"""Supervisor of the service: starts it again when it hangs or died.

``rota up`` starts it as ``python -m rota.service.process.supervisor SETTINGS`` beside the service, which in turn starts
the supervisor again. It ends with the record of the service: one that ends in order removes that, one that was killed
leaves it behind. A standby, which has imported the service already, takes over: on a loaded machine the imports alone
take half a minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import sys
from urllib.parse import urlsplit

from rota.runtime import file_locks, process
from rota.runtime.clock import SystemClock, blocking_sleep
from rota.runtime.environ import Home
from rota.runtime.probe import LOOK_S, HangWatch, end_hung, note_replaced
from rota.runtime.process import SUPERVISOR, ProcessId, RunFolder
from rota.service.config import Settings, load_settings
from rota.service.process.daemon import (
    POLL_S,
    ServiceRecord,
    flags_of,
    identity_of,
    last_service,
    start_service,
    start_standby,
)
from rota.spec.errors import NotReachable, RotaError, StoreCorrupt, TimedOut
from rota.spec.resources import counted

PULSE_MAX_S = 3 * LOOK_S
"""A service whose loop has not touched its pulse for this time gives no answer."""
GRACE_S, DOUBLINGS_MAX = 0.5, 7
"""A service that died is started again after this time, doubled with each failure, unless ``rota up`` was faster."""
STANDBY_AFTER_S = 10.0
"""A service has run for this time before a standby is started: a start, or a short life, is not slowed down by it."""
STANDBY_FAILURES_MAX = 5
"""Standbys of one service that ended by themselves, each after twice the wait of the one before, until none follows."""
END_S = 5.0
UP_LOCK_S = 15.0
"""Longest wait for a ``rota up`` or ``down`` before the next look."""

_log = logging.getLogger("rota.service")


class Supervisor:
    """Watches the service of one home."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._home = settings, Home.of(settings.home)
        self._clock = SystemClock()
        self._hang_watch = HangWatch()
        self._hung: ProcessId | None = None
        self._died_s: float | None = None
        self._failures = 0
        self._since_s = self._clock.monotonic_s()
        """When the service that runs was first seen, or the last standby was started."""
        self._standby: process.Child | None = None
        self._standby_failures = 0
        self._taken = False
        """True if the last start failed because the port was in use."""

    def run(self) -> None:
        """Until the record of the service is gone."""
        while True:
            process.reap_adopted([] if self._standby is None else [self._standby.pid])
            with contextlib.suppress(StoreCorrupt):  # written over: the next start writes a whole one
                record = last_service(self._home)
                if record is None:
                    return
                if process.is_alive(which := identity_of(record)):
                    self._died_s, self._failures, self._taken = None, 0, False
                    self._look(which)
                    self._keep_standby()
                    process.wait_gone((which,), LOOK_S)
                    continue
                self._start_again(record, which)
            blocking_sleep(LOOK_S if self._failures else POLL_S)

    def _keep_standby(self) -> None:
        """Have a standby, once the service has run for a while; one that ends by itself is replaced, ever later."""
        if self._clock.monotonic_s() - self._since_s < STANDBY_AFTER_S * 2**self._standby_failures:
            return
        with contextlib.suppress(OSError):  # no room or process number for it now
            if self._standby is not None and self._standby.poll() is None:
                self._standby_failures = 0
                self._home.standby_fault.unlink(missing_ok=True)
                return
            if self._standby is not None:
                self._note_standby(self._standby.returncode)
            if self._standby_failures < STANDBY_FAILURES_MAX:
                self._since_s = self._clock.monotonic_s()
                self._standby = start_standby(self._settings, self._home)

    def _note_standby(self, exit_status: int) -> None:
        """Record for ``rota status`` that the standby exited unexpectedly."""
        self._standby, self._standby_failures = None, self._standby_failures + 1
        text = f"the standby ended with status {exit_status} ({counted(self._standby_failures, 'time')})"
        _log.error("%s", text)
        process.write_private(self._home.standby_fault, text)

    def _take_standby(self) -> process.Child | None:
        """The standby if it can take over; one that is stopped by a signal is ended."""
        found, self._standby = self._standby, None
        which = None if found is None or found.poll() is not None else process.identify(found.pid)
        if found is None or which is None:
            return None
        if process.is_stopped(which):
            found.kill()
            found.wait()
            return None
        return found

    def _look(self, which: ProcessId) -> None:
        if self._hang_watch.which != which:
            self._since_s, self._standby_failures = self._clock.monotonic_s(), 0
        if why := self._hang_watch.look(which, answers=self._pulse_age_s() < PULSE_MAX_S):
            _log.error("the service, process %s, %s: it is started again", which.pid, why)
            end_hung(which, self._home.run, "service", why, wait_s=END_S)
            self._hung = which

    def _pulse_age_s(self) -> float:
        try:
            return self._clock.wall_s() - self._home.service_pulse.stat().st_mtime
        except OSError:  # it has not begun yet, or the disk does not answer
            return 0.0

    def _start_again(self, record: ServiceRecord, which: ProcessId) -> None:
        self._died_s = self._died_s or self._clock.monotonic_s()
        grace_s = 0.0 if which == self._hung else GRACE_S * 2 ** min(self._failures, DOUBLINGS_MAX)
        if self._clock.monotonic_s() - self._died_s < grace_s:
            return
        try:
            with file_locks.locked(self._home.up_lock, wait_s=UP_LOCK_S):
                self._start_unless_started(record, which)
        except TimedOut as error:  # looked at again soon: the holder may be a rota up that takes long
            _log.error("the service is not started again yet: %s", error)

    def _start_unless_started(self, record: ServiceRecord, which: ProcessId) -> None:
        if last_service(self._home) == record:  # else rota up was faster
            # at the address that clients know; where any port would do, at another one when that is taken meanwhile
            port = self._settings.port if self._taken else urlsplit(record["url"]).port
            try:
                settings = load_settings(flags_of(self._settings) | {"port": port})
                start_service(settings, self._home, standby=self._take_standby())
                self._failures, self._taken = 0, False
                if which != self._hung:
                    note_replaced(self._home.run, "service", which.pid, "ended")
            except (RotaError, OSError) as error:
                self._failures += 1
                self._taken = isinstance(error, RotaError) and error.code == NotReachable.code
                _log.error("the service does not start: %s", error)


def main(arguments: list[str]) -> int:
    """Keep the service of the home that the flags name; 0 when another supervisor does."""
    settings = load_settings(json.loads(arguments[0]))
    home = Home.of(settings.home)
    run = RunFolder(home.run)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with contextlib.suppress(BlockingIOError), (home.run / "supervisor.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run.write(SUPERVISOR, process.own_id(), sys.orig_argv)
        Supervisor(settings).run()
        run.forget(SUPERVISOR)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
