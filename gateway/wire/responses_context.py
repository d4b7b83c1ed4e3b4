"""From the items of a `Response` to what a model is shown: a chat's messages, as templates expect
them.

Above: `from_responses`. Below: the shapes in `responses_items`. Every refusal names its field. What
the model thought, said and called in one turn are items of their own here, and one message there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import UNSET

from gateway.fleet.errors import BadField
from gateway.wire.responses_items import (
    MAX_ITEM_PARTS,
    PREFIXES,
    CallOutput,
    FunctionCall,
    InCall,
    InCallOutput,
    InItem,
    InMessage,
    InReasoning,
    Item,
    ItemReference,
    Message,
    OutputText,
    Reasoning,
    Text,
)

NewId = Callable[[str], str]
"""Of a prefix, an id that nobody has."""
SYSTEM = ("system", "developer")
"""Two names of one role."""


def to_items(
    given: str | list[InItem] | None,
    new_id: NewId,
    stored: Mapping[str, Item],
    *,
    param: str = "input",
) -> tuple[Item, ...]:
    """As they are kept. `stored`: what references name, by id; `param`: the field that holds them.
    Raises BadField."""
    if isinstance(given, str):
        return (user_text(given, new_id),)
    given = given or []
    check_parts(given, param)
    return tuple(
        to_item(item, f"{param}[{index}]", new_id, stored) for index, item in enumerate(given)
    )


def user_text(text: str, new_id: NewId) -> Message:
    return Message(
        id=new_id(PREFIXES[Message]), status="completed", role="user", content=(Text(text),)
    )


def check_parts(given: Iterable[InItem], param: str) -> None:
    contents = (each.content for each in given if isinstance(each, InMessage))
    if sum(len(content) for content in contents if isinstance(content, list)) > MAX_ITEM_PARTS:
        raise BadField(
            f"Invalid value for '{param}': more than {MAX_ITEM_PARTS} parts of content.",
            param=param,
        )


def to_item(item: InItem, place: str, new_id: NewId, stored: Mapping[str, Item]) -> Item:
    match item:
        case InMessage():
            return to_message(item, new_id)
        case InCall():
            return FunctionCall(
                id=item.id or new_id(PREFIXES[FunctionCall]),
                status=item.status or "completed",
                call_id=item.call_id,
                name=item.name,
                arguments=item.arguments,
            )
        case InCallOutput():
            output = item.output
            return CallOutput(
                id=item.id or new_id(PREFIXES[CallOutput]),
                status=item.status or "completed",
                call_id=item.call_id,
                output=output if isinstance(output, str) else tuple(Text(p.text) for p in output),
            )
        case InReasoning():
            return Reasoning(
                id=item.id or new_id(PREFIXES[Reasoning]),
                status=item.status or "completed",
                summary=tuple(item.summary),
                content=tuple(item.content or ()),
            )
        case ItemReference():
            return referred(item, place, stored)


def to_message(item: InMessage, new_id: NewId) -> Message:
    parts = (
        [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
    )
    kind = OutputText if item.role == "assistant" else Text
    return Message(
        id=item.id or new_id(PREFIXES[Message]),
        status=item.status or "completed",
        role=item.role,
        content=tuple(kind(text) for text in parts),
        phase=item.phase or UNSET,
    )


def referred(item: ItemReference, place: str, stored: Mapping[str, Item]) -> Item:
    found = stored.get(item.id)
    if found is None:
        raise BadField(f"Item with id '{item.id}' not found.", param=f"{place}.id")
    return found


# ---- to a chat's messages


def to_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Raises BadField."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    called: dict[str, str] = {}
    turn: dict[str, Any] | None = None
    """Of the model's, to which its next item belongs."""
    for item in items:
        match item:
            case CallOutput():
                messages.append(answered(item, called))
                turn = None
                continue
            case Message() if item.role != "assistant":
                messages.append({"role": templated(item.role), "content": joined(item)})
                turn = None
                continue
        if turn is None or not continues(turn, item):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        match item:
            case Reasoning():
                turn["reasoning_content"] = thought(item)
            case Message():
                turn["content"] = joined(item)
            case FunctionCall():
                called[item.call_id] = item.name
                turn.setdefault("tool_calls", []).append(to_call(item))
    return messages


def continues(turn: dict[str, Any], item: Item) -> bool:
    """A turn is thought, then said, then called; each of the first two once."""
    match item:
        case Reasoning():
            return False
        case Message():
            return not (turn["content"] or "tool_calls" in turn)
    return True


def templated(role: str) -> str:
    return "system" if role in SYSTEM else role


def joined(message: Message) -> str:
    """Parts of text are lines of one text, as in chat."""
    return "\n".join(part.text for part in message.content)


def thought(item: Reasoning) -> str:
    return "\n".join(part.text for part in item.content or item.summary)


def to_call(call: FunctionCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments or "{}"}
    return {"id": call.call_id, "type": "function", "function": function}


def answered(item: CallOutput, called: Mapping[str, str]) -> dict[str, Any]:
    if item.call_id not in called:
        raise BadField(
            f"No tool call found for function call output with call_id {item.call_id}.",
            param="input",
        )
    output = item.output
    text = output if isinstance(output, str) else "\n".join(part.text for part in output)
    name = called[item.call_id]
    return {"role": "tool", "content": text, "tool_call_id": item.call_id, "name": name}


def text_size_of_calls(items: Iterable[Item]) -> int:
    """Characters beside the contents that a template may show."""
    return sum(
        len(item.name) + len(item.arguments) for item in items if isinstance(item, FunctionCall)
    )
