"""Communication hooks for DDP (fp16, bf16, int8, top-k, PowerSGD) with error feedback; decision 0053: why not torch's.

Per bucket, with gradient g and residue e of this rank: ``a = g + e``; ``q = C(a)``; ``e = a - D(q)``; the mean of D(q)
over the ranks is what the optimizer sees. So the sum of what was applied differs from the sum of true means by the mean
of the residues alone: nothing is lost, it comes later (Karimireddy et al., "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019, algorithm 1). Parameters of one dim (norms, biases) are sent whole.

Each hook has a process group of its own and starts its collectives in bucket order; a bucket that any rank finds
non-finite is sent whole.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypedDict, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from rota.spec.errors import BadInput

Kind = Literal["none", "fp16", "bf16", "int8", "topk", "powersgd"]
BLOCK: Final = 256
"""Values that share one int8 scale."""
Bucket: TypeAlias = GradBucket
Future: TypeAlias = "torch.futures.Future[torch.Tensor]"
Gradients = Sequence[torch.Tensor]
Named = Mapping[str, torch.Tensor]


class Residues(TypedDict):
    """What a checkpoint keeps of a compressor, by parameter: ``errors`` flat, of as many values as the parameter has;
    ``warm`` the factor ``[columns, rank]`` with which PowerSGD begins."""

    errors: dict[str, torch.Tensor]
    warm: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """``ratio`` of the values that top-k sends, 0 to 1, and ``rank`` of PowerSGD's factors.

    Raises BadInput for a ratio or a rank out of range.
    """

    kind: Kind = "none"
    ratio: float = 0.01
    rank: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.rank < 1:
            raise BadInput(f"compression: ratio {self.ratio} must be in (0, 1] and rank {self.rank} at least 1")


@dataclass(slots=True)
class Compressor:
    """State of the hook of one rank. ``ddp.register_comm_hook(c, hook)``; ``wire_bytes`` counts what this rank gave."""

    how: Compression
    group: dist.ProcessGroup
    names: dict[int, str] = field(default_factory=dict[int, str])
    """Parameter id -> name: DDP regroups its buckets after the first step, so state belongs to parameters."""
    errors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    warm: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    wire_bytes: int = 0

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    def state_dict(self) -> Residues:
        """Residues and warm factors: part of a checkpoint."""
        return {"errors": dict(self.errors), "warm": dict(self.warm)}

    def load_state_dict(self, kept: Residues) -> None:
        """Inverse of ``state_dict``."""
        self.errors = {name: value.clone() for name, value in kept["errors"].items()}
        self.warm = {name: value.clone() for name, value in kept["warm"].items()}

    def mean(self, bucket: torch.Tensor) -> torch.Tensor:
        """All-reduce of a whole tensor, of any shape, to its mean, in place. Collective over the group."""
        self.wire_bytes += bucket.nbytes
        dist.all_reduce(bucket, group=self.group)
        return bucket.div_(self.world)


def make_compressor(how: Compression, model: torch.nn.Module) -> Compressor:
    """A compressor for a model, with a new process group over all ranks; every rank calls it."""
    return Compressor(
        how, cast("dist.ProcessGroup", dist.new_group()), {id(param): name for name, param in model.named_parameters()}
    )


def hook(state: Compressor, bucket: Bucket) -> Future:
    """The DDP communication hook: the bucket's gradients become the mean over the ranks.

    The future is done when this returns. Raises KeyError for a parameter of another model.
    """
    future: Future = torch.futures.Future()
    names = [state.names[id(param)] for param in bucket.parameters()]
    future.set_result(average(state, names, bucket.buffer(), bucket.gradients()))
    return future


# DDP compares annotations with these classes, and postponed ones are texts.
hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})


def average(state: Compressor, names: Sequence[str], buffer: torch.Tensor, gradients: Gradients) -> torch.Tensor:
    """The mean over the ranks of one bucket, compressed, in ``buffer``, which is flat.

    ``gradients``, with their ``names`` in the same order, are views of it; those of two dims and more are compressed.
    Collective over the group: raises what torch's collectives raise when a rank is gone.
    """
    wide = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient.dim() >= 2}
    if state.how.kind == "none" or not wide:
        return state.mean(buffer)
    flat = torch.cat([gradient.reshape(-1) for gradient in wide.values()])
    for name, part in zip(wide, _parts(wide.values(), flat), strict=True):
        if (error := state.errors.pop(name, None)) is not None:
            part += error.to(part.device)
    if not _all_finite(state, flat):
        mean = state.mean(flat)
    else:
        mean, errors = _COMPRESS[state.how.kind](state, flat, wide)
        state.errors.update(zip(wide, _parts(wide.values(), errors), strict=True))
    write(wide.values(), mean)
    if narrow := [gradient for gradient in gradients if gradient.dim() < 2]:
        write(narrow, state.mean(torch.cat([gradient.reshape(-1) for gradient in narrow])))
    return buffer


def _parts(gradients: Collection[torch.Tensor], flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split([one.numel() for one in gradients])


def write(gradients: Collection[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy a flat tensor into the tensors that it is made of, in order. Raises RuntimeError for another size."""
    for gradient, part in zip(gradients, _parts(gradients, flat), strict=True):
        gradient.copy_(part.view_as(gradient))


