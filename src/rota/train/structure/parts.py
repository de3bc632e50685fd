"""Parts of a model that was not written for plans: its lists of layers, what runs around them, an example input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rota.spec.errors import BadInput
from rota.spec.user_code import UserCode
from rota.train.batch import Inputs, call, each
from rota.train.parallel.model_parts import Absent, Parts, apart
from rota.train.plan.model import ParallelPlan, Stage
from rota.train.structure.stages import cut_stage

LARGE = 0.2
"""A list of layers with less than this share of the parameters of the largest one is part of something else."""
ROWS, SEQ = 2, 8
NEEDS_EXAMPLE = "give one batch to fit or parallelize: example=batch, a tensor or a mapping of what forward takes"


@dataclass(slots=True)
class Seen:
    """What a run of the example showed: calls in order, who drops, and what layers give back."""

    first: dict[str, int] = field(default_factory=dict[str, int])
    """Number of the first call of each module, by name."""
    inputs: dict[str, int] = field(default_factory=dict[str, int])
    """Identity of the first input of each module."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    """Shape of what each module gives, where that is a tensor."""
    drops: list[str] = field(default_factory=list[str])
    """Modules that drop values in training, with the rate."""
    tuples: set[str] = field(default_factory=set[str])
    """Modules that give a tuple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundParts(Parts):
    """The parts of a model whose forward is its own: stages run that forward, with stubs for what they lack."""

    found: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    """Parameters outside the layers that no module of ``before`` or ``after`` has."""
    seen: Seen = field(default_factory=Seen, hash=False, compare=False)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the lists of layers, in the order of their first call."""
        return self.found

    def ends(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules before the first layer and after it, absent ones included."""
        return [model.get_submodule(one) for one in self.before], [model.get_submodule(one) for one in self.after]

    def check(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Raises BadInput for stages of several lists, or of a model with parameters outside its modules."""
        if plan.mesh.pp == 1:
            return
        if len(self.found) > 1:
            raise BadInput(
                f"mesh.pp = {plan.mesh.pp}: {type(model).__name__} has the lists of layers {' and '.join(self.found)}, "
                "stages are cut from one",
                hint="use tp or data ranks for it",
            )
        if self.loose:
            raise BadInput(
                f"mesh.pp = {plan.mesh.pp}: {self.loose[0]} of {type(model).__name__} is a parameter that no module "
                "before or after its layers holds, so every stage would have a copy",
                hint="put it into a module that forward calls",
            )

    def cut(self, model: nn.Module, stage: Stage) -> nn.Module:
        """A copy of the model that shares the parts of ``stage`` and runs only these."""
        name = self.found[0]
        zeros = {one: self.seen.shapes.get(one, ()) for one in self.before}
        return cut_stage(model, name, stage, zeros, self.after, tuples=f"{name}.0" in self.seen.tuples)


def find_parts(model: nn.Module, plan: ParallelPlan, example: Inputs | None) -> Parts:
    """The parts of a model: ``Parts()`` where it has modules of these names, else found in its own structure.

    Raises BadInput when the plan cuts the model and no list of equal layers is in it, or it cannot be run.
    """
    cut = max(plan.mesh.pp, plan.mesh.tp, plan.mesh.cp, plan.mesh.ep) > 1
    usual = Parts()
    if all(hasattr(model, name) for name in (usual.embed, usual.stack, usual.head)):
        return usual
    stacks = find_stacks(model)
    count = sum(len(cast("nn.ModuleList", model.get_submodule(name))) for name in stacks)
    told = sum(run.count for run in plan.layers)
    if not stacks or (not cut and (count != told or usual.count(model))):
        return usual  # data ranks need no parts; what needs them says so
    if count != told:
        raise BadInput(
            f"layers: the plan describes {told} layers, {type(model).__name__} has {count} in {' and '.join(stacks)}",
            hint=f"describe {count} layers, or name its parts: parallelize(..., parts=Parts(stack=...))",
        )
    if not cut and not apart(plan):
        return FoundParts(found=stacks)
    if any(one.is_meta for one in model.parameters()):
        raise BadInput(
            f"model: {type(model).__name__} is on the meta device; a cut found in its structure is proved on values",
            hint="build it on cpu, use data ranks (ZeRO 3), or name its parts and rules: parallelize(parts=, rules=)",
        )
    seen = observe(model, example_for(model, example))
    stacks = tuple(sorted(stacks, key=lambda name: seen.first.get(f"{name}.0", 0)))
    before, after, loose = find_ends(model, stacks, seen)
    return FoundParts(found=stacks, before=before, after=after, loose=loose, seen=seen)


def find_stacks(model: nn.Module) -> tuple[str, ...]:
    """Names of the lists of layers of one class: the outermost ones, but small ones beside a large one."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if any(not other or name.startswith(f"{other}.") for other in sizes):
            continue
        layers = list(module.children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1 and any(layers[0].children()):
            sizes[name] = sum(one.numel() for one in module.parameters())
    most = max(sizes.values(), default=0)
    return tuple(name for name, size in sizes.items() if size and size >= LARGE * most)


def find_ends(
    model: nn.Module, stacks: tuple[str, ...], seen: Seen
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Modules with parameters beside the lists of layers: (called before the first layer, called later), and the
    parameters that none of them has."""
    start = min(seen.first[f"{name}.0"] for name in stacks)
    owners = list(dict.fromkeys(name[:end] for stack in stacks for name, end in _prefixes(stack)))
    beside = [
        f"{owner}.{key}" if owner else key
        for owner in owners
        for key, child in model.get_submodule(owner).named_children()
        if any(True for _ in child.parameters())
    ]
    beside = [name for name in beside if name not in owners and name not in stacks]
    firsts = {name: min((at for one, at in seen.first.items() if below(one, name)), default=-1) for name in beside}
    before = [name for name in beside if 0 <= firsts[name] < start]
    after = [name for name in beside if firsts[name] > start]
    for name in beside:  # a table that is used under another of its names, as that of a decoder
        own = set(model.get_submodule(name).parameters())
        shared = any(own <= set(model.get_submodule(other).parameters()) for other in before)
        if shared and name not in before and isinstance(model.get_submodule(name), nn.Embedding):
            before.append(name)
            after = [other for other in after if other != name]
    named = (*before, *after, *stacks)
    loose = [one for one, _ in model.named_parameters() if not any(below(one, name) for name in named)]
    return tuple(before), tuple(after), tuple(loose)


def _prefixes(name: str) -> Iterator[tuple[str, int]]:
    """The lengths of the names of the modules that contain ``name``."""
    yield name, 0
    for end, letter in enumerate(name):
        if letter == ".":
            yield name, end


def below(name: str, module: str) -> bool:
    """True for a module itself and all in it."""
    return name == module or name.startswith(f"{module}.")


def example_for(model: nn.Module, given: Inputs | None) -> Inputs:
    """Some rows that the model can be run with. Raises BadInput for one of which that is not known."""
    device = next(model.parameters()).device
    if given is not None:
        return each(given, lambda one: one[:ROWS].to(device))
    config, kind = getattr(model, "config", None), getattr(model, "main_input_name", "")
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    draw = torch.Generator().manual_seed(0)
    if kind == "pixel_values" and isinstance(size := getattr(config, "image_size", None), int):
        return {kind: torch.randn(ROWS, getattr(config, "num_channels", 3), size, size, generator=draw).to(device)}
    if config is not None and kind == "input_ids" and tables:
        rows = getattr(config, "vocab_size", tables[0])
        ids = torch.randint(1, rows, (ROWS, SEQ), generator=draw).to(device)
        more = {"decoder_input_ids": ids.flip(1)} if getattr(config, "is_encoder_decoder", False) else {}
        return {kind: ids, **more}
    first = next((one for one in model.modules() if isinstance(one, nn.Embedding | nn.Linear)), None)
    if config is None and isinstance(first, nn.Embedding):
        return torch.randint(0, first.num_embeddings, (ROWS, SEQ), generator=draw).to(device)
    if config is None and isinstance(first, nn.Linear):
        return torch.randn(ROWS, SEQ, first.in_features, generator=draw).to(device)
    raise BadInput(f"model: what {type(model).__name__} takes is not known", hint=NEEDS_EXAMPLE)


class _Drops(TorchFunctionMode):
    def __init__(self, note: Callable[[float], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name, named = getattr(func, "__name__", ""), dict(kwargs or {})
        if "dropout" in name and not name.startswith("scaled"):
            rate = named.get("p", args[1] if len(args) > 1 else 0.0)
            if rate and named.get("training", named.get("train", args[2] if len(args) > 2 else True)):
                self._note(float(rate))
        if name == "scaled_dot_product_attention":
            rate = named.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if rate:
                self._note(float(rate))
        return func(*args, **named)


def observe(model: nn.Module, inputs: Inputs) -> Seen:
    """Run the model as it is, in its mode, and note what happens. Raises BadInput when it cannot be run."""
    seen, count, running = Seen(), iter(range(1 << 30)), list[str]()
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            running.append(name)
            seen.first.setdefault(name, next(count))
            first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
            seen.inputs.setdefault(name, id(first) if first is not None else 0)
            kept.append(first)  # so that no other tensor gets its identity

        return note

    def end(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: object, kwargs: object, output: object) -> None:
            running.pop()
            if isinstance(output, torch.Tensor):
                seen.shapes.setdefault(name, tuple(output.shape))
            if isinstance(output, tuple):
                seen.tuples.add(name)

        return note

    def dropped(rate: float) -> None:
        seen.drops.append(f"{running[-1] if running else type(model).__name__} ({rate:g})")

    kept: list[object] = []
    for name, module in model.named_modules():
        if not isinstance(module, Absent):
            handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
            handles.append(module.register_forward_hook(end(name), with_kwargs=True))
    try:
        with UserCode() as ran, torch.no_grad(), torch.random.fork_rng(devices=[]), _Drops(dropped):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if ran.failed:
        at, error = running[-1] if running else type(model).__name__, ran.take()
        raise BadInput(f"model: {at} cannot be run with an example: {error}", hint=NEEDS_EXAMPLE) from error
    return seen


@contextmanager
def evaluated(*models: nn.Module) -> Iterator[None]:
    """While open, nothing is dropped; afterwards modes are as before."""
    training = [(one, one.training) for model in models for one in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, was in training:
            module.training = was


@contextmanager
def evaluated_with_gradients(model: nn.Module) -> Iterator[None]:
    """As ``evaluated``; afterwards gradients are gone."""
    try:
        with evaluated(model), torch.enable_grad():
            yield
    finally:
        model.zero_grad(set_to_none=True)


def keep_no_cache(model: nn.Module) -> None:
    """Training needs no keys and values of earlier calls, which models of transformers keep where nothing says so."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) is True:
        cast("Any", config).use_cache = False
