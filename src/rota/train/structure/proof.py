"""Proof of a cut that no one has checked: on an example, outputs and gradients of the pieces are those of the whole."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rota.spec.errors import BadInput
from rota.spec.user_code import UserCode
from rota.train.batch import Inputs, call, main_tensor
from rota.train.parallel.mesh import PlanMesh, local, settle
from rota.train.parallel.model_parts import stages_of
from rota.train.plan.model import ParallelPlan
from rota.train.structure.parts import FoundParts, below, evaluated_with_gradients, example_for
from rota.train.structure.stages import INPUTS

LOOSE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Relative difference by which sums in another order may differ, by dtype; of smaller ones ``LOOSE_HALF``."""
LOOSE_HALF = 5e-2
REMEDY = "use data ranks for this model, or name its parts and rules: parallelize(..., parts=, rules=)"


@dataclass(slots=True)
class Trial:
    """What one stage computed as a part of the whole model: what came in, what went out, and the gradient there."""

    given: torch.Tensor | None
    output: torch.Tensor
    grad: torch.Tensor
    sums: dict[str, torch.Tensor]
    """Of the gradient of each of its parameters, as ``sums_of`` gives them."""


@dataclass(slots=True)
class Proof:
    """Outputs and gradients of the whole model for one example."""

    inputs: Inputs
    trials: list[Trial]
    stacks: tuple[str, ...]


@contextmanager
def nonzero(model: nn.Module) -> Iterator[None]:
    """While open, trained parameters that are all zeros hold other values: with those of an adapter of low rank its
    gradients would be zeros, and of other parameters their uses would not be seen."""
    draw, filled = torch.Generator().manual_seed(0), list[str]()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.requires_grad and not one.count_nonzero():
                one.copy_(0.1 * torch.randn(one.shape, generator=draw))
                filled.append(name)
        try:
            with torch.enable_grad():
                yield
        finally:
            now = dict(model.named_parameters(remove_duplicate=False))
            for name in filled:
                local(now[name]).zero_()


