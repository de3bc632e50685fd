"""A loop that never stops calling: what a death elsewhere costs it is the largest gap between two of its answers."""

from __future__ import annotations

import asyncio
import os
import time

import rota


class Worker(rota.Workload):
    """Stateless; answers at once with its process."""

    def setup(self, ctx) -> None:
        self.ctx = ctx

    @rota.op(send=rota.Each)
    def work(self, item: int) -> tuple[int, int]:
        return item * 2, os.getpid()


async def steady(f) -> None:
    """Calls without a pause and commits ten times a second, until the file ``go`` exists."""
    last_s, gap_s, told_s = time.monotonic(), 0.0, 0.0
    while True:
        out = await f.roles.worker.work([1, 2, 3, 4])
        assert [value for value, _ in out] == [2, 4, 6, 8]
        now_s = time.monotonic()
        gap_s, last_s = max(gap_s, now_s - last_s), now_s
        go = (f.output_dir / "go").exists()
        if go or now_s - told_s > 0.1:
            await f.commit({"gap_s": gap_s, "pids": sorted({pid for _, pid in out})})
            told_s = last_s = time.monotonic()
        if (f.output_dir / "from-here").exists():
            (f.output_dir / "from-here").unlink()
            gap_s = 0.0
        if go:
            return
        await asyncio.sleep(0.01)
