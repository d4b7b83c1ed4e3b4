"""OpenAI's `POST /v1/responses/compact` as structs: a conversation, and what is left of it.

Pure shapes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.generate_request import ServiceTier
from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.openai.chat import Unsupported
from gateway.wire.openai_responses.answer import ResponseUsage
from gateway.wire.openai_responses.items import MAX_ITEMS, CompactionItem, InItem, Item, ItemId
from gateway.wire.openai_responses.request import (
    ReasoningConfig,
    RequestTools,
    ResponseRequest,
    TextConfig,
)


class CompactRequest(StrictStruct):
    """The body of `POST /v1/responses/compact`. Codex sends what its turns have; a summary calls no
    tool and has no form."""

    model: str
    input: str | Annotated[list[InItem], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None
    reasoning: ReasoningConfig | None = None
    tools: RequestTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    client_metadata: dict[str, Any] | None = None
    image: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None


def to_response_request(request: CompactRequest) -> ResponseRequest:
    """Return the request of a response whose conversation this is."""
    return ResponseRequest(
        model=request.model,
        input=request.input,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        service_tier=request.service_tier,
        reasoning=request.reasoning,
        tools=request.tools,
        tool_choice="none",
    )


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    """Unix seconds."""
    output: tuple[Item | CompactionItem, ...]
    """The messages of the user, and the summary."""
    usage: ResponseUsage
