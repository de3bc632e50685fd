"""Arguments split and results merge as declared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.job.rpc.dispatch import coordinates, merge, of_items, split
from rota.spec.dispatch import Concat, Mean, Rank, Same, Shard, Sum
from rota.spec.errors import BadInput

DP2 = (("dp", 2),)


@given(
    mesh=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    items=st.integers(1, 40),
    where=st.integers(0, 2),
)
def test_a_batch_through_an_identity_operation_comes_back_equal(mesh: list[int], items: int, where: int) -> None:
    axes = tuple(zip(("dp", "tp", "pp"), mesh, strict=False))
    axis = axes[where % len(axes)][0]
    world = int(np.prod(mesh))
    batch = {"x": np.arange(items * 2).reshape(items, 2), "text": [str(i) for i in range(items)], "lr": 0.1}
    parts = split(batch, Shard(axis, pad="repeat"), mesh=axes, world=world)
    assert len({part.size for part in parts.values()}) == 1, "every member gets the same size"
    back = merge({rank: part.value for rank, part in parts.items()}, parts, Concat(axis), axis=axis, mesh=axes)
    assert np.array_equal(back["x"], batch["x"])
    assert back["text"] == batch["text"]
    assert back["lr"] == 0.1


def test_members_that_differ_in_other_axes_get_the_same_slice() -> None:
    mesh = (("dp", 2), ("tp", 2))
    parts = split([1, 2, 3, 4], Shard("dp"), mesh=mesh, world=4)
    assert [parts[rank].value for rank in range(4)] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert coordinates(mesh, 3) == {"dp": 1, "tp": 1}


def test_mean_is_weighted_by_the_real_items_and_not_by_padding() -> None:
    parts = split([1.0, 2.0, 9.0], Shard("dp", pad="repeat"), mesh=DP2, world=2)
    assert [part.value for part in parts.values()] == [[1.0, 2.0], [9.0, 9.0]]
    results = {rank: {"loss": sum(part.value) / len(part.value)} for rank, part in parts.items()}
    assert merge(results, parts, Mean, axis="dp", mesh=DP2) == {"loss": pytest.approx((1 + 2 + 9) / 3)}


def test_sum_counts_each_slice_once() -> None:
    mesh = (("dp", 2), ("tp", 2))
    parts = split([1, 2], Shard("dp"), mesh=mesh, world=4)
    assert merge({r: sum(p.value) for r, p in parts.items()}, parts, Sum, axis="dp", mesh=mesh) == 3


def test_rank_sends_to_one_and_takes_from_one() -> None:
    assert list(split("x", Rank(1), mesh=DP2, world=2)) == [1]
    parts = split("x", Same, mesh=DP2, world=2)
    assert merge({0: "a", 1: "b"}, parts, Rank(1), axis=None, mesh=DP2) == "b"


def test_drop_leaves_the_rest_out() -> None:
    parts = split([1, 2, 3, 4, 5], Shard("dp", pad="drop"), mesh=DP2, world=2)
    assert [part.value for part in parts.values()] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("batch", "rule", "words"),
    [
        ([1, 2, 3], Shard("dp"), "3 items do not divide over 2 members"),
        ([1, 2], Shard("tp"), "no axis 'tp'; its axes are dp"),
        ({"a": [1, 2], "b": np.zeros(3)}, Shard("dp"), "batch.a has 2 items but batch.b has 3"),
        (7, Shard("dp"), "int cannot be cut along dim 0"),
        ([], Shard("dp"), "the batch is empty"),
        ([1], Rank(2), "the ranks of this role are 0 to 1"),
    ],
)
def test_what_cannot_be_split_says_why(batch: object, rule: Shard | Rank, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        split(batch, rule, mesh=DP2, world=2)


def test_what_each_item_gave_comes_in_order_or_as_mean_or_sum() -> None:
    found = [{"r": 1.0, "x": np.ones(2)}, {"r": 3.0, "x": np.zeros(2)}]
    assert of_items(found, Concat()) == found
    assert of_items(found, Mean)["r"] == 2.0 and of_items(found, Mean)["x"].tolist() == [0.5, 0.5]
    assert of_items([1, 2, 4], Sum) == 7
    assert of_items([], Concat()) == []
    with pytest.raises(BadInput, match="needs at least one; send a batch"):
        of_items([], Sum)


def test_tensors_split_and_join_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    parts = split(torch.arange(5), Shard("dp", pad="repeat"), mesh=DP2, world=2)
    assert parts[1].value.tolist() == [3, 4, 4]
    assert merge({r: p.value for r, p in parts.items()}, parts, Concat("dp"), axis="dp", mesh=DP2).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
