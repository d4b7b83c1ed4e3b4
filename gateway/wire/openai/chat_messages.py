"""A chat's messages as chat templates expect them: `developer` is the newer name of `system`, the
content is one string.

Every refusal names its field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.request_errors import BadField
from gateway.wire.constraints.tool_structs import CalledFunction, ToolCall
from gateway.wire.openai.chat import (
    MAX_PARTS,
    AnyMessage,
    AssistantMessage,
    Content,
    DeveloperMessage,
    FunctionMessage,
    OtherMessage,
    SystemMessage,
    ToolMessage,
    UserMessage,
)


def to_messages(messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """Raises BadField."""
    check_contents(messages)
    check_results(messages)
    templated = [to_template(message) for message in messages]
    name_function_calls(messages, templated)
    return templated


def name_function_calls(messages: Sequence[AnyMessage], templated: list[dict[str, Any]]) -> None:
    """Give ids to calls in the older form, which has none, and to their results: a template shows
    both as those of tools. Raises BadField for a result without a call."""
    last_ids: dict[str, str] = {}
    for index, (message, shown) in enumerate(zip(messages, templated, strict=True)):
        match message:
            case AssistantMessage(function_call=CalledFunction() as called):
                if message.tool_calls:
                    param = f"messages[{index}].function_call"
                    raise BadField(f"'{param}' cannot stand beside 'tool_calls'.", param=param)
                last_ids[called.name] = call_id = f"call{index:05d}"
                function = {"name": called.name, "arguments": called.arguments or "{}"}
                shown["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            case FunctionMessage():
                if message.name not in last_ids:
                    param = f"messages[{index}].name"
                    raise BadField(
                        f"Invalid value for '{param}': no message before it calls that function.",
                        param=param,
                    )
                shown["tool_call_id"] = last_ids[message.name]


def check_contents(messages: Sequence[AnyMessage]) -> None:
    contents = [message.content for message in messages]
    if None in contents:
        for index, message in enumerate(messages):
            calls = isinstance(message, AssistantMessage) and (
                message.tool_calls or message.function_call
            )
            if message.content is None and not calls:
                param = f"messages[{index}].content"
                raise BadField(
                    f"Invalid type for '{param}': expected a string or an array, "
                    "but got null instead.",
                    param=param,
                )
    if sum(len(content) for content in contents if isinstance(content, list)) > MAX_PARTS:
        raise BadField(
            f"Invalid value for 'messages': more than {MAX_PARTS} parts of content.",
            param="messages",
        )


def check_results(messages: Sequence[AnyMessage]) -> None:
    """Check that results of calls stand right behind the message that made them, one for each
    call."""
    called: set[str] = set()
    waiting: set[str] = set()
    called_at = 0
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            check_is_of(message, called, f"messages[{index}]")
            waiting.discard(message.tool_call_id)
        else:
            check_answered(waiting, called_at)
            calls = message.tool_calls if isinstance(message, AssistantMessage) else None
            called, called_at = {call.id for call in calls or ()}, index
            waiting = set(called)
    check_answered(waiting, called_at)


def check_is_of(result: ToolMessage, called: set[str], path: str) -> None:
    if not called:
        raise BadField(
            "Invalid parameter: messages with role 'tool' must be a response to a preceding "
            "message with 'tool_calls'.",
            param=f"{path}.role",
        )
    if result.tool_call_id not in called:
        raise BadField(
            "Invalid parameter: 'tool_call_id' is of no call in 'tool_calls' of the previous "
            "message.",
            param=f"{path}.tool_call_id",
        )


def check_answered(waiting: set[str], called_at: int) -> None:
    """Check that no call waits. `waiting`: the ids of the calls without a result that message
    `called_at` made."""
    if waiting:
        raise BadField(
            "An assistant message with 'tool_calls' must be followed by tool messages responding "
            f"to each 'tool_call_id': {len(waiting)} of them have none.",
            param=f"messages[{called_at}].tool_calls",
        )


def to_template(message: AnyMessage) -> dict[str, Any]:
    match message:
        case SystemMessage() | DeveloperMessage():
            role = "system"
        case UserMessage():
            role = "user"
        case AssistantMessage():
            role = "assistant"
        case ToolMessage() | FunctionMessage():
            role = "tool"
        case OtherMessage():
            role = message.own_role
    templated: dict[str, Any] = {"role": role, "content": joined(message.content)}
    if message.name is not None:
        templated["name"] = message.name
    match message:
        case ToolMessage():
            templated["tool_call_id"] = message.tool_call_id
        case AssistantMessage():
            if message.tool_calls:
                templated["tool_calls"] = [to_call(call) for call in message.tool_calls]
            if thought := message.reasoning_content or message.reasoning:
                templated["reasoning_content"] = thought
    return templated


def joined(content: Content | None) -> str:
    """Join text parts: they are lines of one text, as in vLLM."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or ())


def to_call(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as the model wrote them; `ChatTemplate` knows how its
    template takes them."""
    function = {"name": call.function.name, "arguments": call.function.arguments or "{}"}
    return {"id": call.id, "type": "function", "function": function}


def text_size_of_calls(messages: Sequence[AnyMessage]) -> int:
    """Count the characters beside the contents that a template may show."""
    called = (
        function
        for message in messages
        if isinstance(message, AssistantMessage)
        for function in (message.function_call, *(c.function for c in message.tool_calls or ()))
        if function is not None
    )
    return sum(len(each.name) + len(each.arguments) for each in called)
