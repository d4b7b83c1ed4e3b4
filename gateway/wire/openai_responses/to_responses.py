"""Encodes a replica's events as OpenAI's `Response`: whole, or as the events of a stream.

Knows no HTTP and no replica.

Items are written one behind the other: what was thought, what was said, each call. The next one's
beginning ends the one before. An answer that is not streamed is built in the same way, and of its
events none is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET

from billing.pricing.rating import RatedUsage
from foundation import sse
from gateway.generation_events import (
    CallDelta,
    FinishReason,
    Items,
    MeteredUsage,
    TextDelta,
    TokenInfo,
)
from gateway.wire.openai.chat_answer import call_id
from gateway.wire.openai_responses import events
from gateway.wire.openai_responses.answer import (
    ErrorCode,
    IncompleteDetails,
    ResponseError,
    ResponseObject,
    to_usage,
)
from gateway.wire.openai_responses.client_tools import CalledTool
from gateway.wire.openai_responses.from_responses import new_id
from gateway.wire.openai_responses.items import (
    PREFIXES,
    CustomCall,
    FunctionCall,
    Item,
    ItemStatus,
    Message,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

_encode = msgspec.json.Encoder().encode

NO_TOOLS: Mapping[str, CalledTool] = {}
INCOMPLETE: dict[FinishReason | None, IncompleteDetails] = {
    "length": IncompleteDetails("max_output_tokens"),
    "content_filter": IncompleteDetails("content_filter"),
}


Seal = Callable[[str], str]
"""Makes of a text one that only this installation can read."""


class _TextArgument(msgspec.Struct):
    input: str


_text_decoder = msgspec.json.Decoder(_TextArgument)


class ItemWriter:
    """Builds one item while it is written."""

    def __init__(
        self, kind: type[Item], *, called: CalledTool | None = None, seal: Seal | None = None
    ) -> None:
        """`called`: of a call, its tool; `seal`: seals what was thought, if it is to be sealed."""
        self.kind = kind
        self.id = new_id(PREFIXES[kind])
        self.call_id = "" if called is None else call_id()
        self._called, self._seal = called, seal
        self.pieces: list[str] = []
        self.logprobs: list[TokenInfo] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def name(self) -> str:
        """Return the name of the tool that a call is of, as the client knows it."""
        return "" if self._called is None else self._called.name

    def item(self, status: ItemStatus) -> Item:
        """Return the item as it is by now; one in progress has nothing yet."""
        begun = status != "in_progress"
        if self._called is not None:
            return self._call(self._called, status)
        if self.kind is ReasoningItem:
            parts = (ReasoningText(text=self.text),) if begun else ()
            sealed = self._seal(self.text) if begun and self._seal is not None else UNSET
            return ReasoningItem(id=self.id, status=status, content=parts, encrypted_content=sealed)
        said = (self.said(),) if begun else ()
        return Message(id=self.id, status=status, role="assistant", content=said)

    def _call(self, called: CalledTool, status: ItemStatus) -> Item:
        about: dict[str, Any] = {"id": self.id, "call_id": self.call_id}
        about |= {"name": called.name, "namespace": called.namespace}
        begun = status != "in_progress"
        if self.kind is CustomCall:
            return CustomCall(**about, input=self.input if begun else "")
        return FunctionCall(**about, status=status, arguments=self.text if begun else "")

    @property
    def input(self) -> str:
        """Return the text that a custom tool is called with: the argument, or what stands there in
        its place."""
        try:
            return _text_decoder.decode(self.text).input
        except msgspec.DecodeError:
            return self.text

    def said(self) -> OutputText:
        return OutputText(self.text, logprobs=tuple(self.logprobs))


class ResponseEncoder:
    """Encodes one answer. `response`: as it begins; from `finish` on as it ended. `called`: tools
    that the client knows by another name than the model; `seal`: for what was thought."""

    def __init__(
        self,
        response: ResponseObject,
        *,
        stream: bool,
        called: Mapping[str, CalledTool] = NO_TOOLS,
        seal: Seal | None = None,
    ) -> None:
        self.response = response
        self._stream = stream
        self._called, self._seal = called, seal
        self._sequence_number = 0
        self._is_open = self._has_begun = False
        self._out: list[bytes] = []
        self._done: list[Item] = []
        self._open: ItemWriter | None = None
        self._num_calls = 0
        self._finish_reason: FinishReason | None = None
        self._incomplete: IncompleteDetails | None = None
        """The reason for an incomplete answer that its last event does not give."""

    def open(self) -> bytes:
        """Return what a stream says before anything of it runs."""
        self._is_open = True
        self._send_status("response.created")
        if self.response.status == "queued":
            self._send_status("response.queued")
        return self._taken()

    def encode(self, items: Items) -> bytes:
        if not self._has_begun:
            self._begin()
        for item in items:
            assert isinstance(item, TextDelta)
            self._take(item)
        return self._taken()

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        if not self._done and self._open is None:
            self._say("", None)  # an answer has a message, be it an empty one
        details = self._incomplete or INCOMPLETE.get(self._finish_reason)
        self._close("completed" if details is None else "incomplete")
        self.response = msgspec.structs.replace(
            self.response,
            status="completed" if details is None else "incomplete",
            completed_at=int(time.time()) if details is None else None,
            incomplete_details=details,
            output=tuple(self._done),
            usage=to_usage(usage, cost),
        )
        if not self._stream:
            return _encode(self.response)
        self._send_status("response.completed" if details is None else "response.incomplete")
        return self._taken()

    def fail(self, *, status: int, message: str) -> bytes:
        """The end of a stream, of one in the background also of one that had not begun."""
        if not self._has_begun:
            self._begin()
        code: ErrorCode = "rate_limit_exceeded" if status == 429 else "server_error"
        self._close("incomplete")
        self.response = msgspec.structs.replace(
            self.response,
            status="failed",
            error=ResponseError(code, message),
            output=tuple(self._done),
        )
        self._send_status("response.failed")
        return self._taken()

    # ---- what was thought, said and called

    def _take(self, delta: TextDelta) -> None:
        """The logprobs are of all of it."""
        if delta.reasoning:
            self._think(delta.reasoning)
        if delta.text or (delta.logprobs and not (delta.reasoning or delta.calls)):
            self._say(delta.text, delta.logprobs)
        for call in delta.calls:
            self._call(call)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason

    def _think(self, text: str) -> None:
        at = self._writing(ReasoningItem)
        at.pieces.append(text)
        if self._stream:
            about = self._about(at)
            self._send(events.ReasoningDelta(**about, delta=text))

    def _say(self, text: str, logprobs: list[TokenInfo] | None) -> None:
        at = self._writing(Message)
        at.pieces.append(text)
        if logprobs:
            at.logprobs += logprobs
        if self._stream and (text or logprobs):
            shown = events.to_event_logprobs(logprobs) if logprobs else []
            self._send(events.OutputTextDelta(**self._about(at), delta=text, logprobs=shown))

    def _call(self, call: CallDelta) -> None:
        if call.name is not None:
            assert call.index == self._num_calls  # a call is over before the next one begins
            self._num_calls += 1
            self._close("completed")
            called = self._called.get(call.name) or CalledTool(call.name)
            kind = CustomCall if called.takes_text else FunctionCall
            self._begin_item(ItemWriter(kind, called=called))
        at = self._open
        assert at is not None and at.kind in (FunctionCall, CustomCall)
        if call.arguments:
            at.pieces.append(call.arguments)
            if self._stream and at.kind is FunctionCall:
                name = "response.function_call_arguments.delta"
                about = self._about(at)
                self._send(events.ArgumentsDelta(type=name, **about, delta=call.arguments))

    # ---- items begin and end

    def _writing(self, kind: type[Item]) -> ItemWriter:
        if self._open is None or self._open.kind is not kind:
            self._close("completed")
            self._begin_item(ItemWriter(kind, seal=self._seal))
        assert self._open is not None
        return self._open

    def _begin_item(self, at: ItemWriter) -> None:
        self._open = at
        if not self._stream:
            return
        self._send_item("response.output_item.added", at.item("in_progress"), len(self._done))
        if at.kind is Message:
            self._send_part("response.content_part.added", at, OutputText(""))
        elif at.kind is ReasoningItem:
            self._send_part("response.content_part.added", at, ReasoningText(text=""))

    def _close(self, status: ItemStatus) -> None:
        at = self._open
        if at is None:
            return
        done = at.item(status)
        if self._stream:
            self._say_done(at)
            self._send_item("response.output_item.done", done, len(self._done))
        self._done.append(done)
        self._open = None

    def _say_done(self, at: ItemWriter) -> None:
        text = at.text
        if at.kind is FunctionCall:
            about = self._about(at)
            self._send(events.FunctionArgumentsDone(**about, name=at.name, arguments=text))
        elif at.kind is CustomCall:  # told whole: until then it is a piece of JSON
            self._send(events.CustomInputDelta(**self._about(at), delta=at.input))
            self._send(events.CustomInputDone(**self._about(at), input=at.input))
        elif at.kind is ReasoningItem:
            self._send(events.ReasoningDone(**self._about(at), text=text))
            self._send_part("response.content_part.done", at, ReasoningText(text=text))
        else:
            shown = events.to_event_logprobs(at.logprobs)
            self._send(events.OutputTextDone(**self._about(at), text=text, logprobs=shown))
            self._send_part("response.content_part.done", at, at.said())

    # ---- events

    def _begin(self) -> None:
        self._has_begun = True
        if not self._stream:
            return
        if not self._is_open:
            self._out.append(self.open())
        if self.response.status == "queued":
            self.response = msgspec.structs.replace(self.response, status="in_progress")
        self._send_status("response.in_progress")

    def _about(self, at: ItemWriter) -> dict[str, Any]:
        return {
            "sequence_number": self._next(),
            "item_id": at.id,
            "output_index": len(self._done),
        }

    def _next(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number

    def _send_status(self, name: events.StatusType) -> None:
        number = self._next()
        event = events.StatusEvent(type=name, sequence_number=number, response=self.response)
        self._send(event)

    def _send_item(self, name: events.ItemEventType, item: Item, place: int) -> None:
        number = self._next()
        event = events.ItemEvent(type=name, sequence_number=number, output_index=place, item=item)
        self._send(event)

    def _send_part(
        self, name: events.PartType, at: ItemWriter, part: OutputText | ReasoningText
    ) -> None:
        self._send(events.ContentPartEvent(type=name, **self._about(at), part=part))

    def _send(self, event: events.ResponseEvent) -> None:
        self._out += (opening_of(event.type), _encode(event), sse.END)

    def _taken(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out


@cache
def opening_of(name: str) -> bytes:
    """Return the bytes before an event's data, which is JSON of one line."""
    return b"event: %b\n%b" % (name.encode(), sse.DATA)
