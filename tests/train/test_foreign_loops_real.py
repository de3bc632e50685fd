"""What training loops of others do: options by name, evaluation between steps, models built on the meta device.

Two real processes over Gloo against one process of plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rota.spec.errors import BadInput
from rota.train.apply import cross_entropy_sum, parallelize
from rota.train.batch import call, main_tensor
from rota.train.loop import restore_settings, settings
from rota.train.plan.model import Layer, Mesh, ParallelPlan, Stage
from tests.real.train.ranks import LONG_S, run_ranks
from tests.train import zoo

STEPS = 4
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
ZERO_1 = zoo.plan(Mesh(dp_replicate=2), Layer(zero=1))
FOURS = tuple(Stage(layers=(at, at + 1), chunk=at // 2, embed=at == 0, head=at == 3) for at in range(4))
PLANS: dict[str, ParallelPlan] = {
    **{name: zoo.PLANS[name] for name in ("dp", "fsdp", "tp", "pp")},
    "zero 1": ZERO_1,
    "zero 2": zoo.plan(Mesh(dp_shard=2), Layer(zero=2)),
    "on the host": zoo.plan(Mesh(dp_replicate=2), Layer(offload="optimizer_cpu")),
    "interleaved": replace(zoo.PLANS["pp"], stages=FOURS, schedule="interleaved"),
    "zero bubble": replace(zoo.PLANS["pp"], schedule="zb"),
}
CELLS = (*(("GPT-2, tied", plan) for plan in PLANS), ("Qwen2, tied", "tp"), ("Qwen2, tied", "fsdp"))
META = (("Qwen2, tied", "fsdp"), ("Qwen2, tied", "zero 2"), ("GPT-2, tied", "dp"), ("other names", "fsdp"))


def no_decay(name: str, parameter: torch.Tensor) -> dict[str, object]:
    """As most recipes have it: biases and norms do not decay; one weight has a rate of its own."""
    if parameter.dim() < 2:
        return {"weight_decay": 0.0}
    return {"lr": 1e-3} if "1." in name else {}


def right(output: object, targets: torch.Tensor) -> torch.Tensor:
    """Number of right tokens."""
    return (main_tensor(output).argmax(-1) == targets)[targets != -100].sum().float()


@cache
def reference(name: str) -> list[float]:
    """Losses before each step in evaluation mode, share of right tokens, and losses of the steps, of plain torch."""
    model, found = zoo.fresh(name), list[float]()
    groups: dict[str, dict[str, Any]] = {}
    for key, one in model.named_parameters():
        options = no_decay(key, one)
        groups.setdefault(str(options), {"params": [], **options})["params"].append(one)
    optimizer = ADAMW(list(groups.values()))
    for inputs, targets in zoo.batches(name, STEPS):
        tokens = (targets != -100).sum()
        with torch.no_grad():
            output = call(model.eval(), inputs)
            found += [float(cross_entropy_sum(output, targets) / tokens), float(right(output, targets) / tokens)]
        loss = cross_entropy_sum(call(model.train(), inputs), targets) / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def under(name: str, plan: str) -> list[float]:
    """The same under a plan."""
    trained = parallelize(zoo.fresh(name), PLANS[plan], optimizer=ADAMW, per_parameter=no_decay)
    found = list[float]()
    for inputs, targets in zoo.batches(name, STEPS):
        given = zoo.share(trained.rows, inputs), targets[trained.rows]
        found += [trained.evaluate(given), trained.evaluate(given, loss=right)]
        assert all(one.training for piece in trained.pieces for one in piece.modules())
        found.append(trained.step(given).loss)
    check_groups(trained.optimizer)
    trained.close()
    return found


def check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Every rank has the same groups, which come back from a checkpoint of any of them."""
    mine = json.loads(json.dumps(settings(optimizer)))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    assert [{one["rota_options"] for one in held} for held in every] == [
        {"{}", '{"lr": 0.001}', '{"weight_decay": 0.0}'}
    ] * len(every)
    for held in every:
        restore_settings(optimizer, held)
        assert json.loads(json.dumps(settings(optimizer))) == mine
    with pytest.raises(BadInput, match=r"per_parameter gave the options \[''\], now"):
        restore_settings(optimizer, [{"lr": 1.0}])


def losses_of_meta(name: str, plan: str, *, meta: bool) -> list[float]:
    """Losses of a model that was built without values, or whose modules were drawn in the same order."""
    with torch.device("meta"):
        model = zoo.MODELS[name]().train()
    torch.manual_seed(3)
    if not meta:
        model.to_empty(device="cpu")
        draw = getattr(model, "_init_weights", None) or (lambda one: one.reset_parameters())
        with torch.no_grad():
            for part in model.modules():
                if any(True for _ in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
                    draw(part)
        getattr(model, "tie_weights", lambda: None)()  # to the first of the names
    trained = parallelize(model, PLANS[plan], optimizer=ADAMW)
    if meta and plan == "fsdp":
        held = sum(one.to_local().numel() for one in model.parameters())  # type: ignore[operator]
        assert held <= 0.6 * sum(one.numel() for one in model.parameters())
    return [trained.step(zoo.share(trained.rows, x), y[trained.rows]).loss for x, y in zoo.batches(name, STEPS)]


class Unset(nn.Module):
    """Holds a weight that its initialisation forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(13, 6), nn.Parameter(torch.ones(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * self.scale


def refusals() -> Iterator[tuple[str, Callable[[], object]]]:
    """What is refused, and the text of it."""
    with torch.device("meta"):
        llama, unset = zoo.MODELS["Llama"](), Unset()
    make = partial(parallelize, optimizer=ADAMW)
    one = replace(
        PLANS["fsdp"], layers=(Layer(count=1, zero=3),), stages=(Stage(layers=(0, 1), embed=True, head=True),)
    )
    for plan in ("tp", "pp"):
        yield "LlamaForCausalLM is on the meta device; a cut found", partial(make, llama, PLANS[plan])
    yield "model: Unset is on the meta device and has no reset_parameters", partial(make, unset, one)
    yield r"scale is on the meta device and its init", partial(make, unset, one, initial=lambda _: None)
    net = zoo.MODELS["other names"]()
    for text, options in (("AdamW has no option 'decay'", {"decay": 1}), ("not JSON serializable", {"lr": net})):
        yield text, partial(make, net, PLANS["dp"], per_parameter=lambda *_, given=options: given)


def _rank(_rank: int, _size: int) -> dict[str, Any]:
    found: dict[str, Any] = {" under ".join(cell): (under(*cell), reference(cell[0])) for cell in CELLS}
    for name, plan in META:
        given = [losses_of_meta(name, plan, meta=meta) for meta in (True, False)]
        found[f"meta {name} under {plan}"] = given
    for text, call_it in refusals():
        with pytest.raises(BadInput, match=text):
            call_it()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two measured."""
    return run_ranks(_rank, 2, home=tmp_path_factory.mktemp("loops"), limit_s=LONG_S)[0]


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=" under ".join)
def test_options_by_name_and_evaluation_are_those_of_one_process(cell: tuple[str, str], found: dict[str, Any]) -> None:
    given, expected = found[" under ".join(cell)]
    assert given == pytest.approx(expected, abs=1e-5)


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", META, ids=" under ".join)
def test_a_model_on_the_meta_device_trains_like_one_with_values(cell: tuple[str, str], found: dict[str, Any]) -> None:
    meta, whole = found[f"meta {' under '.join(cell)}"]
    assert meta == pytest.approx(whole, abs=1e-6)
    assert meta[-1] != meta[0]
