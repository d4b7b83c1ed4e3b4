"""Remembers what prompts looked like, so that a customer can be told why the prefix cache missed.

    child blocks by parent digest:   root -> [b0]   b0 -> [b1, b1']   b1 -> [a tail, nothing]

The prefix cache knows what is cached; this knows what was asked, cached or not: of each digest
(`prefix_cache.py`) the blocks that followed it, the last one of a prompt as far as it goes. The
longest common prefix with what is remembered is then exact to the token: whole blocks are found by
their digests, and the block behind them is compared with what followed there before. Digests begin
with a digest of the salt: no tenant's prompt is compared with another's.

Knows no queue, no KV and no request. Of what is forgotten the least recently met goes first, a
child before its parent.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.protocol import SeenPrefix

MAX_PARENTS = 65_536
"""Digests of which is known what followed: as many blocks of prompts, under half a KiB each."""
MAX_CHILDREN = 8
"""Most recent continuations of one digest."""
_TOKEN_BYTES = array("I").itemsize


class PromptMemory:
    """Bounded by `max_parents`; all tenants share it as they share the blocks."""

    def __init__(
        self, block_size: int, *, max_parents: int = MAX_PARENTS, max_children: int = MAX_CHILDREN
    ) -> None:
        assert block_size >= 1 and max_parents >= 1 and max_children >= 1
        self._block_size = block_size
        self._max_parents, self._max_children = max_parents, max_children
        self._children: OrderedDict[bytes, list[bytes]] = OrderedDict()
        """Least recently met first, a child before its parent; of a parent's the latest first. An
        empty child: a prompt ended there."""

    def __len__(self) -> int:
        return len(self._children)

    def meet(
        self, prompt: Sequence[int], digests: Sequence[bytes], cached_tokens: int
    ) -> SeenPrefix | None:
        """How far an earlier prompt went like this one, and remember this one, too. None: not one
        token. O(len(prompt)).

        digests: of the salt, then of each full block. cached_tokens: those found in the cache.
        """
        assert len(digests) == len(prompt) // self._block_size + 1, "a digest of each full block"
        packed, step = array("I", prompt).tobytes(), self._block_size * _TOKEN_BYTES
        seen = self._look_up(packed, step, digests, cached_tokens)
        self._remember(packed, step, digests)
        return seen

    def _look_up(
        self, packed: bytes, step: int, digests: Sequence[bytes], cached_tokens: int
    ) -> SeenPrefix | None:
        parents = self._children
        known = next((i for i, each in enumerate(digests) if each not in parents), len(digests))
        if known == 0:
            return None
        start = (known - 1) * step
        rest = packed[start : start + step]
        longest, ended = 0, False
        for child in parents[digests[known - 1]]:
            common = _common_tokens(child, rest)
            # Also where what came behind a whole block is forgotten: nothing is known to differ.
            ends = common * _TOKEN_BYTES == len(child)
            longest, ended = max((longest, ended), (common, ends))
        tokens, asked = start // _TOKEN_BYTES + longest, len(packed) // _TOKEN_BYTES
        if tokens == 0:
            return None
        # The last token of a prompt is always computed, and cached are whole blocks.
        cacheable = min(tokens, asked - 1) // self._block_size * self._block_size
        return SeenPrefix(
            tokens=tokens,
            outcome="repeated" if tokens == asked else "continued" if ended else "broken",
            evicted_tokens=max(0, cacheable - cached_tokens),
        )

    def _remember(self, packed: bytes, step: int, digests: Sequence[bytes]) -> None:
        """From the end on: whoever is forgotten has no child that is not."""
        parents = self._children
        for index in range(len(digests) - 1, -1, -1):
            child = packed[index * step : (index + 1) * step]
            children = parents.setdefault(digests[index], [])
            if not children or children[0] != child:
                if child in children:
                    children.remove(child)
                children.insert(0, child)
                del children[self._max_children :]
            parents.move_to_end(digests[index])
        while len(parents) > self._max_parents:
            parents.popitem(last=False)


def _common_tokens(one: bytes, other: bytes) -> int:
    return len(os.path.commonprefix([one, other])) // _TOKEN_BYTES
