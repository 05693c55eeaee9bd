"""Philox4x32-10 in plain Python: the counter-based random function behind every seeded draw, as test truth.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); known answers are in the test.
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from a 4-word counter and a 2-word key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _WORD, (left >> 32) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw of one token in [0, 1): key is the 64-bit seed, counter is (position, choice, 0, 0), and the number is
    the upper 53 bits of the first two words, first word first."""
    first, second, _, _ = philox4x32_10((position, choice, 0, 0), (seed & _WORD, seed >> 32))
    return ((first << 32 | second) >> 11) * 2.0**-53
