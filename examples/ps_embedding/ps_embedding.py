"""The job: parameter servers that hold two sparse tables, trainers that run ahead of each other by a bound, the loop.

A server's state at a commit is its snapshot: a server that dies comes back with it, and the loop continues from that
commit. A trainer has no state: its replacement joins at the slowest clock while the others continue.

Pairs are leased in shards from a journal in the output folder, so a fast trainer takes more, and the shard of a trainer
that dies is continued by another one. The journal's snapshot is part of each commit, so data rolls back with the model.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import words

from rota import Concat, Mean, Rank, Same, Workload, op
from rota.spec.errors import Fenced, TimedOut
from rota.train.data import DataSpec, Lease, ShardJournal, ShardTable
from rota.train.ps import Rule
from rota.train.ps.client import PsClient, ServerLost
from rota.train.ps.server import PsServer, ServerSpec
from rota.train.ps.table import RowOptimizer, TableSpec

DIM, ROUNDS, CLOCKS = 24, 10, 40
LOST_MAX = 5
"""A round is CLOCKS iterations of every trainer and ends in a commit."""
DATA = DataSpec(samples=len(words.corpus().train), shard_size=4 * words.BATCH, epochs=1000, lease_s=30.0)
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
        self.journal: ShardJournal | None = None
        self.lease: Lease | None = None
        self.slow_s = float(ctx.env.get("SLOW_S", "0"))

    @op(send=Same, recv=Mean, deadline="5m")
    def train(self, addresses: list[str], folder: str, until: int) -> dict[str, float]:
        """Iterations up to clock ``until``; ``lost`` is 1 when a server died under them."""
        if self.journal is None:
            self.journal = ShardJournal(Path(folder), DATA, worker=self.ctx.rank, epoch=self.ctx.epoch)
        began, losses = time.monotonic(), [0.0]
        try:
            client = self._join(addresses)
            while client.clock < until:
                losses.append(self._iterate(client, self.journal))
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

    def _iterate(self, client: PsClient, journal: ShardJournal) -> float:
        """One clock; without gradients while another trainer holds the last shards of an epoch."""
        clock, loss = client.wait_turn(), 0.0
        lease = self.lease = self._renewed(journal)
        end = 0 if lease is None else min(lease.offset + words.BATCH, lease.end)
        if lease is not None:
            word, candidates = words.batch(journal.samples(lease, lease.offset, end), lease.epoch)
            rows = client.pull("words", word)
            near = client.pull("near", candidates.reshape(-1)).reshape(*candidates.shape, DIM)
            loss, of_words, of_near = words.gradients(rows, near)
            client.push("words", word, of_words)
            client.push("near", candidates.reshape(-1), of_near.reshape(-1, DIM))
        if clock % self.ctx.world_size == self.ctx.rank:
            time.sleep(self.slow_s)  # each trainer straggles in its turn
        client.tick()
        if lease is not None:
            with suppress(Fenced):  # the data went back with the model: another one trains these pairs again
                self.lease = journal.advance(lease, end)
        return loss

    def _renewed(self, journal: ShardJournal) -> Lease | None:
        """The lease that is held, or a new one; None while there is nothing to lease."""
        if self.lease is not None and self.lease.offset < self.lease.end:
            try:
                return journal.advance(self.lease, self.lease.offset)
            except Fenced:  # it ran out, or the data went back with the model
                self.lease = None
        try:
            return journal.lease(timeout_s=0.0)
        except TimedOut:
            return None

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
    journal = ShardJournal(f.output_dir, DATA, worker=-1)
    journal.restore(rows[-1]["data"] if rows else ShardTable(spec=DATA).snapshot())
    while (n := len(rows) + 1) <= ROUNDS:
        addresses = await f.roles.ps.addresses()
        row = await f.roles.trainer.train(addresses, str(f.output_dir), n * CLOCKS)
        if row["lost"]:
            # The roll-back to the last commit enters this function anew, long before it was tried so often.
            if (lost := lost + 1) > LOST_MAX:
                raise RuntimeError(f"round {n}: the servers were lost {lost} times in a row")
            continue
        lost = 0
        stats = await f.roles.ps.stats()
        row |= {"lead": max(one["lead_max"] for one in stats), "right": await f.roles.trainer.measure(addresses)}
        row["data"] = journal.snapshot()
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        await f.commit(n, metrics={name: value for name, value in row.items() if name != "data"})
        f.log(f"round {n}: loss {row['loss']:.3f}, held-out pairs ranked right {row['right']:.3f}")
    rate = CLOCKS / float(np.median([row["seconds"] for row in rows]))
    result = {"right": rows[-1]["right"], "lead": max(row["lead"] for row in rows), "clocks_per_s": round(rate, 1)}
    (f.output_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
