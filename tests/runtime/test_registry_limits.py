"""A registry that is there and does not answer: every call has its limit, and who waits is asked each second."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.runtime.redis.client import RedisClient, RegistryAddress
from rota.spec.errors import RegistryUnavailable


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[RegistryAddress]:
    """A socket that takes connections and never reads, as that of a stopped server."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(8)
        yield RegistryAddress(path=str(tmp_path / "s"))


@pytest.mark.parametrize("size", [10, 8 << 20], ids=["without an answer", "that is not even read"])
def test_a_call_ends_within_its_limit_and_says_why(silent: RegistryAddress, size: int) -> None:
    client, began_s = RedisClient(silent, timeout_s=2.0), time.monotonic()
    with pytest.raises(RegistryUnavailable, match="timed out"):
        client.call("ECHO", b"x" * size)
    assert 1.9 < time.monotonic() - began_s < 8
    client.close()


def test_who_waits_for_an_answer_is_asked_each_second_and_may_end_the_wait(silent: RegistryAddress) -> None:
    asked = list[float]()

    def look() -> None:
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise RegistryUnavailable("it is stopped")

    client, began_s = RedisClient(silent, timeout_s=60.0, silent=look), time.monotonic()
    with pytest.raises(RegistryUnavailable, match="it is stopped"):
        client.call("PING")
    assert [round(at - began_s) >= n for n, at in enumerate(asked, 1)] == [True, True]
    client.close()
