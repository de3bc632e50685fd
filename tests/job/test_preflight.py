"""The check of a node before an instance starts: folders, space, devices; on real folders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rota.job.core.progress import Verdict
from rota.job.health import preflight
from rota.job.health.preflight import DeviceWatch, NodeUnfit, Unfit, collective, compute, findings_for, pairwise, quick
from rota.runtime import devices
from rota.runtime.clock import blocking_sleep
from rota.runtime.devices import DeviceFamily, FakeDevices, Nvidia
from rota.spec.reasons import Reason


def test_a_fit_node_has_nothing_wrong_and_no_file_is_left(tmp_path: Path) -> None:
    assert quick([tmp_path, tmp_path / "new"]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_takes_no_writes_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (found,) = quick([tmp_path / "file" / "below"])
    assert (found.check, found.reason) == ("disk", Reason.OUTPUT_FULL)
    assert f"{tmp_path / 'file' / 'below'} takes no writes" in found.text


def test_too_little_space_is_given_in_mebibytes(tmp_path: Path) -> None:
    (found,) = quick([tmp_path], free_min_bytes=1 << 62)
    assert found.reason is Reason.OUTPUT_FULL and "MiB left" in found.text


def use(monkeypatch: pytest.MonkeyPatch, family: DeviceFamily) -> None:
    monkeypatch.setattr(preflight, "local_family", lambda: family)


def test_a_device_that_is_not_there_is_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDevices("1xH100"))
    (found,) = DeviceWatch((0, 1)).look()
    assert (found.check, found.reason) == ("devices", Reason.GPU_LOST)
    assert NodeUnfit([found]).reason is Reason.GPU_LOST


def test_arithmetic_that_is_wrong_is_found_and_right_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute(0) == []
    right = torch.Tensor.__matmul__

    def flipped(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(one, other)
        product[100, 7] += 1.0  # one wrong bit in a register
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", flipped)
    (found,) = compute(0)
    assert (found.check, found.reason) == ("compute", Reason.NODE_SUSPECT)
    assert "cpu computes 1 of 262144 products wrong" in found.text


@pytest.mark.parametrize("broken", [False, True])
def test_a_collective_of_the_mesh_is_summed_and_a_member_that_sends_wrong_numbers_is_noticed(broken: bool) -> None:
    store = dist.HashStore()

    def member(rank: int) -> list[Unfit]:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        # A member that counts itself twice sends other numbers than it should.
        return collective(group, rank + (broken and rank == 1), 2, "cpu")

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(member, range(2)))
    assert [[one.reason for one in each] for each in found] == [[Reason.COLLECTIVE_WRONG] if broken else []] * 2


class BadLink(dist.ProcessGroupGloo):
    """A member that sends other numbers than it should, or sends them late."""

    late_s, wrong = 0.0, 0

    def send(self, tensors: list[torch.Tensor], *to: int) -> dist.Work:
        blocking_sleep(self.late_s)
        self.sent = [one + self.wrong for one in tensors]
        return super().send(self.sent, *to)


def test_of_a_mesh_the_one_that_is_late_is_the_slowest_and_the_one_that_sends_wrong_numbers_is_faulty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.job.health.preflight.MATRIX_N", 8)  # the four share the cores of one machine
    monkeypatch.setattr("rota.job.health.preflight.COLLECTIVE_N", 1024)
    store = dist.HashStore()

    def member(rank: int) -> list[Verdict]:
        found = []
        for name, late_s, wrong in (("late", 0.03 * (rank == 3), 0), ("wrong", 0.0, int(rank == 0))):
            group = BadLink(dist.PrefixStore(name, store), rank, 4, timedelta(seconds=20))
            group.late_s, group.wrong = late_s, wrong
            found.append(pairwise(group, dist.PrefixStore(f"pairs {name}", store), rank, 4, "cpu"))
        return found

    with ThreadPoolExecutor(4) as threads:
        (late, wrong), *others = threads.map(member, range(4))
    assert all(one == [late, wrong] for one in others), "all of them judge alike"
    assert max(late.slow, key=lambda n: late.slow[n]) == 3 and late.faulty == ()
    assert wrong.faulty == (0,)
    assert [len(findings_for(late, 3, exclude=exclude)) for exclude in (False, True)] == [0, 1]
    assert (
        findings_for(wrong, 0, exclude=False)[0].reason is Reason.NODE_SUSPECT
        and findings_for(wrong, 1, exclude=False) == []
    )


def test_a_device_that_the_kernel_log_reports_is_unfit_and_its_neighbour_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = (Path(__file__).parents[1] / "data" / "job" / "kernel.log").read_text().replace("[ 1843.", "[9999999999.")
    for address in ("0000:1a:00.0", "0000:44:00.0"):
        (tmp_path / "gpus" / address).mkdir(parents=True)
    use(monkeypatch, Nvidia(tmp_path / "gpus"))
    monkeypatch.setattr(devices.process, "output_of", lambda command, **_: log if command == ("dmesg",) else "")
    assert DeviceWatch((0,)).look() == []
    (found,) = DeviceWatch((1,)).look()
    assert (found.check, found.reason) == ("devices", Reason.GPU_LOST)
    assert "device 1 is faulty: Xid 79: GPU has fallen off the bus. (0000:44:00); drain" in found.text


def test_a_device_whose_memory_errors_rise_under_its_work_is_faulty_and_older_errors_are_not_held_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = {0: 7, 1: 2, 2: 0}
    family = FakeDevices("3xH100")
    monkeypatch.setattr(family, "memory_errors", lambda: dict(counted))
    use(monkeypatch, family)
    watch = DeviceWatch((0, 1))
    assert watch.look() == []
    counted |= {0: 0, 2: 5}
    assert watch.look() == [], "device 0 was reset, device 2 is somebody else's"
    counted[1] = 3
    (found,) = watch.look()
    assert found.reason is Reason.GPU_ECC and "device 1 had 1 uncorrectable memory errors" in found.text
