"""Follows the prefix cache of each engine, and keeps the index of who has what.

What an engine tells is applied as it comes. Where a change is missing all of it is asked for anew;
what was known of an engine whose connection is lost is forgotten at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.prefix_digests import SPAN_BLOCKS
from engine.protocol import CacheChanged, CacheSnapshot, ReplicaStatus
from gateway.fleet.conductor.index_writer import KvIndexWriter

log = logging.getLogger(__name__)


class CacheFollower:
    """Hears one engine, as the `engine.transport.client.CacheHearer` of its client."""

    def __init__(
        self,
        address: str,
        index: KvIndexWriter,
        *,
        clock: Callable[[], float] = time.time,
        on_known: Callable[[], None] = lambda: None,
    ) -> None:
        """`clock`: Unix seconds. `on_known`: called whenever all that an engine has is known."""
        self._address, self._index, self._clock = address, index, clock
        self._on_known = on_known
        self._engine_id: str | None = None
        """None: it is away, or has no place in the index."""
        self._seq: int | None = None
        """The latest change that was applied; None: what it has is not known yet."""
        self._is_first_part = True

    def connected(self, status: ReplicaStatus) -> None:
        if not self._index.add(status.engine_id, status.num_blocks // SPAN_BLOCKS):
            log.warning("%s is one engine too many for the index", self._address)
            return
        self._engine_id = status.engine_id
        self._seq, self._is_first_part = None, True

    def heard(self, news: CacheSnapshot | CacheChanged) -> bool:
        if self._engine_id is None:
            return True
        if isinstance(news, CacheSnapshot):
            self._begin(self._engine_id, news)
            return True
        if self._seq is None:  # it happened before the snapshot that is to come
            return True
        if news.seq != self._seq + 1:
            self._seq = None
            return False
        self._index.remove(self._engine_id, news.removed)
        self._index.store(self._engine_id, news.stored)
        self._index.told(self._clock() - news.since)
        self._seq = news.seq
        return True

    def lost(self) -> None:
        if self._engine_id is not None:
            self._index.drop(self._engine_id)
        self._engine_id, self._seq = None, None

    def _begin(self, engine_id: str, part: CacheSnapshot) -> None:
        if self._is_first_part:
            self._index.clear(engine_id)
        self._index.store(engine_id, part.keys)
        self._is_first_part = part.last
        if part.last:
            self._seq = part.seq
            self._on_known()
