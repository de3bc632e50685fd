"""A character-level GPT of 0.34 M parameters, its log-probabilities and its batched sampling with a key-value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from task import ALPHABET, ANSWER_LEN, END, PROMPT_LEN
from torch import Tensor, nn

WIDTH, HEADS, LAYERS = 96, 4, 3
SHARPNESS_SPEED = 60.0
"""The logits carry a learned inverse temperature exp(speed · sharpness). Each step of Adam moves a weight by about the
learning rate, too little to sharpen a policy by its thousand head weights; the factor gives that one direction its own
speed (a learned logit scale as in Radford et al. 2021, arXiv 2103.00020, section 2.5)."""
CONTEXT = PROMPT_LEN + ANSWER_LEN


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then an MLP four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BLD: Tensor, cache: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Hidden states after the block, and the keys and values [B, heads, length so far, width of a head].

        With a cache `x_BLD` holds one new position, which may look at everything before it.
        """
        batch, length, _ = x_BLD.shape
        qkv = self.qkv(self.norm_attention(x_BLD)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = torch.cat([cache[0], key], dim=2), torch.cat([cache[1], value], dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x_BLD = x_BLD + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x_BLD + self.down(F.gelu(self.up(self.norm_mlp(x_BLD)))), (key, value)


class GPT(nn.Module):
    """Next-token model over `task.ALPHABET`; prompts fill the first PROMPT_LEN positions, answers the rest."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.sharpness = nn.Parameter(torch.zeros(()))
        chance = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=_spread(name, parameter), generator=chance)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Logits [B, L, alphabet]."""
        return self.extend(tokens_BL, [None] * LAYERS)[0]

    def extend(
        self, tokens_BL: Tensor, caches: list[tuple[Tensor, Tensor]] | list[None]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits of the new positions and the grown caches."""
        start = 0 if caches[0] is None else caches[0][0].shape[2]
        x_BLD = self.token(tokens_BL) + self.position.weight[start : start + tokens_BL.shape[1]]
        grown: list[tuple[Tensor, Tensor]] = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BLD, kept = block(x_BLD, cache)
            grown.append(kept)
        return self.head(self.norm(x_BLD)) * (SHARPNESS_SPEED * self.sharpness).exp(), grown


def _spread(name: str, weight: Tensor) -> float:
    """Standard deviation at the start: wide embeddings learn sums in fewer steps, a flat head starts undecided."""
    if name.startswith(("token", "position")):
        return 0.5
    return 0.02 if name.startswith("head") else weight.shape[1] ** -0.5


def answer_logprobs(net: GPT, prompts_BP: Tensor, answers_BT: Tensor) -> Tensor:
    """Log-probability [B, T] of each answer token given all before it."""
    logits = net(torch.cat([prompts_BP, answers_BT[:, :-1]], dim=1))[:, PROMPT_LEN - 1 :]
    return torch.log_softmax(logits, dim=-1).gather(-1, answers_BT.unsqueeze(-1)).squeeze(-1)


def answer_mask(answers_BT: Tensor) -> Tensor:
    """1.0 for the tokens of each answer up to and with its first end token, 0.0 after it."""
    ended_before = (answers_BT == END).cumsum(dim=1) - (answers_BT == END).long()
    return (ended_before == 0).float()


@torch.no_grad()
def sample(net: GPT, prompts_BP: Tensor, uniforms_BT: Tensor | None) -> Tensor:
    """Answers [B, T], by inverse transform of the given uniform numbers, or greedily when there are none."""
    logits, caches = net.extend(prompts_BP, [None] * LAYERS)
    chosen: list[Tensor] = []
    for position in range(ANSWER_LEN):
        last_BV = logits[:, -1]
        if uniforms_BT is None:
            token_B = last_BV.argmax(dim=-1)
        else:
            edges_BV = torch.softmax(last_BV.double(), dim=-1).cumsum(dim=-1)
            token_B = (edges_BV < uniforms_BT[:, position : position + 1]).sum(dim=-1).clamp(max=len(ALPHABET) - 1)
        chosen.append(token_B)
        if position + 1 < ANSWER_LEN:
            logits, caches = net.extend(token_B.unsqueeze(1), caches)
    answers_BT = torch.stack(chosen, dim=1)
    return torch.where(answer_mask(answers_BT) > 0, answers_BT, END)
