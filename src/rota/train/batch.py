"""A batch: one tensor, or a mapping of tensors by keyword, and the parts of it that a step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from rota.spec.errors import BadInput

LABELS = "labels"
"""The field of a mapping that holds the targets."""

Inputs = torch.Tensor | Mapping[str, Any]
"""What the model is called with: one tensor, or keywords. Values without rows are for every micro-batch."""


def in_two(given: Inputs | Sequence[Any], targets: torch.Tensor | None) -> tuple[Inputs, torch.Tensor]:
    """(inputs, targets) of two values, a pair, or a mapping with ``labels``. Raises BadInput without targets."""
    if targets is not None:
        return cast("Inputs", given), targets
    if isinstance(given, Mapping):
        fields = dict(cast("Mapping[str, Any]", given))
        if LABELS not in fields:
            raise BadInput(
                f"batch: a mapping of {', '.join(fields)} has no {LABELS!r}, which are its targets",
                hint="give step(inputs, targets)",
            )
        return fields, fields.pop(LABELS)
    inputs, wanted = given
    return inputs, wanted


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


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The output of a model for a batch."""
    return model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs)
