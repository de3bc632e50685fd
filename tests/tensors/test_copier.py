"""Large copies by several threads: every byte arrives, and nobody writes any more when the copy has ended."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from rota.spec.errors import BadInput
from rota.tensors.writer import Copier, threads_wanted

MIB = 1 << 20


def random_bytes(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(size).bytes(size), np.uint8)


class Watched(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that calls ``seen`` with the name of the thread that is about to write to it."""

    seen: Any = None

    def __array_finalize__(self, parent: Any) -> None:
        self.seen = getattr(parent, "seen", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.seen(threading.current_thread())
        super().__setitem__(key, value)


def watched(size: int, seen: Any) -> Watched:
    memory = np.zeros(size, np.uint8).view(Watched)
    memory.seen = seen
    return memory


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_bytes_of_tensors_of_any_size_arrive(threads: int) -> None:
    sizes = [0, 1, 1000, 3 * MIB + 1, 300 << 10, 6 * MIB, 7]
    sources = [random_bytes(size) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    Copier(threads).copy(list(zip(targets, sources, strict=True)))
    assert all(np.array_equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_a_large_copy_is_shared_and_a_small_one_is_not() -> None:
    together = threading.Barrier(2, timeout=60)
    seen: dict[threading.Thread, int] = {}

    def first_of_each(thread: threading.Thread) -> None:
        if thread not in seen:
            seen[thread] = together.wait()

    copier = Copier(2)
    copier.copy([(watched(12 * MIB, first_of_each), random_bytes(12 * MIB))])
    assert len(seen) == 2
    small: set[threading.Thread] = set()
    copier.copy([(watched(4 * MIB, small.add), random_bytes(4 * MIB))])
    assert small == {threading.current_thread()}


def test_what_a_thread_raises_is_raised_by_the_copy() -> None:
    here, raised = threading.current_thread(), threading.Event()

    def fail_elsewhere(thread: threading.Thread) -> None:
        if thread is here:
            assert raised.wait(60)
        else:
            raised.set()
            raise MemoryError("no slice")

    with pytest.raises(MemoryError, match="no slice"):
        Copier(2).copy([(watched(12 * MIB, fail_elsewhere), random_bytes(12 * MIB))])


def test_an_interrupt_waits_for_those_who_still_write() -> None:
    here, begun, interrupted = threading.current_thread(), threading.Event(), threading.Event()
    ended: list[threading.Thread] = []

    def interrupt(thread: threading.Thread) -> None:
        if thread is here:
            assert begun.wait(60)
            interrupted.set()
            raise KeyboardInterrupt
        begun.set()
        assert interrupted.wait(60)
        random_bytes(MIB)
        ended.append(thread)

    with pytest.raises(KeyboardInterrupt):
        Copier(2).copy([(watched(12 * MIB, interrupt), random_bytes(12 * MIB))])
    assert ended


def test_a_copier_that_was_closed_copies_alone() -> None:
    copier, target, source = Copier(4), np.zeros(9 * MIB, np.uint8), random_bytes(9 * MIB)
    copier.close()
    copier.copy([(target, source)])
    assert np.array_equal(target, source)


@pytest.mark.parametrize("given", ["0", "65", "-1", "two", "1.5"])
def test_a_number_of_threads_that_is_none_is_named(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_TENSORS_COPY_THREADS", given)
    with pytest.raises(BadInput, match=rf"ROTA_TENSORS_COPY_THREADS='{given}': a number of threads, 1 to 64"):
        threads_wanted()


def test_no_more_threads_are_wanted_than_cores_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROTA_TENSORS_COPY_THREADS", raising=False)
    for cores, threads in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr("rota.tensors.writer.cores_allowed", lambda cores=cores: cores)
        assert threads_wanted() == threads
