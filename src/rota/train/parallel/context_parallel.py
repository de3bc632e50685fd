"""Context parallelism: long sequences over ranks by ring attention or Ulysses, where an attention core allows it.

Ring: in place of ``scaled_dot_product_attention`` inside a core, keys and values travel around the ring while each rank
keeps its queries; partial results are merged by their log-sum-exp (Liu, Zaharia, Abbeel 2023, "Ring Attention with
Blockwise Transformers"). A sequence is cut into 2 * cp chunks and rank i holds chunks i and 2 * cp - 1 - i, so that
every rank has equal work under a causal mask. Ulysses: an all-to-all turns a part of the sequence with all heads into
the whole sequence with some heads (Jacobs et al. 2023).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rota.spec.errors import BadInput
from rota.spec.user_code import UserCode
from rota.train.parallel.mesh import Context, PlanMesh, all_to_all
from rota.train.parallel.model_parts import Parts
from rota.train.plan.model import ModelShape, ParallelPlan

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
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
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


def check_alone(name: str, rest: Sequence[object], named: Mapping[str, object]) -> None:
    """Raises BadInput for a core that is called with more than q, k and v: a mask is not split over ranks."""
    if any(one is not None for one in (*rest, *named.values())):
        raise BadInput(
            f"mesh.cp: {name} is called with more than q, k and v, which is not split over ranks",
            hint="compute a mask inside the core from the length of q (cp_kind ulysses), or use cp = 1",
        )


def token_by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
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


def set_positions(holders: Iterable[nn.Module], places: torch.Tensor | None) -> None:
    """Name the place of each column of what comes next: a tensor ``[T]``, or None."""
    for one in holders:
        one.positions = cast("torch.Tensor", places)


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
    places = [(one, getattr(one, "positions", None)) for one in position_modules(model)]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, was in training:
            module.training = was
        for module, kept in places:
            set_positions([module], kept)


log = logging.getLogger(__name__)


def columns(plan: ParallelPlan, rank: int, seq: int) -> torch.Tensor:
    """Positions of a sequence of ``seq`` tokens that cp rank ``rank`` holds, in its order.

    Raises BadInput when ``seq`` does not divide.
    """
    cp = plan.mesh.cp
    pieces = 2 * cp if plan.cp_kind == "ring" else cp
    if seq % pieces:
        raise BadInput(f"batch: {seq} tokens a sequence do not divide into {pieces} pieces (cp {cp}, {plan.cp_kind})")
    chunks = torch.arange(seq).chunk(pieces)
    return torch.cat([chunks[rank], chunks[pieces - 1 - rank]]) if plan.cp_kind == "ring" else chunks[rank]


def split_attention(piece: nn.Module, parts: Parts, plan: ParallelPlan, mesh: PlanMesh) -> None:
    """Let every attention ``core`` of this piece span the ranks of a cp group. Its names stay."""
    group = mesh.group("cp")
    for index, layer in parts.layers(piece):
        for core in cores_of(layer):
            name, inner = _name(index, core), inner_of(core)
            spans = AttentionRing(name, inner, group) if plan.cp_kind == "ring" else Ulysses(name, inner, group)
            core.forward = spans


def cores_of(layer: nn.Module) -> list[nn.Module]:
    """The modules named ``core`` of a layer, each once."""
    named = (part for name, part in layer.named_modules() if name.rpartition(".")[2] == "core")
    return list(named)


def inner_of(core: nn.Module) -> Attend:
    """What a core computes by itself, before it spanned ranks."""
    forward = core.forward
    return forward.inner if isinstance(forward, AttentionRing | Ulysses) else forward


def _name(index: int, core: nn.Module) -> str:
    return f"the core of layer {index} ({type(core).__name__})"


def check_cores(model: nn.Module, parts: Parts, plan: ParallelPlan) -> None:
    """Raises BadInput for a layer without a ``core``, and for attention that would be another one over ranks.

    Without a ``shape`` the heads are not known: a core that takes only its own number or width of them is looked at
    in the first step.
    """
    shape, cp, tp = getattr(model, "shape", None), plan.mesh.cp, plan.mesh.tp
    heads, key_heads, width = 2 * cp, 2 * cp, 8
    if isinstance(shape, ModelShape):
        heads, key_heads, width = shape.heads // tp, max(1, shape.key_heads // tp), shape.head_dim
    device = next(model.parameters()).device
    with evaluated(model):
        for index, layer in parts.layers(model):
            cores = cores_of(layer)
            if not cores:
                raise BadInput(
                    f"mesh.cp = {cp}: layer {index} ({type(layer).__name__}) has no attention module 'core'",
                    hint="put softmax(q k) v into a module 'core' that takes q, k, v as [batch, heads, seq, width]",
                )
            for core in cores:
                q = torch.empty(1, heads, 1, width, device=device)
                with UserCode() as running:  # for heads that are only guessed
                    if plan.cp_kind == "ring":
                        inspect_core(_name(index, core), inner_of(core), q, key_heads, width, cp, 6)
                    else:
                        inspect_heads(_name(index, core), inner_of(core), q, cp)
                if running.failed:
                    if isinstance(error := running.take(), (BadInput, SystemExit)):
                        raise error
                    log.debug("%s is looked at in the first step: %s", _name(index, core), error)


def inspect_heads(name: str, core: Attend, q: torch.Tensor, ranks: int) -> None:
    """Raises BadInput when some of the heads alone give another output, as with a bias for each head."""
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, q.shape[1], 4 * ranks, q.shape[3], generator=draw).to(q) for _ in range(3)]
    outs = [core(*some) for some in zip(*(one.chunk(ranks, dim=1) for one in whole), strict=True)]
    if not same_by_part(core(*whole), torch.cat(outs, dim=1)):
        raise BadInput(
            f"cp_kind = ulysses: {name} treats heads by their number, and a rank has some of them",
            hint="use cp_kind ring when it is softmax(q k) v without a mask, or cp = 1",
        )


def check_positions(model: nn.Module, parts: Parts, plan: ParallelPlan) -> None:
    """Raises BadInput for a part of the model that treats tokens by their place in what it is given: a rank of a cp
    group has other places."""
    cp, seq = plan.mesh.cp, 4 * plan.mesh.cp
    here = [columns(plan, rank, seq) for rank in range(cp)]
    kinds = {type(layer): (f"layer {index}", layer) for index, layer in reversed(list(parts.layers(model)))}
    ends = [(name, model.get_submodule(name)) for name in (parts.embed, parts.head)]
    cores = list({core: None for _, layer in parts.layers(model) for core in cores_of(layer)})  # one may be in several
    x = torch.arange(seq, device=next(model.parameters()).device)[None] % 2
    with evaluated(model), replaced_forward(cores, token_by_token):
        for name, part in (ends[0], *kinds.values(), ends[1]):
            equal = False
            with UserCode() as running:
                x, equal = compare_positions(model, part, x, here)
            if running.failed:
                error = running.take()
                if position_modules(model):
                    log.debug("places of %s are not looked at: %s", name, error)
                    return
                raise BadInput(
                    f"mesh.cp = {cp}: {name} ({type(part).__name__}) cannot be run on {seq} tokens ({error}), and no "
                    "module has an attribute 'positions'",
                    hint="let forward be head(layers(embed(x))); read places from self.positions, None = 0 to T - 1",
                ) from error
            if not equal:
                raise BadInput(
                    f"mesh.cp = {cp}: {name} ({type(part).__name__}) treats a token by its place in what it is given, "
                    "and a rank holds other places; it has no attribute 'positions', or does not read it",
                    hint="read the places of the columns from self.positions of that module, None = 0 to T - 1",
                )


def compare_positions(
    model: nn.Module, part: nn.Module, x: torch.Tensor, here: list[torch.Tensor]
) -> tuple[torch.Tensor, bool]:
    """The output of a part of the model for ``x``, and whether its pieces give the same when their places are set."""
    set_positions(position_modules(model), None)
    whole, outs = part(x), list[torch.Tensor]()
    for some in here:
        set_positions(position_modules(model), some.to(x.device))
        outs.append(part(x[:, some]))
    return whole, same_by_part(whole[:, torch.cat(here)], torch.cat(outs, dim=1))


class Ulysses:
    """Any attention core, run on the whole sequence with 1/cp of the heads."""

    def __init__(self, name: str, core: Attend, group: dist.ProcessGroup) -> None:
        self.name, self.inner, self.group = name, core, group

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **named: object
    ) -> torch.Tensor:
        """Attention of this rank's part of the sequence, all heads. Raises BadInput for further tensors."""
        check_alone(self.name, rest, named)
        ranks = self.group.size()
        if k.shape[1] % ranks:  # fewer key heads than ranks: give each query head its own
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        out = self.inner(*(self._whole(part) for part in (q, k, v)))
        # [B, H/cp, T, D] -> rows are pieces of the sequence -> [B, H, T/cp, D]
        rows = out.unflatten(2, (ranks, -1)).movedim(2, 0)
        return all_to_all(rows, self.group).movedim(0, 1).flatten(1, 2)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """[B, H, T/cp, D] -> rows are groups of heads -> [B, H/cp, T, D]."""
        rows = part.unflatten(1, (self.group.size(), -1)).movedim(1, 0)
        return all_to_all(rows, self.group).movedim(0, 2).flatten(2, 3)


