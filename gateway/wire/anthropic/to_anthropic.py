"""Encodes a replica's events as Anthropic's messages: one encoder per request.

Knows no HTTP and no replica: an upstream's answer comes as `TextDelta`s as well. Whole and streamed
are cut into the same blocks, by `Cutter`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from billing.events import Tier
from billing.pricing.rating import RatedUsage
from foundation import sse
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import FinishReason, Item, MeteredUsage, TextDelta
from gateway.ids import uuid7_hex
from gateway.wire.anthropic.answer import (
    AnthropicMessage,
    Content,
    ServedTier,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
    to_delta_usage,
    to_message_usage,
)
from gateway.wire.anthropic.partial_json import to_object

Items = Sequence[Item]
Kind = Literal["text", "thinking", "tool_use"]

SERVED_AS: dict[Tier, ServedTier] = {
    "default": "standard",
    "priority": "priority",
    "flex": "batch",
    "batch": "batch",
}
STOP_REASONS: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
}
CALL_ID_CHARS = 24
PING = sse.encode(b'{"type":"ping"}', b"ping")
STOP = sse.encode(b'{"type":"message_stop"}', b"message_stop")
DELTAS: dict[Kind, tuple[bytes, bytes]] = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
_encode = msgspec.json.Encoder().encode


class MessageEncoder(Protocol):
    def encode(self, items: Items) -> bytes: ...

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes: ...


class MessageHead(NamedTuple):
    id: str
    model: str
    tier: ServedTier
    max_tokens: int | None

    def message(
        self,
        content: list[Content],
        usage: MeteredUsage,
        cost: RatedUsage | None = None,
        end: tuple[StopReason, str | None] | tuple[None, None] = (None, None),
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=end[0],
            stop_sequence=end[1],
            usage=to_message_usage(usage, self.tier, cost),
        )


def to_anthropic(request: GenerateRequest, heading: AnswerHeader) -> MessageEncoder:
    head = to_head(request, heading)
    return MessageStream(head) if request.stream else MessageBody(head)


def to_opening(
    request: GenerateRequest, heading: AnswerHeader
) -> Callable[[MeteredUsage], bytes] | None:
    """Return the function that makes a stream's first bytes, once its prompt is counted."""
    if not request.stream:
        return None
    head = to_head(request, heading)

    def opening(usage: MeteredUsage) -> bytes:
        shown = _encode(head.message([], usage))
        return event(b"message_start", b',"message":%b' % shown) + PING

    return opening


def to_head(request: GenerateRequest, heading: AnswerHeader) -> MessageHead:
    assert request.prompt is not None
    tier = SERVED_AS[heading.service_tier]
    return MessageHead(heading.id, request.model, tier, request.prompt.max_tokens)


