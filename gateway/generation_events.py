"""The events that a replica yields while it serves one request, and the usage that they count.

Made by `gateway.fleet`, turned into vendors' formats by `gateway.wire`. Knows no replica, no tenant
and no price.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

CacheCause = Literal[
    "intact",
    "first",
    "changed",
    "evicted",
    "restarted",
    "other_replica",
    "not_kept",
    "unmarked",
    "too_short",
    "unknown",
]
CAUSES: tuple[CacheCause, ...] = get_args(CacheCause)
UNBROKEN: tuple[CacheCause, ...] = ("intact", "unknown")


class CachedTokens(msgspec.Struct, frozen=True):
    """The tokens of a prompt that were not computed, by where they were found: in the engine's KV
    cache, in a tier below it (host memory or disk), or at another engine."""

    pool: int = 0
    tier: int = 0
    fetched: int = 0

    def __str__(self) -> str:
        told = {"pool": self.pool, "tier": self.tier, "fetched": self.fetched}
        return ", ".join(f"{name} {number}" for name, number in told.items() if number) or "none"


class CacheOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why so much of a prompt was read from the cache and no more.

    The causes are explained in `gateway.fleet.engine.cache_outcome`.
    """

    cause: CacheCause
    position: int = 0
    """The position of the first token that differs or is missing. 0 if the prompt has no such
    place."""
    prefix: str = ""
    """A digest of how the prompt begins, by which nobody can tell what it is who does not know the
    namespace; empty: it is shorter than that."""
    found: CachedTokens = CachedTokens()
    """Counts the cached tokens of all its prompts by where they were found."""


FinishReason = Literal["stop", "length", "content_filter", "tool_calls", "function_call"]


class MeteredUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the tokens of an attempt: cumulative, and monotone from event to event but for the
    step from an estimate to the replica's own count.

    prompt = uncached_input + cache_read + cache_write + cache_write_1h + embedding_input.
    `wasted_output` was generated but lies behind a stop string, so nobody sees it or pays for it.
    Disputed is what an upstream claims beyond what the request can have used: nobody pays for it,
    and it is in no other count.
    """

    uncached_input: int = 0
    cache_read: int = 0
    cache_write: int = 0
    """For five minutes."""
    cache_write_1h: int = 0
    embedding_input: int = 0
    """Read to make embeddings of it."""
    output: int = 0
    reasoning_output: int = 0
    """Part of `output`."""
    wasted_output: int = 0
    recomputed_input: int = 0
    recomputed_cached: int = 0
    """Read again by this attempt of what one before it had read or written, and of that from the
    cache: the house's, in no other count."""
    estimated: bool = False
    """True where a count is ours and not the replica's."""
    disputed_input: int = 0
    disputed_output: int = 0

    @property
    def is_disputed(self) -> bool:
        return self.disputed_input > 0 or self.disputed_output > 0

    @property
    def prompt_tokens(self) -> int:
        cached = self.cache_read + self.cache_write + self.cache_write_1h
        return self.uncached_input + cached + self.embedding_input

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output


class TokenTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenInfo(msgspec.Struct, frozen=True):
    """OpenAI's `logprobs.content[]` entry."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenTop]


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of tool call `index` of a choice: its name, once, and a part of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Text our engine added to choice `index`."""

    index: int
    text: str
    reasoning: str = ""
    """The reasoning that came before `text`."""
    calls: tuple[CallDelta, ...] = ()
    """The call deltas that came after `text`."""
    logprobs: list[TokenInfo] | None = None
    token_ids: list[int] | None = None
    """The tokens since the choice's last delta, with one that ends it; None: not asked for."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """The one of the client's at which it ended."""


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's entry of `prompt_logprobs`."""

    logprob: float
    rank: int
    """The token's rank among all tokens, from 1."""
    decoded_token: str


class PromptReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tells what the client asked to know of the prompt of choice `index`; None: not that."""

    index: int
    token_ids: list[int] | None = None
    logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """By token id, the prompt's own first; of its first token None, as nothing comes before it."""


class PromptEcho(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of choice `index`, repeated before anything else (`echo`)."""

    index: int
    text: str
    first: TokenTop
    """Its first token: nothing comes before it, so nothing is said of it."""
    logprobs: list[TokenInfo] | None
    """The logprobs of the other tokens; None: not requested."""


class EmbeddingVector(msgspec.Struct, frozen=True):
    """The embedding of prompt `index`."""

    index: int
    vector: bytes
    """float32, little-endian."""


class RawChunk(msgspec.Struct, frozen=True):
    """An upstream's `chat.completion.chunk`, as JSON without its usage and under our model name."""

    payload: bytes


class RawRun(msgspec.Struct, frozen=True):
    """Consecutive chunks that differ in one text alone: each is before + text + after."""

    before: bytes
    texts: list[bytes]
    after: bytes

    @property
    def last(self) -> bytes:
        return self.before + self.texts[-1] + self.after


class RawBody(msgspec.Struct, frozen=True):
    """An upstream's whole `chat.completion`, as JSON under our model name."""

    payload: bytes


Item = TextDelta | PromptEcho | PromptReport | EmbeddingVector | RawChunk | RawRun | RawBody
Items = Sequence[Item]


class ReplicaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one step of a replica. `usage` is None until the replica has begun to work:
    until then there is nothing to bill.

    The last event of an attempt has `finished=True` and its final usage.
    """

    items: tuple[Item, ...] = ()
    usage: MeteredUsage | None = None
    finished: bool = False
    queue_time_s: float | None = None
    cache: CacheOutcome | None = None
    """With the last event: why so much of the prompt was cached and no more. None: nobody says."""
