"""Run one command beside whatever this process does: in its environment and folder, with a limit on time and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

OUTPUT_BYTES_MAX = 80_000
"""Kept of each stream: two of them fit into one message of the gateway, however they are escaped."""
CANNOT_RUN, NOT_FOUND = 126, 127
"""What shells answer for a command that cannot be run, and for one that is not there."""
_DRAIN_S = 1.0


async def run_beside(argv: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
    """Run ``argv`` word by word without input, at most so long; everything it started ends with it.

    ``{exit_status, stdout, stderr, cut, timed_out}``: a signal is 128 and its number, as in a shell; ``cut`` when more
    than ``OUTPUT_BYTES_MAX`` of a stream came.
    """
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    loop = asyncio.get_running_loop()
    try:
        transport, run = await loop.subprocess_exec(
            _Run, *argv, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except (OSError, ValueError) as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
        return _document(status, b"", f"{argv[0]}: {error}\n".encode(errors="replace"), False)
    timed_out = False
    try:
        async with asyncio.timeout(timeout_s):
            await run.exited.wait()
    except TimeoutError:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # somebody outside the group may hold a pipe
            async with asyncio.timeout(_DRAIN_S):
                await run.closed.wait()
        status = transport.get_returncode()
        transport.close()
    status = -signal.SIGKILL if status is None else status
    return _document(status if status >= 0 else 128 - status, run.kept[1], run.kept[2], timed_out)


class _Run(asyncio.SubprocessProtocol):
    """Keeps the beginning of both streams. Not ``Process.wait``, which waits for whoever inherited a pipe too."""

    def __init__(self) -> None:
        self.kept = {1: bytearray(), 2: bytearray()}
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.kept[fd] += data[: OUTPUT_BYTES_MAX + 1 - len(self.kept[fd])]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


def _document(status: int, out: bytes | bytearray, err: bytes | bytearray, timed_out: bool) -> dict[str, Any]:
    stdout, stderr = (bytes(one[:OUTPUT_BYTES_MAX]).decode(errors="replace") for one in (out, err))
    cut = max(len(out), len(err)) > OUTPUT_BYTES_MAX
    return {"exit_status": status, "stdout": stdout, "stderr": stderr, "cut": cut, "timed_out": timed_out}
