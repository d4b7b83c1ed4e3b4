"""The answers of Anthropic's Messages API, as structs.

Pure shapes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from billing.pricing.rating import RatedUsage
from gateway.generation_events import MeteredUsage
from gateway.wire.anthropic.reports import CacheCreation
from gateway.wire.usage.cost import UsageCost, to_usage_cost

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "refusal",
    "model_context_window_exceeded",
]
ServedTier = Literal["standard", "priority", "batch"]
JsonObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: JsonObject


Content = TextContent | ThinkingContent | ToolUseContent


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class DeltaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative. `input_tokens` is what was neither read from a cache nor written to one."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    cost: UsageCost | UnsetType = UNSET
    """The cost, if it was requested."""


class MessageUsage(DeltaUsage, frozen=True, kw_only=True):
    cache_creation: CacheCreation
    service_tier: ServedTier


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    """null: of a stream that begins."""
    stop_sequence: str | None
    usage: MessageUsage


def to_delta_usage(usage: MeteredUsage, cost: RatedUsage | None = None) -> DeltaUsage:
    return DeltaUsage(
        input_tokens=usage.uncached_input,
        cache_creation_input_tokens=usage.cache_write + usage.cache_write_1h,
        cache_read_input_tokens=usage.cache_read,
        output_tokens=usage.output,
        output_tokens_details=OutputTokensDetails(usage.reasoning_output),
        cost=UNSET if cost is None else to_usage_cost(cost),
    )


def to_message_usage(
    usage: MeteredUsage, tier: ServedTier, cost: RatedUsage | None = None
) -> MessageUsage:
    created = CacheCreation(
        ephemeral_1h_input_tokens=usage.cache_write_1h,
        ephemeral_5m_input_tokens=usage.cache_write,
    )
    told = msgspec.structs.asdict(to_delta_usage(usage, cost))
    return MessageUsage(cache_creation=created, service_tier=tier, **told)
