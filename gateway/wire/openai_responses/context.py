"""Converts the items of a `Response` to a chat's messages, as templates expect them.

Every refusal names its field. What the model thought, said and called in one turn are items of
their own here, and one message there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from msgspec import UNSET

from gateway.request_errors import BadField
from gateway.wire.openai_responses.items import (
    MAX_ITEM_PARTS,
    PREFIXES,
    CallOutput,
    ClientCall,
    ClientOutput,
    CustomCall,
    CustomOutput,
    FunctionCall,
    InAdditionalTools,
    InCall,
    InCallOutput,
    InCompaction,
    InCustomCall,
    InCustomOutput,
    InItem,
    InMessage,
    InReasoning,
    InShellCall,
    InShellOutput,
    Item,
    ItemReference,
    McpApprovalRequest,
    McpCall,
    Message,
    OutputText,
    ReasoningItem,
    ShellCall,
    ShellOutput,
    Text,
)
from gateway.wire.openai_responses.mcp_history import (
    CALLS,
    Answers,
    answers_of,
    in_place_of,
    round_of,
    to_mcp_item,
    waiting,
    waits,
)
from gateway.wire.shared.refusals import unsupported

NewId = Callable[[str], str]
"""A function that makes a new id with the given prefix."""
SYSTEM = ("system", "developer")
"""Two names of one role."""


def to_items(
    given: str | list[InItem] | None,
    new_id: NewId,
    stored: Mapping[str, Item],
    *,
    param: str = "input",
    without: type[InItem] | None = None,
) -> tuple[Item, ...]:
    """Return items as they are kept. `stored`: what references name, by id; `param`: the field that
    holds them; `without`: what among them is no item of a conversation. Raises BadField."""
    if isinstance(given, str):
        return (user_text(given, new_id),)
    given = given or []
    check_parts(given, param)
    return tuple(
        to_item(item, f"{param}[{index}]", new_id, stored)
        for index, item in enumerate(given)
        if without is None or not isinstance(item, without)
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
                namespace=item.namespace or UNSET,
            )
        case InCallOutput() | InCustomOutput():
            kind = CallOutput if isinstance(item, InCallOutput) else CustomOutput
            output = item.output
            return kind(
                id=item.id or new_id(PREFIXES[kind]),
                status=item.status or "completed",
                call_id=item.call_id,
                output=output if isinstance(output, str) else tuple(Text(p.text) for p in output),
            )
        case InCustomCall():
            return CustomCall(
                id=item.id or new_id(PREFIXES[CustomCall]),
                status=item.status or UNSET,
                call_id=item.call_id,
                name=item.name,
                input=item.input,
                namespace=item.namespace or UNSET,
            )
        case InShellCall() | InShellOutput():
            return to_shell_item(item, place, new_id)
        case InCompaction() | InAdditionalTools():
            raise unsupported(f"{place}.type", "not supported here: it is of a response's `input`")
        case InReasoning():
            if item.encrypted_content is not None:
                why = "not supported here: what is sealed is for a response"
                raise unsupported(f"{place}.encrypted_content", why)
            return ReasoningItem(
                id=item.id or new_id(PREFIXES[ReasoningItem]),
                status=item.status or "completed",
                summary=tuple(item.summary),
                content=tuple(item.content or ()),
            )
        case ItemReference():
            return referred(item, place, stored)
    return to_mcp_item(item, new_id)


def to_shell_item(
    item: InShellCall | InShellOutput, place: str, new_id: NewId
) -> ShellCall | ShellOutput:
    status = item.status or "completed"
    if isinstance(item, InShellCall):
        id_ = item.id or new_id(PREFIXES[ShellCall])
        return ShellCall(id=id_, status=status, call_id=item.call_id, action=item.action)
    call_id = item.call_id or item.id
    if call_id is None:
        param = f"{place}.call_id"
        raise BadField(f"Missing required parameter: '{param}'.", param=param)
    id_ = item.id or new_id(PREFIXES[ShellOutput])
    return ShellOutput(id=id_, status=status, output=item.output, call_id=call_id)


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
    items = list(items)
    told = MessageBuilder(answers_of(items), in_place_of(items))
    if instructions is not None:
        told.messages.append({"role": "system", "content": instructions})
    for item in items:
        told.add(item)
    told.end_turn()
    told.check_answered()
    return told.messages


class MessageBuilder:
    """Builds messages, item by item. `in_place`: ids of requests for approval for which a call
    stands that was begun."""

    def __init__(self, answers: Answers, in_place: Collection[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answers, self._in_place = answers, in_place
        self._called: dict[str, str] = {}
        self._open: dict[str, None] = {}
        """Ids of calls that the client has not answered, in their order."""
        self._turn: dict[str, Any] | None = None
        """The assistant message that the model's next item is added to."""
        self._results: list[dict[str, Any]] = []
        """Results of its calls that were answered here; they follow the message."""
        self._round: str | None = None
        """The round that those calls belong to."""

    def add(self, item: Item) -> None:
        """Raises BadField."""
        match item:
            case CallOutput() | CustomOutput() | ShellOutput():
                self.end_turn()
                self.messages.append(answered(item, self._called))
                self._open.pop(item.call_id, None)
            case Message() if item.role != "assistant":
                self.end_turn()
                self.messages.append({"role": templated(item.role), "content": joined(item)})
            case McpCall() | McpApprovalRequest() if self._is_call(item):
                round_ = round_of(item.id)
                if self._round not in (None, round_):
                    self.end_turn()
                call = call_of(item.id, item.alias, item.arguments)
                self._turn_for(item).setdefault("tool_calls", []).append(call)
                self._round = round_
                self._results.append(waiting(item, self._answers))
            case Message() | ReasoningItem() | FunctionCall() | CustomCall() | ShellCall():
                self._say(item)

    def _is_call(self, item: McpCall | McpApprovalRequest) -> bool:
        """Return whether it is a call, and not the result of one that stands elsewhere."""
        if isinstance(item, McpApprovalRequest):
            return item.id not in self._in_place
        return item.approval_request_id is None or waits(item)

    def _say(self, item: Message | ReasoningItem | ClientCall) -> None:
        turn = self._turn_for(item)
        match item:
            case ReasoningItem():
                turn["reasoning_content"] = thought(item)
            case Message():
                turn["content"] = joined(item)
            case FunctionCall() | CustomCall() | ShellCall():
                self._called[item.call_id] = item.alias
                self._open[item.call_id] = None
                call = call_of(item.call_id, item.alias, item.arguments)
                turn.setdefault("tool_calls", []).append(call)

    def _turn_for(self, item: Item) -> dict[str, Any]:
        if self._turn is None or not continues(self._turn, item):
            self.end_turn()
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def check_answered(self) -> None:
        """OpenAI's models go on from no call that nobody answered. Raises BadField."""
        if self._open:
            raise BadField(
                f"No tool output found for function call {next(iter(self._open))}.", param="input"
            )

    def end_turn(self) -> None:
        self.messages += self._results
        self._results, self._turn, self._round = [], None, None


def continues(turn: dict[str, Any], item: Item) -> bool:
    """A turn is thought, then said, then called; each of the first two once."""
    match item:
        case ReasoningItem():
            return False
        case Message():
            return not (turn["content"] or "tool_calls" in turn)
    return True


def templated(role: str) -> str:
    return "system" if role in SYSTEM else role


def joined(message: Message) -> str:
    """Join parts of text: they are lines of one text, as in chat."""
    return "\n".join(part.text for part in message.content)


def thought(item: ReasoningItem) -> str:
    return "\n".join(part.text for part in item.content or item.summary)


def call_of(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as templates take it."""
    return {
        "id": id_,
        "type": "function",
        "function": {"name": name, "arguments": arguments or "{}"},
    }


def answered(item: ClientOutput, called: Mapping[str, str]) -> dict[str, Any]:
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
    """Count the characters beside the contents that a template may show."""
    called = (FunctionCall, CustomCall, ShellCall, *CALLS)
    return sum(len(item.alias) + len(item.arguments) for item in items if isinstance(item, called))
