"""Translates an MCP server's `sampling/createMessage` to a chat completion and back. Pure. The
specification (2025-11-25 and 2026-07-28, client/sampling) rules how turns follow: a tool's result
stands only beside results, in the user's message after the one that called it, and each call has
one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from mcp_types import (
    CreateMessageRequestParams,
    SamplingMessage,
    TextContent,
    ToolResultContent,
    ToolUseContent,
)
from pydantic import ValidationError

from gateway.request_errors import BadField
from gateway.settings.file import WrittenMcpSampling
from gateway.wire.constraints.tool_structs import MAX_NAME_CHARS, MAX_TOOL_CALLS, MAX_TOOLS
from gateway.wire.openai.chat_answer import AnswerCall, ChatCompletion
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, INVALID_PARAMS, RpcError

MAX_PROMPT_BYTES = 1024 * 1024
STOP_REASONS = {"stop": "endTurn", "length": "maxTokens", "tool_calls": "toolUse"}
NOT_SERVED = ("task",)
"""Optional fields of a sampling request that are refused by name; servers are not told that we
support them."""
ERROR = "Error: "
"""Before the result of a call that failed, as on the Messages API."""
NOT_A_NAME = re.compile("[^a-zA-Z0-9_-]")
"""MCP's tools may have dots in their names; functions that models call may not."""
FIELDS = (
    (re.compile(r"^tools\[(\d+)\]\.function\.parameters"), r"tools.\1.inputSchema"),
    (re.compile(r"^tools\[(\d+)\]\.function\."), r"tools.\1."),
    (re.compile("^max_tokens$"), "maxTokens"),
    (re.compile("^stop$"), "stopSequences"),
    (re.compile("^tool_choice"), "toolChoice"),
)
"""Translates the fields of a chat completion to those of a sampling request, for errors."""


def to_chat(written: WrittenMcpSampling, params: dict[str, Any]) -> bytes:
    """Translate to a chat completion, within what the operator allows. Raises: RpcError."""
    asked = understood(params)
    if asked.include_context not in (None, "none"):
        raise bad("includeContext", "has to be 'none'")
    if asked.max_tokens < 1:
        raise bad("maxTokens", "has to be 1 or more")
    messages = turns(asked.messages)
    if asked.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": asked.system_prompt})
    chat: dict[str, Any] = {
        "model": written.model,
        "messages": messages,
        "max_tokens": min(asked.max_tokens, written.max_tokens),
        **tools_of(asked),
    }
    if asked.temperature is not None:
        chat["temperature"] = asked.temperature
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    body = msgspec.json.encode(chat)
    if len(body) > MAX_PROMPT_BYTES:
        raise bad("messages", f"with all else more than {MAX_PROMPT_BYTES} bytes")
    return body


def understood(params: dict[str, Any]) -> CreateMessageRequestParams:
    """Raises: RpcError."""
    try:
        asked = CreateMessageRequestParams.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise bad(".".join(str(part) for part in first["loc"]), first["msg"]) from None
    for name in NOT_SERVED:
        if params.get(name) is not None:
            raise bad(name, "is not served by this gateway's own models")
    return asked


# Tools that the model may call.


def tools_of(asked: CreateMessageRequestParams) -> dict[str, Any]:
    """Return `tools` and `tool_choice` of a chat completion. Raises: RpcError."""
    tools = asked.tools or []
    if len(tools) > MAX_TOOLS:
        raise bad("tools", f"more than {MAX_TOOLS}")
    mode = None if asked.tool_choice is None else asked.tool_choice.mode
    if not tools:
        if mode == "required":
            raise bad("toolChoice", "wants a tool to be called, and there are none in 'tools'")
        return {}
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        if not 1 <= len(tool.name) <= MAX_NAME_CHARS:
            raise bad(f"tools.{index}.name", f"has to have 1 to {MAX_NAME_CHARS} characters")
        name = function_name(tool.name)
        if name in functions:
            raise bad(f"tools.{index}.name", "another tool has it")
        functions[name] = {"name": name, "parameters": tool.input_schema}
        if tool.description is not None:
            functions[name]["description"] = tool.description
    found = [{"type": "function", "function": each} for each in functions.values()]
    return {"tools": found, "tool_choice": mode or "auto"}


def function_name(name: str) -> str:
    return NOT_A_NAME.sub("_", name)


# What was said before.


def turns(messages: Sequence[SamplingMessage]) -> list[dict[str, Any]]:
    """Raises: RpcError, where a call has no result or a result no call."""
    found: list[dict[str, Any]] = []
    waiting: list[ToolUseContent] = []
    for index, message in enumerate(messages):
        place = f"messages.{index}.content"
        results = [each for each in message.content_as_list if isinstance(each, ToolResultContent)]
        if results or waiting:
            found += results_of(message, results, waiting, place)
            waiting = []
            continue
        waiting = calls_of(message, place)
        found.append(turn(message, waiting, place))
    if waiting:
        raise bad(f"messages.{len(messages) - 1}.content", f"{MISSING}: '{waiting[0].id}'")
    return found


