"""The example of parameter servers as a job: it learns, keeps its bound, and heals when a shard or a trainer dies."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real import jobs
from tests.real.jobs import Run, job, role, run_job

from rota.spec.job import Fail
from rota.spec.states import JobState
from rota.train.data import DataSpec, ShardTable

pytestmark = [pytest.mark.usefixtures("registry"), pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ps_embedding"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jobs, "WORKLOADS", EXAMPLE)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in ("ps_embedding", "words"):
        sys.modules.pop(name, None)


def pairs() -> int:
    from words import corpus

    return len(corpus().train)


def pairs_counted(journal: Path) -> tuple[Counter[tuple[int, int]], list[dict[str, Any]]]:
    """How often each position of each epoch is in the model, and the snapshots that the data went back to."""
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    table, counted = ShardTable(spec=DataSpec(**records[0]["spec"])), Counter[tuple[int, int]]()
    restored: list[dict[str, Any]] = []
    for record in records[1:]:
        match record["do"]:
            case "join":
                table.join(record["worker"], record["epoch"])
            case "lease":
                table.lease(record["worker"], record["epoch"], record["at"])
            case "advance":
                before = table.leases.get(record["number"])
                if before and table.advance(record["number"], record["offset"], record["at"]):
                    counted.update((before.epoch, at) for at in range(before.offset, record["offset"]))
            case _:
                restored.append(record["kept"])
                table.restore(record["kept"])
                rests = {at for begin, end in table.returned for at in range(begin, end)}
                for epoch, at in list(counted):
                    if epoch > table.epoch or (epoch == table.epoch and (at >= table.fresh or at in rests)):
                        del counted[epoch, at]
    return counted, restored


def test_a_killed_server_heals_from_its_last_commit_and_a_killed_trainer_holds_nobody_up(engine, example) -> None:
    async def body(run: Run) -> None:
        await run.until_committed(2)
        run.kill("ps/1")
        await run.until_committed(5)
        run.kill("trainer/0")
        ended = await run.end()
        assert ended.state is JobState.SUCCEEDED, run.story()
        assert run.starts("ps/1") == 2 and run.starts("trainer/0") == 2, run.story()
        rows = [json.loads(line) for line in (run.output / "rounds.jsonl").read_text().splitlines()]
        result = json.loads((run.output / "result.json").read_text())
        assert len(rows) == 10
        assert result["lead"] <= 2
        assert result["right"] > rows[0]["right"]
        counted, restored = pairs_counted(run.output / "shards.jsonl")
        assert set(counted.values()) == {1}, "each pair once an epoch, whoever died"
        assert len(counted) == rows[-1]["data"]["epoch"] * pairs() + rows[-1]["data"]["counted"]
        assert restored[1:], "the data went back with the servers"
        assert all(kept in [row["data"] for row in rows] for kept in restored[1:]), "to a commit that stays"
        if os.environ.get("ROTA_DEEP"):
            assert result["right"] > 0.66 > rows[0]["right"], "as one process learns, within the noise"

    fail = Fail(limit_n=10)
    spec = job(
        role("ps", "ps_embedding:Server", 2, fail=fail),
        role("trainer", "ps_embedding:Trainer", 2, fail=fail),
        role("loop", "ps_embedding:fit", fail=fail),
        OMP_NUM_THREADS="1",
    )
    run_job(engine, spec, body)
