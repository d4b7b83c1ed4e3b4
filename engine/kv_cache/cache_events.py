"""Keeps account of the spans that are in the prefix cache, and tells who watches what it gained and
lost.

A span counts as cached while its last block is: without a sliding window the blocks before it are
cached, too. Its key is all that is told (`engine.prefix_digests`).

Changes are numbered. Who watches begins with a snapshot and applies what comes after it; a number
left out means that it missed something, and asks for another one. While nobody watches, nothing is
collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.prefix_digests import KEY_BYTES, span_key
from engine.protocol import MAX_CACHE_KEYS, CacheChanged, CacheSnapshot


class CacheEvents:
    """The spans of one prefix cache. `clock`: Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys: dict[int, bytes] = {}
        """The keys of all spans, by the last block of each."""
        self._gained: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}
        """Both are to be told; no key is in both."""
        self._since = 0.0
        """The time of the first of them."""
        self._seq = 0
        self._is_watched = False

    @property
    def has_changes(self) -> bool:
        return bool(self._gained or self._lost)

    def stored(self, block: int, digest: bytes) -> None:
        """Note that a span is cached. `block`: its last one, with this digest."""
        key = self._keys[block] = span_key(digest)
        if self._is_watched:
            self._note(key, self._gained, self._lost)

    def evicted(self, block: int) -> None:
        """Note that a block is not cached any more, be it the last one of a span or not."""
        key = self._keys.pop(block, None)
        if key is not None and self._is_watched:
            self._note(key, self._lost, self._gained)

    def watch(self) -> list[CacheSnapshot]:
        """Collect changes from now on. Return all that is cached, in one part or several."""
        self._is_watched = True
        self._clear()
        parts = _frames(self._keys.values()) or [b""]
        return [
            CacheSnapshot(seq=self._seq, keys=keys, last=number == len(parts))
            for number, keys in enumerate(parts, 1)
        ]

    def end_watch(self) -> None:
        """Nobody watches any more."""
        self._is_watched = False
        self._clear()

    def take_changes(self) -> list[CacheChanged]:
        """Return what happened since the last call, in the order in which it is to be applied."""
        changes = []
        for is_loss, keys in ((True, self._lost), (False, self._gained)):
            for told in _frames(keys):
                self._seq += 1
                changes.append(
                    CacheChanged(
                        seq=self._seq,
                        removed=told if is_loss else b"",
                        stored=b"" if is_loss else told,
                        since=self._since,
                    )
                )
        self._clear()
        return changes

    def _note(self, key: bytes, into: dict[bytes, None], opposite: dict[bytes, None]) -> None:
        if not self.has_changes:
            self._since = self._clock()
        if key in opposite:  # they cancel out
            del opposite[key]
        else:
            into[key] = None

    def _clear(self) -> None:
        self._gained.clear()
        self._lost.clear()


def _frames(keys: Iterable[bytes]) -> list[bytes]:
    """Return the keys one behind the other, no more of them together than a message may have."""
    told, most = b"".join(keys), MAX_CACHE_KEYS * KEY_BYTES
    return [told[start : start + most] for start in range(0, len(told), most)]
