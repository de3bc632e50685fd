"""Models with parts that a split must not forget, and the ranks that train them under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rota.train.apply import Parallel, cross_entropy_sum, parallelize
from rota.train.parallel.model_parts import Parts
from rota.train.parallel.tensor_parallel import Rules
from rota.train.plan.model import Layer, Mesh, ParallelPlan, Stage, data_parallel

STEPS, BATCH, SEQ, WORDS, WIDTH, HEADS = 5, 4, 16, 13, 16, 4
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
Data = tuple[torch.Tensor, torch.Tensor]


class Core(nn.Module):
    """Attention; ``is_causal``, ``scale`` and ``window`` (tokens that a query sees) as given."""

    def __init__(
        self, *, is_causal: bool = True, scale: float | None = None, window: int = 0, own: bool = False
    ) -> None:
        super().__init__()
        self.is_causal, self.scale, self.window, self.own = is_causal, scale, window, own

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.own:  # the same by hand
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        mask = None
        if self.window and q.shape[2] > self.window:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(1 - self.window)
        causal = self.is_causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)


class Attention(nn.Module):
    """As in Qwen3 with ``norms``; ``places``: queries and keys are turned by their places, as rotary embeddings do."""

    def __init__(self, core: nn.Module, *, norms: bool = True, places: Callable[[], torch.Tensor | None] | None = None):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        if norms:
            self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)
        self.core, self.norms, self.places = core, norms, places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.places is not None:
            given = self.places()
            angle = 0.5 * (torch.arange(x.shape[1]) if given is None else given)[:, None]
            q, k = (torch.cat([h[..., :2] * angle.cos() - h[..., 2:] * angle.sin(), h[..., 2:]], -1) for h in (q, k))
        return self.o_proj(self.core(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """Two experts, each token to the better one, as in Mixtral with one of its two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2, bias=False), nn.ModuleList([Gated(), Gated()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        best = share.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            here = best == index
            if here.any():
                out[here] = expert(x[here]) * share[here][:, index, None]
        return out


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.positions: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Words(nn.Module):
    """Two layers between an embedding and a head; takes ``input_ids`` by position or by keyword."""

    def __init__(self, block: Callable[[Embed], nn.Module]) -> None:
        super().__init__()
        self.embed = Embed()
        self.layers = nn.ModuleList([block(self.embed), block(self.embed)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def qwen() -> Words:
    return Words(lambda _: Block(Attention(Core()), Gated()))


def mixtral() -> Words:
    return Words(lambda _: Block(Attention(Core(), norms=False), Mixture()))


def with_core(**how: Any) -> Words:
    return Words(lambda _: Block(Attention(Core(**how), norms=False), Gated()))


def rotary() -> Words:
    """Layers read the places of tokens from the embedding, which the first stage alone runs."""
    return Words(lambda embed: Block(Attention(Core(), norms=False, places=lambda: embed.positions), Gated()))


def lost() -> Words:
    """Layers count places in what they are given."""
    return Words(lambda _: Block(Attention(Core(), norms=False, places=lambda: None), Gated()))


MIXTRAL_RULES: Rules = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "column"),
    "self_attn.o_proj": "row",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
}


def plan(mesh: Mesh, kind: Layer | None = None, **rest: Any) -> ParallelPlan:
    kind = kind or Layer()
    halves = (Stage(layers=(0, 1), embed=True), Stage(layers=(1, 2), head=True))
    return ParallelPlan(
        mesh=mesh, stages=halves if mesh.pp == 2 else (Stage(layers=(0, 2), embed=True, head=True),),
        layers=(replace(kind, count=2),), embed=kind, head=kind,
        **{"micro_batch": BATCH // mesh.dp // 2, "micro_batches": 2, **rest},
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    build: Callable[[], nn.Module]
    plan: ParallelPlan
    rules: Rules | None = None
    mapping: bool = False


TP, SP = plan(Mesh(tp=2), Layer(tp=2)), plan(Mesh(tp=2), Layer(tp=2, sp=True))
RING = plan(Mesh(cp=2))
CASES = {
    "norms of queries and keys, tp": Case(build=qwen, plan=TP),
    "norms of queries and keys, tp with split sequence": Case(build=qwen, plan=SP),
    "a mixture of its own, tp with split sequence": Case(
        build=mixtral, plan=SP, rules={**MIXTRAL_RULES, "mlp": "outside"}
    ),
    "an encoder, ring": Case(build=partial(with_core, is_causal=False), plan=RING),
    "a scale of its own, ring": Case(build=partial(with_core, scale=0.9), plan=RING),
    "attention by hand, ring": Case(build=partial(with_core, own=True), plan=RING),
    "a window, ulysses": Case(build=partial(with_core, window=5), plan=replace(RING, cp_kind="ulysses")),
    "places in the layers, ring": Case(build=rotary, plan=RING),
    "mappings, tp": Case(build=qwen, plan=TP, mapping=True),
    "mappings, zero 3": Case(build=qwen, plan=plan(Mesh(dp_shard=2), Layer(zero=3)), mapping=True),
}
STAGES = {"places in the layers, ring x stages": Case(build=rotary, plan=plan(Mesh(cp=2, pp=2), schedule="1f1b"))}


def batches(steps: int) -> Iterator[Data]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, WORDS, (BATCH, SEQ + 1), generator=draw)
        yield ids[:, :-1], ids[:, 1:]


def reference(build: Callable[[], nn.Module]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the last weights of plain torch on one process."""
    torch.manual_seed(0)
    model = build()
    optimizer, losses = ADAMW(model.parameters()), list[float]()
    for inputs, targets in batches(STEPS):
        loss = cross_entropy_sum(model(inputs), targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: one.detach() for name, one in model.named_parameters()}


def begin(case: Case, **how: Any) -> Parallel:
    torch.manual_seed(0)
    return parallelize(case.build(), case.plan, rules=case.rules, parts=Parts(), **{"optimizer": ADAMW, **how})


def trained(case: Case) -> tuple[list[float], Parallel]:
    made, losses = begin(case), list[float]()
    for inputs, targets in batches(STEPS):
        x, y = made.share(inputs), made.share(targets)
        losses.append(made.step({"input_ids": x, "labels": y} if case.mapping else (x, y)).loss)
    return losses, made


class Normed(nn.Module):
    """With a BatchNorm over the rows that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(SEQ)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layers[0](self.norm(self.embed(ids)))))


def normed_reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two replicas in one process: mean gradients, and the statistics of the first one for both."""
    torch.manual_seed(0)
    model, losses = Normed(), list[float]()
    optimizer = ADAMW(model.parameters())
    for inputs, targets in batches(STEPS):
        total = torch.zeros(())
        for rank in (1, 0):  # the first replica's statistics are those that stay
            kept = {name: one.clone() for name, one in model.named_buffers()}
            rows = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
            loss = cross_entropy_sum(model(inputs[rows]), targets[rows]) / targets.numel()
            loss.backward()
            total += loss.detach()
            if rank:
                for name, one in model.named_buffers():
                    one.copy_(kept[name])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, dict(model.named_buffers())


NORMED = {
    "ddp": data_parallel(layers=1, dp=2, micro_batch=BATCH // 2),
    "zero 3": data_parallel(layers=1, dp=2, micro_batch=BATCH // 2, zero=3),
}
