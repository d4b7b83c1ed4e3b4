"""The events of a streamed `Response`, one struct for each shape; `type` tells them apart."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.generation_events import TokenInfo
from gateway.wire.openai_responses.answer import ResponseObject
from gateway.wire.openai_responses.items import Item, OutputText, ReasoningText

StatusType = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]
ItemEventType = Literal["response.output_item.added", "response.output_item.done"]
PartType = Literal["response.content_part.added", "response.content_part.done"]


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    """The event's name, too."""
    sequence_number: int
    """Counts the events from 0, without a gap."""


class StatusEvent(ResponseEvent, frozen=True, kw_only=True):
    type: StatusType
    response: ResponseObject


class ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    type: ItemEventType
    output_index: int
    item: Item


class ItemPartEvent(ResponseEvent, frozen=True, kw_only=True):
    """An event about a part of an item, or a step of a call or a list of tools."""

    item_id: str
    output_index: int


class ContentPartEvent(ItemPartEvent, frozen=True, kw_only=True):
    type: PartType
    content_index: int = 0
    part: OutputText | ReasoningText


class ArgumentsDelta(ItemPartEvent, frozen=True, kw_only=True):
    delta: str


class ArgumentsDone(ItemPartEvent, frozen=True, kw_only=True):
    arguments: str


class CustomInputDelta(ItemPartEvent, frozen=True, kw_only=True):
    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    delta: str


class CustomInputDone(ItemPartEvent, frozen=True, kw_only=True):
    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    input: str


class FunctionArgumentsDone(ArgumentsDone, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    """The function's. OpenAI's clients in Java require it, those in Python do not know it."""


class EventTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class EventLogprob(msgspec.Struct, frozen=True):
    """An event has no bytes of it; the item has."""

    token: str
    logprob: float
    top_logprobs: list[EventTop]


class OutputTextDelta(ItemPartEvent, frozen=True, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    content_index: int = 0
    delta: str
    logprobs: list[EventLogprob] = []


class OutputTextDone(ItemPartEvent, frozen=True, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    content_index: int = 0
    text: str
    logprobs: list[EventLogprob] = []


class ReasoningDelta(ItemPartEvent, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    content_index: int = 0
    delta: str


class ReasoningDone(ItemPartEvent, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    content_index: int = 0
    text: str


def to_event_logprobs(infos: list[TokenInfo]) -> list[EventLogprob]:
    return [
        EventLogprob(
            info.token,
            info.logprob,
            [EventTop(top.token, top.logprob) for top in info.top_logprobs],
        )
        for info in infos
    ]
