"""Ways to agree, on four real ranks: each against plain all-reduce, its reference loop, or its cost formula."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from tests.proof.collectives import ring_all_reduce, tree_all_reduce
from tests.real.train.ranks import run_ranks
from torch import nn

from rota.spec.errors import BadInput
from rota.train import sync
from rota.train.compress import Compression
from rota.train.plan.hardware import Link, all_reduce_s
from rota.train.ps.client import PsClient
from rota.train.ps.clocks import Rule
from rota.train.ps.server import PsServer, ServerSpec
from rota.train.ps.table import RowOptimizer, TableSpec, first_rows
from rota.train.sync import Compressed, Hierarchical, LocalSgd, PsSync, ShardedEmbedding

STEPS = 10


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(step * 16 + rank)
    x = torch.randn(5, 6, generator=made)
    return (net(x) - x[:, :3].sin()).square().mean()


def train(rank: int, agree: Any, make: Any) -> list[torch.Tensor]:
    """Weights after STEPS steps with a way to agree; None: the plain DistributedDataParallel."""
    net = model()
    wrapped: Any = nn.parallel.DistributedDataParallel(net) if agree is None or agree.reduces else net
    if agree is not None:
        agree.attach(wrapped)
    optimizer = make(net.parameters())
    for step in range(STEPS):
        loss(wrapped, rank, step).backward()
        optimizer.step() if agree is None else agree.update(optimizer)
        optimizer.zero_grad()
    return [one.detach() for one in net.parameters()]


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((one - two).abs().max()) for one, two in zip(ours, theirs, strict=True))


def reference_local_sgd(size: int, every: int) -> list[torch.Tensor]:
    """All replicas in one process."""
    nets = [model() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(net, rank, step).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for weights in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([one.detach() for one in weights]).mean(0)
                for one in weights:
                    one.data.copy_(mean)
    return [one.detach() for one in nets[0].parameters()]


def every_way(rank: int, size: int) -> dict[str, Any]:
    def sgd(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=0.1)

    def adam(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(weights, lr=0.01)

    plain, plain_adam, group = train(rank, None, sgd), train(rank, None, adam), dist.group.WORLD
    found: dict[str, Any] = {
        "hierarchical": apart(train(rank, Hierarchical(2), sgd), plain),
        "local_sgd(1)": apart(train(rank, LocalSgd(1, group), sgd), plain),
        "bf16": apart(train(rank, Compressed(Compression(kind="bf16")), sgd), plain),
        "ps_sync": apart(train(rank, PsSync(Rule(mode="ps_sync"), 2, group), adam), plain_adam),
    }
    local = train(rank, LocalSgd(5, group), sgd)
    found["local_sgd(5)"] = apart(local, reference_local_sgd(size, 5))
    ssp = PsSync(Rule(mode="ps_ssp", s=1), 2, group)
    net = model()
    before = float(loss(net, 0, 99).detach())
    trained = model()
    for one, weights in zip(trained.parameters(), train(rank, ssp, lambda w: torch.optim.SGD(w, lr=0.03)), strict=True):
        one.data.copy_(weights)
    found["ssp learns"] = float(loss(trained, 0, 99).detach()) < before
    assert ssp.client is not None
    found["ssp lead"] = max(one["lead_max"] for one in ssp.client.stats())
    ssp.close()
    sync.machine_identity = lambda: f"machine {rank // 2}"
    try:
        train(rank, PsSync(Rule(mode="ps_sync"), 2, group), adam)
    except BadInput as error:
        found["refused"] = error.message
    os.environ["ROTA_NODE_ADDRESS"] = "203.0.113.1" if rank == 0 else "127.0.0.2"  # an address of no machine here
    try:
        train(rank, PsSync(Rule(mode="ps_sync"), 2, group), adam)
    except BadInput as error:
        found["no address"] = error.message
    os.environ["ROTA_NODE_ADDRESS"] = "127.0.0.2"  # as if of one of the machines
    far = PsSync(Rule(mode="ps_sync"), 2, group)
    found["ps_sync, machines"] = apart(train(rank, far, adam), plain_adam)
    assert far.client is not None
    found["servers at"] = far.client.addresses
    found["hybrid"] = hybrid(rank, size)
    dist.barrier()  # servers live in the first ranks
    return found


def hybrid(rank: int, size: int) -> float:
    """Rows on a server, the dense layer by all-reduce, against one process with the whole table."""
    spec = TableSpec(name="rows", dim=6, optimizer=RowOptimizer(kind="sgd", lr=0.1), scale=0.5)
    address: list[Any] = [None]
    if rank == 0:
        server = PsServer(ServerSpec(rule=Rule(mode="ps_sync"), tables=(spec,)))
        address = [server.serve()]
    dist.broadcast_object_list(address)
    client = PsClient(address, rank)
    dist.barrier()
    ours, alone = ShardedEmbedding(client, "rows"), nn.Embedding(40, 6)
    alone.weight.data.copy_(torch.from_numpy(first_rows(spec, torch.arange(40).numpy())))
    dense, reference = nn.parallel.DistributedDataParallel(model()), model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (dense, nn.ModuleList([alone, reference]))]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids = [torch.randint(40, (5, 3), generator=torch.Generator().manual_seed(step * 8 + r)) for r in range(size)]
        client.wait_turn()
        dense(ours(ids[rank]).mean(1)).square().mean().backward()
        ours.push()
        client.tick()
        torch.stack([reference(alone(one).mean(1)).square().mean() for one in ids]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    client.wait_turn()
    rows = torch.from_numpy(client.pull("rows", torch.arange(40).numpy()))
    dist.barrier()
    return max(float((rows - alone.weight).abs().max()), apart(list(dense.parameters()), list(reference.parameters())))


def test_each_way_to_agree_does_what_it_says(train_home: Path) -> None:
    for found in run_ranks(every_way, 4, home=train_home):
        print(found)
        assert found["hierarchical"] <= 1e-6
        assert found["local_sgd(1)"] <= 1e-6
        assert found["local_sgd(5)"] <= 1e-6
        assert found["ps_sync"] <= 1e-6
        assert found["hybrid"] <= 1e-6
        assert 0 < found["bf16"] <= 2e-3
        assert "ps_sync on 2 machines, and ROTA_NODE_ADDRESS is not set" in found["refused"]
        assert "rank 0 cannot listen at 203.0.113.1" in found["no address"], "every rank says so, and none waits"
        assert found["ps_sync, machines"] <= 1e-6
        assert {one.rpartition(":")[0] for one in found["servers at"]} == {"127.0.0.2"}
        assert found["ssp learns"] and found["ssp lead"] <= 1


def walk(rank: int, size: int) -> dict[str, tuple[bool, int, int]]:
    found = {}
    for name, algorithm in (("ring", ring_all_reduce), ("tree", tree_all_reduce)):
        flat = torch.arange(24.0) * (rank + 1)
        traffic = algorithm(flat)
        good = torch.equal(flat, torch.arange(24.0) * sum(range(1, size + 1)))
        found[name] = (good, traffic.messages, traffic.bytes)
    return found


@pytest.mark.parametrize("size", [3, 4])
def test_ring_and_tree_send_what_the_cost_model_counts(train_home: Path, size: int) -> None:
    ranks = run_ranks(walk, size, home=train_home)
    wide, messages = 24 * 4, math.ceil(math.log2(size))
    for rank in ranks:
        assert rank["ring"] == (True, 2 * (size - 1), 2 * (size - 1) * wide // size)
        assert rank["tree"][0]
    assert ranks[0]["tree"][1:] == (messages, messages * wide), "the root sends to log2(K) children"
    assert sum(rank["tree"][1] for rank in ranks) == 2 * (size - 1)
    link = Link(gb_s=1e-9, latency_us=0)  # one byte a second
    assert all_reduce_s(size, wide, link) == pytest.approx(ranks[0]["ring"][2])
