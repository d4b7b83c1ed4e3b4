"""Tells why so much of a prompt was read from the cache and no more: one cause for each request,
that of the first token which had to be computed.

Pure. Knows positions in tokens, never what stands there; an upstream's prompt, whose tokens nobody
here knows, is told apart by how its text begins.

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
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from billing.cache_contracts import FLOORS, Breakpoint, ContractName
from engine.protocol import SeenPrefix
from gateway.fleet.engine.prefix_memory import EarlierPrompt
from gateway.generate_request import GenerateRequest
from gateway.generation_events import CacheCause

PREFIX_TOKENS = 128
"""Prompts whose clients name no key are told apart by this many first tokens."""
PREFIX_CHARS = 512
"""About as much as `PREFIX_TOKENS`."""
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


def text_digest(namespace: str, request: GenerateRequest) -> str:
    """Return the digest of the first `PREFIX_CHARS` of its texts; empty where there are fewer."""
    found: list[str] = []
    missing = PREFIX_CHARS
    for text in texts_of(request):
        found.append(text[:missing])
        missing -= len(found[-1])
        if not missing:
            return digest(namespace, "".join(found).encode(errors="replace"))
    return ""


def texts_of(request: GenerateRequest) -> Iterator[str]:
    """Yield the texts in order; with their roles, which are part of what is compared."""
    if request.plain is not None:
        for prompt in request.plain.prompts:
            yield prompt if isinstance(prompt, str) else prompt.beginning(PREFIX_CHARS)
    elif request.prompt is not None:
        yield from texts_of_messages(request.prompt.messages)
    elif request.forward is not None:
        yield from texts_of_messages(request.forward["messages"])


def texts_of_messages(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield str(message.get("role"))
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part if isinstance(part, str) else part.get("text")
            if isinstance(text, str):
                yield text
