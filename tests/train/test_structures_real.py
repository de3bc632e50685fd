"""Models with norms of queries, mixtures, buffers, places, windows and mappings, against one process of plain torch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rota.spec.errors import BadInput
from rota.train.checkpoint import Checkpoints
from tests.real.train.ranks import LONG_S, run_ranks
from tests.train import structures
from tests.train.structures import BATCH, CASES, MIXTRAL_RULES, NORMED, SP, STAGES, TP, Case

Found = dict[str, dict[str, Any]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def weights_apart(weights: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight from that of rank 0."""
    worst = 0.0
    for one in weights.values():
        first = one.clone()
        dist.broadcast(first, 0)
        worst = max(worst, float((one - first).abs().max()))
    return worst


def run_cases(names: dict[str, Case]) -> Found:
    found: Found = {}
    for name, case in names.items():
        losses, made = structures.trained(case)
        weights = {key: whole(one.detach()) for piece in made.pieces for key, one in piece.named_parameters()}
        apart = weights_apart(weights) if case.plan.mesh.pp == 1 else 0.0
        found[name] = {"losses": losses, "apart": apart, "weights": weights}
        made.close()
    return found


def run_normed(folder: Path) -> Found:
    """Losses, and the statistics that every rank has and a checkpoint holds."""
    found: Found = {}
    for name, plan in NORMED.items():
        made = structures.begin(Case(build=structures.Normed, plan=plan))
        losses = [made.step(made.share(x), made.share(y)).loss for x, y in structures.batches(structures.STEPS)]
        mine = {key: one.clone() for key, one in made.state_dict().items() if key.startswith("model.norm.")}
        with Checkpoints(folder / name) as saves:
            saves.save(made.state_dict(), step=1, extra={}, wait=True)
            again = structures.begin(Case(build=structures.Normed, plan=plan))
            checkpoint = saves.find()
            assert checkpoint is not None
            saves.load(checkpoint, again.state_dict())
        kept = {key: one.clone() for key, one in again.state_dict().items() if key in mine}
        found[name] = {
            "losses": losses,
            "mine": {key: whole(one) for key, one in mine.items()},
            "kept": {key: whole(one) for key, one in kept.items()},
        }
    return found


def refuse_together() -> None:
    """What needs two ranks to be refused; no rank waits for another."""
    for plan in (replace(NORMED["zero 3"], micro_batch=BATCH // 2), TP):
        build = structures.Normed if plan is not TP else structures.qwen
        with pytest.raises(BadInput, match="Adafactor needs whole parameters"):
            structures.begin(Case(build=build, plan=plan), optimizer=torch.optim.Adafactor)
    with pytest.raises(BadInput, match=r"no rule names mlp\.gate\.weight, mlp\.experts\.0.*sp splits the tokens"):
        structures.begin(Case(build=structures.mixtral, plan=SP, rules=MIXTRAL_RULES))
    with pytest.raises(BadInput, match=r"no rule names self_attn\.q_norm\.weight, self_attn\.k_norm\.weight"):
        structures.begin(Case(build=structures.qwen, plan=TP, rules={**MIXTRAL_RULES}))
    made = structures.begin(Case(build=structures.Normed, plan=NORMED["ddp"]))
    with pytest.raises(BadInput, match="inputs has 4 sequences, this rank trains 2"):
        made.step(*next(structures.batches(1)))


def warned() -> list[str]:
    """Warnings of the future at the start of replicas."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        structures.begin(Case(build=structures.Normed, plan=NORMED["ddp"]))
    return [str(one.message) for one in seen if issubclass(one.category, FutureWarning | DeprecationWarning)]


def _rank(rank: int, size: int, folder: str) -> None:
    found: Found = {}
    if size == 2:
        found["warned"] = {"texts": warned()}
        refuse_together()
        found |= {f"normed, {name}": one for name, one in run_normed(Path(folder)).items()}
    found |= run_cases(CASES if size == 2 else STAGES)
    torch.save(found, Path(folder, f"{size}.{rank}.pt"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two ranks found."""
    return world(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of four ranks found."""
    return world(tmp_path_factory.mktemp("four"), 4)


def world(folder: Path, size: int) -> list[Found]:
    run_ranks(_rank, size, str(folder), home=folder, limit_s=LONG_S)
    return [torch.load(folder / f"{size}.{rank}.pt") for rank in range(size)]


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_structure_trains_like_one_process_and_weights_stay_equal_on_all_ranks(name: str, two: list[Found]) -> None:
    losses, weights = structures.reference(CASES[name].build)
    for found in two:
        assert found[name]["losses"] == pytest.approx(losses, abs=1e-5)
        assert found[name]["apart"] == 0.0
        worst = max(float((one - weights[key]).abs().max()) for key, one in found[name]["weights"].items())
        assert worst <= 2e-4  # of AdamW's steps of 1e-2, which turn on the sign of gradients near 0
    assert losses[-1] != losses[0]


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STAGES)
def test_places_reach_the_layers_of_every_stage(name: str, four: list[Found]) -> None:
    losses, _ = structures.reference(STAGES[name].build)
    for found in four:
        assert found[name]["losses"] == pytest.approx(losses, abs=1e-5)


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NORMED)
def test_running_statistics_are_those_of_one_rank_on_all_and_in_a_checkpoint(name: str, two: list[Found]) -> None:
    losses, buffers = structures.normed_reference()
    for found in two:
        one = found[f"normed, {name}"]
        assert one["losses"] == pytest.approx(losses, abs=1e-5)
        for key, want in buffers.items():
            assert torch.allclose(one["mine"][f"model.{key}"], want, atol=1e-6)
            assert torch.equal(one["mine"][f"model.{key}"], two[0][f"normed, {name}"]["mine"][f"model.{key}"])
            assert torch.equal(one["kept"][f"model.{key}"], one["mine"][f"model.{key}"])


@pytest.mark.real
@pytest.mark.timeout(900)
def test_replicas_start_without_a_warning_of_the_future(two: list[Found]) -> None:
    assert [found["warned"]["texts"] for found in two] == [[], []]
