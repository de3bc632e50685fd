"""State goes through names and JSON and comes back equal."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.job.checkpoint import flatten, rebuild, tensors_of
from rota.spec.errors import BadInput

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
arrays = st.lists(st.floats(-1, 1), max_size=4).map(np.array)
states = st.recursive(
    plain | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 5), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def test_the_tensors_of_a_state_are_named_by_the_way_to_them() -> None:
    w, m = np.ones(2), np.zeros(1)
    found = tensors_of({"net": {"0.weight": w}, "opt": {"state": {0: {"m": m}}, "lr": 0.1}, "rest": (1, [m])})
    assert list(found) == ["net.0.weight", "opt.state.0.m", "rest.1.0"]
    assert found["net.0.weight"] is w and tensors_of(3) == {}


@pytest.mark.slow
@given(states)
def test_state_comes_back_equal_with_its_types_and_keys(state: object) -> None:
    outline, tensors = flatten(state)
    assert same(rebuild(json.loads(json.dumps(outline)), tensors), state)


@pytest.mark.slow
def test_the_state_of_an_optimiser_comes_back_and_goes_on_equally() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    outline, tensors = flatten({"net": net.state_dict(), "opt": optimiser.state_dict(), "rng": torch.get_rng_state()})
    back = rebuild(json.loads(json.dumps(outline)), tensors)
    twin = torch.nn.Linear(3, 2)
    other = torch.optim.Adam(twin.parameters(), lr=0.1)
    twin.load_state_dict(back["net"])
    other.load_state_dict(back["opt"])
    torch.set_rng_state(back["rng"])
    for each, step in ((net, optimiser), (twin, other)):
        step.zero_grad()
        each(torch.ones(1, 3)).sum().backward()
        step.step()
    assert torch.equal(net.weight, twin.weight)


def test_restored_tensors_belong_to_their_owner() -> None:
    kept = np.zeros(3)
    outline, tensors = flatten({"x": kept})
    back = rebuild(outline, tensors)
    back["x"] += 1
    assert kept.sum() == 0


@pytest.mark.parametrize(
    ("state", "words"),
    [({"f": object()}, "state.f is a object"), ({"a": {(1, 2): 3}}, "state.a has a key of type tuple")],
)
def test_what_is_no_state_is_named_by_its_path(state: object, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        flatten(state)
