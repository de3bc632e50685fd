"""Seeded random numbers and fresh identifiers."""

from __future__ import annotations

import random
import secrets
from typing import Protocol

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class RandomSource(Protocol):
    """Random numbers and identifiers for every part; a seeded source makes a run repeatable."""

    def rng(self) -> random.Random:
        """The generator for draws that may repeat under the same seed."""
        ...

    def new_id(self, bits: int = 96) -> str:
        """A new identifier in Crockford base 32, never used before."""
        ...


class SystemRandom:
    """RandomSource of the operating system."""

    def __init__(self) -> None:
        self._rng = random.Random(secrets.randbits(64))

    def rng(self) -> random.Random:
        return self._rng

    def new_id(self, bits: int = 96) -> str:
        return encode(secrets.randbits(bits), bits)


class SeededRandom:
    """RandomSource that repeats: the same seed gives the same draws and identifiers."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def rng(self) -> random.Random:
        return self._rng

    def new_id(self, bits: int = 96) -> str:
        return encode(self._rng.getrandbits(bits), bits)


def encode(value: int, bits: int) -> str:
    """``value`` in Crockford base 32 with leading zeros for ``bits`` bits."""
    digits = -(-bits // 5)
    return "".join(_CROCKFORD[(value >> (5 * i)) & 31] for i in reversed(range(digits)))


def ulid(wall_s: float, random_source: RandomSource) -> str:
    """A sortable identifier: 48 bits of milliseconds, then 80 random bits (the ULID format)."""
    return encode(int(wall_s * 1000) & ((1 << 48) - 1), 50) + random_source.new_id(80)


def secret_token(bits: int = 256) -> str:
    """A secret from the operating system, whatever the source in use."""
    return secrets.token_urlsafe(bits // 8)
