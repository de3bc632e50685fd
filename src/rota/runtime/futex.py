"""Futex: wait for a word of shared memory to change, and wake those who wait (man 2 futex)."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

from rota.runtime.clock import blocking_sleep

_NUMBER: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL: Final = (1 << 31) - 1
_POLL_S: Final = 0.001
_LIBC: Final = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, limit_s: float) -> None:
    """Sleep until the word of 32 bits at an address is said to have changed from ``value``, at most ``limit_s``.

    It may return early, and returns at once when the word has another value. Elsewhere than on x86-64 and arm64 it
    sleeps for a millisecond.
    """
    if _NUMBER is None:
        blocking_sleep(min(limit_s, _POLL_S))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    low = ctypes.c_uint32(value)
    _LIBC.syscall(_NUMBER, ctypes.c_void_p(address), _WAIT, low, ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all who wait for the word at an address, in any process."""
    if _NUMBER is not None:
        _LIBC.syscall(_NUMBER, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)
