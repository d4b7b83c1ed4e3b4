"""OpenAI's `Response`, as a struct.

Knows no stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from billing.events import Tier
from billing.pricing.rating import RatedUsage
from gateway.generate_request import ReasoningEffort
from gateway.generation_events import MeteredUsage
from gateway.wire.constraints.format_structs import JsonObjectFormat, TextFormat
from gateway.wire.openai_responses.client_tools import (
    ClientTool,
    CustomTool,
    HostedTool,
    NamespaceTool,
    ResponseFunctionTool,
)
from gateway.wire.openai_responses.items import Item
from gateway.wire.openai_responses.mcp_tools import McpApprovalFilter, McpTool, McpToolFilter
from gateway.wire.openai_responses.request import (
    ConversationId,
    ReasoningConfig,
    ReasoningSummary,
    ResponseRequest,
    SchemaFormat,
    ToolChoice,
    Verbosity,
)
from gateway.wire.usage.cost import UsageCost, to_usage_cost

Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ResponseOutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


IncompleteReason = Literal[
    "max_output_tokens",
    "content_filter",
    "max_tool_rounds",
    "max_tool_seconds",
    "max_tool_tokens",
    "max_tool_cost",
    "rate_limit_exceeded",
    "insufficient_quota",
    "context_length_exceeded",
    "overloaded",
]
"""From the third on ours alone: why a loop of tools went no further."""


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of an answer: `input_tokens` includes cached ones, `output_tokens` reasoning."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int
    cost: UsageCost | UnsetType = UNSET
    """The cost, if it was requested."""


class ResponseError(msgspec.Struct, frozen=True):
    code: ErrorCode
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: IncompleteReason


class AnsweredTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class AnsweredMcpTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="mcp"):
    server_label: str
    server_description: str | None
    allowed_tools: list[str] | McpToolFilter | None
    require_approval: Literal["always", "never"] | McpApprovalFilter


class AnsweredText(msgspec.Struct, frozen=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat
    verbosity: Verbosity = "medium"


class AnsweredReasoning(msgspec.Struct, frozen=True):
    effort: ReasoningEffort | None
    summary: ReasoningSummary | None


class ConversationRef(msgspec.Struct, frozen=True):
    id: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix seconds."""
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    conversation: ConversationRef | None = None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: tuple[Item, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None
    reasoning: AnsweredReasoning
    safety_identifier: str | None
    service_tier: Tier
    temperature: float
    text: AnsweredText
    tool_choice: ToolChoice
    tools: tuple[AnsweredTool | CustomTool | NamespaceTool | AnsweredMcpTool, ...]
    """Without those that were left out; `metadata` names these."""
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


LEFT_OUT = "tollgate.left_out_tools"
"""The label in `metadata` that names the types of tools that no model was shown."""


def begun(
    request: ResponseRequest,
    *,
    id: str,
    created_at: int,
    service_tier: Tier,
    status: Status,
    left_out: Sequence[str] = (),
) -> ResponseObject:
    """Return an answer that only repeats its request, before it says anything. `left_out`: types of
    tools that the model is not shown."""
    text, reasoning = request.text, request.reasoning or ReasoningConfig()
    return ResponseObject(
        id=id,
        created_at=created_at,
        status=status,
        background=bool(request.background),
        conversation=None
        if request.conversation is None
        else ConversationRef(id_of(request.conversation)),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=(request.metadata or {}) | ({LEFT_OUT: ", ".join(left_out)} if left_out else {}),
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=AnsweredReasoning(reasoning.effort, reasoning.summary),
        safety_identifier=request.safety_identifier,
        service_tier=service_tier,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=AnsweredText(
            (text and text.format) or TextFormat(), (text and text.verbosity) or "medium"
        ),
        tool_choice=request.tool_choice or "auto",
        tools=tuple(
            to_answered(tool) for tool in request.tools or () if not isinstance(tool, HostedTool)
        ),
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )


def to_answered(
    tool: ClientTool | NamespaceTool | McpTool,
) -> AnsweredTool | CustomTool | NamespaceTool | AnsweredMcpTool:
    match tool:
        case CustomTool() | NamespaceTool():
            return tool
        case ResponseFunctionTool():
            return AnsweredTool(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=bool(tool.strict),
            )
        case McpTool():
            return AnsweredMcpTool(
                server_label=tool.server_label,
                server_description=tool.server_description,
                allowed_tools=tool.allowed_tools,
                require_approval=tool.require_approval or "always",
            )


def id_of(conversation: str | ConversationId) -> str:
    return conversation if isinstance(conversation, str) else conversation.id


def to_usage(usage: MeteredUsage, cost: RatedUsage | None = None) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cache_read,
            cache_write_tokens=usage.cache_write + usage.cache_write_1h,
        ),
        output_tokens=usage.output,
        output_tokens_details=ResponseOutputTokensDetails(reasoning_tokens=usage.reasoning_output),
        total_tokens=usage.total_tokens,
        cost=UNSET if cost is None else to_usage_cost(cost),
    )
