"""Two machines without a shared folder: code goes to them, logs and outputs come back, commands run there.

The same job file as on one machine, with no setting about addresses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from tests.machines.bed import bed
from tests.machines.site import LIMIT_S, Site, long, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKDIR = "/tmp/code"
T = TypeVar("T")

TRAIN = """
import os, pathlib, socket, sys, time
import torch.distributed as dist
import helper

dist.init_process_group("gloo")
rank, host = dist.get_rank(), socket.gethostname()
out = pathlib.Path(os.environ["ROTA_OUTPUT_DIR"])
(out / "parts" / f"rank{rank}").mkdir(parents=True)
(out / "parts" / f"rank{rank}" / "w.bin").write_bytes(bytes([rank]) * 3_000_000)
if rank % 2 == 0:
    os.symlink("/etc/passwd", out / "parts" / f"link{rank}")
print("STARTED", host, rank, helper.WORD, os.getcwd(), os.environ["ROTA_HOME"], os.environ["TOP"], flush=True)
while not pathlib.Path("/tmp/go").exists():
    time.sleep(0.1)
dist.barrier()
for n in range(2000):
    os.write(1, f"LINE {host} {rank} {n}\\n".encode())  # at once: two ranks of a machine write into one pipe
dist.destroy_process_group()
"""

WIDE = """
name: wide
secrets: [TOP]
roles:
  main:
    run: torchrun --nnodes 2 --nproc-per-node 2 train.py
    replicas: 2
    mesh: {dp: 2}
    resources: {cpus: 2}
    apart: [{role: self, level: node}]
"""

ROLES = """
import socket
from rota import Workload, op
import helper

class Worker(Workload):
    def setup(self, ctx):
        self.host = socket.gethostname()

    @op
    def where(self):
        print("WHERE", self.host, helper.WORD, flush=True)
        return self.host

async def flow(job):
    print("FIRST", await job.roles["worker"].where(), flush=True)
"""

SUMS = """
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
from rota.train.ps.clocks import Rule
from rota.train.sync import PsSync

torch.manual_seed(0)
net = torch.nn.Linear(3, 2)
agree = PsSync(Rule(mode="ps_sync"), 4, dist.group.WORLD)
agree.attach(net)
other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
other.module.load_state_dict(net.state_dict())
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, other)]
for step in range(5):
    for one in (net, other):
        one(torch.full((1, 3), float(rank + step))).sum().sin().backward()
    agree.update(optimizers[0])
    optimizers[1].step()
    for one in optimizers:
        one.zero_grad()
apart = max(float((a - b).abs().max()) for a, b in zip(net.parameters(), other.module.parameters()))
if rank == 0:
    found = {"sum": total.item(), "hosts": hosts, "address": os.environ["MASTER_ADDR"]}
    print("RESULT", json.dumps({**found, "apart": apart, "servers": agree.client.addresses}), flush=True)
agree.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def over_two() -> Iterator[Site]:
    with bed(2, subnet=84) as machines, site(machines) as made:
        yield made


def _until(look: Callable[[], T], what: str) -> T:
    deadline = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.3)
    return found


