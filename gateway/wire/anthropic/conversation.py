"""A conversation in Anthropic's blocks as chat templates expect it: a system message, turns whose
content is one string, calls, and results as messages of their own.

Turns of one role that follow each other are one, as they are to the vendor. Results come in the
order of the calls that they answer, whatever the client's: templates show them without ids. Every
refusal names its field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gateway.generate_request import PromptPlace
from gateway.request_errors import BadField
from gateway.wire.anthropic.messages import (
    AssistantTurn,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolAddition,
    ToolRemoval,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.wire.openai.chat import MAX_PARTS
from gateway.wire.shared.cache_control import Block, Mark, marks_of

ERROR = "Error: "
"""Before the result of a call that failed: templates have no other place to say so."""
LINE, NOTHING = "\n", ""
"""Between texts of a user, as in `chat_messages`; between those of an answer, which were one."""


class BlockAtPath(NamedTuple):
    """A block, and its path in the request."""

    path: str
    block: Any


class ConversationBuilder:
    """A conversation as it is built up."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        """The path of the first block that each message was made of."""
        self.blocks: list[Block] = []
        self.num_other_chars = 0
        self.continues = False
        """The last message is the beginning of the answer."""

    def add(self, path: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.paths.append(path)

    @property
    def whole(self) -> PromptPlace:
        """Return the place behind the last message."""
        return PromptPlace(num_messages=len(self.messages))

    def place_texts(
        self,
        texts: Sequence[BlockAtPath],
        between: str,
        *,
        before: int = 0,
        own: Sequence[Mark] = (),
        num_calls: int | None = None,
    ) -> None:
        """Add the cache blocks of the last message's texts. `before`: characters of its content
        before them. `own`: marks of what holds them all. `num_calls`: 0 where calls follow, None
        where the last one ends its message."""
        num_chars = before - len(between)
        for number, (path, block) in enumerate(texts, start=1):
            num_chars += len(between) + len(block.text)
            of_block, is_last = marks_of(block, path), number == len(texts)
            place = PromptPlace(len(self.messages), num_chars, num_calls=num_calls)
            if is_last and num_calls is None:
                place = self.whole
            found = [*of_block, *own] if is_last else of_block
            self.blocks.append(Block(place, found, is_empty=not (block.text or own)))


def to_messages(
    system: str | list[TextBlock] | None, messages: Sequence[Message]
) -> ConversationBuilder:
    """Raises BadField."""
    found = ConversationBuilder()
    add_system(found, list(placed(system or [], "system")))
    num_parts, calls = 0, dict[str, BlockAtPath]()
    for role, group in groupby(enumerate(messages), key=lambda each: type(each[1])):
        parts = [
            part
            for number, message in group
            for part in placed(message.content, f"messages[{number}].content")
        ]
        num_parts += len(parts)
        said = [part for part in parts if not isinstance(part.block, ToolAddition | ToolRemoval)]
        if num_parts > MAX_PARTS:
            message = f"Invalid value for 'messages': more than {MAX_PARTS} blocks of content."
            raise BadField(message, param="messages")
        if role is AssistantTurn:
            refuse_unanswered(calls)
            calls = add_answer(found, parts)
        elif said or not parts:
            calls = add_turn(found, role.__struct_config__.tag, said, calls)
    refuse_unanswered(calls)
    if isinstance(messages[-1], AssistantTurn):
        begin_answer(found)
    return found


def placed(content: str | Sequence[Any], path: str) -> Iterator[BlockAtPath]:
    if isinstance(content, str):
        yield BlockAtPath(path, TextBlock(text=content))
    else:
        yield from (BlockAtPath(f"{path}[{index}]", each) for index, each in enumerate(content))


def add_system(found: ConversationBuilder, texts: Sequence[BlockAtPath]) -> None:
    if texts:
        found.add("system", {"role": "system", "content": joined(texts, LINE)})
        found.place_texts(texts, LINE)


def add_turn(
    found: ConversationBuilder,
    role: str,
    parts: Sequence[BlockAtPath],
    calls: dict[str, BlockAtPath],
) -> dict[str, BlockAtPath]:
    """Add a turn of the user or the system: the results of `calls` first, then what was said.
    Returns the calls that are still to be answered."""
    results: dict[str, BlockAtPath] = {}
    texts: list[BlockAtPath] = []
    for part in parts:
        if not isinstance(part.block, ToolResultBlock):
            texts.append(part)
            continue
        name = part.block.tool_use_id
        param = f"{part.path}.tool_use_id"
        if texts:
            message = f"Invalid value for '{part.path}': results come first in a turn."
            raise BadField(message, param=part.path)
        if name not in calls:
            message = f"Invalid value for '{param}': the turn before has no such tool_use."
            raise BadField(message, param=param)
        if name in results:
            raise BadField(f"Invalid value for '{param}': it has a result already.", param=param)
        results[name] = part
    for name, call in calls.items():
        if name in results:
            add_result(found, results[name], call.block)
    if texts or not results:
        path = texts[0].path if texts else "messages"
        found.add(path, {"role": role, "content": joined(texts, LINE)})
        found.place_texts(texts, LINE)
    return {name: call for name, call in calls.items() if name not in results}


def add_result(found: ConversationBuilder, part: BlockAtPath, call: ToolUseBlock) -> None:
    result: ToolResultBlock = part.block
    texts = list(placed(result.content or "", f"{part.path}.content"))
    before = ERROR if result.is_error else ""
    message = {"role": "tool", "content": before + joined(texts, LINE)}
    found.add(part.path, {**message, "tool_call_id": result.tool_use_id, "name": call.name})
    own = marks_of(result, part.path)
    if isinstance(result.content, list) and result.content:
        found.place_texts(texts, LINE, before=len(before), own=own)
    else:
        found.blocks.append(Block(found.whole, own))


def add_answer(found: ConversationBuilder, parts: Sequence[BlockAtPath]) -> dict[str, BlockAtPath]:
    """An earlier one. Returns its calls."""
    texts = [part for part in parts if isinstance(part.block, TextBlock)]
    calls: dict[str, BlockAtPath] = {}
    thoughts = [part.block.thinking for part in parts if isinstance(part.block, ThinkingBlock)]
    for part in parts:
        if isinstance(part.block, ToolUseBlock):
            if part.block.id in calls:
                param = f"{part.path}.id"
                raise BadField(f"Invalid value for '{param}': two calls have it.", param=param)
            calls[part.block.id] = part
    message: dict[str, Any] = {"role": "assistant", "content": joined(texts, NOTHING)}
    if calls:
        message["tool_calls"] = [to_call(part) for part in calls.values()]
        found.num_other_chars += sum(size_of(call) for call in message["tool_calls"])
    if any(thoughts):
        message["reasoning_content"] = NOTHING.join(thoughts)
        found.num_other_chars += len(message["reasoning_content"])
    found.add(parts[0].path if parts else "messages", message)
    found.place_texts(texts, NOTHING, num_calls=0 if calls else None)
    for number, part in enumerate(calls.values(), start=1):
        of_call = PromptPlace(len(found.messages), num_calls=number)
        place = found.whole if number == len(calls) else of_call
        found.blocks.append(Block(place, marks_of(part.block, part.path)))
    return calls


def begin_answer(found: ConversationBuilder) -> None:
    """The last message is what the answer begins with; one that says nothing is none."""
    message, path = found.messages[-1], found.paths[-1]
    text = message["content"]
    if not text and "reasoning_content" not in message and len(found.messages) > 1:
        del found.messages[-1], found.paths[-1]
    elif not text or text[-1].isspace():
        raise BadField(
            f"Invalid value for '{path}': an answer begins with text that ends in no white space.",
            param=path,
        )
    else:
        found.continues = True


def refuse_unanswered(calls: dict[str, BlockAtPath]) -> None:
    for part in calls.values():
        message = (
            f"Invalid value for '{part.path}': a tool_use needs its tool_result in the next turn."
        )
        raise BadField(message, param=part.path)


def joined(texts: Sequence[BlockAtPath], between: str) -> str:
    return between.join(part.block.text for part in texts)


def to_call(part: BlockAtPath) -> dict[str, Any]:
    """Return a call whose arguments are spaced as most models write them, so that they are the text
    that is cached."""
    call: ToolUseBlock = part.block
    try:
        arguments = json.dumps(call.input, ensure_ascii=False)
    except RecursionError as error:
        param = f"{part.path}.input"
        raise BadField(f"Invalid value for '{param}': nested too deep.", param=param) from error
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def size_of(call: dict[str, Any]) -> int:
    """Count the characters that a template may show."""
    return len(call["function"]["name"]) + len(call["function"]["arguments"])
