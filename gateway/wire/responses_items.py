"""Items of OpenAI's Responses API, as structs: what a conversation is made of, asked and answered.

Above: `responses` and `responses_answer`, whose requests and answers have them;
`responses_context`, which makes a model's messages of them; what is stored. Below: nothing. What a
client sends may leave out what we know (`In...`); what we keep and answer has all of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.fleet.replica import TokenInfo
from gateway.wire.openai import Unsupported
from gateway.wire.openai_forms import Strict
from gateway.wire.openai_tools import ToolName

MAX_ID_CHARS = 128
MAX_ITEMS = 10_000
"""Of one request, and of all that it continues."""
MAX_ITEM_PARTS = 10_000

ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Role = Literal["user", "assistant", "system", "developer"]
Phase = Literal["commentary", "final_answer"]


# ---- as a client sends them


class InText(Strict, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Unsupported = None


class InOutputText(Strict, tag_field="type", tag="output_text"):
    """Of an earlier answer, as it came."""

    text: str
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None
    logprobs: Any = None
    parsed: Any = None
    """What a client's library read in it; not read here."""


class InMessage(Strict, tag_field="type", tag="message"):
    role: Role
    content: str | Annotated[list[InText | InOutputText], Meta(max_length=MAX_ITEM_PARTS)]
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Phase | None = None


class InCall(Strict, tag_field="type", tag="function_call"):
    call_id: ItemId
    name: ToolName
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    namespace: Unsupported = None
    caller: Unsupported = None
    in_background: Unsupported = msgspec.field(default=None, name="async")
    parsed_arguments: Any = None


class InCallOutput(Strict, tag_field="type", tag="function_call_output"):
    call_id: ItemId
    output: str | Annotated[list[InText], Meta(max_length=MAX_ITEM_PARTS)]
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: Unsupported = None
    caller: Unsupported = None


class SummaryText(Strict, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Strict, tag_field="type", tag="reasoning_text"):
    text: str


class InReasoning(Strict, tag_field="type", tag="reasoning"):
    summary: list[SummaryText]
    id: ItemId | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Unsupported = None
    status: ItemStatus | None = None


class ItemReference(Strict, tag_field="type", tag="item_reference"):
    """One that is stored, by its id."""

    id: ItemId


InItem = InMessage | InCall | InCallOutput | InReasoning | ItemReference


def with_type(item: Any) -> Any:
    """OpenAI takes a message without its type, and a reference that is nothing but its id."""
    if isinstance(item, dict) and item.get("type") is None:
        kind = "item_reference" if item.keys() <= {"id", "type"} else "message"
        return {**item, "type": kind}
    return item


# ---- as they are kept and answered


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[None, ...] = ()
    logprobs: tuple[TokenInfo, ...] = ()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Role
    content: tuple[Text | OutputText, ...]
    phase: Phase | UnsetType = UNSET


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CallOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    id: str
    status: ItemStatus
    call_id: str
    output: str | tuple[Text, ...]


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought stands in it whole; nobody writes a summary of it here."""

    id: str
    status: ItemStatus
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] = ()


Item = Message | FunctionCall | CallOutput | Reasoning
PREFIXES: dict[type, str] = {
    Message: "msg_",
    FunctionCall: "fc_",
    CallOutput: "fco_",
    Reasoning: "rs_",
}
"""Of ids."""
