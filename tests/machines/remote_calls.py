"""A role that answers from its machine and a loop that calls it until a file ``end`` appears; for ``test_calls``."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np

import rota
from rota.spec.errors import RotaError

ARRAY = np.arange(300_000, dtype=np.float64)
"""2.4 MB, more than a frame carries inside its pickle."""


class Remote(rota.Workload):
    """Says where it is; notes each call that runs, and each that is cancelled."""

    def setup(self, ctx: Any) -> None:
        self.notes: Path = ctx.output_dir / "ran"
        self.cancelled: Path = ctx.output_dir / "cancelled"
        assert ctx.node == socket.gethostname() and not ctx.address.startswith("127.")

    @rota.op(send=rota.Rank(0), retry="never")
    def where(self, n: int) -> tuple[int, str, int]:
        """The number, the host and the process; noted in a file first."""
        with self.notes.open("a") as file:
            file.write(f"{n}\n")
        return n, socket.gethostname(), os.getpid()

    @rota.op(send=rota.Rank(0))
    def total(self, array: Any) -> tuple[float, bool]:
        """The sum of an array, and whether it may be written to."""
        return float(array.sum()), bool(array.flags.writeable)

    @rota.op(send=rota.Rank(0), deadline="3s")
    async def hold(self) -> None:
        """Wait until the caller gives up."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.touch()
            raise


async def drive(f: Any) -> None:
    """Call without a pause; each answer or error is one line of ``answers``."""
    out: Path = f.output_dir
    try:
        await f.roles.one.hold()
    except RotaError as error:
        (out / "held").write_text(type(error).__name__)
    total, writeable = await f.roles.one.total(ARRAY)
    (out / "total").write_text(f"{total == ARRAY.sum()} {writeable}")
    begun = sum(1 for _ in (out / "answers").open()) if (out / "answers").exists() else 0
    with (out / "answers").open("a", buffering=1) as answers:
        for n in range(begun, 10**9):
            if (out / "end").exists():
                return
            try:
                number, host, pid = await f.roles.one.where(n)
                assert number == n
                answers.write(f"{n} {host} {pid}\n")
            except RotaError as error:
                answers.write(f"{n} {type(error).__name__} 0\n")
            await asyncio.sleep(0.01)
