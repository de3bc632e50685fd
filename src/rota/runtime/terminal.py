"""Terminals beside an instance: a program on a pseudo-terminal, its output by offset, its input taken once.

Who is at the terminal reads and writes by requests that may be repeated, so it survives a lost connection and a new
service. It is hung up when nothing is heard of them for a while.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from rota.runtime import process
from rota.runtime.clock import Clock
from rota.runtime.process import ProcessId

TERMINALS_MAX = 8
"""Open ones beside one instance."""
AWAY_S, SILENT_S = 30.0, 120.0
"""A terminal is hung up when it was neither read nor written for ``AWAY_S``, or only read for ``SILENT_S``.

Who only reads may be a connection whose other end is gone.
"""
LOOK_S = 1.0
ENDED_KEPT_S = 60.0
"""How long the end of a program can be asked for."""
CHUNK_BYTES = 32_768
"""Most output in one answer: it is one message of the gateway, which keeps answers for who repeats a request."""
BEHIND_BYTES_MAX = 4 * CHUNK_BYTES
"""Output that was not fetched; at this the program waits."""
KEPT_BYTES = 8 * CHUNK_BYTES
"""Output that was fetched and can be again, after a lost connection."""
HANGUP_S = 5.0
END_READ_S = 10.0
"""An instance that has ended waits this long after the end of a program for who is at its terminal to read it."""
DRAIN_S = 0.5
END_LOOK_S = 0.05
SIZE_MAX = 1000
_CONTROLLING = (
    "import fcntl,os,signal,sys,termios\n"
    "for one in ('HUP','INT','QUIT','TSTP','TTIN','TTOU'): signal.signal(getattr(signal,'SIG'+one),signal.SIG_DFL)\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK,())\n"
    "fcntl.ioctl(0,termios.TIOCSCTTY,0)\n"
    "try: os.execvp(sys.argv[1],sys.argv[1:])\n"
    "except OSError as e:\n"
    " print(f'{sys.argv[1]}: {e.strerror}',file=sys.stderr)\n"
    f" os._exit(126+(e.errno=={errno.ENOENT}))"
)
"""Becomes the command, with its input as the terminal of its session, and the signals of a terminal as usual.

