"""Models that are not the built-in ones train under a plan like one process: two real processes over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from rota.spec.errors import BadInput
from rota.train.apply import Parallel, cross_entropy_sum, parallelize
from rota.train.checkpoint import Checkpoints
from rota.train.parallel.tensor_parallel import Rules
from rota.train.plan.model import Layer, Mesh, ParallelPlan, Stage, data_parallel
from tests.real.train.ranks import LONG_S, run_ranks

WORLD, STEPS, BATCH, CLIP = 2, 6, 12, 0.5
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
RULES: Rules = {"mlp": "enter", "mlp.up": "column", "mlp.down": "row"}


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Words(nn.Module):
    """Of 13 words; ``tied``: one table is embedding and head; ``same``: one layer is in all places."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, same: bool = False) -> None:
        super().__init__()
        layers = [Block(6)] * 4 if same else [Block(6) for _ in range(4)]
        self.embed, self.layers = nn.Embedding(13, 6), nn.Sequential(*layers)
        self.head = nn.Linear(6, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:  # all of the second stage
            for part in (*list(self.layers)[2:], self.head):
                part.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


class Whole(nn.Module):
    """Has nothing that a plan knows by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(13, 5), nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 13))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(self.table(ids))


class Named(nn.Module):
    """Its ``layers`` are no list; two of them share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"table": nn.Embedding(13, 13), "one": nn.Linear(13, 13), "two": nn.Linear(13, 13)})
        self.layers["two"].weight = self.layers["one"].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers["two"](torch.tanh(self.layers["one"](self.layers["table"](ids))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    build: Callable[[], nn.Module]
    plan: ParallelPlan
    then: ParallelPlan | None = None
    """The plan under which the second half is trained, from a checkpoint."""


def data(zero: int) -> ParallelPlan:
    return data_parallel(layers=4, dp=2, micro_batch=3, micro_batches=2, zero=zero)


HALVES = (Stage(layers=(0, 2), embed=True), Stage(layers=(2, 4), head=True))
STAGES = replace(data(0), mesh=Mesh(pp=2), stages=HALVES, schedule="1f1b", micro_batches=3, micro_batch=4)
SPLIT = Layer(tp=2)
TENSOR = replace(data(0), mesh=Mesh(tp=2), layers=(replace(SPLIT, count=4),), embed=SPLIT, head=SPLIT, micro_batch=6)
TIED, FROZEN, SAME = partial(Words, tied=True), partial(Words, frozen=True), partial(Words, same=True)
CASES = {
    "a whole, ddp": Case(build=Whole, plan=data(0)),
    "a whole, zero 1": Case(build=Whole, plan=data(1)),
    "a whole, zero 3": Case(build=Whole, plan=replace(data(3), embed=Layer())),
    "layers by name, two tied, zero 1": Case(build=Named, plan=data(1)),
    "layers in a Sequential, stages": Case(build=Words, plan=STAGES),
    "tied, stages": Case(build=TIED, plan=STAGES),
    "tied, tp": Case(build=TIED, plan=TENSOR),
    "tied, stages -> zero 3": Case(build=TIED, plan=STAGES, then=data(3)),
    "tied, zero 1 -> stages": Case(build=TIED, plan=data(1), then=STAGES),
    "tied, tp -> stages": Case(build=TIED, plan=TENSOR, then=STAGES),
    "one layer four times, stages": Case(build=SAME, plan=STAGES),
    "one layer four times, zero 3 -> ddp, full recompute": Case(
        build=SAME, plan=data(3), then=replace(data(0), layers=(Layer(count=4, recompute="full"),))
    ),
    "a frozen stage": Case(build=FROZEN, plan=STAGES),
    "a frozen stage -> zero 1": Case(build=FROZEN, plan=STAGES, then=data(1)),
}  # fmt: skip


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 13, (BATCH, 9), generator=draw)
        yield ids[:, :-1], ids[:, 1:]


def reference(build: Callable[[], nn.Module]) -> list[float]:
    torch.manual_seed(0)
    model = build()
    optimizer, losses = ADAMW([one for one in model.parameters() if one.requires_grad]), list[float]()
    for inputs, targets in batches(STEPS):
        loss = cross_entropy_sum(model(inputs), targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def begin(case: Case, plan: ParallelPlan, seed: int) -> Parallel:
    torch.manual_seed(seed)
    return parallelize(case.build(), plan, optimizer=ADAMW, clip_norm=CLIP, rules=RULES)


def losses_of(case: Case, folder: Path) -> list[float]:
    losses, trained = list[float](), begin(case, case.plan, 0)
    for step, (inputs, targets) in enumerate(batches(STEPS)):
        if case.then and step == STEPS // 2:
            with Checkpoints(folder) as saves:
                saves.save(trained.state_dict(), step=step, extra={}, wait=True)
                found, trained = saves.find(), begin(case, case.then, 7)
                assert found is not None
                saves.load(found, trained.state_dict())
        losses.append(trained.step(trained.share(inputs), trained.share(targets)).loss)
    return losses


def refuse_what_is_split_apart() -> None:
    with pytest.raises(BadInput, match=r"embed\.weight and head\.weight are one parameter, this plan splits them"):
        parallelize(TIED(), replace(TENSOR, head=Layer()), optimizer=ADAMW, rules=RULES)
    split = replace(TENSOR, layers=(replace(SPLIT, count=4, sp=True),))
    trained = parallelize(Words(), split, optimizer=ADAMW, rules=RULES)
    with pytest.raises(BadInput, match="9 tokens a sequence do not divide by tp 2"):
        trained.step((torch.zeros(BATCH, 9, dtype=torch.long),) * 2)


def _rank(_rank: int, _size: int, folder: str) -> dict[str, list[float]]:
    refuse_what_is_split_apart()
    return {name: losses_of(case, Path(folder, name)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("models")
    return run_ranks(_rank, WORLD, str(folder), home=folder, limit_s=LONG_S)[0]


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_ones_own_trains_like_one_process(name: str, losses: dict[str, list[float]]) -> None:
    expected = reference(CASES[name].build)
    assert losses[name] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] != expected[0]
