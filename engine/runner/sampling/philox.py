"""Philox4x32-10: random numbers as a function of (key, counter), with no state to carry.

Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = NDArray[np.uint64]
"""[..., words] of 32 bits each, in 64-bit lanes so that products do not overflow."""


def philox4x32(counter: Words, key: Words) -> Words:
    """counter [N, 4], key [N, 2] -> [N, 4]; all words are 32 bits wide."""
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _WORD) ^ c1 ^ k0, p1 & _LOW, (p0 >> _WORD) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One draw from [0, 1) for each (seed, position), both below 2**64. Multiples of 2**-52: a draw
    times a sum stays below the sum."""
    seed, position = np.array(seeds, np.uint64), np.array(positions, np.uint64)
    zero = np.zeros_like(position)
    counter = np.stack((position & _LOW, position >> _WORD, zero, zero), axis=1)
    words = philox4x32(counter, np.stack((seed & _LOW, seed >> _WORD), axis=1))
    bits = (words[:, 1] << _WORD) | words[:, 0]
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
