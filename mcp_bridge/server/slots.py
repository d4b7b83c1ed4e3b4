"""Concurrency slots of one worker: so many for all, fewer for one owner.

Pure.
"""

from __future__ import annotations

from collections import Counter


class Slots:
    """Counts the slots in use.

    `most`: for all. `of_one`: for one owner of each kind, in the order in which `take` names them:
    a tenant, then a principal of it, so that neither many keys nor one take a worker.
    """

    def __init__(self, most: int, *of_one: int) -> None:
        self._most, self._of_one = most, of_one
        self._taken = 0
        self._by_owner: Counter[tuple[int, str]] = Counter()

    @property
    def is_full(self) -> bool:
        return self._taken >= self._most

    def take(self, *owners: str) -> bool:
        """False: there is none for them. What was taken is given back by the same owners."""
        assert len(owners) == len(self._of_one)
        kinds = list(enumerate(owners))
        if self.is_full or any(self._by_owner[key] >= self._of_one[key[0]] for key in kinds):
            return False
        self._taken += 1
        self._by_owner.update(kinds)
        return True

    def give_back(self, *owners: str) -> None:
        self._taken -= 1
        for key in enumerate(owners):
            self._by_owner[key] -= 1
            if not self._by_owner[key]:
                del self._by_owner[key]
