"""What one GPU allows: the same numbers as on the CPU, mixed precision, offload, a checkpoint from one to the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rota.train.apply import Parallel, parallelize
from rota.train.checkpoint import Checkpoints
from rota.train.local_hardware import measure
from rota.train.loop import fit, world
from rota.train.plan.model import Dtype, Layer, Mesh, ParallelPlan
from tests.train import equal

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ONE = replace(equal.plan(Mesh()), micro_batch=equal.BATCH // 2)
SHARDED = replace(
    ONE, dtype=Dtype(param="bf16"), layers=(Layer(count=4, zero=3),), embed=Layer(zero=3), head=Layer(zero=3)
)
PLANS: dict[str, tuple[ParallelPlan, float]] = {
    "plain": (ONE, 1e-4),
    "full recompute": (replace(ONE, layers=(Layer(count=4, recompute="full"),)), 1e-4),
    "selective recompute": (replace(ONE, layers=(Layer(count=4, recompute="selective"),)), 1e-4),
    "autocast bf16": (replace(ONE, dtype=Dtype(param="bf16")), 2e-2),
    "sharded bf16": (SHARDED, 2e-2),
    "optimizer on the host": (replace(ONE, layers=(Layer(count=4, offload="optimizer_cpu"),)), 1e-4),
}


def begin(plan: ParallelPlan) -> Parallel:
    return parallelize(equal.fresh_model().cuda(), plan, optimizer=equal.ADAMW, clip_norm=1.0)


def losses(trained: Parallel, first: int = 0, last: int = equal.STEPS) -> list[float]:
    given = list(equal.batches(equal.STEPS))[first:last]
    return [trained.step(inputs.cuda(), targets.cuda()).loss for inputs, targets in given]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_on_one_gpu_trains_like_the_cpu(name: str) -> None:
    plan, tolerance = PLANS[name]
    with world():
        got = losses(begin(plan))
    expected = equal.reference(equal.SHAPE)
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) <= tolerance


def test_a_loop_whose_model_and_data_are_made_on_the_cpu_trains_on_the_gpu() -> None:
    got: list[float] = []
    given = list(equal.batches(equal.STEPS))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    fit(
        equal.fresh_model, lambda step, _: given[step], optimizer=equal.ADAMW, steps=equal.STEPS, batch=equal.BATCH,
        plan=ONE, clip_norm=1.0, on_step=lambda _, result: got.append(result.loss),
    )  # fmt: skip
    assert torch.cuda.max_memory_allocated() > before, "the model was there"
    expected = equal.reference(equal.SHAPE)
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) <= 1e-4


def test_shards_on_one_mesh_are_stepped_by_operators_on_lists() -> None:
    with world():
        assert [group["foreach"] for group in begin(SHARDED).optimizer.param_groups] == [True]


def test_a_gpu_is_measured_with_its_host() -> None:
    found, figures = measure()
    device, rates = found.device, found.device.peak_tflops
    assert torch.cuda.get_device_name() in found.provenance
    assert rates["bf16"] > rates["fp32"] > 1.0
    assert 0.0 < device.launch_us < device.dispatch_us
    assert found.host.memory_gib > 0 and found.host.gb_s > 0
    assert all(one.low <= one.value <= one.high for one in figures)


def test_a_checkpoint_moves_from_the_gpu_to_the_cpu(tmp_path: Path) -> None:
    half = equal.STEPS // 2
    with world():
        trained = begin(ONE)
        got = losses(trained, 0, half)
        Checkpoints(tmp_path).save(trained.state_dict(), step=half, extra={}, wait=True)
    torch.cuda.empty_cache()
    with world(replace(ONE, backend="gloo")):
        trained = parallelize(equal.fresh_model(), ONE, optimizer=equal.ADAMW, clip_norm=1.0)
        saves = Checkpoints(tmp_path)
        found = saves.find()
        assert found is not None
        saves.load(found, trained.state_dict())
        rest = [trained.step(inputs, targets).loss for inputs, targets in list(equal.batches(equal.STEPS))[half:]]
    expected = equal.reference(equal.SHAPE)
    assert max(abs(one - other) for one, other in zip(got + rest, expected, strict=True)) <= 1e-4
