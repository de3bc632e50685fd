"""Ways to hang: each role hangs once, in the way its environment names, and works when it is called again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time

import rota

ROLES = ("sleep", "spin", "gil", "stop", "lock", "await", "itself", "read", "left", "right", "gone")
"""The roles of the job, named by how they hang."""


class Hanging(rota.Workload):
    """One operation that hangs the first time."""

    def setup(self, ctx) -> None:
        self.ctx = ctx

    @rota.op
    async def work(self) -> str:
        trap = self.ctx.output_dir / f"hung-{self.ctx.role}-{self.ctx.rank}"
        if not trap.exists():
            trap.touch()
            await getattr(self, f"hang_{self.ctx.role}")()
        return self.ctx.role

    async def hang_sleep(self) -> None:
        time.sleep(1000)

    async def hang_spin(self) -> None:
        while True:
            pass

    async def hang_gil(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")  # exponential, in C, and never lets the interpreter go

    async def hang_stop(self) -> None:
        signal.raise_signal(signal.SIGSTOP)  # to this thread: else it goes on until another one has taken the signal

    async def hang_lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    async def hang_await(self) -> None:
        await asyncio.Event().wait()

    async def hang_itself(self) -> None:
        """Blocks the event loop that would have to run what it waits for."""
        with self.ctx.waiting("itself/0", "its own event loop"):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), asyncio.get_running_loop()).result()

    async def hang_read(self) -> None:
        path = self.ctx.work_dir / "pipe"
        os.mkfifo(path)
        path.read_bytes()

    async def hang_left(self) -> None:
        with self.ctx.waiting("right/0", "a socket"):
            await asyncio.Event().wait()

    async def hang_right(self) -> None:
        with self.ctx.waiting("left/0", "a socket"):
            await asyncio.Event().wait()

    async def hang_gone(self) -> None:
        with self.ctx.waiting("process 4194305", "lease of device 0"):
            await asyncio.Event().wait()


class Slow(rota.Workload):
    """Long and legal: steps with progress for longer than the limit, a declared silence, and never called at all."""

    def setup(self, ctx) -> None:
        self.ctx = ctx

    @rota.op
    def work(self) -> str:
        for step in range(40):
            time.sleep(0.25)
            self.ctx.progress(step)
        with self.ctx.quiet("evaluation", max_s=60):
            time.sleep(8)
        return "slow"


async def everything(f) -> None:
    """Calls every role at once; waits far longer than the limit on progress for most of them."""
    calls = [f.roles[name].work() for name in (*ROLES, "slow")]
    found = await asyncio.gather(*calls)
    await f.commit({"found": sorted(found)})


async def stuck_between_calls(f) -> None:
    """The loop itself hangs once, between a call and a commit."""
    await f.roles.slow.work()
    trap = f.output_dir / "hung-loop"
    if not trap.exists():
        trap.touch()
        await asyncio.Event().wait()
    await f.commit({"done": True})


async def not_finite(f) -> None:
    """The second loss is not a number, the first time."""
    for n in range(f.committed + 1, 4):
        trap = f.output_dir / "nan"
        bad = n == 2 and not trap.exists()
        if bad:
            trap.touch()
        await f.commit({"loss": float("nan") if bad else 1.0 / n, "entered_at": f.committed})


class Ranks(rota.Workload):
    """Two ranks of a process group; in the third step one does not come to the collective, the first time."""

    def setup(self, ctx) -> None:
        self.ctx = ctx
        ctx.process_group()

    @rota.op(send=rota.Same, recv=rota.Rank(0))
    def step(self, n: int) -> float:
        import torch
        import torch.distributed as dist

        trap = self.ctx.output_dir / "missing-rank"
        if n == 3 and self.ctx.rank == 1 and not trap.exists():
            trap.touch()
            while True:
                time.sleep(0.1)
        mine = torch.ones(4)
        dist.all_reduce(mine)
        return float(mine.sum())


async def in_step(f) -> None:
    for n in range(f.committed + 1, 6):
        await f.commit({"sum": await f.roles.ranks.step(n)})


class Legal(rota.Workload):
    """Goes on for ``LEGAL_S`` seconds in steps that are nearly as long as the limit, and rests with notice."""

    def setup(self, ctx) -> None:
        self.ctx = ctx

    @rota.op
    def work(self) -> str:
        until_s, step = time.monotonic() + float(os.environ["LEGAL_S"]), 0
        while time.monotonic() < until_s:
            step += 1
            time.sleep(3.5)
            self.ctx.progress(step)
            if step % 4 == 0:
                with self.ctx.quiet("evaluation", max_s=60):
                    time.sleep(12)
        return "legal"

    @rota.op
    async def wait(self) -> str:
        """Waits for another one over a channel that Rota does not see, and says so."""
        with self.ctx.waiting("legal/0", "its own socket"):
            await asyncio.sleep(float(os.environ["LEGAL_S"]))
        return "waited"


async def legally(f) -> None:
    """Computes between two calls, for longer than the limit, without a word."""
    work = asyncio.gather(f.roles.legal.work(), f.roles.other.wait())
    until_s = time.monotonic() + float(os.environ["LEGAL_S"])
    while time.monotonic() < until_s:
        burnt_s = time.monotonic() + 9.0
        while time.monotonic() < burnt_s:
            sum(range(10_000))
        await asyncio.sleep(2.0)
    await f.commit({"found": await work})
