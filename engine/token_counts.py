"""Counts the tokens of one text while it grows, for penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

Counted = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Each token of a text once, [n], and how often it stands in the output, [n]: 0 for a token of the
prompt alone."""


class TokenCounts:
    """Holds how often each token stands in a text. An output only grows: what a step took back was
    never part of it, so each token is counted once, whatever became of the sequence meanwhile."""

    def __init__(self, prompt: Rows[int]) -> None:
        self._place = {token_id: i for i, token_id in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._place, np.int64, len(self._place))
        self._counts = np.zeros(len(self._ids), np.int64)
        """Both may be longer than `_place`: room for tokens to come."""
        self._num_counted = 0
        """Leading tokens of the output."""

    def count(self, output: Rows[int], drafts: Rows[int] = ()) -> Counted:
        """Return the counts of the prompt, `output` and `drafts`; arrays to read before the next
        call. output: all of it, which begins with what was given before. drafts: they stand behind
        it in this answer alone."""
        assert len(output) >= self._num_counted, "an output does not shrink"
        for token_id in output[self._num_counted :]:
            place = self._place_of(token_id)  # first: the arrays may grow
            self._counts[place] += 1
        self._num_counted = len(output)
        num_known = len(self._place)
        ids, counts = self._ids[:num_known], self._counts[:num_known]
        return self._with_drafts(ids, counts, drafts) if drafts else (ids, counts)

    def _with_drafts(
        self, ids: NDArray[np.int64], counts: NDArray[np.int64], drafts: Rows[int]
    ) -> Counted:
        counts, new = counts.copy(), Counter[int]()
        for token_id in drafts:
            if (place := self._place.get(token_id)) is None:
                new[token_id] += 1
            else:
                counts[place] += 1
        more = np.array([*new.items()], np.int64).reshape(-1, 2)
        return np.concatenate((ids, more[:, 0])), np.concatenate((counts, more[:, 1]))

    def _place_of(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            room = max(16, place)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.int64)))
        self._ids[place] = token_id
        return place
