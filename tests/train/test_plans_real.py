"""Every plan trains like one process: real processes, collectives of Gloo. ``ROTA_DEEP=1`` runs all plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train import equal

NAMES = (*equal.PLANS, *equal.CHANGES) if os.environ.get("ROTA_DEEP") else equal.QUICK


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> equal.Worlds:
    """Of the plans that were asked for: ``-k`` runs some of them."""
    asked = [item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)]
    return equal.Worlds(tmp_path_factory.mktemp("losses"), tuple(asked))


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_trains_like_one_process(
    name: str, worlds: equal.Worlds, record_property: Callable[[str, object], None]
) -> None:
    losses = worlds.losses(name)
    expected = equal.reference(equal.shape_of(name))
    worst = max(abs(got - want) for got, want in zip(losses, expected, strict=True))
    record_property("worst", worst)  # ``--junitxml`` tells it
    assert worst <= equal.TOLERANCE[equal.PLANS[name.split(" -> ")[0]].dtype.param]
    assert expected[-1] != expected[0]
