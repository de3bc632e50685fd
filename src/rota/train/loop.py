"""fit(): the training loop, read top to bottom."""

from __future__ import annotations

import io
import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from rota import tensors
from rota.runtime import environ
from rota.runtime.clock import SystemClock
from rota.runtime.devices import local_family
from rota.runtime.node import accelerator, group_backend
from rota.spec.errors import BadInput, RotaError
from rota.train import shm
from rota.train.apply import Parallel, StepResult, cross_entropy_sum, home_of, parallelize
from rota.train.batch import Inputs
from rota.train.checkpoint import Checkpoints, MemoryCheckpoints, candidates, own_group
from rota.train.data import mix
from rota.train.local_hardware import plan_for_world
from rota.train.optim import OPTIONS, MakeOptimizer, PerParameter, restore_settings, settings
from rota.train.parallel.mesh import local
from rota.train.parallel.model_parts import Loss, Parts
from rota.train.parallel.tensor_parallel import Rules
from rota.train.plan.hardware import Json
from rota.train.plan.model import ParallelPlan
from rota.train.ps.table import State as SyncState
from rota.train.weights import described, joined_dims

log = logging.getLogger(__name__)

SKIPPED_MAX = 10
"""Steps in a row without finite loss and gradients that end the training."""

Data = Callable[[int, slice], tuple[Inputs, torch.Tensor] | Mapping[str, object]]
"""(step, rows of the global batch) to (inputs, targets) of those rows, or to one mapping with ``labels``: the same for
any world that steps."""


