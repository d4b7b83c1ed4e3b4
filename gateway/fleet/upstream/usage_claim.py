"""Reads what an upstream says it used, and bounds it by what the request can have used.

Pure. An upstream's count is a claim: it is billed as far as the request could have reached, and
what it says beyond that is disputed, never billed. A count that is no number, or less than
nothing, says nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from gateway.generation_events import MeteredUsage

MOST_COUNT = 2**63 - 1
"""A larger count stands for this many: the spool and Postgres hold no more."""
MAX_DIGITS = 19
"""The digits of a count that comes as text."""
NULL = Raw(b"null")

Count = int | None


class UsageBound(msgspec.Struct, frozen=True):
    """The most tokens that one request can have used, over all choices."""

    input_tokens: int
    output_tokens: int


class _PromptDetails(msgspec.Struct):
    cached_tokens: Raw = NULL
    cache_write_tokens: Raw = NULL


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: Raw = NULL


class _Claim(msgspec.Struct):
    prompt_tokens: Raw = NULL
    completion_tokens: Raw = NULL
    total_tokens: Raw = NULL
    prompt_tokens_details: Raw = NULL
    completion_tokens_details: Raw = NULL
    prompt_cache_hit_tokens: Raw = NULL
    """DeepSeek's name for cached_tokens."""


PlainCount = Annotated[int, Meta(ge=0, le=MOST_COUNT)] | None


class _PlainPromptDetails(msgspec.Struct):
    cached_tokens: PlainCount = None
    cache_write_tokens: PlainCount = None


class _PlainCompletionDetails(msgspec.Struct):
    reasoning_tokens: PlainCount = None


class _PlainClaim(msgspec.Struct):
    """A claim whose counts are all whole numbers, as most are."""

    prompt_tokens: PlainCount = None
    completion_tokens: PlainCount = None
    total_tokens: PlainCount = None
    prompt_tokens_details: _PlainPromptDetails | None = None
    completion_tokens_details: _PlainCompletionDetails | None = None
    prompt_cache_hit_tokens: PlainCount = None


_decode_plain = msgspec.json.Decoder(_PlainClaim).decode
_decode_claim = msgspec.json.Decoder(_Claim).decode
_decode_prompt_details = msgspec.json.Decoder(_PromptDetails | None).decode
_decode_completion_details = msgspec.json.Decoder(_CompletionDetails | None).decode


def read_claim(usage: bytes) -> MeteredUsage | None:
    """Read a `usage` object. None: it says nothing; there is no empty prompt, and some send zeros
    until they count."""
    try:
        claim = _decode_plain(usage)
    except (msgspec.DecodeError, RecursionError):
        found = _to_plain(usage)
        if found is None:
            return None
        claim = found
    prompt = claim.prompt_tokens
    if not prompt:
        return None
    prompt_details, details = claim.prompt_tokens_details, claim.completion_tokens_details
    cached = prompt_details.cached_tokens if prompt_details else None
    cached = cached or claim.prompt_cache_hit_tokens or 0
    written = (prompt_details.cache_write_tokens if prompt_details else None) or 0
    reasoning = (details.reasoning_tokens if details else None) or 0
    cache_read = min(prompt, cached)
    cache_write = min(prompt - cache_read, written)
    # Where reasoning is not part of completion_tokens (xAI, Gemini), it still is of the total.
    output = max(claim.completion_tokens or 0, (claim.total_tokens or 0) - prompt)
    return MeteredUsage(
        uncached_input=prompt - cache_read - cache_write,
        cache_read=cache_read,
        cache_write=cache_write,
        output=output,
        reasoning_output=min(output, reasoning),
    )


def _to_plain(usage: bytes) -> _PlainClaim | None:
    """Read a claim some of whose counts are written otherwise, or are none."""
    try:
        claim = _decode_claim(usage)
    except (msgspec.DecodeError, RecursionError):
        return None
    prompt = _details(_decode_prompt_details, claim.prompt_tokens_details) or _PromptDetails()
    completion = _details(_decode_completion_details, claim.completion_tokens_details)
    return _PlainClaim(
        to_count(claim.prompt_tokens),
        to_count(claim.completion_tokens),
        to_count(claim.total_tokens),
        _PlainPromptDetails(to_count(prompt.cached_tokens), to_count(prompt.cache_write_tokens)),
        _PlainCompletionDetails(to_count((completion or _CompletionDetails()).reasoning_tokens)),
        to_count(claim.prompt_cache_hit_tokens),
    )


def _details(decode: Any, raw: Raw) -> Any:
    """Details that cannot be read are none."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def to_count(raw: Raw) -> Count:
    """Read a count: whole, in a float or as text, as vendors send it. None: it is none."""
    text = bytes(raw)
    try:
        value = msgspec.json.decode(text)
    except msgspec.ValidationError:  # a number that is too large for Python's decoder
        return MOST_COUNT if text[:1].isdigit() else None
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not value.is_integer():  # no number and infinity are none, too
        return None
    if value < 0:
        return None
    return min(int(value), MOST_COUNT)


def bound_usage(claimed: MeteredUsage, bound: UsageBound) -> MeteredUsage:
    """Return what is billed of a claim; what is beyond the bound is disputed. Of the input that is
    cut off first what costs most: what was written to a cache, then what was not read from it."""
    more_input = max(0, claimed.prompt_tokens - bound.input_tokens)
    more_output = max(0, claimed.output - bound.output_tokens)
    if not (more_input or more_output):
        return claimed
    kept: dict[str, int] = {}
    left = bound.input_tokens
    for name in ("cache_read", "embedding_input", "uncached_input", "cache_write"):
        kept[name] = min(left, getattr(claimed, name))
        left -= kept[name]
    kept["cache_write_1h"] = min(left, claimed.cache_write_1h)
    output = claimed.output - more_output
    return msgspec.structs.replace(
        claimed,
        **kept,
        output=output,
        reasoning_output=min(output, claimed.reasoning_output),
        disputed_input=more_input,
        disputed_output=more_output,
    )
