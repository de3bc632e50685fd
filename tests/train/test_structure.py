"""The structure of a model that was not written for plans, found without processes."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from rota.spec.errors import BadInput
from rota.train.batch import main_tensor
from rota.train.loop import world
from rota.train.parallel.mesh import PlanMesh
from rota.train.structure.parts import FoundParts, example_for, find_parts, find_stacks, observe
from rota.train.structure.proof import Proof, Trial, check_pieces, prove
from rota.train.structure.rules import divide_counts, find_splits, split_found
from rota.train.structure.stages import Reached
from tests.train import zoo

TP, PP = zoo.PLANS["tp"], zoo.PLANS["pp"]


class Pair(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.heads = nn.Dropout(rate), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.heads(self.c(self.b(self.a(x)))))


class Model(nn.Module):
    """Four layers, and a small list beside them."""

    def __init__(self, rate: float = 0.0, odd: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.deep = nn.ModuleDict({"list": nn.ModuleList(Pair(rate) for _ in range(4))})
        self.tail = nn.Sequential(nn.Sequential(nn.Linear(8, 2)), nn.Sequential(nn.Linear(2, 3)))
        self.odd = nn.Parameter(torch.ones(8)) if odd else 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.odd
        for layer in cast("nn.ModuleList", self.deep["list"]):
            x = layer(x)
        return self.tail(x)


def found(model: nn.Module) -> FoundParts:
    parts = find_parts(model, TP, None)
    assert isinstance(parts, FoundParts)
    return parts


def test_the_large_list_of_equal_layers_is_the_stack_and_what_is_called_around_it_the_ends() -> None:
    parts = found(Model())
    assert (parts.found, parts.before, parts.after, parts.loose) == (("deep.list",), ("table",), ("tail",), ())


def test_linears_without_known_names_are_columns_and_rows_in_the_order_of_calls() -> None:
    model = zoo.Net()
    parts = found(model)
    splits = find_splits(model.get_submodule("body.steps.0"), "body.steps.0", {}, parts)
    assert {name: (split.enters, split.sums) for name, split in splits.items()} == {
        "first": (True, False),
        "second": (True, False),
        "third": (False, True),
    }


def test_names_that_say_a_role_need_no_order() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    splits = find_splits(block, "0", {}, FoundParts(found=("",)))
    assert set(splits) == {"linear1", "linear2"}, "attention that does not call its linears stays whole"


def test_an_odd_chain_of_linears_is_refused_with_its_names() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Chain()
    with pytest.raises(BadInput, match=r"the linears of blocks\.2 \(0\) do not come in pairs"):
        find_splits(model.blocks[2], "blocks.2", {}, found(model))


def test_dropout_is_refused_by_its_module_and_only_in_training() -> None:
    model = Model(0.25)
    parts = found(model)
    with pytest.raises(BadInput, match=r"deep\.list\.0\.drop \(0\.25\) drops values in training"):
        split_found(model, parts, TP, cast("PlanMesh", _Tensor()))
    assert not found(model.eval()).seen.drops


class _Tensor:
    def axis(self, name: str) -> torch.Tensor:
        return torch.zeros(2)


def test_a_parameter_outside_all_modules_has_no_stage() -> None:
    with pytest.raises(BadInput, match="odd of Model is a parameter that no module before or after its layers holds"):
        found(Model(odd=True)).check(Model(odd=True), PP)


def test_a_plan_of_another_number_of_layers_is_refused_with_both() -> None:
    model = Model()
    del model.deep["list"][3]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(BadInput, match=r"the plan describes 4 layers, Model has 3 in deep\.list"):
        find_parts(model, TP, None)


def test_heads_that_do_not_divide_are_refused_with_their_number() -> None:
    block = zoo.Step()
    vars(block)["num_heads"] = 3
    split = find_splits(nn.TransformerEncoderLayer(8, 2, 16), "0", {}, FoundParts(found=("",)))["linear1"]
    with pytest.raises(BadInput, match=r"layers\.0\.mlp has num_heads 3, which does not divide"):
        divide_counts(block, "layers.0.mlp.up", split, nn.Linear(8, 16), 2)


def test_stages_one_after_the_other_give_what_the_whole_model_gives() -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, 11, (3, 5))
    first, second = (found(model).cut(model, stage) for stage in PP.stages)
    assert torch.equal(second(first(ids), stage_inputs=ids), model(ids))
    names = {name for name, _ in second.named_parameters()}
    assert "tail.1.0.bias" in names and "table.weight" not in names and "deep.list.1.a.weight" not in names
    assert len(list(model.named_parameters())) == len(names | {name for name, _ in first.named_parameters()})


class Fused(nn.Module):
    """Queries, keys and values by one linear, split by the width of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(8, -1)
        return q * k + v


class Summed(nn.Module):
    """A model that adds what its layers give to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers, self.head = (
            nn.Embedding(11, 8),
            nn.ModuleList(Fused() for _ in range(4)),
            nn.Linear(8, 3),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_a_module_that_needs_the_whole_width_is_named_with_what_to_change() -> None:
    model, ids = Summed(), torch.randint(0, 11, (2, 5))
    trial = Trial(None, model(ids).detach(), torch.ones(2, 5, 3), {})
    cast("Fused", model.layers[2]).qkv = nn.Linear(8, 12)  # what one of two tensor ranks has
    with world(), pytest.raises(BadInput) as error:
        check_pieces([model], Proof(ids, [trial], ("layers",)), TP, cast("PlanMesh", _Tensor()))
    assert str(error.value).startswith(
        "mesh: layers.2 (Fused) of Summed cannot be run when it is split: not enough values"
    )
    assert "take the number of heads or the width from the tensor" in str(error.value)


def test_a_sum_between_layers_is_refused_with_where_it_belongs() -> None:
    model = Summed()
    with pytest.raises(
        BadInput, match=r"Summed gives another output in stages of layers: .* computes between"
    ) as error:
        prove(model, found(model), PP, None, cast("PlanMesh", _Tensor()))
    assert "let each layer compute that in its own forward, as a sum x + f(x)" in error.value.hint


def test_a_model_whose_input_is_not_known_asks_for_an_example() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Conv1d(4, 4, 1))
    with pytest.raises(BadInput, match="what Sequential takes is not known"):
        example_for(model, None)
    given = example_for(model, torch.zeros(5, 3, 7))
    assert isinstance(given, torch.Tensor) and given.shape == (2, 3, 7)


def test_what_cannot_be_run_is_refused_with_the_module_that_failed() -> None:
    with pytest.raises(BadInput, match="model: 0 cannot be run with an example"):
        observe(nn.Sequential(nn.Linear(3, 3)), torch.zeros(2, 5))


def test_lists_of_one_class_only_are_stacks() -> None:
    mixed = nn.ModuleDict({"list": nn.ModuleList([Pair(), nn.Sequential(nn.Linear(8, 8))])})
    assert find_stacks(mixed) == ()
    assert find_stacks(Model()) == ("deep.list",)


def test_the_main_tensor_is_the_logits_or_the_first_and_else_refused() -> None:
    assert main_tensor((torch.ones(1), None)).item() == 1
    with pytest.raises(BadInput, match="gives str"):
        main_tensor("text")
    assert str(Reached(torch.ones(1))) == ""


def test_the_page_of_models_has_the_cells_that_are_run() -> None:
    assert zoo.PAGE.read_text() == zoo.page(), "run python -m tests.train.zoo --write"
