"""SplitMix64: one number spread over all 64 bits, the same on every machine and in every process."""

from __future__ import annotations

from typing import Any, Final, TypeVar

GOLDEN: Final = 0x9E3779B97F4A7C15
"""The step between the states of SplitMix64: 2^64 over the golden ratio, made odd."""
MASK64: Final = 2**64 - 1
T = TypeVar("T")


def mix64(value: T) -> T:
    """The finaliser of SplitMix64, of a number below 2^64 or of each in an array of ``uint64``; it has an inverse.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mixed: Any = value
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK64
    return mixed ^ mixed >> 31
