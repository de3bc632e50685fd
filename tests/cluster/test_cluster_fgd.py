"""Placements by fragmentation: the measure by hand, and the published part of a real cluster that is given out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster_makers import ask, node, slot, state

from rota.cluster.core.cycle import step
from rota.cluster.core.events import JobArrived
from rota.cluster.policies import get_profile
from rota.cluster.policies.fgd import FreeNodeTable, Gradient, Mix, TaskShape, fragments
from rota.cluster.sim.runs import fill
from rota.runtime.clock import SystemClock
from rota.spec.ids import JobId

DATA = Path(__file__).resolve().parent.parent / "data" / "cluster"
HALF, TWO, CPU_ONLY = TaskShape(1000, 1, 500), TaskShape(4000, 2, 1000), TaskShape(2000, 0, 0)


def test_the_fragmentation_of_three_nodes_is_what_follows_by_hand() -> None:
    mix = Mix([HALF] * 2 + [TWO] + [CPU_ONLY])
    cpu = np.array([8000, 2000, 0])
    left = np.array([[1000, 400], [1000, 1000], [300, 0]])
    # Node 0: half tasks cannot use 400; two whole devices are not there (1400); no device asked (1400).
    # Node 1: half tasks use all; cores are short for two (2000); no device asked (2000). Node 2: no cores at all.
    expected = [(2 * 400 + 1400 + 1400) / 4, (0 + 2000 + 2000) / 4, 300]
    assert fragments(cpu, left, mix, np.ones((3, 3), dtype=bool)).tolist() == expected


def test_kept_answers_are_those_of_a_fresh_start() -> None:
    board = FreeNodeTable([16000] * 4, [64] * 4, [4] * 4, [0] * 4)
    mix = Mix([HALF] * 3 + [TWO] * 2 + [CPU_ONLY])
    kept = Gradient(board, mix)
    for at, kind in enumerate([HALF, TWO, HALF, CPU_ONLY, TWO, HALF] * 2):
        rise, device = kept.of(kind)
        fresh_rise, fresh_device = Gradient(board, mix).of(kind)
        assert (rise.tolist(), device.tolist()) == (fresh_rise.tolist(), fresh_device.tolist())
        able = board.able(kind, 1)
        chosen = int(able[at % len(able)])
        idle = [int(g) for g in np.flatnonzero(board.left[chosen] >= kind.share)]
        board.take(chosen, kind, 1, idle[: kind.devices])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "low", "high"), [("random", 87.07, 88.03), ("bestfit", 92.87, 93.25), ("fgd", 95.27, 95.49)]
)
def test_what_is_given_out_of_a_real_cluster_lies_in_the_published_range(policy: str, low: float, high: float) -> None:
    nodes, pods = (DATA / f"alibaba2023_{name}.csv.gz" for name in ("node_list_gpu_node", "pod_list_default"))
    shown = fill(nodes, pods, policy, 42, SystemClock())
    assert low <= shown["allocation_percent"]["130"] <= high
    assert shown["gpus"] == 6212


def test_the_profile_keeps_whole_nodes_for_jobs_that_need_them() -> None:
    s, fgd = state(node("a", 4), node("b", 4)), get_profile("fgd")
    step(s, JobArrived(ask=ask("half", slot(0.5))), fgd, 0.0)
    step(s, JobArrived(ask=ask("other", slot(0.5), at=1)), fgd, 1.0)
    step(s, JobArrived(ask=ask("whole", slot(4), at=2)), fgd, 2.0)
    held = {job: s.jobs[JobId(job)].held for job in ("half", "other", "whole")}
    assert held["half"][0].devices == held["other"][0].devices
    assert held["whole"][0].node != held["half"][0].node


def test_where_no_node_is_left_to_choose_from_nothing_grows() -> None:
    mix = Mix([HALF] * 2 + [TWO] + [CPU_ONLY])
    none = np.zeros(0, dtype=np.int64)
    allowed = mix.allowed(none)
    assert allowed.shape == (0, 3)
    assert fragments(none, np.zeros((0, 8), dtype=np.int64), mix, allowed).shape == (0,)
