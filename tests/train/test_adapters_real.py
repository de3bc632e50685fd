"""Adapters of low rank (peft) train under a plan like one process, or are refused: two real processes over Gloo."""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from rota.spec.errors import BadInput
from rota.train.apply import cross_entropy_sum, parallelize
from rota.train.batch import call
from rota.train.plan.model import Layer, Mesh
from tests.real.train.ranks import LONG_S, run_ranks
from tests.train import zoo

STEPS = 8
RATE = 3e-2
ADAMW = partial(torch.optim.AdamW, lr=RATE)
PLANS = {**zoo.PLANS, "zero 1": zoo.plan(Mesh(dp_replicate=2), Layer(zero=1))}
STRATEGIES = ("dp", "zero 1", "fsdp", "tp", "tp, ends whole", "pp")
MODELS = ("Llama", "GPT-2, tied")
CELLS = tuple((name, plan) for name in MODELS for plan in STRATEGIES)


def adapted(name: str, **more: Any) -> nn.Module:
    """A frozen model with adapters at all its linears, whose second halves are zeros."""
    peft: Any = importlib.import_module("peft")
    targets = "all-linear" if name == "Llama" else ["c_attn", "c_proj", "c_fc"]
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", **more)
    return peft.get_peft_model(zoo.MODELS[name](), settings).train()


@cache
def reference(name: str, rate: float = RATE) -> list[float]:
    """Losses of plain torch on one process."""
    model, losses = adapted(name), list[float]()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate)
    for inputs, targets in zoo.batches(name, STEPS):
        loss = cross_entropy_sum(call(model, inputs), targets) / (targets != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_under(name: str, strategy: str) -> list[float]:
    """The same under a plan; of what is not trained nothing changes."""
    model = adapted(name)
    frozen = {key: one.clone() for key, one in model.named_parameters() if not one.requires_grad}
    trained = parallelize(model, PLANS[strategy], optimizer=ADAMW)
    losses = [trained.step(zoo.share(trained.rows, x), y[trained.rows]).loss for x, y in zoo.batches(name, STEPS)]
    for piece in trained.pieces:
        for key, one in piece.named_parameters():
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one  # type: ignore[operator]
            assert key not in frozen or torch.equal(whole.reshape(frozen[key].shape), frozen[key])
    return losses


def _rank(_rank: int, _size: int) -> list[object]:
    """Of each cell its losses, those of one process, and the last one of weights that stay."""
    found: list[object] = []
    for cell in CELLS:
        try:
            found.append([losses_under(*cell), reference(cell[0]), reference(cell[0], 0.0)[-1]])
        except BadInput as refusal:
            found.append(str(refusal))
    with pytest.raises(BadInput, match=r"lora_dropout.* drops values in training"):
        parallelize(adapted("Llama", lora_dropout=0.1), PLANS["tp"], optimizer=ADAMW)
    with pytest.raises(BadInput, match=r"mesh"):
        parallelize(adapted("Llama", use_dora=True), PLANS["tp"], optimizer=ADAMW)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], object]:
    """What each cell gave, or a refusal."""
    first, _ = run_ranks(_rank, 2, home=tmp_path_factory.mktemp("adapters"), limit_s=LONG_S)
    return dict(zip(CELLS, first, strict=True))


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=" under ".join)
def test_adapters_train_like_one_process(cell: tuple[str, str], found: dict[tuple[str, str], object]) -> None:
    given = found[cell]
    assert isinstance(given, list), given
    losses, expected, still = given
    assert losses == pytest.approx(expected, abs=1e-5)
    assert abs(expected[-1] - still) > 1e-3
