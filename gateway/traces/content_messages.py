"""Says what a request asked and was answered as the conventions for generative AI have it: messages
of parts, as JSON."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from gateway.request_log.answers import NotedAnswer
from gateway.request_log.content import (
    OUTPUT_ROLE,
    StoredCall,
    StoredChoice,
    StoredMessage,
    to_content,
)
from gateway.traces import conventions as names

log = logging.getLogger(__name__)

TOOL = "tool"
REASONS = {"tool_calls": "tool_call", "function_call": "tool_call", "": "error"}
"""The conventions' word for a reason, where it is another one; none is of an answer that did not
end."""


def content_attributes(answer: NotedAnswer) -> dict[str, str | int | float | bool]:
    """Return the attributes of what was captured; none where nothing was, or it cannot be read."""
    captured = None if answer.meter is None else answer.meter.content
    if captured is None:
        return {}
    try:
        content = to_content(captured)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        log.warning("a span has no content: %s", type(error).__name__)
        return {}
    if content is None:
        return {}
    prompts = [{"role": "user", "parts": [text_part(text)]} for text in content.prompts]
    asked = prompts or [to_input(message) for message in content.messages]
    found: dict[str, str | int | float | bool] = {
        names.INPUT_MESSAGES: to_json(asked),
        names.OUTPUT_MESSAGES: to_json([to_output(choice) for choice in content.choices]),
    }
    if content.tools:
        found[names.TOOL_DEFINITIONS] = to_json(content.tools)
    if content.is_cut:
        found[names.CONTENT_CUT] = True
    return found


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def to_input(message: StoredMessage) -> dict[str, Any]:
    if message.role == TOOL:
        answered = {"type": "tool_call_response", "id": message.call_id, "response": message.text}
        return {"role": TOOL, "parts": [answered]}
    return {
        "role": message.role,
        "parts": parts_of(message.reasoning, message.text, message.calls),
    }


def to_output(choice: StoredChoice) -> dict[str, Any]:
    return {
        "role": OUTPUT_ROLE,
        "parts": parts_of(choice.reasoning, choice.text, choice.calls),
        "finish_reason": REASONS.get(choice.finish_reason, choice.finish_reason),
    }


def parts_of(reasoning: str, text: str, calls: tuple[StoredCall, ...]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reasoning:
        parts.append({"type": "reasoning", "content": reasoning})
    if text:
        parts.append(text_part(text))
    return parts + [to_part(call) for call in calls]


def to_part(call: StoredCall) -> dict[str, Any]:
    """Return a call; its arguments are a value where they are JSON, else a text."""
    part = {"type": "tool_call", "name": call.name, "arguments": value_of(call.arguments)}
    return part | ({"id": call.id} if call.id else {})


def value_of(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
