"""Tells why so much of a prompt was read from the cache and no more: one cause for each request,
that of the first token which had to be computed.

Pure. Knows positions in tokens, never what stands there.

    intact         all that an earlier prompt had in common with this one, and more there was not
    first          no prompt that is remembered began like this one
    changed        an earlier one was the same up to a position, and went on otherwise
    evicted        it was the same, and was not cached any more, or was just being computed
    restarted      it was the same, and went to a process of the engine that is gone
    other_replica  its prefix went to another replica of the model before
    not_kept       it was the same; of what `cache_control` had kept nothing was alive
    unmarked       the model keeps what `cache_control` marks, and this request marks nothing
    too_short      it can have no cached tokens: under the contract's minimum, or one block
    unknown        nobody can say: an upstream counts by itself, or no prefix is looked for
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from billing.cache_contracts import FLOORS, Breakpoint, ContractName
from engine.protocol import SeenPrefix
from gateway.fleet.engine.prefix_memory import EarlierPrompt
from gateway.generation_events import CacheCause

PREFIX_TOKENS = 128
"""By which prompts are told apart whose clients name no key."""
DIGEST_BYTES = 8


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """The circumstances of one prompt when it was sent."""

    contract: ContractName
    block_size: int
    engine_id: str
    before: EarlierPrompt
    breakpoints: Sequence[Breakpoint] = ()
    """Those that the engine was told of."""
    is_marked: bool = False
    """The client named breakpoints, wherever they lie."""
    is_looked_for: bool = True
    """The engine may take something of it from its cache."""


def outcome_of(
    here: Circumstances, num_tokens: int, seen: SeenPrefix | None, read: int
) -> tuple[CacheCause, int]:
    """The cause, and its position. num_tokens: of the prompt; seen: `Usage.seen` of it; read: those
    that count as read from the cache."""
    if not here.is_looked_for:
        return "unknown", 0
    cacheable = cacheable_tokens(num_tokens, here.block_size)
    if here.contract == "explicit" and not here.is_marked:
        return "unmarked", 0
    if not FLOORS[here.contract].round_down(cacheable) or (here.is_marked and not here.breakpoints):
        return "too_short", 0
    if here.breakpoints and read >= here.breakpoints[-1].position:
        return "intact", 0  # what comes behind was not to be kept
    same = 0 if seen is None else seen.tokens
    if here.before.tokens > same and here.before.engine_id != here.engine_id:
        return "restarted", same
    if seen is None:
        # Sent to this very process, which yet remembers none: it looks for no prefixes.
        return ("unknown" if here.before.tokens else "first"), 0
    if seen.evicted_tokens:
        return "evicted", min(cacheable, cacheable_tokens(same + 1, here.block_size)) - (
            seen.evicted_tokens
        )
    if here.breakpoints and not read and same >= here.breakpoints[0].position:
        return "not_kept", 0
    if seen.outcome == "broken":
        return "changed", same
    return "intact", 0


def cacheable_tokens(num_tokens: int, block_size: int) -> int:
    """Count the tokens of a prompt that may be cached, in whole blocks: the last token is always
    computed."""
    return (num_tokens - 1) // block_size * block_size


def prefix_digest(namespace: str, token_ids: Sequence[int]) -> str:
    """Return the digest of the first `PREFIX_TOKENS`; empty of a shorter prompt."""
    if len(token_ids) < PREFIX_TOKENS:
        return ""
    return digest(namespace, array("I", token_ids[:PREFIX_TOKENS]).tobytes())


def digest(namespace: str, data: bytes) -> str:
    """Return RFC 7693's BLAKE2b under a namespace, of whatever length."""
    key = blake2b(namespace.encode(), digest_size=32).digest()
    return blake2b(data, key=key, digest_size=DIGEST_BYTES).hexdigest()
