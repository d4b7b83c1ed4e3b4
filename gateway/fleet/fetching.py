"""Decides whether an engine reads a prompt's beginning from another one instead of computing it.

Pure. All is weighed in seconds, by what reading took the engine that would read (`PeerStatus`) and
what computing takes it (`gateway.fleet.predicted_time`). Engines read of those alone whose KV is
the same (`layout`); whoever has most of a prompt is the one to read from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.protocol import KVSource, PeerStatus
from gateway.fleet.engine_view import EngineView
from gateway.fleet.predicted_time import Prompt

MARGIN = 0.8
"""Reading must be expected to take no longer than this part of what it saves: the engine asks the
same again (`engine.tiers.policy`), and does not read where it finds otherwise."""


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a prompt's front to be read from another engine."""

    source: int
    """Its position."""
    front: int
    """The tokens that it has."""
    seconds: float
    """To read those that the reader lacks."""


class Holders:
    """The engines that have most of a prompt, for each layout and each machine whose processes
    alone reach them: the best two, so that each engine finds another one than itself."""

    def __init__(self, views: Sequence[EngineView], cached: Sequence[int]) -> None:
        self._best: dict[tuple[bytes, str], list[tuple[int, int]]] = {}
        for at, (view, tokens) in enumerate(zip(views, cached, strict=True)):
            peer = peer_of(view)
            if peer is not None and tokens:
                best = self._best.setdefault((peer.layout, peer.host), [])
                best.append((tokens, at))
                best.sort(reverse=True)
                del best[2:]

    def fetch_for(self, at: int, view: EngineView, num_tokens: int, cached: int) -> Fetch | None:
        """Return what the engine at a position would read of a prompt of which it has `cached`
        tokens; None: there is nothing, or computing it is as good."""
        peer = peer_of(view)
        if peer is None:
            return None
        for tokens, source in self._reached_by(peer):
            if source == at:
                continue
            own, after = Prompt.of(num_tokens, cached), Prompt.of(num_tokens, tokens)
            if after.cached <= own.cached:
                return None
            seconds = peer.read_s + peer.read_token_s * (after.cached - own.cached)
            price = view.price
            saved_s = price.own_seconds(own.missing, own.cached)
            saved_s -= price.own_seconds(after.missing, after.cached)
            return Fetch(source, after.cached, seconds) if seconds <= MARGIN * saved_s else None
        return None

    def _reached_by(self, peer: PeerStatus) -> Sequence[tuple[int, int]]:
        """Return those that an engine can read, who has most first."""
        here = self._best.get((peer.layout, peer.host), [])
        anywhere = self._best.get((peer.layout, ""), []) if peer.host else []
        return sorted((*here, *anywhere), reverse=True) if here and anywhere else here or anywhere


def can_read(reader: PeerStatus, source: PeerStatus) -> bool:
    """Tell whether an engine reaches another one, whose blocks mean the same."""
    return reader.layout == source.layout and source.host in ("", reader.host)


def peer_of(view: EngineView) -> PeerStatus | None:
    return None if view.status is None else view.status.peer


def source_of(views: Sequence[EngineView], fetch: Fetch | None) -> KVSource | None:
    """Return the engine to read from, as its reader is told of it."""
    status = None if fetch is None else views[fetch.source].status
    if fetch is None or status is None or status.peer is None:
        return None
    return KVSource(engine_id=status.engine_id, address=status.peer.address, num_tokens=fetch.front)
