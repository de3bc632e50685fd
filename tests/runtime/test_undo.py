"""Undo of what was begun."""

from __future__ import annotations

import pytest

from rota.runtime.undo import undone_if_raised


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_a_block_that_raises_is_undone_once_and_its_error_goes_on(error: BaseException) -> None:
    undone = list[str]()
    with pytest.raises(type(error)) as raised, undone_if_raised(undone.append, "it"):
        raise error
    assert raised.value is error and undone == ["it"]


def test_a_block_that_returns_is_not_undone() -> None:
    undone = list[str]()

    def work() -> str:
        with undone_if_raised(undone.append, "it"):
            return "done"

    assert (work(), undone) == ("done", [])
