"""What parallelize refuses, and the parts it is made of, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rota.spec.errors import BadInput, Infeasible
from rota.train.apply import parallelize
from rota.train.local_hardware import check_memory, this_machine
from rota.train.loop import world
from rota.train.models.gpt import Gpt
from rota.train.optim import FileOptimizer, HostOptimizer, by_bytes, fill_state, optimizer_tensors, partition
from rota.train.parallel.context_parallel import columns
from rota.train.parallel.mesh import PlanMesh
from rota.train.parallel.model_parts import Parts, stages_of
from rota.train.parallel.tensor_parallel import split_layers
from rota.train.plan.model import Layer, Mesh, ModelShape, ParallelPlan, Stage, Sync, data_parallel

SHAPE = ModelShape(layers=4, hidden=16, heads=4, seq=16, vocab=32, tied=False)
SGD = partial(torch.optim.SGD, lr=0.1)
ALONE = data_parallel(layers=4, dp=1, micro_batch=2)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with world():
        yield


def test_a_plan_for_more_ranks_than_there_are_spells_out_the_product() -> None:
    wide = replace(ALONE, mesh=Mesh(dp_replicate=2, cp=3))
    with pytest.raises(BadInput, match="dp_replicate 2 x dp_shard 1 x cp 3 x tp 1 = 6 ranks, the world has 1"):
        parallelize(Gpt(replace(SHAPE, seq=18)), wide, optimizer=SGD)


def test_every_broken_rule_of_a_plan_is_told_at_once() -> None:
    wrong = replace(ALONE, mesh=Mesh(tp=3), micro_batches=0)
    with pytest.raises(BadInput, match=r"micro_batches = 0.*heads 4 does not divide by tp 3"):
        parallelize(Gpt(SHAPE), wrong, optimizer=SGD)


def test_a_plan_too_large_for_the_machine_is_refused_with_both_numbers() -> None:
    large = replace(SHAPE, layers=4, hidden=65536, heads=64, seq=4096)
    with pytest.raises(Infeasible, match=r"needs \d+\.\d+ GiB, a device of this-machine has \d+\.\d+ GiB less"):
        check_memory(ALONE, large, this_machine())


def test_a_model_without_the_named_parts_is_refused() -> None:
    with pytest.raises(BadInput, match="Linear has no module 'embed'"):
        parallelize(nn.Linear(2, 2), replace(ALONE, mesh=Mesh(tp=2)), optimizer=SGD)
    with pytest.raises(BadInput, match="Linear has no module 'layers'"):
        parallelize(nn.Linear(2, 2), replace(ALONE, layers=(Layer(count=4, recompute="full"),)), optimizer=SGD)


def test_layers_that_no_rule_fits_are_named_with_their_modules() -> None:
    model = Gpt(SHAPE)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(4))
    plan = replace(ALONE, mesh=Mesh(tp=1), layers=(Layer(count=4, tp=2),))
    with pytest.raises(BadInput, match="no rule says how to split Sequential with modules 0"):
        split_layers(model, Parts(), plan, PlanMesh(Mesh(), torch.device("cpu")), None)


def test_a_stage_keeps_the_global_names_of_its_layers() -> None:
    piece = Parts().cut(Gpt(SHAPE), Stage(layers=(2, 4), head=True))
    names = {name.rsplit(".", 2)[0] for name, _ in piece.named_parameters()}
    assert {"layers.2.attn", "layers.3.attn"} <= names
    assert not any(name.startswith(("layers.0", "layers.1", "embed")) for name in names)
    assert piece(torch.zeros(1, 16, 16)).shape == (1, 16, 32)


def test_stages_lie_in_a_circle_or_in_a_v() -> None:
    halves = tuple(Stage(layers=(i, i + 1)) for i in range(4))
    plan = ParallelPlan(mesh=Mesh(pp=2), stages=halves, layers=(Layer(count=4),), schedule="interleaved")
    assert [stages_of(plan, rank) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [stages_of(replace(plan, schedule="zbv"), rank) for rank in (0, 1)] == [[0, 3], [1, 2]]


def test_ring_columns_give_each_rank_an_early_and_a_late_chunk() -> None:
    plan = replace(ALONE, mesh=Mesh(cp=2))
    assert columns(plan, 0, 8).tolist() == [0, 1, 6, 7]
    assert columns(plan, 1, 8).tolist() == [2, 3, 4, 5]
    with pytest.raises(BadInput, match="6 tokens a sequence do not divide into 4 pieces"):
        columns(plan, 0, 6)


def test_parameters_are_dealt_out_evenly() -> None:
    shares = partition([torch.zeros(size) for size in (7, 5, 4, 4)], 2)
    assert [sum(one.numel() for one in share) for share in shares] == [11, 9]


def test_a_schedule_that_turns_momentum_finds_it_in_state_on_the_host() -> None:
    optimizer = HostOptimizer(partial(torch.optim.AdamW, lr=0.1), [nn.Parameter(torch.ones(2))])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4)
    before = optimizer.parts[0].param_groups[0]["lr"]
    optimizer.step()
    schedule.step()
    assert optimizer.parts[0].param_groups[0]["lr"] > before


def test_groups_of_parameters_stay_under_the_budget() -> None:
    groups = by_bytes([torch.zeros(size) for size in (10, 10, 30, 10)], 80)
    assert [[one.numel() for one in group] for group in groups] == [[10, 10], [30], [10]]


def test_state_in_files_steps_like_state_in_memory(tmp_path: Path) -> None:
    drawn = [torch.randn(64, 3), torch.randn(5)]
    kept, filed = ([nn.Parameter(one.clone()) for one in drawn] for _ in range(2))
    make = partial(torch.optim.AdamW, lr=0.1)
    plain, files = make(kept), FileOptimizer(make, filed, tmp_path, budget_bytes=600)
    assert len(files.parts) == 2
    for _ in range(3):
        for one, two in zip(kept, filed, strict=True):
            one.grad = torch.ones_like(one)
            two.grad = torch.ones_like(two)
        plain.step()
        files.step()
    assert all(torch.equal(one, two) for one, two in zip(kept, filed, strict=True))


def test_state_on_the_host_is_there_before_a_step_and_a_checkpoint_does_not_move_it() -> None:
    layer = nn.Linear(4, 2)
    optimizer = HostOptimizer(partial(torch.optim.AdamW, lr=0.1), list(layer.parameters()))
    fill_state(optimizer)
    assert set(optimizer_tensors([layer], optimizer, {})) >= {"optim.weight.exp_avg", "optim.bias.exp_avg_sq"}
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # as under DDP: the gradients stay, as zeros
    before = {name: kept.clone() for name, kept in optimizer_tensors([layer], optimizer, {}).items()}
    fill_state(optimizer)
    assert all(torch.equal(kept, before[name]) for name, kept in optimizer_tensors([layer], optimizer, {}).items())
    assert before["optim.weight.step"] == 1 and before["optim.weight.exp_avg"].abs().sum() > 0


def test_a_full_disk_is_told_before_any_weight_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource
    import signal

    weight = nn.Parameter(torch.ones(1000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            FileOptimizer(partial(torch.optim.AdamW, lr=0.1), [weight], tmp_path, budget_bytes=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(weight, torch.ones(1000))


def test_compression_on_one_rank_has_nobody_to_send_to() -> None:
    trained = parallelize(Gpt(SHAPE), replace(ALONE, sync=Sync(compression="topk")), optimizer=SGD)
    result = trained.step(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    assert not result.skipped


@pytest.mark.slow
def test_a_step_whose_loss_is_not_finite_changes_no_weight() -> None:
    model = Gpt(SHAPE)
    trained = parallelize(model, ALONE, optimizer=SGD, loss=lambda output, _: output.sum() * float("nan"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = trained.step(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    assert result.skipped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert dist.get_world_size() == 1


def test_nodes_of_unequal_size_are_no_hierarchy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(BadInput, match=r"sync\.hierarchical: 1 ranks are not nodes of 2"):
        parallelize(Gpt(SHAPE), replace(ALONE, sync=Sync(hierarchical=True)), optimizer=SGD)


@pytest.mark.parametrize("schedule", ["zb", "zbv"])
def test_a_frozen_first_stage_is_refused_where_torch_loses_gradients(schedule: Literal["zb", "zbv"]) -> None:
    chunks = 2 if schedule == "zbv" else 1
    bounds = [round(4 * i / (2 * chunks)) for i in range(2 * chunks + 1)]
    stages = tuple(Stage(layers=span, embed=not i, head=span[1] == 4) for i, span in enumerate(pairwise(bounds)))
    model = Gpt(SHAPE)
    for part in (model.embed, model.layers[: bounds[1]]):
        part.requires_grad_(False)
    plan = replace(ALONE, mesh=Mesh(pp=2), stages=stages, schedule=schedule, micro_batches=2)
    with pytest.raises(BadInput, match=f"schedule = {schedule}: the first stage is frozen"):
        parallelize(model, plan, optimizer=SGD)


def test_a_step_takes_a_pair_and_tells_its_time_and_its_state_can_be_taken_back() -> None:
    torch.manual_seed(0)
    trained = parallelize(Gpt(SHAPE), ALONE, optimizer=partial(torch.optim.AdamW, lr=0.1))
    batch = (torch.zeros(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long))
    kept = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    first = trained.step(batch)
    assert first.compute_s > 0 and first.wait_s > 0
    second = trained.step(*batch)
    assert second.loss < first.loss
    trained.load(kept)
    assert [trained.step(batch).loss, trained.step(batch).loss] == [first.loss, second.loss]
    del kept["model.head.out.weight"]
    with pytest.raises(BadInput, match=r"what is given has no model\.head\.out\.weight \(continue"):
        trained.load(kept)
