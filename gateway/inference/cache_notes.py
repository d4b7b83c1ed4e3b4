"""Notes what the cache report is told of one attempt: no text of it, but a way to ask where a
position of its prompt lies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import msgspec

from billing.events import Attempt
from gateway.fleet.engine.cache_outcome import text_digest
from gateway.fleet.replica import LocatingReplica, MessagePlace, PreparedRequest, Replica
from gateway.generation_events import CacheOutcome, MeteredUsage
from gateway.lanes import Priority
from gateway.wire.usage.cache_report import PrefixKind

MAX_CACHE_KEY = 128
"""Characters of a `prompt_cache_key` that is a label as it is."""

Locate = Callable[[int], Coroutine[Any, Any, MessagePlace | None]]
"""Finds the message that holds a position of the prompt."""


class CacheNote(msgspec.Struct, frozen=True, kw_only=True):
    """The cache's part in one attempt that is billed to somebody."""

    attempt: Attempt
    usage: MeteredUsage
    cache_key: str | None = None
    """As the client named it."""
    outcome: CacheOutcome | None = None
    """None: nobody says."""
    replica: str = ""
    locate: Locate | None = None
    """None: its prompt did not change, or is no conversation."""


OnCached = Callable[[CacheNote], None]


def unnoted(_: CacheNote) -> None:
    """Do nothing: nobody wants to know."""


class PrefixLabel(NamedTuple):
    """The label by which a customer knows its prefixes."""

    kind: PrefixKind
    text: str


def note_of(
    attempt: Attempt,
    usage: MeteredUsage,
    outcome: CacheOutcome | None,
    replica: Replica,
    prepared: PreparedRequest,
    priority: Priority,
    *,
    salt: str,
) -> CacheNote:
    """outcome: as its replica said; salt: of its org."""
    request = prepared.request
    if outcome is None and request.cache_key is None:
        outcome = CacheOutcome(cause="unknown", prefix=text_digest(salt, request))
    changed = outcome is not None and outcome.cause == "changed" and request.prompt is not None
    return CacheNote(
        attempt=attempt,
        usage=usage,
        cache_key=request.cache_key,
        outcome=outcome,
        replica=replica.name,
        locate=partial(_locate, replica, prepared, priority) if changed else None,
    )


async def _locate(
    replica: Replica, prepared: PreparedRequest, priority: Priority, position: int
) -> MessagePlace | None:
    if not isinstance(replica, LocatingReplica):
        return None
    return await replica.locate(prepared, position, priority)


def to_label(note: CacheNote) -> PrefixLabel:
    """A key of the client's own if that is a line of text of a length to be shown, else a digest of
    how the prompt begins."""
    key, digest = note.cache_key, "" if note.outcome is None else note.outcome.prefix
    if key and len(key) <= MAX_CACHE_KEY and key.isprintable():
        return PrefixLabel("cache_key", key)
    return PrefixLabel("digest", digest) if digest else PrefixLabel("short", "")
