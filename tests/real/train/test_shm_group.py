"""The process group in shared memory: each collective against arithmetic, PyTorch's wrappers on top, and deaths."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from tests.real.train.ranks import Ranks, run_ranks

import rota.tensors
from rota.train import shm
from rota.train.shm import CollectiveMismatch, PeerLost

LATE_MAX_S = 1.0 if os.environ.get("ROTA_DEEP") else 5.0
"""So long after a death its peers know, the time apart in which they had no core."""


def group(**how: Any) -> Any:
    shm.register()
    made: Any = dist.new_group(backend="rota_shm", **how)
    inner: Any = made._get_backend(torch.device("cpu")) if not isinstance(made, shm.ShmGroup) else made
    assert inner.shared
    return made


def given(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(n) * 7 + rank * 13) % 31).to(dtype)


def every_collective(rank: int, size: int) -> int:
    g, checked = group(), 0
    for n in (6 * 37, 6 * 100_003):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            all_given = [given(peer, n, dtype) for peer in range(size)]
            total = torch.stack(all_given).sum(0).to(dtype)
            for op, want in (
                (dist.ReduceOp.SUM, total),
                (dist.ReduceOp.MAX, torch.stack(all_given).max(0).values),
                (dist.ReduceOp.AVG, (total / size).to(dtype)),
            ):
                if op == dist.ReduceOp.AVG and dtype == torch.int64:
                    continue
                got = given(rank, n, dtype)
                dist.all_reduce(got, op, group=g)
                assert torch.equal(got, want), (n, dtype, op)
                part = torch.empty(n // size, dtype=dtype)
                dist.reduce_scatter_single(part, given(rank, n, dtype), op, group=g)
                assert torch.equal(part, want.view(size, -1)[rank]), (n, dtype, op)
            joined = torch.empty(n * size, dtype=dtype)
            dist.all_gather_single(joined, given(rank, n, dtype), group=g)
            assert torch.equal(joined, torch.cat(all_given))
            listed = [torch.empty(n, dtype=dtype) for _ in range(size)]
            dist.all_gather(listed, given(rank, n, dtype), group=g)
            assert all(torch.equal(one, two) for one, two in zip(listed, all_given, strict=True))
            sent = given(rank, n, dtype)
            dist.broadcast(sent, src=size - 1, group=g)
            assert torch.equal(sent, all_given[-1])
            swapped = torch.empty(n, dtype=dtype)
            dist.all_to_all_single(swapped, given(rank, n, dtype), group=g)
            assert torch.equal(swapped, torch.cat([one.view(size, -1)[rank] for one in all_given]))
            checked += 1
    none = torch.empty(0)
    dist.all_gather_single(torch.empty(0), none, group=g)
    dist.reduce_scatter_single(torch.empty(0), none, group=g)
    dist.all_to_all_single(torch.empty(0), none, group=g)
    dist.barrier(group=g)
    return checked + what_gloo_does(rank, size, g)


def what_gloo_does(rank: int, size: int, g: Any) -> int:
    """Gaps, odd sizes, point to point, uneven exchanges: not in shared memory, yet right."""
    wide = given(rank, 1001, torch.float32).repeat(2, 1).t()  # not contiguous, odd
    dist.all_reduce(wide, group=g)
    total = torch.stack([given(peer, 1001, torch.float32) for peer in range(size)]).sum(0)
    assert torch.equal(wide[:, 1], total)
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=g)
    box = torch.zeros(3)
    if rank == 0:
        dist.send(torch.ones(3), 1, group=g)
    elif rank == 1:
        dist.recv(box, 0, group=g)
        assert box.sum() == 3
    uneven = torch.empty(size * (rank + 1))
    splits = [peer + 1 for peer in range(size)]
    dist.all_to_all_single(uneven, torch.full((sum(splits),), float(rank)), [rank + 1] * size, splits, group=g)
    assert uneven.tolist() == [float(peer) for peer in range(size) for _ in range(rank + 1)]
    return 1


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_gives_the_arithmetic_of_all_ranks(train_home: Path, size: int) -> None:
    assert run_ranks(every_collective, size, home=train_home) == [7] * size


def sum_bits(rank: int, size: int) -> list[bytes]:
    g, found = group(), []
    for n in (3, 3 * 90_001):
        value = torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank * 3)
        dist.all_reduce(value, group=g)
        found.append(value.numpy().tobytes())
    return found


def test_sums_have_the_same_bits_on_all_ranks_and_in_the_order_of_ranks(train_home: Path) -> None:
    one, two, three = run_ranks(sum_bits, 3, home=train_home)
    assert one == two == three
    for bits, n in zip(one, (3, 3 * 90_001), strict=True):
        parts = [torch.randn(n, generator=torch.Generator().manual_seed(r)) * 10.0 ** (r * 3) for r in range(3)]
        assert bits == ((parts[0] + parts[1]) + parts[2]).numpy().tobytes()


def many_small(rank: int, size: int) -> bool:
    """Slots are rewritten thousands of times: one read too early or too late shows as a wrong sum."""
    g = group()
    for i in range(1_500):
        n = (i * 7919) % 300 + 1
        value = torch.full((n,), float(i * size + rank))
        dist.all_reduce(value, group=g)
        want = float(sum(i * size + peer for peer in range(size)))
        assert value[0] == value[-1] == want, (i, n, value[0], want)
    return True


def test_thousands_of_rounds_never_see_a_slot_too_early_or_too_late(train_home: Path) -> None:
    assert all(run_ranks(many_small, 2, home=train_home))


def train(kind: str, g: Any, rank: int, size: int) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    mesh = DeviceMesh.from_group(g, "cpu", mesh_dim_names=("dp",))
    if kind == "ddp":
        net = torch.nn.parallel.DistributedDataParallel(net, process_group=g)
    elif kind == "fsdp":
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert distribute_tensor(torch.ones(4), mesh).full_tensor().sum() == 4
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        seed = step * 10 + (rank if kind != "tp" else 0)
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in net.parameters()]


def compare_with_gloo(rank: int, size: int) -> list[float]:
    shm, gloo = group(), dist.new_group(backend="gloo")
    worst = []
    for kind in ("ddp", "fsdp", "tp"):
        ours, theirs = train(kind, shm, rank, size), train(kind, gloo, rank, size)
        worst.append(max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)))
    return worst


def test_ddp_fsdp2_and_tensor_parallel_train_as_on_gloo(train_home: Path) -> None:
    for worst in run_ranks(compare_with_gloo, 2, home=train_home):
        assert max(worst) <= 1e-6, worst


def out_of_step(rank: int, size: int) -> str:
    g = group()
    try:
        if rank == 0:
            dist.all_reduce(torch.zeros(8), group=g)
        else:
            dist.broadcast(torch.zeros(4), src=0, group=g)
    except CollectiveMismatch as error:
        return error.message
    return "nothing"


def test_ranks_in_different_collectives_are_told_both_names(train_home: Path) -> None:
    first, second = run_ranks(out_of_step, 2, home=train_home)
    assert "rank 0 is in all_reduce of 8 float32, rank 1 in broadcast of 4 float32" in first
    assert "rank 1 is in broadcast of 4 float32, rank 0 in all_reduce of 8 float32" in second


def coreless_s() -> float:
    """Seconds in which this thread could run and waited for a core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def wait_for_the_dead(rank: int, size: int, folder: str) -> tuple[float, str, int, str]:
    g = group()
    value = torch.ones(1 << 20)
    dist.all_reduce(value, group=g)
    Path(folder, f"ready-{rank}").touch()
    try:
        while True:
            before_s = coreless_s()
            dist.all_reduce(value, group=g)
    except PeerLost as error:
        late_s = time.monotonic() - float(Path(folder, "killed").read_text()) - (coreless_s() - before_s)
        Path(folder, f"told-{rank}").touch()
        deadline = time.monotonic() + 30  # who goes first would be the next to be missed
        while not all(Path(folder, f"told-{one}").exists() for one in (0, 2)) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(PeerLost):
            dist.barrier(group=g)
        return late_s, error.fields["operation"], error.fields["rank"], error.message