@long
def test_a_job_over_two_machines_that_share_no_folder(over_two: Site) -> None:
    head, other = over_two.machines
    over_two.put("train.py", TRAIN)
    over_two.put("helper.py", "WORD = 'packed'\n")
    over_two.put("data/big.bin", "")
    subprocess.run(["truncate", "-s", "300M", str(head.path(f"{WORKDIR}/data/big.bin"))], check=True)
    over_two.head.run("sh", "-c", f"printf hushhush | {sys.executable} -m rota secret set TOP", env=over_two.environ)
    over_two.put("job.yaml", WIDE)
    refused = head.run(
        *(sys.executable, "-m", "rota", "run", f"{WORKDIR}/job.yaml", "-d"), env=over_two.environ, ok=False
    )
    assert refused == ""
    over_two.put(".gitignore", "data/\n")
    job = over_two.submit(WIDE)
    over_two.put("helper.py", "WORD = 'changed'\n")

    log = head.path("/tmp/follow.txt")
    follower = head.spawn(sys.executable, "-m", "rota", "logs", "-f", job, env=over_two.environ, log=log)
    _until(lambda: log.exists() and log.read_text().count("STARTED") == 4, "four ranks start")
    started = {
        tuple(line.split("STARTED ")[1].split()[:6]) for line in log.read_text().splitlines() if "STARTED" in line
    }
    homes = {one.name: over_two.home_of(one) for one in over_two.machines}
    assert {(row[0], *row[2:5]) for row in started} == {
        (host, "packed", f"{home}/jobs/{job}/code", home) for host, home in homes.items()
    }
    assert "hushhush" not in log.read_text()
    assert "hushhush" not in other.run("sh", "-c", f"grep -r hushhush {over_two.home_of(other)} || true")

    shown = over_two.json("show", job)
    far = next(one["instance"] for one in shown["instances"] if one["node"] == other.name)
    assert over_two.rota("exec", job, far, "--", "hostname").strip() == other.name
    assert "hushhush" not in over_two.rota("exec", job, far, "--", "sh", "-c", "echo $TOP")
    top = {one["instance"]: one for one in over_two.json("top", job)["items"]}
    assert top[far]["node"] == other.name and top[far]["beat_age_s"] < 30 and top[far]["rss_bytes"] > 2**20

    for machine in over_two.machines:
        machine.run("touch", "/tmp/go")
    assert over_two.ended(job)["state"] == "SUCCEEDED", over_two.rota("logs", job)
    follower.wait(LIMIT_S)
    for text in (log.read_text(), over_two.rota("logs", job)):
        lines = [line.split("LINE ")[1].split() for line in text.splitlines() if "LINE " in line]
        for rank in "0123":
            assert [int(n) for _, who, n in lines if who == rank] == list(range(2000))
        assert {host for host, _, _ in lines} == {head.name, other.name}
    assert not head.path(f"/tmp/rota/jobs/{job}/logs/{far.replace('/', '-')}.log").exists()

    over_two.head.run("mkdir", "/tmp/copies")
    over_two.rota("cp", f"{job}:parts", "/tmp/copies")
    for rank in range(4):
        assert head.path(f"/tmp/copies/parts/rank{rank}/w.bin").read_bytes() == bytes([rank]) * 3_000_000
    assert not list(head.path("/tmp/copies/parts").glob("link*"))
    one = next(row for row in over_two.json("cp", f"{job}:", "--list")["items"] if row["node"] == other.name)
    assert one["path"].startswith("parts")
    assert over_two.rota("cp", f"{job}:../..", "/tmp/copies", ok=False) == ""


def test_a_job_of_roles_runs_over_both_machines(over_two: Site) -> None:
    over_two.put("roles.py", ROLES)
    over_two.put("helper.py", "WORD = 'roles'\n")
    job = over_two.submit(
        """
name: roles
roles:
  flow: {workload: "roles:flow"}
  worker:
    workload: "roles:Worker"
    replicas: 2
    resources: {cpus: 1}
    apart: [{role: self, level: node}]
"""
    )
    ended = over_two.ended(job)
    page = over_two.json("logs", job)
    lines = over_two.rota("logs", job)
    assert ended["state"] == "SUCCEEDED" and not page["notices"], (ended, page, lines)
    (first,) = [line.split("WHERE ")[1].split()[0] for line in lines.splitlines() if line.startswith("worker/0")]
    assert f"FIRST {first}" in lines
    assert {line.split("WHERE ")[1] for line in lines.splitlines() if "WHERE " in line} == {"m0 roles", "m1 roles"}


def test_a_torchrun_job_over_two_machines_needs_no_address(over_two: Site) -> None:
    over_two.put("sums.py", SUMS)
    job = over_two.submit(
        """
name: wide
roles:
  main:
    run: torchrun --nnodes 2 --nproc-per-node 2 sums.py
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
    addresses = {one.address for one in over_two.machines}
    assert found["address"] in addresses
    assert found["apart"] < 1e-6, "parameter servers on both machines agree as all-reduce does"
    assert {one.rpartition(":")[0] for one in found["servers"]} == addresses


@long
def test_a_dead_machine_is_named_with_what_was_known_of_its_output(over_two: Site) -> None:
    other = over_two.machines[1]
    job = over_two.submit(
        """
name: last
retry: 1
roles:
  main:
    run: [sh, -c, "echo SEEN $(hostname); sleep 600"]
    replicas: 2
    resources: {cpus: 1}
    apart: [{role: self, level: node}]
"""
    )
    _until(lambda: over_two.rota("logs", job).count("SEEN") == 2, "both print")
    other.kill()
    page = _until(lambda: (found := over_two.json("logs", job))["notices"] and found, "the loss is noticed")
    (notice,) = page["notices"]
    assert notice.startswith("m1 does not answer") and "were read) is on m1 and is not shown" in notice
    assert [line["text"] for line in page["items"] if "SEEN" in line["text"]] == ["SEEN m0"]
    over_two.rota("stop", job)
