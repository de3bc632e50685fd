"""A role without torch for benchmarks and tests: echoes, waits, fails once, fails always."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import rota


class Echo(rota.Workload):
    """Answers with what it got."""

    def setup(self, ctx: Any) -> None:
        self.ctx = ctx
        (ctx.work_dir / f"ready-{ctx.epoch}").touch()

    @rota.op(send=rota.Rank(0))
    def echo(self, x: Any) -> Any:
        """One call to one instance."""
        return x

    @rota.op(send=rota.Same)
    def echo_all(self, x: Any) -> Any:
        """One call to every instance; the answer of the first."""
        return x

    @rota.op(send=rota.Rank(0))
    def size(self, x: Any) -> int:
        """The length of what it got."""
        return len(x)

    @rota.op(send=rota.Each)
    async def slow(self, seconds: float) -> float:
        """Wait without blocking the instance."""
        await asyncio.sleep(seconds)
        return seconds

    @rota.op(send=rota.Rank(0))
    def fail_once(self, x: Any) -> Any:
        """Raise the first time in the life of the job; the mark is in the job's output folder."""
        mark = self.ctx.output_dir / "failed-once"
        if not mark.exists():
            mark.touch()
            raise RuntimeError("planned to fail once")
        return x

    @rota.op(send=rota.Rank(0))
    def fail_always(self, x: Any) -> Any:
        """Raise every time."""
        raise RuntimeError("planned to fail always")


def _at(rank: int) -> Any:
    def at(self: Any, x: Any) -> Any:
        return x

    at.__name__ = f"at_{rank}"
    at.__doc__ = f"One call to instance {rank}."
    return rota.op(send=rota.Rank(rank))(at)


class Eight(Echo):
    """Eight instances that are called one by one."""


for _rank in range(8):
    setattr(Eight, f"at_{_rank}", _at(_rank))


async def measure(f: Any) -> None:
    """Time calls of the KINDS in rounds; the file `calls.json` in the output folder holds the seconds per call.

    A round begins when the file `round-N` appears, so that a benchmark can run its peer between two rounds.
    """
    import json
    import os

    import numpy as np

    rounds, calls, warm = int(os.environ["ROUNDS"]), int(os.environ["CALLS"]), int(os.environ["WARM_CALLS"])
    payload, array = b"x" * 100, np.ones(1 << 20, np.uint8)
    made: dict[str, Any] = {
        "single": lambda: f.roles.one.echo(payload),
        "group": lambda: f.roles.eight.echo_all(payload),
        "large": lambda: f.roles.one.size(array),
        **{f"flood {rank}": lambda call=f"at_{rank}": getattr(f.roles.eight, call)(payload) for rank in range(8)},
    }
    kinds = os.environ.get("KINDS", "single,group").split(",")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def repeated(kind: str, count: int) -> None:
        for _ in range(count):
            await made[kind]()

    for kind in kinds:
        await repeated("flood 0" if kind == "flood" else kind, warm)
    (f.output_dir / "warm").touch()
    for n in range(rounds):
        while not (f.output_dir / f"round-{n}").exists():
            await asyncio.sleep(0.005)
        for kind in kinds:
            at_once = int(os.environ.get("AT_ONCE", "64")) if kind == "flood" else 1
            each = max(1, calls // 16) if kind == "flood" else calls
            began = time.perf_counter()
            names = [kind] if at_once == 1 else [f"flood {number % 8}" for number in range(at_once)]
            await asyncio.gather(*(repeated(name, each) for name in names))
            seconds[kind].append((time.perf_counter() - began) / (at_once * each))
        (f.output_dir / "calls.part").write_text(json.dumps(seconds))
        (f.output_dir / "calls.part").rename(f.output_dir / "calls.json")
        (f.output_dir / f"done-{n}").touch()


async def once(f: Any) -> None:
    """Call `fail_once` and then `slow` twice."""
    assert await f.roles.one.fail_once(7) == 7
    assert await f.roles.one.slow([0.01, 0.02]) == [0.01, 0.02]


async def always(f: Any) -> None:
    """Call what always fails."""
    await f.roles.one.fail_always(7)
