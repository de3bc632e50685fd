"""Tables of the parameter server against torch.optim, and the life of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rota.train.ps.table import (
    Dense,
    ParameterTable,
    RowOptimizer,
    TableFull,
    TableSpec,
    dense_range,
    first_rows,
    owners,
)


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_dense_and_rows_update_as_torch_does(kind: str) -> None:
    torch = pytest.importorskip("torch")
    optimizer = RowOptimizer(kind=kind, lr=0.05)  # type: ignore[arg-type]
    table = ParameterTable(TableSpec(name="t", dim=4, optimizer=optimizer, scale=0.5))
    start = table.pull(ids(3, 9))
    dense = Dense(start, optimizer)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    theirs = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[kind]([weight], lr=0.05)
    for step in range(6):
        grads = np.random.default_rng(step).normal(size=(2, 4)).astype(np.float32)
        weight.grad = torch.from_numpy(grads)
        theirs.step()
        dense.apply(grads)
        table.push(ids(9, 3, 9), np.stack([grads[1] - 1, grads[0], np.ones(4, np.float32)]))
    np.testing.assert_allclose(dense.weights, weight.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(table.pull(ids(3, 9)), weight.detach().numpy(), atol=1e-6)


def test_ftrl_keeps_small_weights_at_zero() -> None:
    table = ParameterTable(TableSpec(name="t", dim=1, optimizer=RowOptimizer(kind="ftrl", lr=0.5, l1=2.0), scale=0.0))
    table.push(ids(1, 2), np.array([[1.0], [5.0]], np.float32))
    # z = 5, n = 25: w = -(5 - 2) / ((1 + 5) / 0.5)
    np.testing.assert_allclose(table.pull(ids(1, 2)), [[0.0], [-0.25]])


def test_rows_begin_the_same_anywhere_and_fill_their_range_evenly() -> None:
    spec = TableSpec(name="t", dim=50, scale=0.2, seed=4)
    some, other = first_rows(spec, np.arange(1000)), first_rows(spec, ids(999, 5))
    assert np.array_equal(some[[999, 5]], other)
    assert abs(some.mean()) < 0.002 and abs(some.std() - 0.2 / 3**0.5) < 0.002
    assert len(np.unique(some)) > 49_000 and np.abs(some).max() <= 0.2
    assert not np.array_equal(first_rows(TableSpec(name="u", dim=50, scale=0.2, seed=4), ids(5)), some[5:6])


def test_a_row_is_trained_from_its_min_count_on_and_forgotten_after_its_ttl() -> None:
    table = ParameterTable(TableSpec(name="t", dim=1, optimizer=RowOptimizer(lr=1.0), min_count=2, ttl_steps=3))
    start, one = table.pull(ids(7)), np.ones((1, 1), np.float32)
    table.push(ids(7), one)
    assert np.array_equal(table.pull(ids(7)), start)
    table.push(ids(7), one)
    assert np.array_equal(table.pull(ids(7)), start - 1)
    for _ in range(4):
        table.push(ids(), np.zeros((0, 1), np.float32))
    assert len(table) == 0
    assert np.array_equal(table.pull(ids(7)), start)


def test_a_full_table_refuses_by_name_and_changes_nothing() -> None:
    table = ParameterTable(TableSpec(name="clicks", dim=2, bytes_max=100))
    table.pull(ids(1, 2, 3))
    with pytest.raises(TableFull, match="'clicks': 1 more rows need 128 bytes, bytes_max is 100"):
        table.pull(ids(1, 4))
    assert (len(table), table.bytes) == (3, 96)


def test_a_snapshot_restores_to_the_same_future() -> None:
    table = ParameterTable(TableSpec(name="t", dim=3, optimizer=RowOptimizer(kind="adam", lr=0.1)))
    rng = np.random.default_rng(0)
    table.push(rng.integers(0, 50, 40), rng.normal(size=(40, 3)).astype("f4"))
    again = ParameterTable(table.spec)
    again.restore(table.snapshot())
    more, grads = rng.integers(0, 60, 40), rng.normal(size=(40, 3)).astype("f4")
    for one in (table, again):
        one.push(more, grads)
    assert np.array_equal(table.pull(np.arange(60)), again.pull(np.arange(60)))


def test_servers_share_ids_evenly_and_a_new_server_takes_from_neighbours_only() -> None:
    many = np.arange(100_000)
    four = owners(many, 4)
    assert np.bincount(four).min() > 24_000
    assert (owners(many, 5) != four).mean() < 0.55
    assert [dense_range(10, 3, server) for server in range(3)] == [(0, 3), (3, 6), (6, 10)]
