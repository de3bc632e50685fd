"""Models of transformers and others that nobody wrote for plans, small, and the plans of two ranks to try on them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rota.train.apply import cross_entropy_sum, parallelize
from rota.train.batch import Inputs, call
from rota.train.plan.model import Layer, Mesh, ParallelPlan, Stage

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
LAYERS, BATCH, SEQ, VOCAB, STEPS, CLIP = 4, 8, 8, 48, 10, 0.5
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
WIDTHS = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def of_transformers(model: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers with random weights."""
    transformers = importlib.import_module("transformers")
    made = getattr(transformers, config)(**settings)
    made._attn_implementation = "sdpa"
    return getattr(transformers, model)(made)


class TorchEncoder(nn.Module):
    """torch's own encoder layers, whose attention has no linears that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.out = nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Net(nn.Module):
    """Names that no list knows; deeper in the model, with a gate between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        self.body = nn.ModuleDict({"steps": nn.ModuleList(Step() for _ in range(LAYERS))})
        self.last = nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for step in cast("nn.ModuleList", self.body["steps"]):
            x = step(x)
        return self.last(x)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(16), nn.Linear(16, 24)
        self.second, self.third = nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.third(torch.tanh(self.first(y)) * self.second(y))


T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
DRY = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
VIT = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", **WIDTHS),
    "Qwen2, tied": partial(of_transformers, "Qwen2ForCausalLM", "Qwen2Config", **WIDTHS, tie_word_embeddings=True),
    "Qwen3": partial(of_transformers, "Qwen3ForCausalLM", "Qwen3Config", **WIDTHS, head_dim=8),
    "Mixtral": partial(of_transformers, "MixtralForCausalLM", "MixtralConfig", **WIDTHS, num_local_experts=4),
    "GPT-2, tied": partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", **GPT2, **DRY),
    "ViT": partial(
        of_transformers, "ViTForImageClassification", "ViTConfig", **VIT, intermediate_size=24, num_labels=6
    ),
    "T5, two stacks": partial(
        of_transformers, "T5ForConditionalGeneration", "T5Config", **T5, dropout_rate=0.0, decoder_start_token_id=0
    ),
    "torch's encoder": TorchEncoder,
    "other names": Net,
}
HALVES = (Stage(layers=(0, LAYERS // 2), embed=True), Stage(layers=(LAYERS // 2, LAYERS), head=True))


WHOLE = (Stage(layers=(0, LAYERS), embed=True, head=True),)


def plan(mesh: Mesh, kind: Layer, ends: Layer | None = None, **more: Any) -> ParallelPlan:
    """All layers of one kind, two micro-batches."""
    ends = ends or replace(kind, count=1)
    settings: dict[str, Any] = {"stages": WHOLE, "micro_batches": 2, "micro_batch": BATCH // mesh.dp // 2} | more
    return ParallelPlan(mesh=mesh, layers=(replace(kind, count=LAYERS),), embed=ends, head=ends, **settings)


PLANS: dict[str, ParallelPlan] = {
    "dp": plan(Mesh(dp_replicate=2), Layer()),
    "fsdp": plan(Mesh(dp_shard=2), Layer(zero=3)),
    "tp": plan(Mesh(tp=2), Layer(tp=2)),
    "tp, ends whole": plan(Mesh(tp=2), Layer(tp=2), Layer()),
    "pp": plan(Mesh(pp=2), Layer(), stages=HALVES, schedule="1f1b", micro_batches=4, micro_batch=2),
    "ep": plan(Mesh(dp_shard=2, ep=2), Layer(zero=2)),
    "cp": plan(Mesh(cp=2), Layer()),
}


def batches(name: str, steps: int = STEPS) -> Iterator[tuple[Inputs, torch.Tensor]]:
    """What a model takes, and targets: some are padding."""
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids = torch.randint(1, VOCAB, (BATCH, SEQ + 1), generator=draw)
        targets = ids[:, 1:].clone()
        targets[step % BATCH, : step % 5] = -100
        if name == "ViT":
            yield {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=draw)}, targets[:, 0] % 6
        elif name.startswith("T5"):
            yield {"input_ids": ids[:, :-1], "decoder_input_ids": ids[:, :-1].flip(1)}, targets
        elif name in ("torch's encoder", "other names"):
            yield ids[:, :-1], targets
        else:
            yield {"input_ids": ids[:, :-1]}, targets


def fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


@cache
def reference(name: str) -> list[float]:
    """Losses of plain torch on one process."""
    model, losses = fresh(name), list[float]()
    optimizer = ADAMW(model.parameters())
    for inputs, targets in batches(name):
        loss = cross_entropy_sum(call(model, inputs), targets) / (targets != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_under(name: str, strategy: str) -> list[float]:
    """Losses of the same steps under a plan, on this world."""
    trained = parallelize(fresh(name), PLANS[strategy], optimizer=ADAMW, clip_norm=CLIP)
    losses = [
        trained.step(share(trained.rows, inputs), targets[trained.rows]).loss for inputs, targets in batches(name)
    ]
    trained.close()
    return losses


def share(rows: slice, inputs: Inputs) -> Inputs:
    if isinstance(inputs, Mapping):
        return {key: value[rows] for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    return inputs[rows]


NO_EXPERTS = r"mesh\.ep = 2: layer 0 has no experts"
NO_CORE = r"mesh\.cp = 2: layer 0 \(\w+\) has no attention module 'core'"
NO_STAGES = r"T5ForConditionalGeneration has the lists of layers encoder\.block and decoder\.block"
REFUSED: dict[tuple[str, str], str] = {
    **{(name, "ep"): NO_EXPERTS for name in MODELS if name != "Mixtral"},
    **{(name, "cp"): NO_CORE for name in MODELS},
    ("T5, two stacks", "pp"): NO_STAGES,
}
"""Cells that are refused, and what the refusal says; all others train like one process."""
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def page() -> str:
    """The table of models and plans, of which ``test_zoo_real`` runs every cell."""
    lines = [
        "# Models and plans",
        "",
        "Models of `transformers` and `torch` with random weights, as their classes are, on two ranks: `equal` trains",
        "10 steps like one process (losses within 1e-5). Written by `python -m tests.train.zoo --write`; every cell is",
        "run by `ROTA_DEEP=1 pytest tests/train/test_zoo_real.py`.",
        "",
        f"| model | {' | '.join(PLANS)} |",
        f"|---{'|---' * len(PLANS)}|",
    ]
    for name in MODELS:
        cells = ["refused" if (name, strategy) in REFUSED else "equal" for strategy in PLANS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    equal = len(MODELS) * len(PLANS) - len(REFUSED)
    lines += ["", f"{equal} equal, {len(REFUSED)} refused before the first step.", ""]
    return "\n".join(lines)


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(page())