def fit(
    build: Callable[[], nn.Module],
    data: Data,
    *,
    optimizer: MakeOptimizer,
    steps: int,
    batch: int,
    plan: ParallelPlan | Literal["auto"] = "auto",
    seed: int = 0,
    per_parameter: PerParameter | None = None,
    loss: Loss = cross_entropy_sum,
    parts: Parts | None = None,
    rules: Rules | None = None,
    example: Inputs | None = None,
    clip_norm: float | None = None,
    rate: Callable[[int], float] | None = None,
    checkpoint: Path | str | None = None,
    resume: Literal["auto", "never"] = "auto",
    keep: int = 2,
    save_every_s: float | None = None,
    memory: str | None = None,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> int:
    """Train to ``steps`` optimizer steps of ``batch`` sequences each on the ranks that torchrun started, or alone.

    Plan ``auto`` is the one of the job (``plan`` in its file), else the planner finds one for the ranks there are. With
    ``checkpoint`` it continues from the newest good one, under whatever plan it was written (``resume`` never: a folder
    that has one is refused); SIGTERM saves and ends. Whoever can write into that folder can run code here: its files
    are unpickled, and their sums show damage, not who wrote them. ``memory`` names the run in the tensor store of this
    machine: state copied there outlives the processes and is preferred if as new and of the same plan. A model that
    ``build`` makes on the CPU is trained on this rank's GPU, if there is one and the group speaks NCCL. ``rate(step)``
    gives the learning rate, ``per_parameter`` what differs by name, as in ``parallelize``; so do ``rules`` and
    ``example``, rows of a batch for a model whose cut must be proved and whose inputs cannot be made up. What a step
    draws, as dropout, depends on seed, step and replica. Returns the steps done. Raises BadInput for a plan that cannot
    be applied, or whose ``sync`` keeps state of another number of replicas; RotaError when the loss stays not finite.
    """
    check_arguments(build, data, optimizer, plan, steps, resume)
    given = None if plan == "auto" else plan
    folder = None if checkpoint is None else Path(checkpoint)
    if folder and resume == "never" and folder.exists() and (kept := candidates(folder)):
        raise BadInput(f"checkpoint: {kept[0]} is there, resume is never", hint="give an empty folder, or resume auto")
    with world(given), ExitStack() as ends:
        torch.manual_seed(seed)
        model, device = built(build), own_device()
        if home_of(model).type == "cpu" and device.type != "cpu":
            model = model if any(one.is_meta for one in model.parameters()) else model.to(device)
        else:
            device = home_of(model)
        plan = given or plan_of_job() or plan_for_world(model, batch)
        if plan.global_batch != batch:
            raise BadInput(f"plan: steps over {plan.global_batch} sequences, batch is {batch}")
        trained = parallelize(
            model, plan, optimizer=optimizer, per_parameter=per_parameter, loss=loss, parts=parts, rules=rules,
            example=example, clip_norm=clip_norm, device=device, offload_folder=folder,
        )  # fmt: skip
        ends.enter_context(closing(trained))
        saves = ends.enter_context(Checkpoints(folder, keep=keep)) if folder else None
        copies = in_memory(memory, trained) if memory else None
        first = restore(saves, copies, trained)
        return _run(trained, data, saves, copies, first, steps, seed, rate, save_every_s, on_step)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``build`` makes. Raises BadInput when that is not a model with something to train."""
    model: object = build()
    if not isinstance(model, nn.Module):
        raise BadInput(f"build: gives {type(model).__name__}, which is not a torch.nn.Module", hint="return the model")
    if not any(one.requires_grad for one in model.parameters()):
        raise BadInput(f"build: {type(model).__name__} has no parameter that is trained", hint="set requires_grad")
    return model


def check_arguments(
    build: object, data: object, optimizer: object, plan: object, steps: object, resume: object
) -> None:
    """Raises BadInput for what ``fit`` would stumble over later, as these are values of untyped scripts."""
    for name, given, wanted in (
        ("build", build, "a function that makes the model"),
        ("data", data, "a function of (step, rows) that gives the batch of those rows"),
        ("optimizer", optimizer, "a function that makes one from parameters: lambda p: torch.optim.AdamW(p, lr=1e-3)"),
    ):
        if not callable(given) or isinstance(given, nn.Module):
            raise BadInput(f"{name}: {type(given).__name__} is not a function", hint=f"give {wanted}")
    if plan != "auto" and not isinstance(plan, ParallelPlan):
        hint = "give rota.train.plan.model.data_parallel(layers=, dp=), or ParallelPlan.from_json(text)"
        raise BadInput(f"plan: {type(plan).__name__} is neither 'auto' nor a ParallelPlan", hint=hint)
    if not isinstance(steps, int) or steps < 0:
        raise BadInput(f"steps: {steps!r} is not a whole number from 0 on")
    if resume not in ("auto", "never"):
        raise BadInput(f"resume: {resume!r} is neither 'auto' nor 'never'")


def own_device() -> torch.device:
    """The device of this rank, made the current one, where the default process group has its backend; else the CPU."""
    kind = accelerator()
    if kind == "cpu" or local_family().backend not in dist.get_backend_config():
        return torch.device("cpu")
    devices: Any = torch.get_device_module(kind)
    index = int(environ.get("LOCAL_RANK", "0")) % devices.device_count()
    devices.set_device(index)
    return torch.device(kind, index)


def plan_of_job() -> ParallelPlan | None:
    """The plan that Rota chose for a world of this size, None outside a job with plans."""
    text = environ.get("ROTA_PLAN")
    plan = ParallelPlan.from_json(text) if text else None
    return plan if plan and plan.mesh.world == dist.get_world_size() else None


def _run(
    trained: Parallel,
    data: Data,
    saves: Checkpoints | None,
    copies: MemoryCheckpoints | None,
    first: int,
    steps: int,
    seed: int,
    rate: Callable[[int], float] | None,
    save_every_s: float | None,
    on_step: Callable[[int, StepResult], None] | None,
) -> int:
    every_s = trained.plan.checkpoint.every_s if save_every_s is None else save_every_s
    clock, skipped = SystemClock(), 0
    saved_s = clock.monotonic_s()
    with terminated() as stopped, closing(Agreement()) as agree:
        step = first
        while step < steps:
            if rate is not None:
                set_rate(trained.optimizer, checked_rate(step, rate(step)))
            torch.manual_seed(seed_of(seed, step))
            try:
                batch = data(step, trained.rows)
            except StopIteration as end:  # of an iterator that the function reads
                hint = "give fewer steps, or begin it again at its end"
                raise BadInput(f"data: ended before step {step + 1} of {steps}", hint=hint) from end
            torch.manual_seed(seed_of(seed, step, 1 + trained.draws))
            result = trained.step(batch)
            step += 1
            skipped = skipped + 1 if result.skipped else 0
            if skipped >= SKIPPED_MAX:
                raise RotaError(
                    f"loss or gradients were not finite in steps {step - skipped + 1} to {step}; nothing was updated"
                )
            if on_step is not None:
                on_step(step, result)
            due = clock.monotonic_s() - saved_s >= every_s
            stop, due = agree(stop=stopped(), due=due and not (saves and saves.busy))
            if saves is not None and (due or stop or step == steps):
                save(saves, trained, step)
                saved_s = clock.monotonic_s()
            if copies is not None and step % trained.plan.checkpoint.memory_every == 0:
                copies.save(kept_tensors(trained), step=step, extra=extra_of(trained))
            if stop:
                break
    if saves is not None:
        saves.wait()
    return step


def seed_of(seed: int, step: int, stream: int = 0) -> int:
    """Of what a step draws: stream 0 is ``data`` on all ranks, the others are dropout of ranks with different values.

    A run that continues draws what one without a stop would have drawn.
    """
    return mix(seed ^ mix(step ^ mix(stream)))


def save(saves: Checkpoints, trained: Parallel, step: int) -> None:
    """Begin a save of everything that ``resume`` needs. A save that failed before is logged; training continues."""
    try:
        saves.wait()
    except OSError as error:
        kept = "the one before stays" if candidates(saves.folder) else "there is none yet"
        log.error("the last checkpoint was not written, %s: %s", kept, error)
    saves.save(kept_tensors(trained), step=step, extra=extra_of(trained))


def kept_tensors(trained: Parallel) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, and what this replica alone has."""
    return {**trained.state_dict(), **own_state(trained)}


def extra_of(trained: Parallel) -> Json:
    """What a checkpoint holds beside tensors."""
    of_model = {"joined": joined_dims(trained), **described(trained.pieces[0])}
    return {"plan": trained.plan.to_json(), "optimizer": settings(trained.optimizer), "model": of_model}


def in_memory(run: str, trained: Parallel) -> MemoryCheckpoints:
    """The copies of this rank in the tensor store of its machine."""
    rank = dist.get_rank()
    part = (int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1")))
    plane = tensors.connect(label=f"{run}/{rank}", keep=True)
    return MemoryCheckpoints(plane, run, plan=trained.plan.id, rank=rank, part=part)


def restore(saves: Checkpoints | None, copies: MemoryCheckpoints | None, trained: Parallel) -> int:
    """Load the newest good state, resharded for this plan when it comes from disk; returns its step, 0 without one."""
    held = copies.find() if copies else None
    found = None
    try:
        found = saves.find() if saves else None
    except BadInput as damaged:
        if not same_everywhere(held.step if held else -1) or held is None:
            raise
        log.warning("%s; step %d is in memory", damaged, held.step)
    for reason in found.refused if found else ():
        log.warning("checkpoint refused: %s", reason)
    newer = held is not None and (found is None or held.step >= found.step)
    if copies is not None and same_everywhere(held.step if held and newer else -1) and held and newer:
        copies.load(held, trained.state_dict())
        restore_own(trained, copies.find_tensor(held, own_name()))
        restore_settings(trained.optimizer, held.extra["optimizer"])
        return held.step
    if copies is not None:
        copies.drop()
    if saves is None or found is None:
        return 0
    saves.load(found, trained.state_dict())
    restore_own(trained, saves.find_bytes(found, own_name()))
    restore_settings(trained.optimizer, found.extra["optimizer"])
    return found.step


def same_everywhere(step: int) -> bool:
    """True when every rank gives the same number. Collective."""
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    return len(set(steps)) == 1


class Agreement:
    """All ranks decide the same at the same step: any may ask to stop, rank 0 says when a save is due."""

    def __init__(self) -> None:
        self._group = own_group()

    def __call__(self, *, stop: bool, due: bool) -> tuple[bool, bool]:
        """(stop, save) for every rank. Collective."""
        if self._group is None:
            return stop, due
        asked = torch.tensor([stop, due and self._group.rank() == 0], dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked[0]), bool(asked[1])

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)


def checked_rate(step: int, rate: object) -> float:
    """Raises BadInput for what is not a learning rate, which would make all weights not finite, or fail in torch."""
    if not isinstance(rate, Real | torch.Tensor) or not 0 <= (value := float(rate)) < inf:
        raise BadInput(f"rate: {rate!r} for step {step} is not a number from 0 on", hint="return the learning rate")
    return value


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One learning rate for all parameters but those whose options give another."""
    for group in optimizer.param_groups:
        if "lr" not in json.loads(str(group.get(OPTIONS, "{}"))):
            group["lr"] = rate


@contextmanager
def terminated() -> Iterator[Callable[[], bool]]:
    """While open, SIGTERM does not end the process but makes the given function return True.

    Signals belong to the main thread: in another one SIGTERM keeps its meaning and the answer is always False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    heard: list[int] = []

    def note(number: int, _: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def world(plan: ParallelPlan | None = None) -> Iterator[None]:
    """The default process group: the caller's, else one from torchrun's variables, else a world of one."""
    if dist.is_initialized():
        yield
        return
    wanted = "auto" if plan is None else plan.backend
    backend = wanted if wanted != "auto" else group_backend()
    if backend == "shm":
        shm.register()
        backend = shm.NAME
    if environ.get("RANK"):
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public, its stub is not
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Own(TypedDict):
    """What a rank alone has, of how many: the state of its synchroniser, and its weights where replicas differ."""

    world: int
    state: SyncState
    tensors: dict[str, torch.Tensor]


def own_name() -> str:
    """The name of this rank's part in a checkpoint."""
    return f"sync.{dist.get_rank()}"


def own_state(trained: Parallel) -> dict[str, torch.Tensor]:
    """``{own_name(): bytes}`` of what this rank alone has; empty for a plan whose replicas are equal.

    Where gradients are not reduced, replicas differ between rounds or pushes, so their weights and moments are in it.
    """
    state = {} if trained.agree is None else trained.agree.state_dict()
    if trained.agree is None or (trained.agree.reduces and not state):
        return {}
    tensors = {} if trained.agree.reduces else {name: local(one) for name, one in trained.state_dict().items()}
    file = io.BytesIO()
    torch.save({"world": dist.get_world_size(), "state": state, "tensors": tensors}, file)
    return {own_name(): torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}


def restore_own(trained: Parallel, found: torch.Tensor | None) -> None:
    """Inverse of ``own_state``; before the first step. Raises BadInput when the checkpoint is of another world.

    None = the checkpoint has no such part, which is right for a plan whose replicas are equal.
    """
    if trained.agree is None or (trained.agree.reduces and not trained.agree.state_dict()):
        return
    kept: _Own | None = None
    if found is not None:
        kept = torch.load(io.BytesIO(found.numpy().tobytes()), weights_only=False)  # may hold arrays of numpy; see fit
    if kept is None or kept["world"] != dist.get_world_size():
        sync, had = trained.plan.sync, "none" if kept is None else f"{kept['world']} replicas"
        raise BadInput(
            f"checkpoint: state of {had} for sync.mode {sync.mode} with compression {sync.compression} on "
            f"{dist.get_world_size()}",
            hint="continue with its plan and number of ranks, or use mode allreduce without compression",
        )
    trained.agree.load_state_dict(kept["state"])
    with torch.no_grad():
        for name, tensor in trained.state_dict().items() if kept["tensors"] else ():
            local(tensor).copy_(kept["tensors"][name])