def event(name: bytes, fields: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b"%b}\n\n' % (name, name, fields)


def signature_of(thinking: str) -> str:
    """Return a signature of the reasoning: opaque to clients, who send it back; nothing here checks
    it."""
    digest = hashlib.blake2b(thinking.encode(errors="replace"), digest_size=48).digest()
    return base64.b64encode(digest).decode()


class Piece(NamedTuple):
    """A piece of one block."""

    kind: Kind
    text: str
    name: str | None = None
    """The name of the call whose block begins with this piece."""


class Cutter:
    """Cuts deltas into pieces of blocks, and knows how the answer ended."""

    def __init__(self) -> None:
        self._finish_reason: FinishReason | None = None
        self._stop_string: str | None = None
        self._has_calls = False

    def pieces(self, items: Items) -> Iterator[Piece]:
        for item in items:
            assert isinstance(item, TextDelta)
            if item.reasoning:
                yield Piece("thinking", item.reasoning)
            if item.text:
                yield Piece("text", item.text)
            for call in item.calls:
                self._has_calls = True
                yield Piece("tool_use", call.arguments, call.name)
            if item.finish_reason is not None:
                self._finish_reason, self._stop_string = item.finish_reason, item.stop_string

    def end(self, output_tokens: int, max_tokens: int | None) -> tuple[StopReason, str | None]:
        """Return why it ended, and at which of the client's stop strings."""
        if self._stop_string is not None:
            return "stop_sequence", self._stop_string
        reason = STOP_REASONS[self._finish_reason or "stop"]
        if reason == "end_turn" and self._has_calls:
            return "tool_use", None
        if reason == "max_tokens" and max_tokens is not None and output_tokens < max_tokens:
            return "model_context_window_exceeded", None
        return reason, None


class MessageStream:
    """Writes blocks one behind the other, each between its start and its stop. What comes before
    them is `to_opening`'s."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._cutter = Cutter()
        self._open: Kind | None = None
        self._index = -1
        self._thinking: list[str] = []

    def encode(self, items: Items) -> bytes:
        events: list[bytes] = []
        for piece in self._cutter.pieces(items):
            if piece.kind != self._open or piece.name is not None:
                events += self._closed()
                events.append(self._opened(piece))
            if piece.kind == "thinking":
                self._thinking.append(piece.text)
            if piece.text:
                kind, field = DELTAS[piece.kind]
                events.append(self._delta(kind, field, piece.text))
        return b"".join(events)

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        reason, stop = self._cutter.end(usage.output, self._head.max_tokens)
        delta = _encode({"stop_reason": reason, "stop_sequence": stop})
        told = _encode(to_delta_usage(usage, cost))
        last = event(b"message_delta", b',"delta":%b,"usage":%b' % (delta, told))
        return b"".join([*self._closed(), last, STOP])

    def _opened(self, piece: Piece) -> bytes:
        self._index += 1
        self._open = piece.kind
        block = _encode(begun(piece))
        fields = b',"index":%d,"content_block":%b' % (self._index, block)
        return event(b"content_block_start", fields)

    def _closed(self) -> Iterator[bytes]:
        if self._open == "thinking":
            signature = signature_of("".join(self._thinking))
            yield self._delta(b"signature_delta", b"signature", signature)
            self._thinking.clear()
        if self._open is not None:
            yield event(b"content_block_stop", b',"index":%d' % self._index)
        self._open = None

    def _delta(self, kind: bytes, field: bytes, text: str) -> bytes:
        fields = b',"index":%d,"delta":{"type":"%b","%b":%b}' % (
            self._index,
            kind,
            field,
            _encode(text),
        )
        return event(b"content_block_delta", fields)


class MessageBody:
    """The same blocks, whole."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._cutter = Cutter()
        self._blocks: list[tuple[Piece, list[str]]] = []
        """The first piece and the text of each block."""

    def encode(self, items: Items) -> bytes:
        for piece in self._cutter.pieces(items):
            last = self._blocks[-1][0].kind if self._blocks else None
            if piece.kind != last or piece.name is not None:
                self._blocks.append((piece, []))
            self._blocks[-1][1].append(piece.text)
        return b""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        content = [ended(piece, "".join(texts)) for piece, texts in self._blocks]
        end = self._cutter.end(usage.output, self._head.max_tokens)
        return _encode(self._head.message(content, usage, cost, end))


def begun(piece: Piece) -> Content:
    match piece.kind:
        case "text":
            return TextContent("")
        case "thinking":
            return ThinkingContent("", "")
        case "tool_use":
            return to_tool_use(piece, "")


def ended(piece: Piece, text: str) -> Content:
    match piece.kind:
        case "text":
            return TextContent(text)
        case "thinking":
            return ThinkingContent(text, signature_of(text))
        case "tool_use":
            return to_tool_use(piece, text)


def to_tool_use(piece: Piece, arguments: str) -> ToolUseContent:
    call_id = f"toolu_{uuid7_hex()[-CALL_ID_CHARS:]}"
    shown = msgspec.Raw(to_object(arguments).encode(errors="replace"))
    return ToolUseContent(call_id, piece.name or "", shown)