class AttentionRing:
    """A core whose attention spans a sequence that the ranks of ``group`` hold in chunks as ``columns`` says.

    What the core does before and after, causal or not, and its scale stay; ``name`` is for errors.
    """

    def __init__(self, name: str, core: Attend, group: dist.ProcessGroup) -> None:
        self.name, self.inner, self.group = name, core, group
        self._how: AttentionCall | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **named: object
    ) -> torch.Tensor:
        """Attention of this rank's part of the sequence. Raises BadInput for one that a ring cannot compute."""
        check_alone(self.name, rest, named)
        if self._how is None:
            self._how = inspect_core(self.name, self.inner, q, k.shape[1], v.shape[3], self.group.size(), q.shape[2])
        if not self._how.called:
            return _Ring.apply(q, k, v, self.group, self._how)
        with ReplacedAttention(self._attend):
            return self.inner(q, k, v)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return _Ring.apply(q, k, v, self.group, attention_call(self.name, *rest, **named))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, how: AttentionCall
    ) -> torch.Tensor:
        scale = 1.0 / math.sqrt(q.shape[-1]) if how.scale is None else how.scale
        queries = [part.float() for part in q.chunk(2, dim=2)]
        outs = [torch.zeros_like(part) for part in queries]
        sums = [part.new_full(part.shape[:-1], -math.inf) for part in queries]
        moving = torch.stack([k, v])
        for turn in range(group.size()):
            coming = _pass_on(moving, group) if turn + 1 < group.size() else None
            for mine, theirs, masked in _pairs(group, turn, how.is_causal):
                keys, values = (_chunk(part, theirs, q.shape[1]) for part in moving)
                scores = _scores(queries[mine], keys, scale, masked)
                part_sum = scores.logsumexp(-1)
                both = torch.logaddexp(sums[mine], part_sum)
                part_out = (scores - part_sum[..., None]).exp() @ values
                outs[mine] = outs[mine] * (sums[mine] - both).exp()[..., None]
                outs[mine] = outs[mine] + part_out * (part_sum - both).exp()[..., None]
                sums[mine] = both
            moving = _arrived(coming) if coming else moving
        out = torch.cat(outs, dim=2).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, torch.cat(sums, dim=2))
        ctx.group, ctx.is_causal, ctx.scale = group, how.is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """With the sum of all blocks known, each block's share of the softmax is exact: p = exp(score - sum)."""
        q, k, v, out, sums = ctx.saved_tensors
        group, scale, heads = ctx.group, ctx.scale, q.shape[1]
        queries, d_outs = ([part.float() for part in whole.chunk(2, dim=2)] for whole in (q, grads[0]))
        whole_sums = sums.chunk(2, dim=2)
        dots = (grads[0].float() * out.float()).sum(-1).chunk(2, dim=2)
        d_queries = [torch.zeros_like(part) for part in queries]
        moving = torch.stack([k.float(), v.float(), torch.zeros_like(k.float()), torch.zeros_like(v.float())])
        for turn in range(group.size()):
            for mine, theirs, masked in _pairs(group, turn, ctx.is_causal):
                keys, values = (_chunk(part, theirs, heads) for part in moving[:2])
                share = (_scores(queries[mine], keys, scale, masked) - whole_sums[mine][..., None]).exp()
                d_share = d_outs[mine] @ values.transpose(-1, -2)
                d_scores = share * (d_share - dots[mine][..., None]) * scale
                d_queries[mine] += d_scores @ keys
                _add(moving[2], theirs, d_scores.transpose(-1, -2) @ queries[mine])
                _add(moving[3], theirs, share.transpose(-1, -2) @ d_outs[mine])
            moving = _arrived(_pass_on(moving, group))  # the last turn brings the gradients home
        return torch.cat(d_queries, dim=2).to(q.dtype), moving[2].to(k.dtype), moving[3].to(v.dtype), None, None


