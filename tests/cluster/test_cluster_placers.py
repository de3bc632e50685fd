"""The profiles that differ in the placer alone: by arrival, where least is left over, and anywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived
from rota.cluster.core.jobs import Allocations, LiveJob
from rota.cluster.core.txn import Txn
from rota.cluster.policies import get_profile
from rota.cluster.policies.basic import RandomFit
from rota.cluster.sim.runs import run_sim


def _held(profile: str, *nodes: Any, asks: Any) -> list[Allocations]:
    s, chosen = state(*nodes), get_profile(profile)
    for at, one in enumerate(asks):
        step(s, JobArrived(ask=one), chosen, float(at))
    return [s.jobs[one.id].held for one in asks]


def test_best_fit_counts_cores_beside_devices_and_shares_of_devices() -> None:
    # Of 8 devices and 32 cores at most: a has 4/8 + 32/32 = 1.5, b 6/8 + 8/32 = 1.
    cores = _held("bestfit", node("a", 4, cpus=32), node("b", 8, cpus=8), asks=[ask("two", slot(2, cpus=1))])
    assert cores[0][0].node == 1
    shares = [ask("half", slot(0.5)), ask("all", slot(2)), ask("next", slot(1), at=2)]
    half, whole, one = _held("bestfit", node("a", 4), node("b", 4), asks=shares)
    assert [held[0].node for held in (half, whole, one)] == [0, 0, 0]
    assert len({half[0].devices, whole[0].devices, one[0].devices}) == 3


@pytest.mark.parametrize("profile", ["bestfit", "random"])
def test_jobs_start_in_the_order_of_their_arrival(profile: str) -> None:
    asks = [ask(name, slot(n), at=at) for at, (name, n) in enumerate([("runs", 3), ("large", 4), ("small", 1)])]
    assert [len(held) for held in _held(profile, node("a", 4), asks=asks)] == [1, 0, 0]


def test_at_random_every_node_with_room_is_as_likely_and_a_trial_agrees_with_the_start() -> None:
    s = state(*(node(f"n{i}", 4) for i in range(5)))
    step(s, JobArrived(ask=ask("runs", slot(4))), get_profile("bestfit"), 0.0)
    rows = [LiveJob(ask=ask(f"j{i}", slot(2), slot(2))) for i in range(1000)]
    found = [RandomFit(7).place(s, Txn(), row) for row in rows]
    assert found == [RandomFit(7).place(s, Txn(), row) for row in rows]
    assert found != [RandomFit(8).place(s, Txn(), row) for row in rows]
    for bundle in (0, 1):
        counts = Counter(held[bundle].node for held in found if held)
        assert set(counts) == {1, 2, 3, 4}
        # 4 standard deviations of 1,000 draws with 1 in 4.
        assert all(abs(n - 250) < 55 for n in counts.values())
    together = sum(held[0].node == held[1].node for held in found if held)
    assert abs(together - 250) < 55, "bundles of a gang are drawn one by one"


@pytest.mark.slow
def test_the_seed_of_a_run_is_the_seed_of_random_placement(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text("vc,nodes\na,8\n")
    rows = "".join(f"j{i},{i},1000,{1 + 7 * (i % 2)},a\n" for i in range(12))
    (tmp_path / "t.csv").write_text("job_id,submit_s,duration_s,gpus,vc\n" + rows)

    def starts(seed: int) -> list[float]:
        shown = run_sim(tmp_path / "t.csv", tmp_path / "v.csv", "random", seed=seed)
        assert shown["summary"]["finished"] == 12
        return [job["first_start_s"] for job in shown["jobs"]]

    assert starts(1) == starts(1)
    assert len({tuple(starts(seed)) for seed in range(8)}) > 1
