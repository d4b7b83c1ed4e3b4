"""The events of a streamed `Response`, as structs; an event's name stands in it as its `type`."""

from __future__ import annotations

import msgspec

from gateway.generation_events import TokenInfo
from gateway.wire.openai_responses.answer import ResponseObject
from gateway.wire.openai_responses.items import Item, OutputText, ReasoningText


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int
    """From 0, without a gap."""


class OfResponse(ResponseEvent, frozen=True, kw_only=True):
    response: ResponseObject


class ResponseCreated(OfResponse, frozen=True, kw_only=True, tag="response.created"):
    pass


class ResponseQueued(OfResponse, frozen=True, kw_only=True, tag="response.queued"):
    pass


class InProgress(OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class ResponseCompleted(OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    pass


class Incomplete(OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    pass


class ResponseFailed(OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    pass


class OfItem(ResponseEvent, frozen=True, kw_only=True):
    output_index: int
    item: Item


class ItemAdded(OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    pass


class ItemDone(OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    pass


class AboutItem(ResponseEvent, frozen=True, kw_only=True):
    """An event about a part of an item."""

    item_id: str
    output_index: int


class OfPart(AboutItem, frozen=True, kw_only=True):
    content_index: int = 0
    part: OutputText | ReasoningText


class PartAdded(OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    pass


class PartDone(OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    pass


class ListInProgress(
    AboutItem, frozen=True, kw_only=True, tag="response.mcp_list_tools.in_progress"
):
    pass


class ListCompleted(AboutItem, frozen=True, kw_only=True, tag="response.mcp_list_tools.completed"):
    pass


class McpListFailed(AboutItem, frozen=True, kw_only=True, tag="response.mcp_list_tools.failed"):
    pass


class McpCallInProgress(AboutItem, frozen=True, kw_only=True, tag="response.mcp_call.in_progress"):
    pass


class McpCallCompleted(AboutItem, frozen=True, kw_only=True, tag="response.mcp_call.completed"):
    pass


class McpCallFailed(AboutItem, frozen=True, kw_only=True, tag="response.mcp_call.failed"):
    pass


class McpArgumentsDelta(
    AboutItem, frozen=True, kw_only=True, tag="response.mcp_call_arguments.delta"
):
    delta: str


class McpArgumentsDone(
    AboutItem, frozen=True, kw_only=True, tag="response.mcp_call_arguments.done"
):
    arguments: str


class EventTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class EventLogprob(msgspec.Struct, frozen=True):
    """An event has no bytes of it; the item has."""

    token: str
    logprob: float
    top_logprobs: list[EventTop]


class OutputTextDelta(AboutItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: list[EventLogprob] = []


class TextDone(AboutItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: list[EventLogprob] = []


class ReasoningDelta(AboutItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningDone(AboutItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class ArgumentsDelta(
    AboutItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    AboutItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    arguments: str


def to_event_logprobs(infos: list[TokenInfo]) -> list[EventLogprob]:
    return [
        EventLogprob(
            info.token,
            info.logprob,
            [EventTop(top.token, top.logprob) for top in info.top_logprobs],
        )
        for info in infos
    ]
