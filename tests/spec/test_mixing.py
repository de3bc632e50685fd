"""SplitMix64: orders of data, first rows of tables and random places are the same in every version."""

from __future__ import annotations

import warnings

import numpy as np

from rota.spec.mixing import GOLDEN, MASK64, mix64

FIRST = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
"""The first numbers from the seed 0, as the authors' own C program gives them (prng.di.unimi.it/splitmix64.c)."""


def test_the_first_numbers_are_those_of_the_authors_for_numbers_and_for_arrays() -> None:
    steps = [GOLDEN * n & MASK64 for n in range(1, 5)]
    assert tuple(map(mix64, steps)) == FIRST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mix64(np.array(steps, dtype=np.uint64))
    assert (found.dtype, tuple(found.tolist())) == (np.uint64, FIRST)
