"""Rules from numbers and lines to symptoms, on recorded and replayed inputs."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.job.core.progress import (
    Pace,
    RateWatch,
    bad_losses,
    memory_evidence,
    storage_reason,
    stragglers,
)
from rota.runtime.devices import xid_faults
from rota.spec.reasons import Reason

DATA = Path(__file__).parents[2] / "data" / "job"
RATES, KERNEL = DATA / "cpu_rates.json", DATA / "kernel.log"


def paces(*steps_s: float, steps: int = 20) -> dict[str, Pace]:
    return {f"r/{n}": Pace(steps=steps, step_s=s) for n, s in enumerate(steps_s)}


def test_a_member_half_again_as_slow_as_its_role_is_named_with_its_factor() -> None:
    assert stragglers(paces(1.0, 1.1, 0.9, 1.7)) == {"r/3": pytest.approx(1.7 / 1.05)}
    assert stragglers(paces(1.0, 1.1, 0.9, 1.5)) == {}


def test_too_few_steps_or_members_accuse_nobody() -> None:
    assert stragglers(paces(1.0, 1.0, 9.0, steps=19)) == {}
    assert stragglers(paces(1.0, 9.0)) == {}


@given(st.lists(st.floats(1.0, 1.4), min_size=3, max_size=12))
def test_members_within_the_factor_of_each_other_are_never_slow(steps_s) -> None:
    assert stragglers(paces(*steps_s)) == {}


def watched(rows, *, scale: float = 1.0, offset: float = 0.0) -> list[float]:
    """Times at which the watch says that the rate has dropped; a sample is time, rate, count, excuse, phase."""
    watch, n, found = RateWatch(idle=offset), 0, []
    for at_s, rate, count, excuse, _ in rows:
        watch = watch.seen(at_s, offset + scale * rate, progress=count > n, excused=bool(excuse))
        n = count
        if watch.dropped:
            found.append(at_s)
    return found


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (450.0, 75.0)], ids=["cores", "as if watts of a device"])
def test_in_a_recorded_run_only_the_deadlock_is_a_drop_and_it_is_told_within_35_s(scale: float, offset: float) -> None:
    rows = json.loads(RATES.read_text())["rows"]
    phases = {phase: [row for row in rows if row[4] == phase] for phase in ("checkpoint", "evaluation", "wait", "drop")}
    assert all(len(some) >= 40 for some in phases.values())
    began_s = phases["drop"][0][0]
    told = watched(rows, scale=scale, offset=offset)
    assert told, "the deadlock is seen"
    assert 30 <= told[0] - began_s <= 35, "and nothing before it is: checkpoint, evaluation and waiting are excused"


def test_without_their_excuses_the_same_silences_would_be_drops() -> None:
    rows = [[*row[:3], "", row[4]] for row in json.loads(RATES.read_text())["rows"]]
    wait_s = next(row[0] for row in rows if row[4] == "wait")
    assert any(wait_s <= at_s <= wait_s + 45 for at_s in watched(rows))


def test_of_the_reports_of_a_driver_those_that_are_the_fault_of_a_device_name_it_while_they_are_fresh() -> None:
    lines = KERNEL.read_text().splitlines()
    found = xid_faults(lines, 1850.0)
    assert found == {"0000:44:00": (Reason.GPU_LOST, "Xid 79: GPU has fallen off the bus.")}
    early = {bus: reason for bus, (reason, _) in xid_faults(lines, 1500.0).items()}
    assert early == {"0000:5e:00": Reason.GPU_ECC, "0000:44:00": Reason.GPU_LOST}
    assert xid_faults(lines, 9000.0) == {}, "a fault of the code (31) and a remap that went well (63) are none"


def test_memory_needs_the_signal_and_the_count_of_the_kernel_and_no_word() -> None:
    assert "from 3 to 4" in memory_evidence(9, 3, 4)
    assert memory_evidence(9, 3, 3) == "", "somebody else's SIGKILL"
    assert memory_evidence(11, 3, 4) == ""
    assert memory_evidence(9, None, None) == "", "no control group to ask"


def test_a_full_or_broken_disk_is_known_by_its_number_also_behind_other_errors() -> None:
    assert storage_reason(OSError(errno.ENOSPC, "x")) is Reason.OUTPUT_FULL
    try:
        try:
            raise OSError(errno.ESTALE, "x")
        except OSError as cause:
            raise RuntimeError("could not load the batch") from cause
    except RuntimeError as error:
        assert storage_reason(error) is Reason.DATA_UNREACHABLE
    assert storage_reason(OSError(errno.ENOENT, "No space left")) is None, "a word is no evidence"
    assert storage_reason(ValueError("disk")) is None


def test_only_losses_that_are_not_finite_count() -> None:
    assert bad_losses(
        {"loss": "nan", "policy_loss": float("inf"), "reward": "nan", "loss/value": 1.0, "lossy": None}
    ) == (
        "loss",
        "policy_loss",
    )
