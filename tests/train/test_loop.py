"""How fit() begins and ends in one process, and what two replicas decide together."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from rota.spec.errors import BadInput
from rota.train import checkpoint
from rota.train.apply import StepResult, cross_entropy_sum, parallelize
from rota.train.checkpoint import MANIFEST, Checkpoints, candidates
from rota.train.loop import Agreement, fit, own_device, world
from rota.train.models.gpt import Gpt
from rota.train.plan.model import Sync, data_parallel
from tests.train.fit_script import BATCH, SHAPE, data

SGD = partial(torch.optim.SGD, lr=0.1)
ALONE = data_parallel(layers=SHAPE.layers, dp=1, micro_batch=BATCH)


@pytest.fixture
def alone() -> Iterator[None]:
    with world():
        yield


def train(**how: Any) -> int:
    return fit(partial(Gpt, SHAPE), data, optimizer=SGD, batch=BATCH, **{"plan": ALONE, "steps": 2, **how})


def test_fit_outside_the_main_thread_trains(alone: None) -> None:
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(train()))
    thread.start()
    thread.join(60)
    assert done == [2]


def test_a_folder_may_be_named_by_a_text_and_must_be_empty_when_nothing_may_be_resumed(
    alone: None, tmp_path: Path
) -> None:
    assert train(plan="auto", checkpoint=str(tmp_path), resume="never") == 2
    assert train(checkpoint=str(tmp_path), resume="auto", steps=3) == 3
    with pytest.raises(BadInput, match=r"step-00000003\.1 is there, resume is never"):
        train(checkpoint=tmp_path, resume="never")


@pytest.mark.parametrize(
    ("devices", "backend", "rank", "device"),
    [
        (2, "cpu:gloo,cuda:nccl", "1", "cuda:1"),
        (2, "gloo", "1", "cpu"),
        (0, "gloo", "0", "cpu"),
        (1, "nccl", "3", "cuda:0"),
    ],
)
def test_a_rank_trains_on_its_gpu_where_its_group_speaks_nccl(
    monkeypatch: pytest.MonkeyPatch, devices: int, backend: str, rank: str, device: str
) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "get_backend_config", lambda: str(BackendConfig(dist.Backend(backend))))
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert own_device() == torch.device(device)
    assert current == ([torch.device(device).index] if device != "cpu" else [])


def test_a_mapping_with_labels_trains_like_a_pair(alone: None) -> None:
    losses: list[list[float]] = [[], []]

    def fields(step: int, rows: slice) -> dict[str, torch.Tensor]:
        ids, targets = data(step, rows)
        return {"ids_BT": ids, "labels": targets}

    for given, found in zip((data, fields), losses, strict=True):
        note = partial(lambda found, _, result: found.append(result.loss), found)
        fit(partial(Gpt, SHAPE), given, optimizer=SGD, batch=BATCH, plan=ALONE, steps=2, on_step=note)
    assert losses[0] == losses[1]


def test_training_does_not_begin_anew_where_all_checkpoints_are_damaged(alone: None, tmp_path: Path) -> None:
    assert train(checkpoint=tmp_path) == 2
    for path in candidates(tmp_path):
        (path / MANIFEST).write_text("{")
    with pytest.raises(BadInput, match=f"all 1 in {tmp_path} are damaged"):
        train(checkpoint=tmp_path, steps=3)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000002.1"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"plan": "dp"}, "plan: str is neither 'auto' nor a ParallelPlan"),
        ({"steps": 1.5}, "steps: 1.5 is not a whole number"),
        ({"resume": "always"}, "resume: 'always' is neither"),
        ({"optimizer": "adamw"}, "optimizer: str is not a function"),
        ({"data": [1]}, "data: list is not a function"),
        ({"build": Gpt(SHAPE)}, "build: Gpt is not a function"),
        ({"build": lambda: None}, "build: gives NoneType"),
        ({"build": torch.nn.ReLU}, "build: ReLU has no parameter that is trained"),
        ({"data": lambda *_: None}, "batch: NoneType is neither (inputs, targets) nor a mapping with 'labels'"),
        ({"data": lambda *_: next(iter(()))}, "data: ended before step 1 of 1"),
        ({"data": lambda *_: (1, 2, 3)}, "batch: tuple of 3 is neither"),
        ({"data": lambda step, rows: data(step, rows)[0]}, "batch: Tensor is neither"),
        ({"data": lambda step, rows: (data(step, rows)[0], [1])}, "batch: targets are list, not a tensor"),
        ({"loss": lambda *_: None}, "loss: gives NoneType, not a tensor"),
        ({"loss": lambda output, _: output.sum().item()}, "loss: gives float, not a tensor"),
        ({"loss": lambda output, _: output.sum((1, 2))}, "loss: gives a tensor of shape (4,), not one number"),
        ({"loss": lambda output, _: output.sum().detach()}, "loss: has no gradient"),
        ({"rate": lambda _: None}, "rate: None for step 0 is not a number from 0 on"),
        ({"rate": lambda _: float("nan")}, "rate: nan for step 0"),
        ({"optimizer": lambda _: None}, "optimizer: the function gives NoneType, not an optimizer"),
        ({"keep": 0, "checkpoint": "here"}, "keep: 0 is below 1"),
    ],
)
def test_arguments_that_fit_cannot_take_are_refused_by_name(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    whole: dict[str, Any] = {"build": partial(Gpt, SHAPE), "data": data, "optimizer": SGD, "batch": BATCH, "steps": 1}
    with pytest.raises(BadInput, match=re.escape(says)):
        fit(**{**whole, "plan": ALONE, **given})


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(alone: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    stepped: list[int] = []
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/self/checkpoints")):
        with pytest.raises(BadInput, match=f"checkpoint: {folder} cannot be written: "):
            train(checkpoint=folder, on_step=lambda step, _: stepped.append(step))
    assert not stepped


def test_a_checkpoint_of_a_deeper_model_is_refused(alone: None, tmp_path: Path) -> None:
    deep, plan = replace(SHAPE, layers=4), data_parallel(layers=4, dp=1, micro_batch=BATCH)
    assert fit(partial(Gpt, deep), data, optimizer=SGD, batch=BATCH, plan=plan, steps=1, checkpoint=tmp_path) == 1
    with pytest.raises(BadInput, match=r"this model has no model\.layers\.2\.attn.* more \("):
        train(checkpoint=tmp_path)


def test_an_error_in_training_is_told_after_the_save_that_runs(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any, **named: Any) -> None:
        time.sleep(0.3)
        real(*given, **named)

    def fail(step: int, _: StepResult) -> None:
        if step == 2:
            raise ZeroDivisionError

    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", slow)
    with pytest.raises(ZeroDivisionError):
        train(steps=3, checkpoint=tmp_path, save_every_s=0.0, on_step=fail)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000001.1"]


def both(folder: Path, do: Callable[[int], None]) -> list[int]:
    """Run ``do(rank)`` on two ranks, each a child of this process; returns their exit statuses."""
    children: list[int] = []
    for rank in (0, 1):
        if child := os.fork():
            children.append(child)
            continue
        code = 1
        try:
            torch.set_num_threads(1)
            store = dist.FileStore(str(folder / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
            do(rank)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)
    return [os.waitpid(child, 0)[1] for child in children]


def skip_together(rank: int) -> None:
    """Only replica 1 has an infinite gradient; its loss is finite."""

    def loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if rank:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output.float().sum()

    plan = replace(data_parallel(layers=SHAPE.layers, dp=2, micro_batch=2), sync=Sync(mode="local_sgd", H=8))
    trained = parallelize(Gpt(SHAPE), plan, optimizer=SGD, loss=loss, clip_norm=1.0)
    assert trained.step(*data(0, trained.rows)).skipped


def weigh_by_tokens(rank: int) -> None:
    """One step with padding on replica 0 alone: replicas that do not reduce gradients agree on the same weights."""
    inputs, targets = data(0, slice(0, BATCH))
    targets = targets.clone()
    targets[:2, 3:] = -100
    plain, losses, weights = (
        data_parallel(layers=SHAPE.layers, dp=2, micro_batch=2),
        list[float](),
        list[torch.Tensor](),
    )
    for sync in (Sync(), Sync(mode="local_sgd", H=1), Sync(mode="ps_sync", servers=1)):
        torch.manual_seed(0)
        model = Gpt(SHAPE)
        trained = parallelize(model, replace(plain, sync=sync), optimizer=SGD)
        losses.append(trained.step(trained.share(inputs), trained.share(targets)).loss)
        weights.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
        dist.barrier()
        trained.close()
    assert max(abs(one - losses[0]) for one in losses) <= 1e-6
    assert max(float((one - weights[0]).abs().max()) for one in weights) <= 1e-6


class Drawing(Gpt):
    """Draws in each forward pass, as dropout does."""

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return super().forward(ids_BT) * (1 + 0.1 * torch.rand(1))


def draw_by_step(folder: Path, rank: int) -> None:
    """What a step draws, in the model and in ``data``, is the same after a stop, and the model's differs by replica."""
    plan, found = data_parallel(layers=SHAPE.layers, dp=2, micro_batch=2), list[list[float]]()

    def drawn(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, SHAPE.vocab, (2, SHAPE.seq))  # both replicas have these rows
        found[-1].append(float(ids.sum()))
        return ids, ids

    def run(steps: int, where: Path) -> list[float]:
        found.append([])
        fit(
            partial(Drawing, SHAPE), drawn, optimizer=SGD, batch=BATCH, plan=plan, steps=steps, checkpoint=where,
            loss=note,
        )  # fmt: skip
        return found[-1]

    def note(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        summed = cross_entropy_sum(output, targets)
        if output.requires_grad:
            found[-1].append(float(summed))
        return summed

    whole = run(4, folder / "whole")
    assert whole == run(2, folder / "parts") + run(4, folder / "parts")
    of_all: list[list[float]] = [[], []]
    dist.all_gather_object(of_all, whole)
    assert of_all[0][::2] == of_all[1][::2]
    assert of_all[0][1] != of_all[1][1]


def leave_a_parameter_out(rank: int) -> None:
    """A trained weight that the loss does not use: no weight is updated with gradients of one rank alone."""
    model = Gpt(SHAPE)
    model.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
    before = [one.detach().clone() for one in model.parameters()]
    trained = parallelize(model, data_parallel(layers=SHAPE.layers, dp=2, micro_batch=2), optimizer=SGD)
    with pytest.raises(BadInput, match="does not depend on spare: gradients were not reduced"):
        trained.step(*data(0, trained.rows))
    assert all(torch.equal(one, was) for one, was in zip(model.parameters(), before, strict=True))


def give_groups_back(folder: Path, rank: int) -> None:
    groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    before = len(groups)
    agree = Agreement()
    with Checkpoints(folder / "saved"):
        assert agree(stop=rank == 1, due=False) == (True, False)
        assert len(groups) == before + 2
    agree.close()
    assert len(groups) == before


ADAM, MOMENTUM = partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OWN_STATE: dict[str, tuple[Sync, Any]] = {
    "rounds": (Sync(mode="local_sgd", H=4), MOMENTUM),
    "residues": (Sync(compression="topk"), ADAM),
    "factors": (Sync(compression="powersgd"), ADAM),
    "servers": (Sync(mode="ps_sync", servers=2), ADAM),
    "one server for both": (Sync(mode="ps_sync", servers=1), ADAM),
}


def interrupt(folder: Path, name: str, rank: int) -> None:
    """Six steps without a stop have the losses of three, and of a new model that goes on for three from disk."""
    sync, optimizer = OWN_STATE[name]
    plan = replace(data_parallel(layers=SHAPE.layers, dp=2, micro_batch=2), sync=sync)
    told: list[list[float]] = []

    def run(steps: int, where: Path | None) -> None:
        told.append([])
        fit(
            partial(Gpt, SHAPE), data, optimizer=optimizer, batch=BATCH, plan=plan, steps=steps, checkpoint=where,
            save_every_s=1e9, on_step=lambda _, result: told[-1].append(result.loss),
        )  # fmt: skip

    run(6, None)
    run(3, folder / "saved")
    run(6, folder / "saved")
    whole, first, rest = told
    assert len(rest) == 3
    assert max(abs(one - other) for one, other in zip(whole, first + rest, strict=True)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_STATE if os.environ.get("ROTA_DEEP") else ("rounds", "one server for both"))
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_each_replica_keeps_of_its_own_is_in_a_checkpoint(tmp_path: Path, name: str) -> None:
    assert both(tmp_path, partial(interrupt, tmp_path, name)) == [0, 0]


def test_state_of_another_number_of_replicas_is_refused(alone: None, tmp_path: Path) -> None:
    assert train(checkpoint=tmp_path) == 2
    with pytest.raises(BadInput, match=r"state of none for sync\.mode local_sgd"):
        train(plan=replace(ALONE, sync=Sync(mode="local_sgd", H=2)), checkpoint=tmp_path, steps=3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_replicas_skip_a_step_together_though_one_norm_is_not_finite(tmp_path: Path) -> None:
    assert both(tmp_path, skip_together) == [0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_replicas_refuse_a_loss_that_leaves_a_parameter_out_before_they_are_updated(tmp_path: Path) -> None:
    assert both(tmp_path, leave_a_parameter_out) == [0, 0]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_draws_of_a_step_survive_a_stop_and_differ_between_replicas(tmp_path: Path) -> None:
    assert both(tmp_path, partial(draw_by_step, tmp_path)) == [0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_tokens_count_alike_however_replicas_agree(tmp_path: Path) -> None:
    assert both(tmp_path, weigh_by_tokens) == [0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_groups_of_saves_and_of_decisions_are_given_back(tmp_path: Path) -> None:
    assert both(tmp_path, partial(give_groups_back, tmp_path)) == [0, 0]
