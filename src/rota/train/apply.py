"""parallelize(): apply a plan to a model, step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rota.runtime.clock import SystemClock
from rota.spec.errors import BadInput, first_of
from rota.train.batch import IGNORED as IGNORED
from rota.train.batch import (
    Inputs,
    LossScale,
    call,
    check_rows,
    checked_loss,
    each,
    in_two,
    known_as_sum,
    micro_batches,
    seq_of,
)
from rota.train.batch import cross_entropy_sum as cross_entropy_sum
from rota.train.local_hardware import check_memory, this_machine
from rota.train.optim import (
    MakeOptimizer,
    PerParameter,
    clip_global_norm,
    fill_state,
    optimizer_for,
    optimizer_tensors,
    options_of,
)
from rota.train.parallel.context_parallel import (
    check_cores,
    check_positions,
    columns,
    position_modules,
    set_positions,
    split_attention,
)
from rota.train.parallel.data_parallel import (
    DTYPES,
    Buffers,
    check_reduced,
    mixed,
    only_data,
    replicate_model,
    shard_model,
    sync_gradients,
)
from rota.train.parallel.experts import spread_experts
from rota.train.parallel.mesh import PlanMesh, local, plan_mesh, settle
from rota.train.parallel.meta import Initial, MetaModel
from rota.train.parallel.model_parts import (
    Loss,
    Parts,
    TiedWeights,
    holders,
    recompute,
    schedule,
    stages_of,
    tie_again,
    tied_names,
)
from rota.train.parallel.tensor_parallel import Rules, split_layers
from rota.train.plan.model import ModelShape, ParallelPlan
from rota.train.structure.parts import FoundParts, evaluated, find_parts, keep_no_cache
from rota.train.structure.proof import check_pieces, nonzero, prove
from rota.train.structure.rules import split_found
from rota.train.structure.stages import INPUTS
from rota.train.sync import Synchroniser, synchroniser

log = logging.getLogger(__name__)

SAME_PLAN = "continue with the model and the plan whose state_dict it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step, equal on all ranks: mean loss of the global batch, its real tokens, the norm before clipping
    (None without ``clip_norm``; the mean of the replicas' norms where ``sync`` does not reduce gradients); ``skipped``
    when loss or norm was not finite, or a gradient of fp16 overflowed, and no weight changed. Of this rank are
    ``wait_s``, for others before and after the passes, and ``compute_s``, the rest of the step: collectives inside the
    passes are in it."""

    loss: float
    tokens: int
    grad_norm: float | None
    skipped: bool
    compute_s: float = 0.0
    wait_s: float = 0.0


def parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    optimizer: MakeOptimizer,
    per_parameter: PerParameter | None = None,
    loss: Loss = cross_entropy_sum,
    parts: Parts | None = None,
    rules: Rules | None = None,
    example: Inputs | None = None,
    clip_norm: float | None = None,
    device: torch.device | None = None,
    offload_folder: Path | None = None,
    initial: Initial | None = None,
) -> Parallel:
    """Apply ``plan`` to ``model`` on the ranks of the default process group; collective.

    All ranks give equal models (same seed) and call in the same order. ``loss(output, targets)`` is the SUM over the
    real tokens of a micro-batch; ``optimizer`` makes one from parameters, or from groups of them where
    ``per_parameter(name, parameter)`` gives options, as no weight decay for some. Parts that are not named are found
    in the structure of the model, and a cut is proved on ``example`` (rows of a batch; made up where None): outputs
    and gradients of the pieces are those of the whole. Of a model on the meta device no rank holds more than its part:
    ``initial`` fills the weights of one module (where None, its ``reset_parameters``, or ``_init_weights`` of
    transformers). Raises BadInput with every broken rule.
    """
    device = device or home_of(model)
    keep_no_cache(model)
    options = options_of(model, per_parameter)
    parts = parts or find_parts(model, plan, example)
    check_model(model, plan, parts)  # 1. the plan fits the model and the world
    mesh = plan_mesh(plan.mesh, device, dist.group.WORLD)
    meta = MetaModel(model, plan, initial, tied_names(model))
    ties = [(names, holders(model, names, parts, plan)) for names in tied_names(model)]
    places = WeakSet(position_modules(model))
    if isinstance(parts, FoundParts) and parts.seen.first:
        with nonzero(model):
            proof = prove(model, parts, plan, example, mesh)
            pieces, partial = cut(model, parts, plan, mesh, rules)
            if max(plan.mesh.tp, plan.mesh.ep) > 1:
                partial = check_pieces(pieces, proof, plan, mesh)
    else:
        pieces, partial = cut(model, parts, plan, mesh, rules)
    for piece in pieces:
        for index, layer in parts.layers(piece):  # 5. recompute, layer by layer
            recompute(layer, parts.kind(plan, index))
    if DTYPES[plan.dtype.master] != torch.float32:
        model.to(DTYPES[plan.dtype.master])
    for piece in pieces:
        places.update(position_modules(piece))
    agree = synchroniser(plan, mesh)
    if only_data(plan):
        meta.fill(pieces, device)
    wrapped = [wrap(piece, parts, plan, mesh, agree) for piece in pieces]  # 6. data axes, 10. hooks
    if not only_data(plan):  # 7. values, when each rank has its part
        meta.fill(pieces, device)
    made = optimizer_for(optimizer, pieces, parts, plan, mesh.group("data"), offload_folder, options)  # 8. optimizer
    tied = TiedWeights(ties, pieces, mesh)
    return Parallel(plan, mesh, parts, pieces, wrapped, made, loss, agree, clip_norm, device, tied, partial, places)


def cut(
    model: nn.Module, parts: Parts, plan: ParallelPlan, mesh: PlanMesh, rules: Rules | None
) -> tuple[list[nn.Module], list[str]]:
    """The stages of this rank, split over its tensor, context and expert ranks, and the names of parameters of which
    rules say that each tensor rank sees a part of their work."""
    pieces, partial, ties = [model], list[str](), tied_names(model)
    if plan.mesh.pp > 1:  # 2. the stages of this rank
        pieces = [parts.cut(model, plan.stages[index]) for index in stages_of(plan, mesh.index("pp"))]
    for piece in pieces:
        if plan.mesh.cp > 1:  # 3. attention over ranks, experts over ranks
            split_attention(piece, parts, plan, mesh)
        if plan.mesh.ep > 1:
            spread_experts(piece, parts, mesh)
        if plan.mesh.tp > 1:  # 4. tensor and sequence parallel
            if isinstance(parts, FoundParts) and rules is None:
                split_found(piece, parts, plan, mesh)
            else:
                partial += split_layers(piece, parts, plan, mesh, rules)
            tie_again(piece, ties)
    return pieces, partial


def check_model(model: nn.Module, plan: ParallelPlan, parts: Parts) -> None:
    """Raises BadInput with all rules that the plan breaks for this model, Infeasible when a rank lacks memory.

    A model without a ``shape`` is only checked for what can be seen: its layers.
    """
    parts.check(model, plan)
    shape = getattr(model, "shape", None)
    known = isinstance(shape, ModelShape)
    if not known:
        width = 2 * plan.mesh.tp * plan.mesh.cp
        layers = parts.count(model) or sum(run.count for run in plan.layers)
        shape = ModelShape(layers=layers, hidden=width, heads=width, seq=width, vocab=2, experts=plan.mesh.ep)
    if faults := plan.check(shape):
        raise BadInput("plan: " + "; ".join(map(str, faults)))
    if plan.schedule in ("zb", "zbv") and not any(
        one.requires_grad for one in parts.cut(model, plan.stages[0]).parameters()
    ):  # torch 2.13 then loses gradients of the second stage
        raise BadInput(f"schedule = {plan.schedule}: the first stage is frozen", hint="use 1f1b or interleaved")
    if known:
        check_memory(plan, shape, this_machine())

    if plan.mesh.cp > 1:
        check_cores(model, parts, plan)
        check_positions(model, parts, plan)
    if plan.mesh.dp_shard > 1 and parts.rest(model, plan).zero == 3 and not parts.count(model) and not dist.get_rank():
        log.warning(
            "zero = 3: %s has no %r, so its weights are gathered all at once and shared memory is saved between steps "
            "only; hold its layers in a ModuleList, parallelize(..., parts=Parts(stack=...)) names it",
            type(model).__name__, parts.stack,
        )  # fmt: skip


