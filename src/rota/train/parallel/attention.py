"""Checks of attention cores and of positions: whether a part of the sequence gives what the whole would give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rota.spec.errors import BadInput

PLAIN_BYTES_MAX = 1 << 30
"""Scores of a whole sequence that may be computed once to see what a core without torch's attention does."""

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a core asks of ``scaled_dot_product_attention``; ``called`` False when it computes the same by itself."""

    is_causal: bool
    scale: float | None = None
    called: bool = True


class ReplacedAttention(TorchFunctionMode):
    """While open, ``scaled_dot_product_attention`` is another function of the same arguments."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (self._attend if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def attention_call(
    name: str,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The arguments of a call beside q, k and v. Raises BadInput for those that a ring cannot honour."""
    if attn_mask is not None:
        raise _unlike(name, "gives a mask (a window, padding, a bias by distance)")
    if dropout_p:
        raise _unlike(name, f"drops {dropout_p:g} of the attention")
    return AttentionCall(is_causal=is_causal, scale=scale)


def inspect_core(
    name: str, core: Attend, q: torch.Tensor, key_heads: int, value_width: int, ranks: int, part: int
) -> AttentionCall:
    """What ``core`` computes for a whole sequence, of which each of ``ranks`` has ``part`` tokens.

    ``q`` says the number of heads, their width, dtype and device. Raises BadInput when parts of it in a ring would not
    give the same.

    In place of attention something that works token by token is computed, for the whole and for the parts: a core that
    depends on places or lengths, or that does more than attention, shows.
    """
    heads, width, seq = q.shape[1], q.shape[3], ranks * part
    draw = torch.Generator().manual_seed(0)
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width))
    whole = [torch.randn(1, count, seq, size, generator=draw).to(q) for count, size in sizes]
    seen: list[AttentionCall] = []

    def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        seen.append(attention_call(name, *rest, **named))
        return token_by_token(q, k, v)

    with torch.no_grad():
        with ReplacedAttention(mix):
            out = core(*whole)
            outs = [core(*one) for one in zip(*(tensor.split(part, dim=2) for tensor in whole), strict=True)]
        if not seen:
            return _computed(name, core, whole, out)
        if len(seen) != 1 + ranks or len(set(seen)) != 1:
            raise _unlike(name, "computes attention several times, or otherwise for a part of a sequence")
        if not same_by_part(out, torch.cat(outs, dim=2)):
            raise _unlike(name, "turns q, k, v or the output by their places in what it is given")
    return seen[0]


def _computed(name: str, core: Attend, whole: Sequence[torch.Tensor], out: torch.Tensor) -> AttentionCall:
    """Of a core that does not call torch's attention: is it softmax(q k / sqrt(width)) v, causal or not?"""
    q, k, v = whole
    if 4 * q.shape[1] * q.shape[2] ** 2 <= PLAIN_BYTES_MAX:
        for is_causal in (True, False):
            plain = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
            if same_by_part(plain, out):
                return AttentionCall(is_causal=is_causal, called=False)
    raise _unlike(name, "does not call F.scaled_dot_product_attention and is not the softmax of q k / sqrt(width)")


def _unlike(name: str, what: str) -> BadInput:
    return BadInput(
        f"cp_kind = ring: {name} {what}, which parts of a sequence in a ring would not give",
        hint="use cp_kind ulysses, which runs the core on whole sequences with some of the heads, or cp = 1",
    )


def check_alone(name: str, rest: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raises BadInput for a core that is called with more than q, k and v: a mask is not split over ranks."""
    if any(one is not None for one in (*rest, *named.values())):
        raise BadInput(
            f"mesh.cp: {name} is called with more than q, k and v, which is not split over ranks",
            hint="compute a mask inside the core from the length of q (cp_kind ulysses), or use cp = 1",
        )


def token_by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of attention: of the shape of its output, and without any other token."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    return v * (q.sum(-1, keepdim=True) + 2 * k.sum(-1, keepdim=True)) / q.shape[-1]


def same_by_part(whole: torch.Tensor, joined: torch.Tensor) -> bool:
    """True when both are equal but for rounding."""
    loose = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 3e-2
    return whole.shape == joined.shape and torch.allclose(whole, joined, rtol=loose, atol=loose)


def position_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that read the places of tokens from their attribute ``positions`` (None = 0, 1, ...)."""
    kept = ((one, getattr(one, "positions", 0)) for one in model.modules())
    return [
        one for one, places in kept if isinstance(places, torch.Tensor | None) and not isinstance(places, nn.Parameter)
    ]


def set_positions(holders: Iterable[nn.Module], places: Any) -> None:
    """Name the place of each column of what comes next: a tensor ``[T]``, or None."""
    for one in holders:
        one.positions = places


@contextmanager
def replaced_forward(cores: Sequence[nn.Module], attend: Attend) -> Iterator[None]:
    """While open, these modules compute another function."""
    before = [vars(core).get("forward") for core in cores]
    for core in cores:
        core.forward = attend
    try:
        yield
    finally:
        for core, forward in zip(cores, before, strict=True):
            del core.forward
            if forward is not None:
                core.forward = forward


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """While open, without dropout and gradients, and places may be set; afterwards all is as before."""
    training = [(one, one.training) for one in model.modules()]
    places = [(one, one.positions) for one in position_modules(model)]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, was in training:
            module.training = was
        for module, kept in places:
            set_positions([module], kept)
