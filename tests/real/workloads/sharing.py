"""Prefill and decode as parts of one role, and two roles that take turns on a device; nothing here loads torch."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import numpy as np

import rota

ITEMS, WIDTH = 24, 20_000


def prompts():
    return list(range(ITEMS))


class Prefill(rota.Workload):
    @rota.op(send=rota.Each)
    def fill(self, number: int) -> dict:
        return {"number": number, "cache": np.full(WIDTH, float(number))}


class Decode(rota.Workload):
    def setup(self, ctx) -> None:
        self.ctx = ctx

    @rota.op(send=rota.Each)
    def run(self, item: dict) -> dict:
        assert isinstance(item["cache"], np.ndarray)
        time.sleep(0.05)
        return {**item, "total": float(item["cache"].sum()), "by": self.ctx.rank}


async def generate(f) -> None:
    """The sum of every cache is right, and the loop has not looked into one."""
    total = int(f.kept.get("total", 0))
    async for batch in f.streams.answers.batches(4):
        assert all(type(item["cache"]).__name__ == "Ref" and item["cache"]._value is None for item in batch)
        assert all(item["total"] == item["number"] * WIDTH for item in batch)
        f.kept["total"] = total = total + sum(item["number"] for item in batch)
        await f.commit({"total": total})


class Sharer(rota.Workload):
    """Writes down when it holds the device."""

    def setup(self, ctx) -> None:
        self.path, self.role = Path(ctx.output_dir) / "turns.txt", ctx.role

    def _say(self, what: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{self.role} {os.getpid()} {what}\n")

    @rota.op
    def sleep(self) -> None:
        self._say("sleep")

    @rota.op
    def wake(self) -> None:
        self._say("wake")

    @rota.op
    def work(self, number: int) -> int:
        self._say("begin")
        time.sleep(0.05)
        self._say("end")
        return number


async def turns(f) -> None:
    """Both roles are wanted at once, all the time."""
    for n in range(f.committed + 1, 7):
        assert await asyncio.gather(f.roles.actor.work(n), f.roles.ref.work(-n)) == [n, -n]
        await f.commit({"n": n})