def home_of(model: nn.Module) -> torch.device:
    """Where the model is; cpu for one on the meta device."""
    found = next(model.parameters()).device
    return torch.device("cpu") if found.type == "meta" else found


def scales(plan: ParallelPlan) -> bool:
    """True when gradients are computed or summed in fp16, so that the loss needs a scale."""
    return "fp16" in (plan.dtype.param, plan.dtype.reduce)


def wrap(piece: nn.Module, parts: Parts, plan: ParallelPlan, mesh: PlanMesh, agree: Synchroniser | None) -> nn.Module:
    """Split or copy one piece over the data axes and attach the synchroniser."""
    if agree is not None and not only_data(plan):
        raise BadInput(
            f"sync = {plan.sync}: needs every rank to hold the whole model",
            hint="turn pp, tp, ep and ZeRO 2 and 3 off, or use mode allreduce without compression",
        )
    if agree is not None and not agree.reduces:
        agree.attach(piece)
        return piece
    if not only_data(plan):
        return shard_model(piece, parts, plan, mesh)
    wrapped = replicate_model(piece, mesh)
    if agree is not None and isinstance(wrapped, DistributedDataParallel):  # one replica agrees with itself
        agree.attach(wrapped)
    return wrapped


class Parallel:
    """A model under a plan, ready to step. Every method but ``share`` is collective over the world.

    ``pieces`` are the parts of the model on this rank (several when the pipeline is interleaved), with global names.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        mesh: PlanMesh,
        parts: Parts,
        pieces: list[nn.Module],
        wrapped: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        agree: Synchroniser | None,
        clip_norm: float | None,
        device: torch.device,
        tied: TiedWeights,
        partial: Sequence[str],
        places: WeakSet[nn.Module],
    ) -> None:
        self.plan, self.mesh, self.pieces, self.optimizer = plan, mesh, pieces, optimizer
        self.agree, self.device, self._parts, self._places = agree, device, parts, places
        self._columns: torch.Tensor | None = None
        self._wrapped, self._loss, self._clip_norm = wrapped, loss, clip_norm
        self._parameters = list(dict.fromkeys(one for piece in pieces for one in piece.parameters()))
        self._tied, self._buffers = tied, Buffers(pieces, mesh)
        named = {name: one for piece in pieces for name, one in piece.named_parameters()}
        self._partial = [named[name] for name in partial if name in named]
        self._loss_scale = LossScale() if scales(plan) else None
        self._is_sum = False
        self._replicas = mesh.axis("data").size()
        self._scale, self._clock, self._wait_s = 1.0, SystemClock(), 0.0
        self._loss_sum = torch.zeros((), device=device)
        self._pipeline = None
        if plan.mesh.pp > 1:
            self._pipeline = schedule(wrapped, plan, mesh, device, self._scaled_loss)

    @property
    def local_batch(self) -> int:
        """Sequences that this rank sees in one step."""
        return self.plan.micro_batch * self.plan.micro_batches

    @property
    def draws(self) -> int:
        """Equal on ranks that must draw the same, as those of a tensor group, and on no others."""
        degrees = self.plan.mesh
        return (self.mesh.data_index * degrees.cp + self.mesh.index("cp")) * degrees.pp + self.mesh.index("pp")

    @overload
    def share(self, batch: torch.Tensor) -> torch.Tensor: ...

    @overload
    def share(self, batch: Mapping[str, object]) -> Mapping[str, object]: ...

    def share(self, batch: Inputs) -> Inputs:
        """The rows of a global batch, or of each tensor of a mapping, that this rank trains.

        Raises BadInput for a batch of another size.
        """

        def part(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[0] != self.plan.global_batch:
                raise BadInput(f"batch: {tensor.shape[0]} sequences, the plan steps over {self.plan.global_batch}")
            return tensor[self.rows]

        return each(batch, part)

    @property
    def rows(self) -> slice:
        """The rows of a global batch that this rank trains."""
        first = self.mesh.data_index * self.local_batch
        return slice(first, first + self.local_batch)

    def step(
        self,
        inputs: Inputs | tuple[Inputs, torch.Tensor] | Sequence[torch.Tensor],
        targets: torch.Tensor | None = None,
    ) -> StepResult:
        """Train on this rank's share (``local_batch`` rows, the whole sequence), given as inputs and targets, as a pair
        of them, or as one mapping whose ``labels`` are the targets; one optimizer update. Inputs are a tensor, or a
        mapping of what the model takes by keyword.

        The gradient is that of the mean over all real tokens of the global batch, however they are spread. Raises
        BadInput for rows that are not this rank's, a mapping under stages or context ranks, a length of sequence that
        the plan cannot split, and a loss that is a mean.
        """
        given, wanted = in_two(inputs, targets)
        began_s, self._wait_s = self._clock.monotonic_s(), 0.0
        given, wanted = self._of_rank(given, wanted)
        with self._wait_time():
            tokens = self._count(wanted)
        self._loss_sum = torch.zeros((), device=self.device)
        if self._pipeline is None:
            self._accumulate(given, wanted)
        else:
            self._run_pipeline(given, wanted, self._pipeline.step)
        settle(self._parameters)
        sum_partial(self._partial, self.mesh.group("tp"), self.device)
        self._tied.sum_gradients()
        with self._wait_time():
            fits = self._loss_scale is None or self._loss_scale.scale_back(self._parameters, self.device)
            loss, norm = self._finish()
            if self.agree is None or self.agree.reduces:
                self._buffers.agree()
        skipped = not fits or not _finite(loss) or (norm is not None and not _finite(norm))
        if not skipped:
            self.optimizer.step() if self.agree is None else self.agree.update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=self._set_to_none)
        compute_s = self._clock.monotonic_s() - began_s - self._wait_s
        return StepResult(
            loss=loss, tokens=tokens, grad_norm=norm, skipped=skipped, compute_s=compute_s, wait_s=self._wait_s
        )

    def evaluate(
        self,
        inputs: Inputs | tuple[Inputs, torch.Tensor] | Sequence[torch.Tensor],
        targets: torch.Tensor | None = None,
        *,
        loss: Loss | None = None,
    ) -> float:
        """The mean over the real tokens of the global batch, without gradients and with the model in evaluation mode:
        of the loss, or of another function that gives a sum, as the number of right tokens. The batch is given as to
        ``step``; rows that only fill it have targets of -100. Equal on all ranks; no weight or buffer changes.

        Raises BadInput as ``step`` does.
        """
        given, wanted = self._of_rank(*in_two(inputs, targets))
        tokens = self._count(wanted)
        kept = self._loss, self._is_sum
        self._loss, self._scale = loss or self._loss, 1.0 / self._factor
        self._loss_sum = torch.zeros((), device=self.device)
        try:
            with torch.no_grad(), evaluated(*self._wrapped):
                if self._pipeline is None:
                    self._forward(given, wanted)
                else:
                    self._run_pipeline(given, wanted, self._pipeline.eval)
        finally:
            self._loss, self._is_sum = kept
        for part in (part for one in self._wrapped for part in one.modules() if isinstance(part, FSDPModule)):
            part.reshard()  # ZeRO 2 keeps what it gathered until a backward, and here is none
        dist.all_reduce(self._loss_sum, group=self.mesh.group("data"))
        if self._pipeline is not None:
            dist.all_reduce(self._loss_sum, group=self.mesh.group("pp"))
        return float(self._loss_sum) / max(tokens, 1)

    def _forward(self, inputs: Inputs, targets: torch.Tensor) -> None:
        many = self.plan.micro_batches
        for x, y in zip(micro_batches(inputs, many), targets.tensor_split(many), strict=True):
            with self._autocast():
                output = call(self._wrapped[0], x)
            self._loss_sum += self._scaled_loss(output, y)

    def _of_rank(self, inputs: Inputs, targets: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
        """The columns of a share that this rank holds, on its device; refuses what the plan cannot split."""
        inputs, targets = each(inputs, lambda tensor: tensor.to(self.device)), targets.to(self.device)
        check_rows(inputs, targets, self.local_batch, self.plan.global_batch)
        tp, mesh = self.plan.mesh.tp, self.plan.mesh
        whole = isinstance(self._parts, FoundParts) and mesh.cp == 1  # every stage gets the batch
        if not isinstance(inputs, torch.Tensor) and max(mesh.pp, mesh.cp) > 1 and not whole:
            raise BadInput(
                f"batch: a mapping of {', '.join(inputs)} under pp {mesh.pp} and cp {mesh.cp}, which take one tensor",
                hint="give step(inputs, targets) two tensors, or use a plan with pp = cp = 1",
            )
        if any(kind.sp for kind in self.plan.layers) and seq_of(inputs) % tp:
            raise BadInput(f"batch: {seq_of(inputs)} tokens a sequence do not divide by tp {tp}, as sp needs")
        if isinstance(inputs, torch.Tensor) and mesh.cp > 1:
            here = self._held_columns(inputs.shape[1])
            return inputs[:, here], targets[:, here]
        return inputs, targets

    @contextmanager
    def _wait_time(self) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        yield
        self._wait_s += self._clock.monotonic_s() - began_s

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state on this rank by global name; to be saved, or filled in place."""
        fill_state(self.optimizer)
        return {
            **model_tensors(self.pieces),
            **optimizer_tensors(self.pieces, self.optimizer, self._tied.first),
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over copies of a ``state_dict`` of the same plan. Raises BadInput for a tensor that it lacks, and for
        weights in it that this model does not have or has in another shape."""
        own = self.state_dict()
        if unknown := [name for name in tensors if name.startswith("model.") and name not in own]:
            raise BadInput(f"load: this model has no {first_of(unknown, 1)}", hint=SAME_PLAN)
        if missing := [name for name in own if name not in tensors]:
            raise BadInput(f"load: what is given has no {first_of(missing, 1)}", hint=SAME_PLAN)
        shapes = {name: (tuple(local(one).shape), tuple(local(tensors[name]).shape)) for name, one in own.items()}
        if unlike := [name for name, (here, there) in shapes.items() if here != there]:
            here, there = shapes[unlike[0]]
            raise BadInput(f"load: {unlike[0]} of shape {here} has shape {there} in it", hint=SAME_PLAN)
        with torch.no_grad():
            for name, tensor in own.items():
                local(tensor).copy_(local(tensors[name]))

    def first_name(self, name: str) -> str:
        """The first of the names of a parameter that has several; that name for one of them on this rank."""
        return self._tied.first.get(name, name)

    def close(self) -> None:
        """Release the model; the process groups live as long as the world. Do not step afterwards."""
        if self.agree is not None:
            self.agree.close()
        self._wrapped, self._pipeline, self.pieces = [], None, []

    def _held_columns(self, seq: int) -> torch.Tensor:
        """The positions of a sequence that this rank holds; modules that read them learn when their number changes.
        Layers of any stage may read them from the embedding, which only one stage runs."""
        if self._columns is None or len(self._columns) * self.plan.mesh.cp != seq:
            self._columns = columns(self.plan, self.mesh.index("cp"), seq).to(self.device)
            set_positions(self._places, self._columns)
        return self._columns

    @property
    def _set_to_none(self) -> bool:
        return not isinstance(self._wrapped[0], DistributedDataParallel)

    def _count(self, targets: torch.Tensor) -> int:
        """Real tokens of the global batch; sets the scale of the loss so that the mean of the gradients of all replicas
        is that of all tokens, also where replicas agree otherwise than by reducing gradients."""
        whole = (targets != IGNORED).sum()
        dist.all_reduce(whole, group=self.mesh.group("data"))
        self._scale = self._replicas / max(int(whole), 1)
        return int(whole)

    def _scaled_loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._is_sum = self._is_sum or known_as_sum(self._loss, output, targets)
        return checked_loss(self._loss(output, targets)) * (self._scale * self._factor)

    @property
    def _factor(self) -> float:
        return 1.0 if self._loss_scale is None else self._loss_scale.factor

    def _accumulate(self, inputs: Inputs, targets: torch.Tensor) -> None:
        """Forward and backward of each micro-batch; gradients are reduced in the last one."""
        model, many = self._wrapped[0], self.plan.micro_batches
        for index, (x, y) in enumerate(zip(micro_batches(inputs, many), targets.tensor_split(many), strict=True)):
            last = index == many - 1
            sync_gradients(model, self._parts, self.plan, last=last)
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
                with self._autocast():
                    output = call(model, x)
                loss = self._scaled_loss(output, y)
                if not loss.requires_grad:
                    raise BadInput(
                        "loss: has no gradient", hint="compute it from the output, without detach or no_grad"
                    )
                loss.backward()
                self._loss_sum += loss.detach() / self._factor
        if isinstance(model, DistributedDataParallel):
            check_reduced(model)

    def _autocast(self) -> AbstractContextManager[object]:
        """Mixed precision for replicas whose wrapper does not cast."""
        if only_data(self.plan) and mixed(self.plan):
            return torch.autocast(self.device.type, dtype=DTYPES[self.plan.dtype.param])
        return nullcontext()

    def _run_pipeline(self, inputs: Inputs, targets: torch.Tensor, run: Callable[..., object]) -> None:
        mine = stages_of(self.plan, self.mesh.index("pp"))
        given: tuple[torch.Tensor, ...] = (inputs,) if 0 in mine and isinstance(inputs, torch.Tensor) else ()
        batch: dict[str, Any] = {}
        if isinstance(self._parts, FoundParts):
            batch = {INPUTS: inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
        losses: list[torch.Tensor] = []
        wanted = {"target": targets, "losses": losses} if len(self.plan.stages) - 1 in mine else {}
        run(*given, return_outputs=False, **wanted, **batch)
        for loss in losses:  # of the micro-batches; the function also sees empty data when shapes are probed
            self._loss_sum += loss.detach() / self._factor

    def _finish(self) -> tuple[float, float | None]:
        """Mean loss of the global batch, and the gradient norm when it is clipped."""
        dist.all_reduce(self._loss_sum, group=self.mesh.group("data"))
        if self._pipeline is not None:
            dist.all_reduce(self._loss_sum, group=self.mesh.group("pp"))
        norm = None
        if self._clip_norm is not None:
            norm = clip_global_norm(self._parameters, self._tied.elsewhere, self._clip_norm, self.mesh)
            if self.agree is not None and not self.agree.reduces:  # each replica has its own: all skip, or none
                norms = torch.tensor(norm, device=self.device)
                dist.all_reduce(norms, group=self.mesh.group("data"))
                norm = float(norms) / self._replicas
        return float(self._loss_sum) / self._replicas, norm


def sum_partial(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Weights that all tensor ranks hold whole and use on a part each: their gradients are summed."""
    if not parameters:
        return
    used = torch.tensor([one.grad is not None for one in parameters], device=device, dtype=torch.int32)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for parameter, by_any in zip(parameters, used.tolist(), strict=True):
        if by_any:  # an expert may have no token here; one that has none anywhere is not stepped
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad = local(parameter.grad)
            whole = grad.to(device)  # the same tensor, unless gradients wait on the host
            dist.all_reduce(whole, group=group)
            grad.copy_(whole)


def _finite(number: float) -> bool:
    return number - number == 0.0


def model_tensors(pieces: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """``model.<name>`` of each parameter and persistent buffer on this rank: shards are DTensors."""
    found: dict[str, torch.Tensor] = {}
    for piece in pieces:
        for name, tensor in piece.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                found[f"model.{name}"] = tensor.detach()
    return found
