"""Holds what one request asks and is answered, as it comes, where its project stores that.

A step of an answer costs an append; nothing is encoded or cut here. What it holds is bounded.
"""

from __future__ import annotations

import msgspec

from gateway.generate_request import GenerateRequest
from gateway.generation_events import Items, RawBody, RawChunk, RawRun, TextDelta

MAX_HELD_BYTES = 8 * 1024 * 1024
"""Bounds an answer with the weight of its pieces; it is many times what is stored."""
ITEM_BYTES = 100


class CapturedContent:
    """The content of a request; of a loop of tools that of its last round, whose prompt has all
    rounds before in it."""

    __slots__ = ("_num_bytes", "is_cut", "items", "made", "request")

    def __init__(self) -> None:
        self.request: GenerateRequest | None = None
        self.items: list[TextDelta | RawChunk | RawRun | RawBody] = []
        self.is_cut = False
        """True if more was answered than is held."""
        self.made: object | None = None
        """The texts that were made of it, for whoever wants them after the first one."""
        self._num_bytes = 0

    def begin(self, request: GenerateRequest) -> None:
        """Begin a generation."""
        self.request = request
        self.items = []
        self.is_cut, self.made, self._num_bytes = False, None, 0

    def add(self, items: Items) -> None:
        self.made = None
        for item in items:
            if isinstance(item, TextDelta):
                if item.logprobs is not None or item.token_ids is not None:
                    item = msgspec.structs.replace(item, logprobs=None, token_ids=None)
                size = len(item.text) + len(item.reasoning)
                size += sum(len(call.arguments) for call in item.calls)
            elif isinstance(item, RawRun):
                size = len(item.before) + len(item.after)
                size += sum(len(text) + ITEM_BYTES for text in item.texts)
            elif isinstance(item, (RawChunk, RawBody)):
                size = len(item.payload)
            else:
                continue  # said again, or no text
            self._num_bytes += size + ITEM_BYTES
            if self._num_bytes > MAX_HELD_BYTES:
                self.is_cut = True
                return
            self.items.append(item)
