"""Run a command to its end: no shell, no input, a limit of time, and the beginning of what it wrote."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TypedDict

OUTPUT_BYTES_MAX = 80_000
"""Kept of each stream: two of them fit into one message of the gateway, however they are escaped."""
CANNOT_RUN, NOT_FOUND = 126, 127
"""Exit statuses of shells for a command that cannot be run, and for one that is not there."""
_DRAIN_S = 1.0


class ExecResult(TypedDict):
    """How a command ended. A signal is exit status 128 and its number; ``cut``: a stream had over OUTPUT_BYTES_MAX."""

    exit_status: int
    stdout: str
    stderr: str
    cut: bool
    timed_out: bool


async def execute_command(argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
    """Run ``argv`` without a shell and without input for at most ``timeout_s``; everything it started ends with it."""
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    loop = asyncio.get_running_loop()
    try:
        transport, run = await loop.subprocess_exec(
            _Capture, *argv, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True, env=env
        )
    except (OSError, ValueError) as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
        return _exec_result(status, b"", f"{argv[0]}: {error}\n".encode(errors="replace"), False)
    timed_out = False
    try:
        async with asyncio.timeout(timeout_s):
            await run.exited.wait()
    except TimeoutError:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # a process outside the group may hold a pipe
            async with asyncio.timeout(_DRAIN_S):
                await run.closed.wait()
        status = transport.get_returncode()
        transport.close()
    status = -signal.SIGKILL if status is None else status
    return _exec_result(status if status >= 0 else 128 - status, run.kept[1], run.kept[2], timed_out)


class _Capture(asyncio.SubprocessProtocol):
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


def _exec_result(status: int, out: bytes | bytearray, err: bytes | bytearray, timed_out: bool) -> ExecResult:
    stdout, stderr = (bytes(one[:OUTPUT_BYTES_MAX]).decode(errors="replace") for one in (out, err))
    cut = max(len(out), len(err)) > OUTPUT_BYTES_MAX
    return {"exit_status": status, "stdout": stdout, "stderr": stderr, "cut": cut, "timed_out": timed_out}
