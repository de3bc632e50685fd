"""Pump of an instance's output: stamps every line and appends it to the log; outlives the instance.

A program of its own, started with ``python -I -S`` (15 ms, 8 MB): what an instance wrote before a kill -9 or an abort
is still in the pipes, and a line never waits for the interpreter of the instance. Arguments: log file, label, then the
numbers of the pipes for stdout and stderr. A line of the log is ``<ISO time> <label> <stream> <text>``; of a progress
bar, which writes over its line, it is what a terminal shows, every few seconds and at the end. From stdin it reads the
values that must not be in the log, with zero bytes between them. With ``apart`` as last argument it leaves
its parent, which gets status 0 and reads the number of the process: an engine that ends an instance kills the children
of that, and what is still in the pipes would be lost.
"""

import os
import select
import signal
import sys
import time

_CHUNK_BYTES = 65536
_LINE_BYTES_MAX = 65536
_BAR_S = 5.0
"""Between two lines of one progress bar."""
_HIDDEN_BYTES_MIN = 6
_HIDDEN = b"******"


def _stamp(label: bytes, stream: bytes) -> bytes:
    now = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return b"%s.%03dZ %s %s " % (whole.encode(), int(now % 1 * 1000), label, stream)


def pump(log: int, label: bytes, streams: dict[int, bytes], hide: list[bytes]) -> None:
    """Until all holders have closed both pipes. Lines over 64 KiB are cut into several."""
    pending, shown = dict.fromkeys(streams, b""), dict.fromkeys(streams, 0.0)
    poller = select.poll()
    for fd in streams:
        poller.register(fd, select.POLLIN | select.POLLHUP)
    while pending:
        for fd, _ in poller.poll():
            chunk = os.read(fd, _CHUNK_BYTES)
            *lines, rest = (pending[fd] + chunk).split(b"\n")
            lines = [_on_screen(line) for line in lines]
            if b"\r" in rest:
                bar, now = _on_screen(rest), time.monotonic()
                rest = bar + (b"\r" if rest.endswith(b"\r") else b"")
                if bar and now >= shown[fd] + _BAR_S:
                    lines, rest, shown[fd] = [*lines, bar], b"", now
            if rest and (not chunk or len(rest) > _LINE_BYTES_MAX):
                lines, rest = [*lines, rest], b""
            if hide:
                lines = [_hidden(line, hide) for line in lines]
            if lines:
                stamp = _stamp(label, streams[fd])
                _write_all(log, b"".join(stamp + line + b"\n" for line in lines))
            pending[fd] = rest
            if not chunk:
                poller.unregister(fd)
                del pending[fd]


def _on_screen(line: bytes) -> bytes:
    """What a terminal shows of a line that was written over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _hidden(line: bytes, hide: list[bytes]) -> bytes:
    for value in hide:
        line = line.replace(value, _HIDDEN)
    return line


def _write_all(fd: int, data: bytes) -> None:
    """What a full disk does not take is lost: without a pump the instance would be stopped by its own pipes."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def main() -> None:
    """Read the arguments, leave signals to the instance, pump."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    path, label, out, err, *apart = sys.argv[1:]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    parts = {part for value in sys.stdin.buffer.read().split(b"\0") for part in (value, *value.split(b"\n"))}
    hide = sorted((part for part in parts if len(part) >= _HIDDEN_BYTES_MIN), key=len, reverse=True)
    if apart:
        if pid := os.fork():
            os.write(1, b"%d" % pid)
            os._exit(0)
        os.close(1)
    pump(log, label.encode(), {int(out): b"stdout", int(err): b"stderr"}, hide)


if __name__ == "__main__":
    main()
