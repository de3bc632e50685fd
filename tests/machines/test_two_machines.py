"""One job over two machines: the same file as on one, no setting about addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.machines.bed import bed
from tests.machines.site import Site, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = """
import json, os, socket
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(rank + 1)])
for _ in range(20):
    mine = torch.tensor([float(rank + 1)])
    dist.all_reduce(mine)
    total = mine
hosts = [None] * dist.get_world_size()
dist.all_gather_object(hosts, socket.gethostname())
if rank == 0:
    print("RESULT", json.dumps({"sum": total.item(), "hosts": hosts, "address": os.environ["MASTER_ADDR"]}), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def over_two() -> Iterator[Site]:
    with bed(2, subnet=78) as machines, site(machines) as made:
        yield made


def test_a_torchrun_job_over_two_machines_needs_no_address(over_two: Site) -> None:
    over_two.put("train.py", TRAIN)
    job = over_two.submit(
        """
name: wide
roles:
  main:
    run: torchrun --nnodes 2 --nproc-per-node 2 train.py
    replicas: 2
    mesh: {dp: 2}
    resources: {cpus: 2}
    apart: [{role: self, level: node}]
"""
    )
    ended = over_two.ended(job)
    lines = over_two.rota("logs", job)
    assert ended["state"] == "SUCCEEDED", lines
    (found,) = [json.loads(line.split("RESULT ")[1]) for line in lines.splitlines() if "RESULT " in line]
    assert found["sum"] == 10.0
    assert sorted(found["hosts"]) == ["m0", "m0", "m1", "m1"]
    assert found["address"] in {one.address for one in over_two.machines}
