"""Remembers what an engine has probably cached: prefixes of prompts that this gateway has sent it
lately.

It is a guess, in chunks of CHUNK_TOKENS: the engine may have evicted them, and knows what other
gateways have sent. Prefixes are told apart by namespace (RFC 7693's BLAKE2b over namespace and
tokens), as in the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from gateway.lru import Lru

CHUNK_TOKENS = 128
MAX_CHUNKS = 65_536
"""The bound on remembered chunks: 16 bytes each, plus the mapping's overhead."""


class EarlierPrompt(NamedTuple):
    """The front of a prompt that was known when it was sent: so many tokens of it, in whole chunks,
    and the engine's process that the last of them went to."""

    tokens: int = 0
    engine_id: str = ""


class PrefixMemory:
    def __init__(self) -> None:
        self._known: Lru[bytes, str] = Lru(MAX_CHUNKS)

    def sent(self, namespace: str, token_ids: Sequence[int], engine_id: str = "") -> EarlierPrompt:
        """Remember it."""
        before, goes_on = EarlierPrompt(), True
        for digest in _chain(namespace, token_ids):
            known = self._known.get(digest) if goes_on else None
            if known is None:
                goes_on = False
            else:
                before = EarlierPrompt(before.tokens + CHUNK_TOKENS, known)
            self._known.put(digest, engine_id)
        return before

    def cached_tokens(self, namespace: str, token_ids: Sequence[int]) -> int:
        """Count the cached tokens at the front of these, in whole chunks; the last token is always
        computed."""
        found = 0
        for digest in _chain(namespace, token_ids):
            if digest not in self._known:
                break
            found += CHUNK_TOKENS
        return min(found, max(0, len(token_ids) - 1))


def _chain(namespace: str, token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield one digest for each whole chunk, of it and all before it."""
    if len(token_ids) < CHUNK_TOKENS:
        return
    digest = blake2b(namespace.encode(), digest_size=16).digest()
    for start in range(0, len(token_ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = array("I", token_ids[start : start + CHUNK_TOKENS])
        digest = blake2b(chunk.tobytes(), key=digest, digest_size=16).digest()
        yield digest
