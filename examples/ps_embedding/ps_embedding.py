"""The job: parameter servers that hold two sparse tables, trainers that run ahead of each other by a bound, the loop.

A server's state at a commit is its snapshot: a server that dies comes back with it, and the loop goes on from that
commit. A trainer has no state: its replacement joins at the slowest clock while the others go on.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import words

from rota import Concat, Mean, Rank, Same, Workload, op
from rota.train.ps.client import PsClient, ServerLost
from rota.train.ps.clocks import Rule
from rota.train.ps.server import PsServer, ServerSpec
from rota.train.ps.table import RowOptimizer, TableSpec

DIM, ROUNDS, CLOCKS = 24, 10, 40
LOST_MAX = 5
"""A round is CLOCKS iterations of every trainer and ends in a commit."""
ADAGRAD = RowOptimizer(kind="adagrad", lr=0.15)
TABLES = tuple(
    TableSpec(name=name, dim=DIM, optimizer=ADAGRAD, scale=scale) for name, scale in (("words", 0.3), ("near", 0.0))
)


class Server(Workload):
    """One shard of both tables."""

    def setup(self, ctx: Any) -> None:
        mode, _, bound = ctx.env.get("MODE", "ps_ssp:2").partition(":")
        rule = Rule(mode=mode, s=int(bound or 0))
        self.server = PsServer(ServerSpec(rule=rule, tables=TABLES, gone_s=3.0, token=ctx.job))
        if ctx.restored is not None:
            self.server.restore(ctx.restored)
        self.address = self.server.serve()

    @op(send=Same, recv=Concat())
    def addresses(self) -> list[str]:
        """Where this shard takes calls."""
        return [self.address]

    @op(send=Same, recv=Concat())
    def stats(self) -> list[dict[str, Any]]:
        """Clocks, lead and rows of this shard."""
        return [self.server.stats()]

    @op.state
    def state(self) -> dict[str, Any]:
        """All that the shard needs to go on."""
        return self.server.snapshot()


class Trainer(Workload):
    """Pulls the rows of a batch, computes, pushes their gradients."""

    def setup(self, ctx: Any) -> None:
        self.ctx, self.client = ctx, None
        self.slow_s = float(ctx.env.get("SLOW_S", "0"))

    @op(send=Same, recv=Mean, deadline="5m")
    def train(self, addresses: list[str], until: int) -> dict[str, float]:
        """Iterations up to clock ``until``; ``lost`` is 1 when a server died under them."""
        began, losses = time.monotonic(), [0.0]
        try:
            client = self._join(addresses)
            while client.clock < until:
                losses.append(self._iterate(client))
        except ServerLost:
            self.client = None
            return {"loss": float(np.mean(losses)), "lost": 1.0, "seconds": time.monotonic() - began}
        return {"loss": float(np.mean(losses[1:] or losses)), "lost": 0.0, "seconds": time.monotonic() - began}

    def _join(self, addresses: list[str]) -> PsClient:
        if self.client is None or self.at != addresses:
            self.at = addresses
            self.client = PsClient(
                addresses, self.ctx.rank, epoch=self.ctx.epoch, token=self.ctx.job, retry_s=2.0
            )  # fmt: skip
        return self.client

    def _iterate(self, client: PsClient) -> float:
        clock = client.wait_turn()
        word, candidates = words.batch(self.ctx.seed, self.ctx.rank, clock)
        rows = client.pull("words", word)
        near = client.pull("near", candidates.reshape(-1)).reshape(*candidates.shape, DIM)
        loss, of_words, of_near = words.gradients(rows, near)
        client.push("words", word, of_words)
        client.push("near", candidates.reshape(-1), of_near.reshape(-1, DIM))
        if clock % self.ctx.world_size == self.ctx.rank:
            time.sleep(self.slow_s)  # each trainer straggles in its turn
        client.tick()
        return loss

    @op(send=Rank(0))
    def measure(self, addresses: list[str]) -> float:
        """Share of held-out pairs ranked right."""
        client = PsClient(addresses, self.ctx.rank, token=self.ctx.job, retry_s=10.0, takes_part=False)
        every = np.arange(len(words.corpus().words))
        right = words.ranked_right(client.pull("words", every), client.pull("near", every))
        client.close()
        return right


async def fit(f: Any) -> None:
    """ROUNDS commits; result.json holds the measure before and after, the lead, and iterations a second."""
    path, rows = f.output_dir / "rounds.jsonl", []
    kept = path.read_text().splitlines()[: f.committed] if path.exists() else []
    path.write_text("".join(f"{line}\n" for line in kept))
    rows, lost = [json.loads(line) for line in kept], 0
    while (n := len(rows) + 1) <= ROUNDS:
        addresses = await f.roles.ps.addresses()
        row = await f.roles.trainer.train(addresses, n * CLOCKS)
        if row["lost"]:
            # The roll-back to the last commit enters this function anew, long before it was tried so often.
            if (lost := lost + 1) > LOST_MAX:
                raise RuntimeError(f"round {n}: the servers were lost {lost} times in a row")
            continue
        lost = 0
        stats = await f.roles.ps.stats()
        row |= {"lead": max(one["lead_max"] for one in stats), "right": await f.roles.trainer.measure(addresses)}
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        await f.commit(n, metrics=row)
        f.log(f"round {n}: loss {row['loss']:.3f}, held-out pairs ranked right {row['right']:.3f}")
    rate = CLOCKS / float(np.median([row["seconds"] for row in rows]))
    result = {"right": rows[-1]["right"], "lead": max(row["lead"] for row in rows), "clocks_per_s": round(rate, 1)}
    (f.output_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
