"""The process group of an epoch: its backend follows what torch sees, not the devices that were assigned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.makers import JOB, mesh, spec

from rota.job.health import preflight
from rota.job.health.heartbeat import HeartbeatAnswer
from rota.job.instance import instance
from rota.job.instance.instance import Instance
from rota.job.instance.runners import ProcessGroup, Setup
from rota.job.place import JobPlace
from rota.runtime.launcher import Call
from rota.runtime.node import group_backend
from rota.spec.ids import Epoch
from rota.spec.job import Fail


class AloneLauncher:
    """A master that answers every beat, and lets the one member of a world meet itself."""

    async def call(self, _: object, call: Call) -> Any:
        return call.kwargs["address"] if call.method == "meet" else HeartbeatAnswer(master_epoch=Epoch(1)).to_json()


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """A member of a mesh with a device of a pretend cluster, and the full node check."""
    monkeypatch.setattr(instance, "open_launcher", lambda _: AloneLauncher())
    role = mesh("w", 1, fail=Fail(check="full"))
    place = JobPlace(home=str(tmp_path), job=JOB, workdir=str(tmp_path), launcher="")
    made = Instance(place=place.to_json(), spec=spec(role).to_json(), instance="w/0", epoch=1, attempt=1, devices=[0])
    yield made
    made._control.close()
    made._config.user.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a device here")
def test_a_member_with_pretend_devices_meets_and_sums_over_gloo(member: Instance) -> None:
    meeting = ProcessGroup(member._config, Setup(epoch=Epoch(1), world=1, restore=0))
    try:
        group, numbers = meeting.make(), torch.ones(3)
        dist.all_reduce(numbers, group=group)
        assert numbers.tolist() == [1.0, 1.0, 1.0]
        assert dist.get_backend(group) == "gloo"
    finally:
        meeting.leave()
    assert preflight.compute(devices=1) == [], "there is nothing on device 0 to compute with"


def test_with_cuda_devices_the_tensors_of_both_kinds_have_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert group_backend() == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert group_backend() == "gloo"
