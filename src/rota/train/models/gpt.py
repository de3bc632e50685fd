"""A small readable GPT over bytes or any other vocabulary, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from rota.train.parallel.experts import Experts
from rota.train.plan.model import ModelShape


class SmallEmbedding(nn.Embedding):
    """An embedding whose rows begin small, as in GPT-2 (standard deviation 0.02)."""

    def reset_parameters(self) -> None:
        """Draw the rows anew."""
        nn.init.normal_(self.weight, std=0.02)


class Embed(nn.Module):
    """Token and position rows: ids ``[B, T]`` to ``[B, T, hidden]``.

    ``positions`` ``[T]`` names the place of each column when a rank holds a part of the sequence; None = 0 to T - 1.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.token = SmallEmbedding(shape.vocab, shape.hidden)
        self.position = SmallEmbedding(shape.seq, shape.hidden)
        self.positions: torch.Tensor | None = None

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device) if self.positions is None else self.positions
        return self.token(ids_BT) + self.position(positions)


class Core(nn.Module):
    """Causal softmax attention without parameters: q ``[B, heads, T, D]``, k and v ``[B, kv_heads, T, D]``.

    A module of its own, so that it can be recomputed alone or replaced by one that spans ranks.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Projections around the core. The count of heads is read from the projected width: tensor parallel ranks hold
    some of the heads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_width = shape.key_heads * shape.head_dim
        self.q = nn.Linear(shape.hidden, shape.hidden)
        self.k = nn.Linear(shape.hidden, kv_width)
        self.v = nn.Linear(shape.hidden, kv_width)
        self.o = nn.Linear(shape.hidden, shape.hidden)
        self.core = Core()

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        return self.o(self.core(q, k, v).transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    """Two matrices with GELU between."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.inner)
        self.down = nn.Linear(shape.inner, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One layer: attention, then the MLP or a mixture of them, each after a norm and beside a residual."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden)
        self.attn = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.hidden)
        self.mlp = Mlp(shape) if not shape.experts else mixture(shape)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


def mixture(shape: ModelShape) -> Experts:
    """The experts of one layer."""
    return Experts(experts=shape.experts, top_k=shape.top_k, hidden=shape.hidden, inner=shape.inner)


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x_BTD))


class Gpt(nn.Module):
    """ids ``[B, T]`` to logits ``[B, T, vocab]``; ``embed``, ``layers`` and ``head`` are what a plan speaks about."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = replace(shape, positions=True, tied=False)
        self.embed = Embed(shape)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = Head(shape)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(x_BTD)