def prove(model: nn.Module, parts: FoundParts, plan: ParallelPlan, example: Inputs | None, mesh: PlanMesh) -> Proof:
    """Run the whole model, and its stages one after the other where the plan has some.

    Raises BadInput when the stages give another output or other gradients.
    """
    inputs = example_for(model, example)
    with evaluated_with_gradients(model):
        whole = main_tensor(call(model, inputs))
        weights = _weights(whole.shape, whole)
        (whole.float() * weights).sum().backward()
        sums = {name: sums_of(one) for name, one in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        trial = Trial(None, whole.detach(), weights.to(whole.dtype), sums)
        if plan.mesh.pp == 1:
            return Proof(inputs, [trial], parts.found)
        pieces = [parts.cut(model, stage) for stage in plan.stages]
        trials = _through_stages(model, pieces, parts.found[0], inputs, trial)
        own = [(pieces[index], trials[index]) for index in stages_of(plan, mesh.index("pp"))]
        for piece, one in own:
            _run(piece, inputs, one)
            one.sums = {name: sums_of(parameter) for name, parameter in piece.named_parameters()}
            model.zero_grad(set_to_none=True)
    return Proof(inputs, [one for _, one in own], parts.found)


def _through_stages(
    model: nn.Module, pieces: Sequence[nn.Module], stack: str, inputs: Inputs, trial: Trial
) -> list[Trial]:
    where = f"mesh.pp: {type(model).__name__}"
    outputs: list[torch.Tensor] = []
    with UserCode() as running:
        for piece in pieces:
            output = main_tensor(call_piece(piece, inputs, outputs[-1] if outputs else None))
            output.retain_grad()
            outputs.append(output)
        outputs[-1].backward(trial.grad)
    if running.failed:
        error = running.take()
        raise BadInput(f"{where} cannot be run in stages of {stack}: {error}", hint=REMEDY) from error
    if not close(outputs[-1], trial.output):
        raise BadInput(
            f"{where} gives another output in stages of {stack}: its layers give each other more than one tensor, or "
            "its forward computes between them",
            hint=f"let each layer compute that in its own forward, as a sum x + f(x) of a residual; else {REMEDY}",
        )
    for name, one in model.named_parameters():
        if not sums_close(sums_of(one), trial.sums[name], one.dtype):
            raise BadInput(f"{where}: {name} has another gradient in stages of {stack}", hint=REMEDY)
    grads = [one.grad for one in outputs]
    model.zero_grad(set_to_none=True)
    given = [None, *(one.detach() for one in outputs)]
    return [
        Trial(first, out.detach(), torch.zeros_like(out) if grad is None else grad, {})
        for first, out, grad in zip(given, outputs, grads, strict=False)
    ]


def _run(piece: nn.Module, inputs: Inputs, trial: Trial) -> torch.Tensor:
    """Forward and backward of a piece; its output."""
    given = None if trial.given is None else trial.given.clone().requires_grad_()
    output = main_tensor(call_piece(piece, inputs, given))
    if output.requires_grad and output.shape == trial.grad.shape:
        output.backward(trial.grad)
    return output.detach()


def call_piece(piece: nn.Module, inputs: Inputs, given: torch.Tensor | None) -> object:
    """A piece of a model on a batch; ``given`` is what the stage before has made."""
    if given is None:
        return call(piece, inputs)
    batch = {INPUTS: inputs} if isinstance(inputs, torch.Tensor) else inputs
    return piece(given, **batch)


def check_pieces(pieces: Sequence[nn.Module], proof: Proof, plan: ParallelPlan, mesh: PlanMesh) -> list[str]:
    """Compare the split pieces of this rank with the whole; names of parameters that see a part of the work on each
    tensor rank, so that their gradients are summed. Collective. Raises BadInput that names what is not equal."""
    partial: list[str] = []
    for piece, trial in zip(pieces, proof.trials, strict=True):
        fault, found = "", dict[str, torch.Tensor]()
        with evaluated_with_gradients(piece):
            with UserCode() as running:
                if not close(_run(piece, proof.inputs, trial), trial.output):
                    fault = f"{type(piece).__name__} gives another output when it is split"
                settle(piece.parameters())
                found = {name: sums_of(one) for name, one in piece.named_parameters()}
            if running.failed:
                fault = _cannot_run(piece, running.take())
        _refuse(fault, plan)
        split = {name for name, one in piece.named_parameters() if isinstance(one, DTensor)}
        partial += _partial(piece, found, split, trial.sums, proof.stacks, plan, mesh)
    return partial


def _cannot_run(piece: nn.Module, error: BaseException) -> str:
    """The innermost module of ``piece`` that was running when a split piece raised ``error``, and what it raised."""
    paths, path = {module: name for name, module in piece.named_modules()}, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        path = paths.get(own, path) if isinstance(own, nn.Module) else path
    at = f"{path} ({type(piece.get_submodule(path)).__name__}) of " if path else ""
    return (
        f"{at}{type(piece).__name__} cannot be run when it is split: {error}; its linears have a part of their columns "
        "then, so let a reshape or split of them take the number of heads or the width from the tensor"
    )


def _partial(
    piece: nn.Module,
    found: Mapping[str, torch.Tensor],
    split: set[str],
    sums: Mapping[str, torch.Tensor],
    stacks: Sequence[str],
    plan: ParallelPlan,
    mesh: PlanMesh,
) -> list[str]:
    partial: list[str] = []
    names, dtypes = list(found), {name: one.dtype for name, one in piece.named_parameters()}
    inside = {name for name in names if plan.mesh.tp > 1 and any(below(name, one) for one in stacks)}
    asked = {name for name, one in piece.named_parameters() if one.requires_grad and name in inside - split}
    table = torch.stack([found[name] for name in names])
    every = [torch.empty_like(table) for _ in range(mesh.axis("tp").size())]
    dist.all_gather(every, table, group=mesh.group("tp"))
    fault = ""
    for row, name in enumerate(names):
        here, expected = [one[row] for one in every], sums.get(name)
        if expected is None:
            fault = fault or f"{name} of {type(piece).__name__} and another name of it are two parameters now"
            continue
        if name in asked and not expected[2]:
            fault = fault or (
                f"{name} of {type(piece).__name__} has no gradient on the example, so it is not known whether a rank "
                "sees a part of its work"
            )
        if all(sums_close(one, expected, dtypes[name]) for one in here):
            continue
        if name not in split and sums_close(torch.stack(here).sum(0), expected, dtypes[name]):
            partial.append(name)
        else:
            fault = fault or f"{name} of {type(piece).__name__} has another gradient when it is split"
    _refuse(fault, plan)
    return partial


def _refuse(fault: str, plan: ParallelPlan) -> None:
    """Raises BadInput on all ranks when one has a fault. Collective over the world."""
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    if any(faults):
        mesh = plan.mesh
        axes = " x ".join(f"{axis} {size}" for axis in ("tp", "cp", "ep", "pp") if (size := getattr(mesh, axis)) > 1)
        raise BadInput(f"mesh: {next(filter(None, faults))} ({axes})", hint=REMEDY)


def _weights(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=draw).to(like.device)


def sums_of(parameter: torch.Tensor) -> torch.Tensor:
    """Of the gradient: two weighted sums and the sum of sizes, in fp64; zeros without one."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros(3, dtype=torch.float64)
    whole = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().double().flatten().cpu()
    places = torch.arange(whole.numel(), dtype=torch.float64)
    return torch.stack([whole @ torch.cos(0.7 * places), whole @ torch.sin(1.3 * places + 1), whole.norm()])


def sums_close(here: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """True when two of ``sums_of`` are equal but for rounding; the size of sums is that of their gradient."""
    loose = 10 * LOOSE.get(dtype, LOOSE_HALF)
    return bool((here[:2] - expected[:2]).abs().max() <= loose * expected[2] + 1e-7)


def close(here: torch.Tensor, expected: torch.Tensor) -> bool:
    """True when two outputs are equal but for rounding."""
    loose = LOOSE.get(expected.dtype, LOOSE_HALF)
    return here.shape == expected.shape and bool((here - expected).abs().max() <= loose * expected.abs().max() + 1e-7)
