"""Batches and their loss: inputs as a tensor or by keyword, micro-batches, and the sum that gradients need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from rota.spec.errors import BadInput
from rota.spec.user_code import UserCode
from rota.train.parallel.mesh import local
from rota.train.parallel.model_parts import Loss

LABELS = "labels"
"""The field of a mapping that holds the targets."""

GIVE = f"let data of fit, or what step is given, be two tensors, or one mapping with {LABELS!r}"

Inputs = torch.Tensor | Mapping[str, object]
"""What the model is called with: one tensor, or keywords. Values without rows are for every micro-batch."""


def in_two(given: Inputs | Sequence[Inputs], targets: torch.Tensor | None) -> tuple[Inputs, torch.Tensor]:
    """(inputs, targets) of two values, a pair, or a mapping with ``labels``. Raises BadInput for anything else."""
    inputs, wanted = _parted(given) if targets is None else (given, targets)
    for name, value, kinds in (("inputs", inputs, (torch.Tensor, Mapping)), ("targets", wanted, (torch.Tensor,))):
        if not isinstance(value, kinds):
            kind = "a tensor" + " or a mapping" * (len(kinds) - 1)
            raise BadInput(f"batch: {name} are {type(value).__name__}, not {kind}", hint=GIVE)
    return cast("Inputs", inputs), cast("torch.Tensor", wanted)


def _parted(given: Inputs | Sequence[Inputs]) -> tuple[object, object]:
    if isinstance(given, Mapping):
        fields = dict(cast("Mapping[str, object]", given))
        if LABELS not in fields:
            raise BadInput(
                f"batch: a mapping of {', '.join(fields)} has no {LABELS!r}, which are its targets",
                hint="give step(inputs, targets)",
            )
        labels = fields.pop(LABELS)
        return fields, labels
    if not isinstance(given, tuple | list) or len(given) != 2:
        what = f"{type(given).__name__} of {len(given)}" if isinstance(given, tuple | list) else type(given).__name__
        raise BadInput(f"batch: {what} is neither (inputs, targets) nor a mapping with {LABELS!r}", hint=GIVE)
    return given[0], given[1]


def each(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """The same with ``change`` applied to every tensor with rows."""
    if isinstance(inputs, torch.Tensor):
        return change(inputs)
    return {**inputs, **{name: change(tensor) for name, tensor in tensors_of(inputs).items()}}


def tensors_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors with rows of a batch, by field; a batch of one tensor has the field ``inputs``."""
    given = {"inputs": inputs} if isinstance(inputs, torch.Tensor) else inputs
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.dim()}


def check_rows(inputs: Inputs, targets: torch.Tensor, rows: int, whole: int) -> None:
    """Raises BadInput for a batch that is not the ``rows`` sequences of this rank, of ``whole`` of the global batch."""
    for name, tensor in {**tensors_of(inputs), "targets": targets}.items():
        if tensor.shape[0] != rows:
            hint = f"give step(trained.share(batch)) for a global batch of {whole}, or trained.rows of it"
            raise BadInput(f"batch: {name} has {tensor.shape[0]} sequences, this rank trains {rows}", hint=hint)


def seq_of(inputs: Inputs) -> int:
    """Tokens of a sequence: the second axis of the first tensor that has one. Raises BadInput without one."""
    for tensor in tensors_of(inputs).values():
        if tensor.dim() > 1:
            return tensor.shape[1]
    raise BadInput("batch: no tensor of it is [sequences, tokens, ...]", hint="give tokens as [sequences, tokens]")


def micro_batches(inputs: Inputs, count: int) -> list[Inputs]:
    """``count`` parts of equal rows."""
    parts = {name: tensor.tensor_split(count) for name, tensor in tensors_of(inputs).items()}
    if isinstance(inputs, torch.Tensor):
        return list(parts["inputs"])
    return [{**inputs, **{name: rows[index] for name, rows in parts.items()}} for index in range(count)]