MISSING = "Tool result missing in request"
"""The specification's words, as the next ones."""
MIXED = "Tool results mixed with other content"


def calls_of(message: SamplingMessage, place: str) -> list[ToolUseContent]:
    """Raises: RpcError."""
    calls = [each for each in message.content_as_list if isinstance(each, ToolUseContent)]
    if calls and message.role != "assistant":
        raise bad(place, "only the assistant calls tools")
    if len(calls) > MAX_TOOL_CALLS:
        raise bad(place, f"more than {MAX_TOOL_CALLS} calls")
    if len({each.id for each in calls}) != len(calls):
        raise bad(place, "two calls have the same id")
    for call in calls:
        if not (1 <= len(call.id) <= MAX_NAME_CHARS and 1 <= len(call.name) <= MAX_NAME_CHARS):
            raise bad(place, f"a call's id and name have 1 to {MAX_NAME_CHARS} characters")
    return calls


def turn(message: SamplingMessage, calls: Sequence[ToolUseContent], place: str) -> dict[str, Any]:
    """Raises: RpcError."""
    said = [each for each in message.content_as_list if not isinstance(each, ToolUseContent)]
    found: dict[str, Any] = {"role": message.role, "content": text_of(said, place)}
    if calls:
        found["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {
                    "name": function_name(each.name),
                    "arguments": msgspec.json.encode(each.input).decode(),
                },
            }
            for each in calls
        ]
    return found


def results_of(
    message: SamplingMessage,
    results: Sequence[ToolResultContent],
    calls: Sequence[ToolUseContent],
    place: str,
) -> list[dict[str, Any]]:
    """Return the results in the order of the calls. Raises: RpcError."""
    if message.role != "user":
        raise bad(place, f"{MISSING}: the user's message is behind the calls")
    if results and len(results) != len(message.content_as_list):
        raise bad(place, MIXED)
    by_id = {each.tool_use_id: each for each in results}
    if len(by_id) != len(results):
        raise bad(place, "two results are of the same call")
    for each in by_id.keys() - {call.id for call in calls}:
        raise bad(place, f"a result of a call that is not in the message before: '{each}'")
    found: list[dict[str, Any]] = []
    for call in calls:
        if call.id not in by_id:
            raise bad(place, f"{MISSING}: '{call.id}'")
        content = result_text(by_id[call.id], place)
        found.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return found


def result_text(result: ToolResultContent, place: str) -> str:
    """Raises: RpcError."""
    said = text_of(result.content, place)
    if not result.content and result.structured_content is not None:
        said = msgspec.json.encode(result.structured_content).decode()
    return ERROR + said if result.is_error else said


def text_of(parts: Sequence[Any], place: str) -> str:
    """Raises: RpcError."""
    texts = [part.text for part in parts if isinstance(part, TextContent)]
    if len(texts) != len(parts):
        raise bad(place, "has to be text")
    return "\n".join(texts)


# What the model wrote.


def to_result(answer: ChatCompletion, params: dict[str, Any]) -> dict[str, Any]:
    """Translate an answer back. `params`: what was asked. Raises: RpcError, for a call that nobody
    could make."""
    choice = answer.choices[0]
    reason = str(choice.finish_reason)
    said = {"type": "text", "text": choice.message.content or ""}
    content: Any = said
    if reason == "tool_calls":  # of an answer that was cut off a call may be half of one
        names = {function_name(tool["name"]): tool["name"] for tool in params["tools"]}
        calls = [to_use(call, names) for call in choice.message.tool_calls or ()]
        content = [said, *calls] if said["text"].strip() else calls
    return {
        "role": "assistant",
        "content": content,
        "model": answer.model,
        "stopReason": STOP_REASONS.get(reason, reason),
    }


def to_use(call: AnswerCall, names: dict[str, str]) -> dict[str, Any]:
    """Raises: RpcError."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise unusable("The arguments of the model's call are no object in JSON") from None
    name = names.get(call.function.name)
    if name is None:
        raise unusable("The model called a tool that it was not offered")
    return {"type": "tool_use", "id": call.id, "name": name, "input": arguments}


# What is refused.


def bad(field: str, why: str) -> RpcError:
    return RpcError(INVALID_PARAMS, f"Invalid params: {field}: {why}", {"field": field})


def refused_field(error: BadField) -> RpcError:
    """Translate what a chat completion refuses, by the name of what the server wrote."""
    field = error.param or "params"
    for pattern, ours in FIELDS:
        field = pattern.sub(ours, field)
    return bad(field, str(error))


def unusable(why: str) -> RpcError:
    return RpcError(INTERNAL_ERROR, why, {"reason": "invalid_tool_call"})
