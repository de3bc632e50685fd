"""A program of a job at the terminal of the user: its output here, keys and window size there; shells as jobs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rota.service.cli.flags import Flags
from rota.service.cli.output import Terminal
from rota.service.cli.shell import terminal_name, terminal_size
from rota.service.cli.verbs.live import JobWatch, Ticker, live_line
from rota.service.user_process import monotonic, sleep
from rota.spec.errors import BadInput, Conflict, NotReachable, RotaError, UnknownName
from rota.spec.states import JobState

if TYPE_CHECKING:
    from rota.service.client import Client

ALIVE_S = 5.0
"""Between two signs of life."""
INPUT_BYTES = 16_384
"""Of one request."""
FULL_PAUSE_S = 0.05
LOOK_S = 0.3
IDLE_LIMIT = "1h"
LOST = 255
"""Exit status of a program whose end is not known, as of ssh."""
END_OF_INPUT = b"\x04"
_PID = '"$ROTA_OUTPUT_DIR/.shell"'
_HOLD = f"""f={_PID}; rm -f "$f"; n=0
while [ ! -s "$f" ]; do
  n=$((n+1)); [ $n -le 600 ] || {{ echo "no terminal was opened within five minutes" >&2; exit 1; }}; sleep 0.5
done
p=$(cat "$f"); while kill -0 "$p" 2>/dev/null; do sleep 0.5; done; rm -f "$f"
"""
"""What the job of a shell runs: it ends with the process that its terminal has written down."""
_SHELL = "command -v bash >/dev/null && exec bash; exec sh"


def shell_source(others: Mapping[str, object]) -> str:
    """A job that holds what it asked for as long as its terminal lasts, and begins no second one by itself.

    Raises BadInput for one of the ``others``, flags of ``run`` that mean nothing with ``--shell``, that was given.
    """
    for flag, given in others.items():
        if given:
            raise BadInput(f"{flag} does not go with --shell", hint="its terminal is attached until the shell ends")
    role = {"run": ["/bin/sh", "-c", _HOLD], "fail": {"limit": "0/10m", "then": []}}
    return json.dumps({"name": "shell", "idle_limit": IDLE_LIMIT, "roles": {"main": role}}, indent=1)


def shell_job(flags: Flags, client: Client, job: str, argv: Sequence[str]) -> int:
    """Wait for the job of a shell, attach its terminal, and end it with the shell; the exit status of the shell."""
    terminal = flags.terminal()
    program = [*argv] or ["/bin/sh", "-c", _SHELL]
    words = ["/bin/sh", "-c", f'echo $$ > {_PID}; exec "$@"', "sh", *program]
    status = LOST
    try:
        while _started(flags, client, terminal, job):
            with contextlib.suppress(Conflict):  # it was taken away meanwhile: look again
                status = attach(flags, job, "", words)
                if status != LOST or JobState(client.job(job)["state"]).terminal:
                    break
                terminal.note(f"{job}: its terminal is gone; waiting for another")
            sleep(LOOK_S)
    except (KeyboardInterrupt, SystemExit):
        terminal.note(f"\n{job} is stopped")
        raise
    finally:
        with contextlib.suppress(RotaError):
            if not JobState(client.job(job)["state"]).terminal:
                _leave(client, job)
    return status


def _leave(client: Client, job: str) -> None:
    """End the job: by itself where its shell has ended, else by a request."""
    until_s = monotonic() + 3.0
    while client.job(job)["state"] == JobState.RUNNING and monotonic() < until_s:
        sleep(LOOK_S)
    client.stop(job, grace_s=1.0)


def _started(flags: Flags, client: Client, terminal: Terminal, job: str) -> bool:
    """True once the job runs, with the live line meanwhile; False when it has ended."""
    with flags.client() as other, Ticker(live_line(terminal), JobWatch(other, job)):
        while (state := JobState(client.job(job)["state"])) is not JobState.RUNNING:
            if state.terminal:
                break
            sleep(LOOK_S)
    if state.terminal:
        document = client.job(job)
        terminal.note(f"{job} {document['state']}: {document['text']}")
    return state is JobState.RUNNING


def attach(flags: Flags, job: str, instance: str, argv: Sequence[str]) -> int:
    """Run a command on a terminal beside an instance, attached to this one; its exit status, or ``LOST``.

    Input that is not a terminal is typed into it, then Ctrl-D. Raises what ``Client.open_terminal`` raises.
    """
    terminal = flags.terminal()
    with flags.client() as client, flags.client() as typing:
        rows, columns = terminal_size()
        opened = client.open_terminal(job, instance, argv, term=terminal_name(), rows=rows, columns=columns)
        keys = _Keys(typing, opened["job"], opened["terminal"], (rows, columns))
        with _raw(), keys.sent():
            for one in client.terminal_output(opened["job"], opened["terminal"]):
                if one.ended:
                    break
                sys.stdout.buffer.write(one.data)
                sys.stdout.buffer.flush()
            else:
                return LOST
        if one.exit_status is None:
            terminal.note(f"the terminal beside {opened['instance']} of {opened['job']} ended: {one.text}")
            return LOST
        return one.exit_status


@dataclass(slots=True)
class _Keys:
    """Sends what is typed here, in a thread of its own, with the size of the window and signs of life."""

    client: Client
    job: str
    terminal: str
    size: tuple[int, int]
    offset: int = 0
    waiting: bytes = b""
    ended: bool = False
    input_open: bool = True
    over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def sent(self) -> Iterator[None]:
        """Send until the block is left; then the terminal is hung up, if its program has not ended."""
        wake, woken = os.pipe()
        thread = threading.Thread(target=self._run, args=(wake,), name="keys", daemon=True)
        before = signal.signal(signal.SIGWINCH, lambda *_: os.write(woken, b"w"))
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            os.write(woken, b"o")
            signal.signal(signal.SIGWINCH, before)
            thread.join(timeout=5.0)
            with contextlib.suppress(RotaError):
                if not self.ended:
                    self.client.type_into(self.job, self.terminal, leave=True)

    def _run(self, wake: int) -> None:
        beat_s = 0.0
        while not self.over.is_set():
            source = [0] if self.input_open and len(self.waiting) < INPUT_BYTES else []
            pause_s = FULL_PAUSE_S if self.waiting else max(0.0, beat_s - monotonic())
            ready, _, _ = select.select([wake, *source], [], [], pause_s)
            resized = wake in ready and b"w" in os.read(wake, 4096)
            if 0 in ready:
                self._read()
            if self.over.is_set():
                return
            if not (self.input_open or self.waiting):  # a program that has set its terminal up since has lost the first
                self.waiting = END_OF_INPUT
            try:
                self._send(terminal_size() if resized else None)
            except UnknownName:
                self.ended = True
                return
            except NotReachable:  # the output says when to give up
                self.over.wait(1.0)
            beat_s = monotonic() + ALIVE_S

    def _read(self) -> None:
        data = os.read(0, INPUT_BYTES)
        self.input_open = bool(data)
        self.waiting += data or END_OF_INPUT

    def _send(self, size: tuple[int, int] | None) -> None:
        part = self.waiting[:INPUT_BYTES]
        done = self.client.type_into(self.job, self.terminal, part, offset=self.offset, size=size)
        self.waiting = self.waiting[done["taken"] - self.offset :]
        self.offset, self.ended = done["taken"], done["over"]


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """The terminal of this process gives each key as it is typed, Ctrl-C too; as before at the end."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