def _all_finite(state: Compressor, flat: torch.Tensor) -> bool:
    bad = torch.isfinite(flat).all().logical_not().int().view(1)
    dist.all_reduce(bad, dist.ReduceOp.MAX, group=state.group)
    return not bad.item()


def _exchange(state: Compressor, values: torch.Tensor) -> torch.Tensor:
    """Part j of rank i goes to rank j; the parts that came, in rank order."""
    state.wire_bytes += values.nbytes
    given = values.view(torch.uint8)
    came = torch.empty_like(given)
    dist.all_to_all_single(came, given, group=state.group)
    return came.view(values.dtype)


def _gather(state: Compressor, values: torch.Tensor) -> torch.Tensor:
    """The values of all ranks, joined in rank order."""
    state.wire_bytes += values.nbytes
    given = values.view(torch.uint8)
    came = given.new_empty(state.world * given.numel())
    dist.all_gather_single(came, given, group=state.group)
    return came.view(values.dtype)


Codes = tuple[torch.Tensor, ...]
Sent = tuple[torch.Tensor, torch.Tensor]
"""The mean of what all ranks sent, and what this rank left out; both [N]."""


def _two_shot(
    state: Compressor, flat: torch.Tensor, encode: Callable[[torch.Tensor], Codes], decode: Callable[..., torch.Tensor]
) -> Sent:
    """Codes of parts to their owners, fp32 sum there, codes of the mean to all: sums of codes would overflow.

    What the second coding leaves out goes into the owner's residue times the ranks, so that feedback covers it too.
    """
    world, count = state.world, flat.numel()
    padded = torch.nn.functional.pad(flat, (0, -count % (BLOCK * world)))
    codes = encode(padded)
    error = padded - decode(*codes)
    mine = decode(*(_exchange(state, one) for one in codes)).view(world, -1).sum(0).div_(world)
    codes = encode(mine)
    error.view(world, -1)[dist.get_rank(state.group)] += (mine - decode(*codes)) * world
    mean = decode(*(_gather(state, one) for one in codes))
    return mean[:count], error[:count]


def _half(state: Compressor, flat: torch.Tensor, wide: Named) -> Sent:
    dtype = torch.float16 if state.how.kind == "fp16" else torch.bfloat16
    largest = torch.finfo(dtype).max
    return _two_shot(state, flat, lambda values: (values.clamp(-largest, largest).to(dtype),), torch.Tensor.float)


def _int8(state: Compressor, flat: torch.Tensor, wide: Named) -> Sent:
    return _two_shot(state, flat, quantise, dequantise)


def quantise(values: torch.Tensor) -> Codes:
    """int8 codes [N] and a scale for each BLOCK of them: ``value = code * scale``, wrong by ``scale / 2`` at most."""
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 127
    codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return codes.view(-1), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of ``quantise`` up to rounding."""
    return (codes.view(-1, BLOCK).float() * scales[:, None]).view(-1)


def _topk(state: Compressor, flat: torch.Tensor, wide: Named) -> Sent:
    """The largest values of each rank with their places, gathered and summed (Aji and Heafield, EMNLP 2017)."""
    count = max(1, math.ceil(state.how.ratio * flat.numel()))
    places = flat.abs().topk(count, sorted=False).indices
    error = flat.clone()
    error[places] = 0
    values, places = _gather(state, flat[places]), _gather(state, places.to(torch.int32))
    return torch.zeros_like(flat).index_add_(0, places.long(), values).div_(state.world), error


def _powersgd(state: Compressor, flat: torch.Tensor, wide: Named) -> Sent:
    """For a matrix M: ``P = orthogonal(mean(M Q))``, ``Q = mean(M^T P)``, then ``P Q^T``; Q is the next start.

    Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019), algorithm 1. Matrices that would not shrink are sent whole.
    """
    means: list[torch.Tensor] = []
    errors: list[torch.Tensor] = []
    for (name, gradient), part in zip(wide.items(), _parts(wide.values(), flat), strict=True):
        matrix = part.view(gradient.shape[0], -1)
        rows, columns = matrix.shape
        rank = min(state.how.rank, rows, columns)
        if rank * (rows + columns) >= rows * columns:
            means.append(state.mean(part.clone()))
            errors.append(torch.zeros_like(part))
            continue
        seed = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
        right = state.warm.get(name, torch.randn(columns, rank, generator=seed, device="cpu")).to(matrix)
        left = torch.linalg.qr(state.mean((matrix @ right).float())).Q.to(matrix)  # no qr in half precision
        own = matrix.t() @ left
        right = state.warm[name] = state.mean(own.clone())
        means.append((left @ right.t()).view(-1))
        errors.append((matrix - left @ own.t()).view(-1))
    return torch.cat(means), torch.cat(errors)


_COMPRESS: Final[dict[str, Callable[[Compressor, torch.Tensor, Named], Sent]]] = {
    "fp16": _half, "bf16": _half, "int8": _int8, "topk": _topk, "powersgd": _powersgd,
}  # fmt: skip
