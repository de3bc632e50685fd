"""Weights of checkpoints go out as transformers and peft load them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rota.service.cli.app import call as rota
from rota.spec.errors import BadInput
from rota.train.batch import call
from rota.train.loop import fit
from rota.train.plan.model import Layer, Mesh
from rota.train.weights import export_checkpoint
from tests.train import zoo

PLAN = zoo.plan(Mesh(), Layer())
GIVEN = list(zoo.batches("Llama", 4))


def trained(folder: Path, name: str, build: Any = None) -> nn.Module:
    """The model after three steps, which a checkpoint in ``folder`` holds."""
    kept: list[nn.Module] = []

    def made() -> nn.Module:
        kept.append((build or zoo.MODELS[name])())
        return kept[0]

    def data(step: int, rows: slice) -> tuple[Mapping[str, object], torch.Tensor]:
        inputs, targets = GIVEN[step]
        assert isinstance(inputs, Mapping)
        return inputs, targets

    make = partial(torch.optim.AdamW, lr=1e-2)
    fit(made, data, optimizer=make, steps=3, batch=zoo.BATCH, plan=PLAN, checkpoint=folder)
    return kept[0].eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: Any = call(model.eval(), GIVEN[3][0])
    return found.logits


@pytest.mark.slow
def test_the_newest_good_checkpoint_of_a_folder_is_loaded_by_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(tmp_path / "checkpoints", "Qwen2, tied")
    newer = tmp_path / "checkpoints" / "step-00000009.1"
    newer.mkdir()  # damaged
    draft = tmp_path / "checkpoints" / ".draft-4"  # of a job that still trains
    draft.mkdir()
    assert rota(["export", str(tmp_path / "checkpoints"), "--hf", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert draft.is_dir()
    transformers: Any = importlib.import_module("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(zoo.fresh("Qwen2, tied")), logits(model))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_large_weights_go_into_several_files(tmp_path: Path) -> None:
    model = trained(tmp_path / "checkpoints", "Llama")
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "out", shard_bytes=4000)
    assert len(list((tmp_path / "out").glob("*-of-*.safetensors"))) > 1
    transformers: Any = importlib.import_module("transformers")
    assert torch.equal(logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
    with pytest.raises(BadInput, match="out has weights"):
        export_checkpoint(tmp_path / "checkpoints", tmp_path / "out")


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BadInput, match=f"checkpoint: {folder} has none"):
            export_checkpoint(folder, tmp_path / "out")


@pytest.mark.slow
def test_adapters_are_loaded_by_peft(tmp_path: Path) -> None:
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = trained(tmp_path / "checkpoints", "Llama", lambda: peft.get_peft_model(zoo.fresh("Llama"), config))
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(zoo.fresh("Llama"), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(zoo.fresh("Llama")), logits(model))