What was started in the background or by nohup ignores some of them, and so would its children.
"""


class TerminalRead(TypedDict):
    """Output in base64 up to offset ``end``; ``exit_status`` once the program has ended and all is read."""

    data: str
    end: int
    exit_status: int | None


class TerminalWritten(TypedDict):
    """How many bytes of input the program was given in all; ``over``: it takes no more."""

    taken: int
    over: bool


@dataclass(slots=True)
class _Terminal:
    """One program with its terminal. All of it is of one event loop."""

    user: str
    master: int
    child: asyncio.subprocess.Process
    which: ProcessId | None
    heard_s: float
    read_s: float
    shown: Callable[[bytes], bytes]
    kept: bytearray = field(default_factory=bytearray)
    start: int = 0
    """Offset of the first byte in ``kept``."""
    fetched: int = 0
    taken: int = 0
    open: bool = True
    reading: bool = False
    vacant: bool = False
    """Nothing has the other side open: the program ends, or opens it again."""
    exit_status: int | None = None
    ended_s: float | None = None
    """When its exit status was known."""
    end_read: bool = False
    """The user at the terminal has read the exit status, or has left."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        return self.start + len(self.kept)

    @property
    def is_over(self) -> bool:
        """The program has ended, whether or not its exit status is known yet."""
        return self.exit_status is not None or self.which is None or not process.is_alive(self.which)

    def look(self) -> None:
        """Wait for output, unless too much of it is waiting."""
        wanted = self.open and not self.vacant and self.end - self.fetched < BEHIND_BYTES_MAX
        loop = asyncio.get_running_loop()
        if wanted and not self.reading:
            loop.add_reader(self.master, self._readable)
        elif self.reading and not wanted:
            loop.remove_reader(self.master)
        self.reading = wanted

    def look_again(self) -> None:
        """See whether something has opened the other side since."""
        self.vacant = False
        self.look()

    def _readable(self) -> None:
        try:
            data = os.read(self.master, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: nothing has the other side open any more
            data = b""
        if not data:  # no hang-up: a program that ends has closed its output before it has given its status
            self.vacant = True
        self.kept += self.shown(data)
        if (over := len(self.kept) - KEPT_BYTES) > 0 and (cut := min(over, self.fetched - self.start)) > 0:
            del self.kept[:cut]
            self.start += cut
        self.look()
        self.changed.set()

    def close(self) -> None:
        """Hang up: the kernel sends SIGHUP to the program and what it has in the foreground."""
        if self.open:
            if self.reading:
                asyncio.get_running_loop().remove_reader(self.master)
            self.open = self.reading = False
            os.close(self.master)

    def put(self, data: bytes) -> int:
        """Write as much as the program accepts now; the number of bytes written."""
        try:
            return os.write(self.master, data) if data and self.open else 0
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return 0


class Terminals:
    """The terminals beside one instance, for one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open = dict[str, _Terminal]()
        self._tasks = set[asyncio.Task[None]]()

    async def start(
        self,
        name: str,
        user: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        size: tuple[int, int],
        shown: Callable[[bytes], bytes] = bytes,
    ) -> str:
        """Start a program on a terminal of ``size`` rows and columns, for a user; empty, or why it cannot be.

        ``shown`` is what is kept of its output.
        """
        if sum(one.exit_status is None for one in self._open.values()) >= TERMINALS_MAX:
            return f"{TERMINALS_MAX} terminals are open beside this instance; leave one"
        master, slave = os.openpty()
        try:
            os.set_blocking(master, False)
            _set_size(master, size)
            command = (sys.executable, "-I", "-S", "-c", _CONTROLLING, *argv)
            child = await asyncio.create_subprocess_exec(
                *command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=env
            )
        except (OSError, ValueError) as error:
            os.close(master)
            return f"{argv[0]}: {error}"
        finally:
            os.close(slave)
        which = process.identify(child.pid)
        now_s = self._clock.monotonic_s()
        made = _Terminal(user, master, child, which, now_s, now_s, shown)
        self._open[name] = made
        made.look()
        task = asyncio.get_running_loop().create_task(self._keep(name, made), name="terminal")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ""

    def _find(self, name: str, user: str) -> _Terminal | None:
        found = self._open.get(name)
        return found if found is not None and found.user == user else None

    async def read(self, name: str, user: str, after: int, wait_s: float) -> TerminalRead | None:
        """Output after an offset, waited for that long; None where this user has no such terminal.

        What was dropped is left out: ``end`` less the length of the data is where it begins.
        """
        one = self._find(name, user)
        if one is None:
            return None
        one.read_s = self._clock.monotonic_s()
        one.fetched = max(one.fetched, min(after, one.end))
        one.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while one.end <= after and one.exit_status is None:
                    one.changed.clear()
                    await one.changed.wait()
        begin = max(after, one.start) - one.start
        data = bytes(one.kept[begin : begin + CHUNK_BYTES])
        end = one.start + begin + len(data)
        one.fetched = max(one.fetched, min(end, one.end))
        one.look()
        over = one.exit_status if end >= one.end else None
        one.end_read = one.end_read or (over is not None and not data)
        return {"data": base64.b64encode(data).decode(), "end": end, "exit_status": over}

    def write(
        self, name: str, user: str, offset: int, data: bytes, size: tuple[int, int] | None, leave: bool
    ) -> TerminalWritten | None:
        """Give the program the input from ``offset`` on, of which it had ``taken`` bytes; None as for ``read``.

        Without data it is a sign of life. ``size`` is a new one. ``leave`` hangs up.
        """
        one = self._find(name, user)
        if one is None:
            return None
        one.heard_s = self._clock.monotonic_s()
        if size is not None and one.open:
            _set_size(one.master, size)
        if 0 <= one.taken - offset < len(data):
            one.taken += one.put(data[one.taken - offset :])
        if leave:
            one.end_read = True
            one.close()
        return {"taken": one.taken, "over": not one.open or one.exit_status is not None}

    async def _keep(self, name: str, one: _Terminal) -> None:
        """Until the program has ended and its end was kept for a while."""
        ending = asyncio.ensure_future(one.child.wait())
        try:
            while not ending.done() and one.open:
                await asyncio.wait([ending], timeout=LOOK_S)
                if self._is_left(one):
                    one.close()
                one.look_again()
            if not ending.done():
                await asyncio.wait([ending], timeout=HANGUP_S)
            if not ending.done() and one.which is not None:
                await asyncio.to_thread(process.stop_tree, one.which, grace_s=0.0)
            status = await ending
            await self._drain(one)
            one.exit_status, one.ended_s = status if status >= 0 else 128 - status, self._clock.monotonic_s()
            one.changed.set()
            one.close()
            await self._clock.sleep(ENDED_KEPT_S)
        finally:
            ending.cancel()
            one.close()
            self._open.pop(name, None)

    def _is_left(self, one: _Terminal) -> bool:
        now_s = self._clock.monotonic_s()
        return now_s - max(one.heard_s, one.read_s) > AWAY_S or now_s - one.heard_s > SILENT_S

    async def _drain(self, one: _Terminal) -> None:
        """Take in what the program wrote before its end; not what others write who have its terminal open."""
        one.look_again()
        until_s = self._clock.monotonic_s() + DRAIN_S
        while one.open and not one.vacant and not self._is_left(one):
            await self._clock.sleep(0.02)
            if not one.reading:  # until more of it is fetched
                until_s = self._clock.monotonic_s() + DRAIN_S
            elif self._clock.monotonic_s() > until_s or _is_drained(one.master):
                return

    async def wait_ends_read(self, limit_s: float = END_READ_S) -> None:
        """Until the end of each program that has ended was read, or is ``limit_s`` ago; no longer than that.

        A program may be what the instance waited for, and its exit status is gone with the instance.
        """
        until_s = self._clock.monotonic_s() + limit_s
        while any(self._is_awaited(one, limit_s) for one in self._open.values()):
            if self._clock.monotonic_s() > until_s:
                return
            await self._clock.sleep(END_LOOK_S)

    def _is_awaited(self, one: _Terminal, limit_s: float) -> bool:
        """Whether the program has ended, and who is at it may still read how."""
        if one.end_read or not one.is_over:
            return False
        return one.ended_s is None or self._clock.monotonic_s() - one.ended_s < limit_s

    async def close(self) -> None:
        """Hang all up, at the end of the instance."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _is_drained(master: int) -> bool:
    """True when nothing more of the output is to be read now."""
    waiting = fcntl.ioctl(master, termios.FIONREAD, struct.pack("i", 0))
    return struct.unpack("i", waiting)[0] == 0


def _set_size(master: int, size: tuple[int, int]) -> None:
    """Rows and columns; the kernel says so to what runs in the foreground (SIGWINCH)."""
    rows, columns = (min(max(one, 1), SIZE_MAX) for one in size)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
