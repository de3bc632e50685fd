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


async def measure(f: Any) -> None:
    """Time single and group calls in rounds; the file `calls.json` in the output folder holds the seconds per call.

    A round begins when the file `round-N` appears, so that a benchmark can run its peer between two rounds.
    """
    import json
    import os

    rounds, calls, warm = int(os.environ["ROUNDS"]), int(os.environ["CALLS"]), int(os.environ["WARM_CALLS"])
    payload = b"x" * 100
    for _ in range(warm):
        await f.roles.one.echo(payload)
        await f.roles.eight.echo_all(payload)
    (f.output_dir / "warm").touch()
    seconds: dict[str, list[float]] = {"single": [], "group": []}
    for n in range(rounds):
        while not (f.output_dir / f"round-{n}").exists():
            await asyncio.sleep(0.005)
        for kind, call in (("single", f.roles.one.echo), ("group", f.roles.eight.echo_all)):
            began = time.perf_counter()
            for _ in range(calls):
                await call(payload)
            seconds[kind].append((time.perf_counter() - began) / calls)
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
