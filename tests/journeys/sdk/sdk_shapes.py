"""Looks through what the official SDK made of an answer for what it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

UNKNOWN_TO_THE_SDK = {
    ("ParsedFunctionToolCall", "index"),  # the place of a call in a stream: its accumulator's
    ("ResponseFunctionCallArgumentsDoneEvent", "name"),  # OpenAI's types for Java require it
}
"""Fields by the names of their types."""


def extras(model: BaseModel, at: str = "") -> list[str]:
    """Paths of fields that the SDK's types do not have, but for UNKNOWN_TO_THE_SDK; and of those
    that they cannot be without and that did not come.
    A client that is not strict makes an answer without them and says nothing."""
    return list(_extras(model, at))


def _extras(value: Any, at: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            if (type(value).__name__, name) not in UNKNOWN_TO_THE_SDK:
                yield f"{at}.{name}"
        for name, field in type(value).model_fields.items():
            if field.is_required() and name not in value.model_fields_set:
                yield f"{at}.{name} is missing"
            else:
                yield from _extras(getattr(value, name), f"{at}.{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _extras(each, f"{at}[{index}]")


def said(completion: BaseModel, *, usage: bool = True) -> dict[str, Any]:
    """All of an answer that two requests of one seed have in common; of what it used all but what
    of its prompt was found in the cache. `usage` false: a stream that is not asked for it has
    none."""
    found = completion.model_dump(exclude={"id", "created"}, warnings=False)
    used = found.pop("usage", None)
    if usage:
        used.pop("prompt_tokens_details")
        found["usage"] = used
    for choice in found["choices"]:
        choice["message"].setdefault("parsed", None)  # the accumulator always has it
        for call in choice["message"].get("tool_calls") or ():
            assert call.pop("id").startswith("call_")
            call.pop("index", None)  # of a stream's deltas, kept by its accumulator
            if call["function"].get("parsed_arguments") is None:
                call["function"].pop("parsed_arguments", None)
    return found


def said_by(message: BaseModel, *, usage: bool = True) -> dict[str, Any]:
    """The same of an answer in Anthropic's shape. `usage`: with what it used, which is another
    where the second request found its prompt in the cache."""
    left_out = {"id"} if usage else {"id", "usage"}
    found = message.model_dump(exclude=left_out, warnings=False)
    for block in found["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
        block.pop("parsed_output", None)
    return found


def said_in(response: BaseModel) -> dict[str, Any]:
    """The same of a response; but for what of its prompt was found in the cache."""
    found = response.model_dump(exclude={"id", "created_at", "completed_at"}, warnings=False)
    for item in found["output"]:
        assert item.pop("id").startswith(("msg_", "fc_", "ctc_", "rs_"))
        if item["type"] in ("function_call", "custom_tool_call"):
            assert item.pop("call_id").startswith("call_")
            item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    (found["usage"] or {}).pop("input_tokens_details", None)
    return found