def _pairs(group: dist.ProcessGroup, turn: int, is_causal: bool) -> list[tuple[int, int, bool]]:
    """(my chunk, their chunk, later keys are masked) for the blocks that attention needs in this turn."""
    if not is_causal:
        return [(i, j, False) for i in range(2) for j in range(2)]
    ranks, rank = group.size(), group.rank()
    other = (rank - turn) % ranks
    held, theirs = (rank, 2 * ranks - 1 - rank), (other, 2 * ranks - 1 - other)
    return [(i, j, held[i] == theirs[j]) for i in range(2) for j in range(2) if held[i] >= theirs[j]]


def _scores(queries: torch.Tensor, keys: torch.Tensor, scale: float, masked: bool) -> torch.Tensor:
    scores = queries @ keys.transpose(-1, -2) * scale
    if not masked:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def _chunk(part: torch.Tensor, index: int, heads: int) -> torch.Tensor:
    """One of the two chunks in fp32, its heads repeated for grouped queries."""
    return part.chunk(2, dim=2)[index].float().repeat_interleave(heads // part.shape[1], dim=1)


def _add(total: torch.Tensor, index: int, grad: torch.Tensor) -> None:
    """Add to one chunk in place, summing over the query heads that share a key head."""
    total.chunk(2, dim=2)[index].add_(grad.unflatten(1, (total.shape[1], -1)).sum(2))


def _pass_on(moving: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[dist.Work]]:
    """Send to the next rank of the ring, receive from the one before; the caller waits."""
    ranks, rank = group.size(), group.rank()
    received = torch.empty_like(moving)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, moving, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    return received, works


def _arrived(coming: tuple[torch.Tensor, list[dist.Work]]) -> torch.Tensor:
    for work in coming[1]:
        work.wait()
    return coming[0]
