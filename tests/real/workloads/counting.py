"""A sum that is kept at each commit: whoever comes up without it, or twice at one commit, is noticed at once."""

from __future__ import annotations

import asyncio

import rota


class Counter(rota.Workload):
    """Its state is the sum."""

    def setup(self, ctx) -> None:
        self.total = ctx.restored["total"] if ctx.restored else 0

    @rota.op(retry="commit")
    def add(self, n: int) -> int:
        self.total += n
        return self.total

    @rota.op.state
    def state(self) -> dict[str, int]:
        return {"total": self.total}


async def counting(f) -> None:
    """Adds the numbers from 1, a commit each, until the file ``go`` exists."""
    while not (f.output_dir / "go").exists():
        n = f.committed + 1
        assert await f.roles.counter.add(n) == n * (n + 1) // 2
        await f.commit()
        await asyncio.sleep(0.05)
