"""A `sequence.Constraint` that needs no library and no text, for the tests of what asks one."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray


class Residues:
    """A token's residue is that of the sum of all before it; at most `length` of them."""

    modulus = 3
    gave_up = False

    def __init__(self, length: int = 100) -> None:
        self._length = length
        self._longest: list[int] = []

    def copy(self) -> Residues:
        return Residues(self._length)

    def is_over(self, said: list[int]) -> bool:
        assert said[: len(self._longest)] == self._longest, "what was said is not taken back"
        self._longest = list(said)
        return len(said) >= self._length

    def forced(self, said: list[int]) -> list[int]:
        return []

    def allow(self, said: list[int], drafts: list[int], mask: NDArray[np.int32]) -> None:
        assert np.all(mask == -1)
        for token_id in range(32 * len(mask)):
            if not self.fits(said + drafts, token_id):
                bit = np.array([1 << token_id % 32], np.uint32).view(np.int32)[0]
                mask[token_id // 32] &= ~bit

    @staticmethod
    def allow_all(
        asked: Rows[tuple[int, Residues, list[int], list[int]]], masks: NDArray[np.int32]
    ) -> None:
        for index, constraint, said, drafts in asked:
            constraint.allow(said, drafts, masks[index])

    def fits(self, before: list[int], token_id: int) -> bool:
        return token_id % self.modulus == sum(before) % self.modulus
