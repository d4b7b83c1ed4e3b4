"""The body of Anthropic's messages to a `GenerateRequest`, or the name of the field that is in the
way.

Whatever serves the model, an upstream too, gets the same `ChatPrompt`: what it cannot honour of
that its replica refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.protocol import Grammar
from gateway.generate_request import (
    CacheBreakpoint,
    ChatPrompt,
    Dialect,
    GenerateRequest,
    OutputForm,
    ReasoningEffort,
    Tool,
    ToolUse,
)
from gateway.request_errors import BadField
from gateway.wire.anthropic.conversation import ConversationBuilder, to_messages
from gateway.wire.anthropic.messages import (
    NOT_YET,
    AnyChoice,
    AutoChoice,
    Conversation,
    CountTokensRequest,
    MessagesRequest,
    NoTool,
    OneTool,
    ThinkingDisabled,
    ThinkingEnabled,
)
from gateway.wire.anthropic.offered_tools import offered_tools, tool_blocks
from gateway.wire.constraints.to_grammar import check_size, encoded
from gateway.wire.constraints.to_tool_use import known, offered, only_with_tools
from gateway.wire.openai.from_chat import default, nucleus
from gateway.wire.shared.cache_control import FIELD, Block, breakpoints_of
from gateway.wire.shared.refusals import check_values, decode

EFFORTS: tuple[tuple[int, ReasoningEffort], ...] = ((4096, "low"), (16384, "medium"))
"""The effort for budgets below each bound; larger ones mean `high`."""

EFFORT = "output_config.effort"
"""The field that says how hard to try, which the vendor's models without thinking take as well."""

_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


def from_anthropic(body: bytes, dialect: Dialect) -> GenerateRequest:
    """Raises BadField."""
    check_values(body)
    return to_generate(decode(_messages_decoder, body, NOT_YET))


def from_count_tokens(body: bytes) -> GenerateRequest:
    """Return a request whose prompt is to be counted. Raises BadField."""
    check_values(body)
    request = decode(_count_decoder, body, NOT_YET)
    return GenerateRequest(
        model=request.model,
        stream=False,
        include_usage=False,
        has_tools=bool(request.tools),
        prompt=to_prompt(request),
    )


def to_generate(request: MessagesRequest) -> GenerateRequest:
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        param = "thinking.budget_tokens"
        raise BadField(f"Invalid value for '{param}': not less than 'max_tokens'.", param=param)
    top_p, top_k = nucleus(request.top_p, request.top_k)
    prompt = msgspec.structs.replace(
        to_prompt(request),
        max_tokens=request.max_tokens,
        fits_window=True,
        temperature=default(request.temperature, 1.0),
        top_p=top_p,
        top_k=top_k,
        stop=tuple(request.stop_sequences or ()),
    )
    return GenerateRequest(
        model=request.model,
        stream=bool(request.stream),
        include_usage=True,
        service_tier="default" if request.service_tier == "standard_only" else None,
        has_tools=bool(request.tools),
        prompt=prompt,
    )


def to_prompt(request: Conversation) -> ChatPrompt:
    conversation = to_messages(request.system, request.messages)
    effort, effort_param = reasoning_effort(request)
    tools = offered_tools(request)
    if conversation.continues and isinstance(request.thinking, ThinkingEnabled):
        param = conversation.paths[-1]
        message = f"Invalid value for '{param}': what is thought about cannot have begun."
        raise BadField(message, param=param)
    return ChatPrompt(
        messages=conversation.messages,
        message_paths=tuple(conversation.paths),
        continues=conversation.continues,
        num_other_chars=conversation.num_other_chars,
        breakpoints=to_breakpoints(request, conversation, tools),
        form=output_form(request),
        reasoning_effort=effort,
        effort_param=effort_param,
        effort_is_hint=effort_param == EFFORT,
        tools=tool_use(request, tools),
    )


def to_breakpoints(
    request: Conversation, conversation: ConversationBuilder, tools: Mapping[str, Tool]
) -> tuple[CacheBreakpoint, ...]:
    blocks = [*tool_blocks(request, tools), *conversation.blocks]
    if request.cache_control is not None:
        mark_last(blocks, (FIELD, request.cache_control))
    return breakpoints_of(blocks)


def mark_last(blocks: list[Block], mark: Any) -> None:
    """The last block that can be kept, unless its client has marked it."""
    for position in reversed(range(len(blocks))):
        block = blocks[position]
        if not block.is_empty:
            if not block.marks:
                blocks[position] = block._replace(marks=[mark])
            return


def reasoning_effort(request: Conversation) -> tuple[ReasoningEffort | None, str]:
    """Return how much is to be thought, and the field that says so. A budget is a target, to the
    vendor's own models as well."""
    thinking, config = request.thinking, request.output_config
    asked = None if config is None else config.effort
    match thinking:
        case ThinkingDisabled():
            return "none", "thinking"
        case ThinkingEnabled() if asked is None:
            budget = thinking.budget_tokens
            return next((each for most, each in EFFORTS if budget < most), "high"), "thinking"
    return asked, EFFORT


def output_form(request: Conversation) -> OutputForm | None:
    config = request.output_config
    if config is None or config.format is None:
        return None
    param = "output_config.format.schema"
    grammar = Grammar(kind="json_schema", text=encoded(config.format.schema, param))
    form = OutputForm(grammar, param)
    check_size(form)
    return form


# ---- tools


def tool_use(request: Conversation, by_name: Mapping[str, Tool]) -> ToolUse | None:
    """Return how the model may use the tools that it is shown; None: it is shown none. Raises
    BadField."""
    choice = request.tool_choice
    if not by_name and isinstance(choice, AnyChoice | OneTool):
        raise only_with_tools("tool_choice")
    if not by_name or isinstance(choice, NoTool):
        return None
    forced: tuple[str, ...] = ()
    if isinstance(choice, AnyChoice):
        forced = tuple(by_name)
    elif isinstance(choice, OneTool):
        forced = (known(choice.name, by_name, "tool_choice.name"),)
    return offered(by_name, forced, parallel=is_parallel(choice))


def is_parallel(choice: AutoChoice | AnyChoice | OneTool | None) -> bool:
    """Return whether calls may be parallel: a request that names a tool wants one call of it."""
    return choice is None or not (isinstance(choice, OneTool) or choice.disable_parallel_tool_use)
