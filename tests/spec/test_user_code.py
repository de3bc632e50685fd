"""What code of a user raises is caught, whatever it is; what ends the program or the task is not."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from rota.spec.user_code import UserCode


class Held:
    """Stands for an array that user code holds while it fails."""


@pytest.mark.parametrize("kind", [ValueError, SystemExit, MemoryError, RecursionError])
def test_an_error_is_handed_over_once(kind: type[BaseException]) -> None:
    with UserCode() as ran:
        raise kind("why")
    assert ran.failed
    error = ran.take()
    assert isinstance(error, kind) and str(error) == "why"
    assert not ran.failed
    with pytest.raises(RuntimeError, match="the code returned"):
        ran.take()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_an_interrupt_and_a_cancellation_pass(kind: type[BaseException]) -> None:
    ran = UserCode()
    with pytest.raises(kind), ran:
        raise kind
    assert not ran.failed


def test_what_failed_code_held_is_free_at_once() -> None:
    """An error kept by the frame that it names is freed by a garbage collection only: an array stayed for minutes."""

    def failing() -> tuple[str, weakref.ref[Held]]:
        held = Held()
        with UserCode() as ran:
            raise ValueError(id(held))
        return str(ran.take()), weakref.ref(held)

    gc.disable()
    try:
        _, held = failing()
        assert held() is None
    finally:
        gc.enable()
