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
_CHUNK = 1 << 16


async def run_beside(argv: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
    """Run ``argv`` word by word without input, at most so long; everything it started ends with it.

    ``{exit_status, stdout, stderr, cut, timed_out}``: a signal is 128 and its number, as in a shell; ``cut`` when more
    than ``OUTPUT_BYTES_MAX`` of a stream came.
    """
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except (OSError, ValueError) as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
        return _document(status, bytearray(), bytearray(f"{argv[0]}: {error}\n".encode(errors="replace")), False)
    assert child.stdout is not None and child.stderr is not None
    out, err = bytearray(), bytearray()
    readers = [asyncio.create_task(_keep(child.stdout, out)), asyncio.create_task(_keep(child.stderr, err))]
    timed_out = False
    try:
        async with asyncio.timeout(timeout_s):
            await child.wait()
    except TimeoutError:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        status = await child.wait()
        _, open_ones = await asyncio.wait(readers, timeout=_DRAIN_S)  # somebody outside the group may hold a pipe
        for reader in open_ones:
            reader.cancel()
    return _document(status if status >= 0 else 128 - status, out, err, timed_out)


async def _keep(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while chunk := await stream.read(_CHUNK):
        kept += chunk[: OUTPUT_BYTES_MAX + 1 - len(kept)]


def _document(status: int, out: bytearray, err: bytearray, timed_out: bool) -> dict[str, Any]:
    stdout, stderr = (bytes(one[:OUTPUT_BYTES_MAX]).decode(errors="replace") for one in (out, err))
    cut = max(len(out), len(err)) > OUTPUT_BYTES_MAX
    return {"exit_status": status, "stdout": stdout, "stderr": stderr, "cut": cut, "timed_out": timed_out}