def assert_no_segment_is_left(home: Path) -> None:
    plane = rota.tensors.connect(home=home)
    plane.gc()
    assert plane.fsck()["violations"] == []
    stats = plane.stats()
    assert (stats["names"], stats["bytes"], stats["file_bytes"]) == (0, 0, 0), stats


def test_a_killed_rank_is_named_to_its_peers_within_seconds_and_no_segment_is_left(
    train_home: Path, tmp_path: Path
) -> None:
    ranks = Ranks(wait_for_the_dead, 3, str(tmp_path), home=train_home)
    deadline = time.monotonic() + 30
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(3)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (tmp_path / "killed").write_text(str(time.monotonic()))
    ranks.kill(1)
    for late_s, operation, rank, text in ranks.results(0, 2):
        assert (operation, rank) in (("all_reduce", 1), ("reduce_scatter", 1), ("all_gather", 1)), text
        assert late_s < LATE_MAX_S
    assert_no_segment_is_left(train_home)


def late(rank: int, size: int, folder: str) -> str:
    g, named = group(timeout=timedelta(seconds=2)), Path(folder, "named")
    if rank == 1:
        deadline = time.monotonic() + 30
        while not named.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return "late"
    try:
        dist.barrier(group=g)
    except PeerLost as error:
        named.touch()
        return error.message
    return "nothing"


def test_a_rank_that_lives_but_does_not_come_is_named_at_the_time_out(train_home: Path, tmp_path: Path) -> None:
    assert run_ranks(late, 2, str(tmp_path), home=train_home)[0].startswith("rank 1 did not come within 2 s in barrier")