def call(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The output of a model for a batch."""
    return model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs)


def main_tensor(output: object) -> torch.Tensor:
    """The tensor of an output that a loss reads: logits, the last hidden state, the first of several."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    if isinstance(output, tuple | list) and output:
        output = cast("tuple[object, ...]", output)[0]
    if isinstance(output, Mapping) and output:
        output = next(iter(cast("Mapping[str, object]", output).values()))
    if not isinstance(output, torch.Tensor):
        raise BadInput(f"model: gives {type(output).__name__}, which has no logits", hint="let forward give a tensor")
    return output


IGNORED = -100
"""Targets with this value count neither for the loss nor as tokens, as in torch's cross entropy."""

FACTOR, FACTOR_MAX, GROW_STEPS = 2.0**12, 2.0**24, 2000
"""Loss scale in fp16: where it begins, its limit, and the steps without overflow after which it doubles."""

SAME = 1e-3
"""Relative difference below which two losses count as equal."""


def cross_entropy_sum(output: object, targets: torch.Tensor) -> torch.Tensor:
    """Sum over the real tokens: logits ``[..., V]``, or an output that has ``logits``, and targets ``[...]``, computed
    in fp32. Targets are those of each place: for a language model the next token, not the token itself."""
    logits = main_tensor(output)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def known_as_sum(loss: Loss, output: torch.Tensor, targets: torch.Tensor) -> bool:
    """Compare the loss of one sequence with that of two copies of it; False when these data do not show what it is.

    Raises BadInput for a mean: it does not change, where a sum doubles.
    """
    leaves = tree_leaves(output)
    if not all(isinstance(one, torch.Tensor) and one.shape[:1] == targets.shape[:1] for one in leaves):
        return True  # of an output that has no rows nothing can be said
    if not targets.numel() or targets.is_meta:
        return False
    alone = twice = math.nan
    with UserCode() as running, torch.no_grad():
        first = tree_map(lambda one: one[:1].detach(), (output, targets))
        alone = float(loss(*first))
        twice = float(loss(*tree_map(lambda one: torch.cat([one, one]), first)))
    if running.failed:
        return True  # it takes whole micro-batches only
    if not math.isfinite(alone) or not math.isfinite(twice) or alone == 0.0:
        return False
    if abs(twice - alone) <= SAME * abs(alone):
        raise BadInput(
            f"loss: gives {alone:.4g} for one sequence and {twice:.4g} for two copies of it, as a mean does",
            hint="give the sum over the real tokens (reduction='sum'); it is divided by the tokens of the global batch",
        )
    return True


def checked_loss(value: object) -> torch.Tensor:
    """What a loss function gave. Raises BadInput for anything but one number in a tensor."""
    hint = "return the sum over the real tokens as a tensor: F.cross_entropy(..., reduction='sum')"
    if not isinstance(value, torch.Tensor):
        raise BadInput(f"loss: gives {type(value).__name__}, not a tensor", hint=hint)
    if value.dim():
        raise BadInput(f"loss: gives a tensor of shape {tuple(value.shape)}, not one number", hint=hint)
    return value


class LossScale:
    """A factor on the loss, so that gradients of fp16 do not vanish (Micikevicius et al. 2018, section 3.2).

    It is halved by a step whose gradients overflow, which is skipped, and doubled after ``GROW_STEPS`` others.
    """

    def __init__(self) -> None:
        self.factor, self._good = FACTOR, 0

    def scale_back(self, parameters: Iterable[torch.Tensor], device: torch.device) -> bool:
        """Divide all gradients by the factor. False when one of any rank is not finite. Collective over the world."""
        overflow = torch.zeros((), device=device)
        for parameter in parameters:
            if parameter.grad is not None:
                grad = local(parameter.grad).mul_(1.0 / self.factor)
                overflow = torch.maximum(overflow, (~grad.isfinite().all()).to(overflow))
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        finite = not overflow
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.factor = max(1.0, self.factor / 2)
        elif self._good >= GROW_STEPS:
            self.factor, self._good = min(FACTOR_MAX, self.factor * 2), 0
        return finite
