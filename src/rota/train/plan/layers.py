"""A model as layers: shapes and parameters, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer as the planner sees it. ``ffn`` is the inner width of the MLP; ``gated`` = three MLP matrices.

    ``kv_heads`` < ``heads`` is grouped-query attention. ``tied`` shares the embedding with the head;
    ``positions`` adds a learned row for each of ``seq`` places. ``kept_mib`` is what the forward pass of a layer was
    measured to keep for one sequence without recompute; it takes the place of the formula.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    name: str = ""
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = True
    attention: Literal["flash", "plain"] = "flash"
    dropout: bool = False
    experts: int = 0
    top_k: int = 1
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    positions: bool = False
    kept_mib: float = 0.0

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Inner width of the MLP; four times hidden unless given."""
        return self.ffn or 4 * self.hidden

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def attention_params(model: ModelShape) -> int:
    """Weights and biases of one attention block: query, key, value and output projections."""
    kv_width = model.key_heads * model.head_dim
    weights = model.hidden * model.hidden * 2 + model.hidden * kv_width * 2
    return weights + model.hidden * 2 + kv_width * 2


def mlp_params(model: ModelShape) -> int:
    """Weights and biases of one MLP, or of all experts of one layer with their router."""
    matrices = 3 if model.gated else 2
    one = matrices * model.hidden * model.inner + (matrices - 1) * model.inner + model.hidden
    if model.experts:
        return one * model.experts + model.hidden * model.experts
    return one


def layer_params(model: ModelShape) -> int:
    """All parameters of one layer, with its two norms (scale and shift)."""
    return attention_params(model) + mlp_params(model) + 4 * model.hidden


def embed_params(model: ModelShape, tp: int = 1) -> int:
    """The rows of the vocabulary that one of ``tp`` ranks holds, and those of the places."""
    return model.vocab * model.hidden // tp + (model.seq * model.hidden if model.positions else 0)


def head_params(model: ModelShape, tp: int = 1) -> int:
    """The last norm, and the rows of the vocabulary that one of ``tp`` ranks holds."""
    return model.vocab * model.hidden // tp + 2 * model.hidden


def total_params(model: ModelShape) -> int:
    """The whole model: a tied embedding counts once."""
    shared = model.vocab * model.hidden if model.tied else 0
    return embed_params(model) + model.layers * layer_params(model) + head_params(model) - shared
