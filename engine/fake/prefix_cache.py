"""The prefix cache of an engine without a model: digests of prompts' blocks, and leases on them.

Every prompt is computed at once: what is promised is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from engine.config import BLOCK_SIZE, ResolvedConfig
from engine.kv_cache.block_leases import CacheLeases
from engine.kv_cache.cache_events import CacheEvents
from engine.kv_cache.miss_history import PromptMemory
from engine.kv_cache.prefix_leases import PrefixLeases
from engine.prefix_digests import SPAN_BLOCKS, block_digests, root_digest
from engine.protocol import EngineRequest, SeenPrefix
from engine.sequence import NOTHING_KEPT, KeptTokens


class PrefixMatch(NamedTuple):
    cached_tokens: int
    kept: KeptTokens
    """The kept tokens, cached or not."""
    seen: SeenPrefix | None = None


class FakeCache:
    """As many blocks as the engine has, for what is remembered alone."""

    def __init__(self, resolved: ResolvedConfig, clock: Callable[[], float]) -> None:
        config = resolved.config
        self.enabled = config.prefix_caching
        self.num_blocks = resolved.num_blocks
        self.num_queried = self.num_hit = 0
        """Tokens."""
        self.leases = CacheLeases(int(self.num_blocks * config.cache_lease_share), clock)
        self.keeping = PrefixLeases(self.leases, BLOCK_SIZE)
        self.events = CacheEvents()
        self._prompts = PromptMemory(BLOCK_SIZE)
        self._numbers = count()
        self._prefixes: dict[bytes, int] = {}
        """Blocks' numbers by content, a child before its parent, least recently used first."""

    @property
    def num_cached_blocks(self) -> int:
        return len(self._prefixes)

    def num_cached_tokens(self, request: EngineRequest) -> int:
        """Return how many leading tokens `look_up` would find now. Changes nothing."""
        if not self.enabled:
            return 0
        prompt, found = request.prompt_token_ids, 0
        for digest in _digests(root_digest(request.cache_namespace), prompt[:-1]):
            if digest not in self._prefixes:
                break
            found += BLOCK_SIZE
        return found

    def look_up(self, request: EngineRequest) -> PrefixMatch:
        """Find the longest remembered prefix in whole blocks, and remember this prompt's own."""
        breakpoints, kept = request.breakpoints, NOTHING_KEPT
        if not self.enabled:
            return PrefixMatch(0, KeptTokens(written_tokens=(0,) * len(breakpoints)))
        prompt, salt = request.prompt_token_ids, root_digest(request.cache_namespace)
        digests, table, cached_tokens = _digests(salt, prompt), [], 0
        for index, digest in enumerate(digests, 1):
            end = index * BLOCK_SIZE
            number = self._prefixes.pop(digest, None)
            if number is not None and end < len(prompt):  # the last token is computed anew
                cached_tokens = end
            if number is None:
                number = next(self._numbers)
                if index % SPAN_BLOCKS == 0:
                    self.events.stored(number, digest)
            table.append(number)
        if breakpoints:
            found = table[: cached_tokens // BLOCK_SIZE]
            kept = self.keeping.begin(request.request_id, request.tenant, found, breakpoints)
        for digest, number in zip(reversed(digests), reversed(table), strict=True):
            self._prefixes[digest] = number
        self.keeping.computed(request.request_id, table, len(table))
        if len(self._prefixes) > self.num_blocks:
            self._forget_oldest({*table})
        self.num_queried += len(prompt)
        self.num_hit += cached_tokens
        seen = self._prompts.meet(prompt, [salt, *digests], cached_tokens)
        return PrefixMatch(cached_tokens, kept, seen)

    def _forget_oldest(self, held: set[int]) -> None:
        """As many as there are too many, those under lease last."""
        excess = len(self._prefixes) - self.num_blocks
        idle = [(digest, number) for digest, number in self._prefixes.items() if number not in held]
        idle.sort(key=lambda each: self.leases.holds(each[1]))
        for digest, number in idle[:excess]:
            if self.leases.holds(number):
                self.leases.break_off(number)
            del self._prefixes[digest]
            self.events.evicted(number)


def _digests(before: bytes, token_ids: list[int]) -> list[bytes]:
    """Return the digest of each full block."""
    digests: list[bytes] = []
    for start in range(0, len(token_ids), SPAN_BLOCKS * BLOCK_SIZE):
        span = token_ids[start : start + SPAN_BLOCKS * BLOCK_SIZE]
        digests += block_digests(digests[-1] if digests else before, span, BLOCK_SIZE)
    return digests
