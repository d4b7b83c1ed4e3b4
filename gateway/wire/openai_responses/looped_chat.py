"""A chat completion whose tools are called here: one answer of all rounds, and the steps beside it,
in a field of our own.

What the model says in each round is content, one behind the other, so that a stream adds up to the
whole answer. Of a stream a step is a chunk without choices that has `mcp_step`; a whole answer has
all in `mcp_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from billing.pricing.rating import RatedUsage
from foundation import sse
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import FinishReason, Item, MeteredUsage, TextDelta
from gateway.ids import uuid7_hex
from gateway.wire.openai.to_chat import ChatBody, ChatHead, ChatStream
from gateway.wire.openai_responses.answer import IncompleteReason
from gateway.wire.openai_responses.items import PREFIXES, McpApprovalRequest, McpCall, McpListTools
from gateway.wire.openai_responses.looped_responses import to_listed
from gateway.wire.openai_responses.tool_rounds import Round, ServerTools

_encode = msgspec.json.Encoder().encode


class LoopIncomplete(msgspec.Struct, frozen=True, tag_field="type", tag="incomplete"):
    """The reason why there is no further round."""

    reason: IncompleteReason


ChatStep = McpListTools | McpCall | McpApprovalRequest | LoopIncomplete


class ChatSteps:
    def __init__(self, request: GenerateRequest, heading: AnswerHeader) -> None:
        self._head = ChatHead(
            id=heading.id,
            created=heading.created,
            model=request.model,
            service_tier=heading.service_tier,
        )
        self._stream = request.stream
        self._encoder: ChatStream | ChatBody = (
            ChatStream(self._head, request.include_usage)
            if request.stream
            else ChatBody(self._head, 1)
        )
        self._functions: frozenset[str] = frozenset()
        self._steps: list[ChatStep] = []
        self._asks = False
        """A person has to say something first, so this is no whole answer."""
        self._own: list[int] = []
        """Indices of the round's calls that the client runs itself."""
        self._finish_reason: FinishReason | None = None

    def listed(self, listing: ServerTools) -> bytes:
        item = McpListTools(
            id=PREFIXES[McpListTools] + uuid7_hex(),
            server_label=listing.server_label,
            tools=tuple(to_listed(each) for each in listing.tools),
            error=listing.error,
        )
        return self._step(item)

    def offered(self, own: frozenset[str], asks: frozenset[str]) -> None:
        self._functions = own

    def encode(self, items: Sequence[Item], round_: Round) -> bytes:
        shown = [self._without_steps(item, round_) for item in items if isinstance(item, TextDelta)]
        return self._encoder.encode(shown)

    def _without_steps(self, delta: TextDelta, round_: Round) -> TextDelta:
        """The reason to finish is the last round's."""
        self._finish_reason = delta.finish_reason or self._finish_reason
        calls = []
        for call in delta.calls:
            if round_.calls[call.index].alias not in self._functions:
                continue
            if call.name is not None:
                self._own.append(call.index)
            calls.append(msgspec.structs.replace(call, index=self._own.index(call.index)))
        return msgspec.structs.replace(delta, calls=tuple(calls), finish_reason=None)

    def round_ended(self) -> bytes:
        return b""

    def called(self, call: McpCall) -> bytes:
        return self._step(call)

    def asked(self, request: McpApprovalRequest) -> bytes:
        self._asks = True
        return self._step(request)

    def finish(
        self, usage: MeteredUsage, cost: RatedUsage | None, why: IncompleteReason | None
    ) -> bytes:
        reason: FinishReason = self._finish_reason or "stop"
        if reason == "tool_calls" and not self._own:
            reason = "stop"
        if self._asks:
            reason = "length"
        told = b""
        if why is not None:
            reason, told = "length", self._step(LoopIncomplete(why))
        last = self._encoder.encode([TextDelta(index=0, text="", finish_reason=reason)])
        end = self._encoder.finish(usage, cost)
        if self._stream:
            return told + last + end
        return end[:-1] + b',"mcp_steps":' + _encode(self._steps) + b"}"

    def _step(self, step: ChatStep) -> bytes:
        self._steps.append(step)
        if not self._stream:
            return b""
        return sse.encode(self._head.opened() + b',"choices":[],"mcp_step":' + _encode(step) + b"}")
