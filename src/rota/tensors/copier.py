"""Copy bytes into shared memory, many at once by several threads: one core does not fill the width of the memory."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, TypeAlias

import numpy as np

from rota.runtime import environ
from rota.runtime.devices import cores_allowed
from rota.spec.errors import BadInput
from rota.tensors import faults

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
THREADS: Final = "ROTA_TENSORS_COPY_THREADS"
_THREADS_DEFAULT_MAX: Final = 4
_THREADS_MAX: Final = 64
_SHARED_BYTES_MIN: Final = 8 << 20
_PIECE_BYTES: Final = 2 << 20
_SMALL_BYTES: Final = 256 << 10


def threads_wanted() -> int:
    """``ROTA_TENSORS_COPY_THREADS``, else one a core that this process may use, at most four. Raises BadInput."""
    given = environ.get(THREADS)
    if not given:
        return min(_THREADS_DEFAULT_MAX, cores_allowed())
    if not given.isdecimal() or not 1 <= int(given) <= _THREADS_MAX:
        raise BadInput(f"{THREADS}={given!r}: a number of threads, 1 to {_THREADS_MAX}")
    return int(given)


class Copier:
    """The copies of one plane. At most ``threads``, with the caller's own, share the pieces of one."""

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(self._helpers, 1), "rota-tensors-copy")  # a thread starts at its first use

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy into each target its source, of the same length. Afterwards, whatever was raised, nobody writes there.

        Threads take pieces as they come, so one that gets no core costs nothing but the piece that it has begun.
        """
        shared = self._helpers and sum(source.nbytes for _, source in pairs) >= _SHARED_BYTES_MIN
        pieces = deque[tuple[Bytes, Bytes]]()
        for target, source in pairs:
            if shared and source.nbytes >= _SMALL_BYTES:  # below, a turn of the interpreter costs more than the copy
                for at in range(0, source.nbytes, _PIECE_BYTES):
                    pieces.append((target[at : at + _PIECE_BYTES], source[at : at + _PIECE_BYTES]))
            else:
                target[:] = source
        helpers = [Future[None]() for _ in range(min(self._helpers, len(pieces) - 1))]
        try:
            with contextlib.suppress(RuntimeError):  # no thread to be had, or the process ends: it goes without
                for helper in helpers:
                    self._pool.submit(_help, helper, pieces)
            _drain(pieces)
        finally:
            pieces.clear()
            _settle(helpers)
        for helper in helpers:
            if not helper.cancelled():
                helper.result()

    def close(self) -> None:
        """End the threads; a copy still works afterwards, alone."""
        self._pool.shutdown(wait=False)


def _drain(pieces: deque[tuple[Bytes, Bytes]]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        faults.point("piece")
        target[:] = source


def _help(helper: Future[None], pieces: deque[tuple[Bytes, Bytes]]) -> None:
    if helper.set_running_or_notify_cancel():
        try:
            _drain(pieces)
        except BaseException as error:  # noqa: BLE001  # raised where the copy was asked for
            helper.set_exception(error)
        else:
            helper.set_result(None)


def _settle(helpers: Sequence[Future[None]]) -> None:
    """Wait for the pieces that others have begun; an interrupt waits too, since the block is given up after it."""
    try:
        wait([helper for helper in helpers if not helper.cancel()])
    except BaseException:
        _settle(helpers)
        raise
