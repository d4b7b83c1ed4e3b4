"""Turns what was captured of a request into the texts that are stored of it: messages, tools and
prompts as the model was given them, and what it answered, choice by choice.

Each side has a bound. What is beyond it is left out where it says so: of an answer the end, of a
long conversation the middle, as its beginning is what a cache compares and its end is what was
asked. Images and other parts that are no text are named, never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.fleet.upstream.meter import BrokenAnswer
from gateway.fleet.upstream.text import UpstreamText
from gateway.generate_request import GenerateRequest, PlainPrompt, WrittenIds
from gateway.generation_events import RawBody, RawChunk, RawRun, TextDelta
from gateway.telemetry.captured_content import CapturedContent

MAX_INPUT_BYTES = 256 * 1024
MAX_OUTPUT_BYTES = 256 * 1024
"""Bounds the UTF-8 of each side; a few hundred bytes of names and marks come to it."""
MAX_MESSAGES = 2000
"""The most messages, tools, calls or choices that are stored of a request."""
MESSAGE_BYTES = 64
"""The weight of a message beside its text."""
MAX_SHOWN_IDS = 4096
"""Token ids of a prompt that was given as such."""
OUTPUT_ROLE = "assistant"


def utf8(text: str) -> bytes:
    return text.encode(errors="replace")


class StoredCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of a tool; `arguments`: as the model wrote them."""

    name: str
    arguments: str = ""
    id: str = ""


class StoredMessage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A message. `index`: its place in the conversation. `left_out`: how many characters are
    missing at the end of its text."""

    index: int
    role: str
    text: str = ""
    name: str = ""
    reasoning: str = ""
    calls: tuple[StoredCall, ...] = ()
    call_id: str = ""
    """The call that it answers."""
    left_out: int = 0

    @property
    def size(self) -> int:
        return (
            MESSAGE_BYTES
            + len(utf8(self.text))
            + len(utf8(self.reasoning))
            + sum(MESSAGE_BYTES + len(utf8(call.arguments)) for call in self.calls)
        )


class StoredChoice(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One answer. `left_out`: how many characters at the end of its text are missing; a count of
    what is known, as of an answer of megabytes not all is seen."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: tuple[StoredCall, ...] = ()
    finish_reason: str = ""
    left_out: int = 0


class RequestContent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The texts of one request. Exactly one of `messages` and `prompts` has something."""

    messages: tuple[StoredMessage, ...] = ()
    messages_left_out: int = 0
    """How many messages are missing where their indexes leave a gap."""
    tools: tuple[dict[str, Any], ...] = ()
    """As the model was shown them, in OpenAI's form."""
    tools_left_out: int = 0
    prompts: tuple[str, ...] = ()
    """The texts that a completion goes on with."""
    prompts_left_out: int = 0
    """Characters."""
    choices: tuple[StoredChoice, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Tell whether something is missing."""
        left_out = self.messages_left_out + self.tools_left_out + self.prompts_left_out
        left_out += sum(message.left_out for message in self.messages)
        return left_out + sum(choice.left_out for choice in self.choices) > 0


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(RequestContent).decode


def to_content(captured: CapturedContent) -> RequestContent | None:
    """Return the texts of a request, which are made once; None: it writes none, as an embedding
    does. Raises: ValueError for what an upstream answered that cannot be read."""
    if not isinstance(captured.made, RequestContent):
        captured.made = _make_content(captured)
    return captured.made if isinstance(captured.made, RequestContent) else None


def _make_content(captured: CapturedContent) -> RequestContent | None:
    request = captured.request
    if request is None or request.embedding is not None:
        return None
    if request.plain is not None and request.plain.path == "embeddings":
        return None
    asked = input_of(request)
    return msgspec.structs.replace(asked, choices=choices_of(request, captured))


def input_of(request: GenerateRequest) -> RequestContent:
    if request.prompt is not None:
        use = request.prompt.tools
        shown = () if use is None else tuple(tool.shown for tool in use.tools)
        return bounded(shown, [to_message(n, it) for n, it in enumerate(request.prompt.messages)])
    if request.completion is not None:
        return prompts_of(request.completion.prompts)
    if request.plain is not None:
        return prompts_of(request.plain.prompts)
    body = request.forward or {}
    messages = [it for it in as_list(body.get("messages")) if isinstance(it, dict)]
    tools = tuple(it for it in as_list(body.get("tools")) if isinstance(it, dict))
    return bounded(tools, [to_message(n, it) for n, it in enumerate(messages)])


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def to_message(index: int, message: Mapping[str, Any]) -> StoredMessage:
    calls = [it for it in as_list(message.get("tool_calls")) if isinstance(it, dict)]
    old_call = message.get("function_call")
    if isinstance(old_call, dict):
        calls.append({"function": old_call})
    return StoredMessage(
        index=index,
        role=text_or(message.get("role")),
        text=text_of(message.get("content")),
        name=text_or(message.get("name")),
        reasoning=text_or(message.get("reasoning_content") or message.get("reasoning")),
        calls=tuple(to_call(call) for call in calls[:MAX_MESSAGES]),
        call_id=text_or(message.get("tool_call_id")),
    )


def to_call(call: Mapping[str, Any]) -> StoredCall:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else encode(arguments).decode()
    return StoredCall(text_or(function.get("name")), arguments, text_or(call.get("id")))


def text_or(value: object) -> str:
    return value if isinstance(value, str) else ""


def text_of(content: object) -> str:
    """Return the text of a content; a part that is none stands there by its type."""
    if isinstance(content, list):
        return "\n".join(map(part_text, content))
    return text_or(content)


def part_text(part: object) -> str:
    if isinstance(part, dict):
        text = part.get("text")
        return text if isinstance(text, str) else f"[{text_or(part.get('type')) or 'part'}]"
    return text_or(part)


def prompts_of(prompts: Sequence[PlainPrompt]) -> RequestContent:
    kept: list[str] = []
    room, left_out = MAX_INPUT_BYTES, 0
    for prompt in prompts[:MAX_MESSAGES]:
        if isinstance(prompt, WrittenIds):
            text = prompt.beginning(MAX_SHOWN_IDS)
            left_out += len(prompt.text) - len(text)
        else:
            text = prompt
        begin, missing = cut(text, room)
        left_out += missing
        room -= len(utf8(begin)) + MESSAGE_BYTES
        kept.append(begin)
        if room <= 0:
            break
    left_out += sum(
        len(it.text) if isinstance(it, WrittenIds) else len(it) for it in prompts[len(kept) :]
    )
    return RequestContent(prompts=tuple(kept), prompts_left_out=left_out)


def bounded(tools: tuple[dict[str, Any], ...], messages: Sequence[StoredMessage]) -> RequestContent:
    """Leave out what is beyond the bound: of the tools the last ones, if they take more than half
    of it, and of the messages those in the middle."""
    kept_tools, room = fitting_tools(tools)
    sizes = [message.size for message in messages]
    if sum(sizes) <= room and len(messages) <= MAX_MESSAGES:
        kept = list(messages)
    else:
        kept = without_middle(messages, sizes, room)
    return RequestContent(
        messages=tuple(kept),
        messages_left_out=len(messages) - len(kept),
        tools=kept_tools,
        tools_left_out=len(tools) - len(kept_tools),
    )


def fitting_tools(tools: Sequence[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], int]:
    """Return the first tools that fit in half of the bound, and what is left for messages."""
    kept: list[dict[str, Any]] = []
    num_bytes = 0
    for tool in tools[:MAX_MESSAGES]:
        num_bytes += len(encode(tool))
        if num_bytes > MAX_INPUT_BYTES // 2:
            num_bytes -= len(encode(tool))
            break
        kept.append(tool)
    return tuple(kept), MAX_INPUT_BYTES - num_bytes


def without_middle(
    messages: Sequence[StoredMessage], sizes: Sequence[int], room: int
) -> list[StoredMessage]:
    """Keep the last messages that fit in half of the room and the first ones that fit in the rest;
    the one at which these end is cut."""
    half, last = room // 2, len(messages) - 1
    tail: list[StoredMessage] = []
    used = 0
    for index in range(last, 0, -1):
        if used + sizes[index] > half or len(tail) == MAX_MESSAGES // 2:
            break
        tail.append(messages[index])
        used += sizes[index]
    if not tail and sum(sizes[:-1]) > half:
        tail.append(cut_message(messages[last], half))
        used = half
    head: list[StoredMessage] = []
    room -= used
    for index in range(min(len(messages) - len(tail), MAX_MESSAGES // 2)):
        head.append(cut_message(messages[index], room))
        room -= sizes[index]
        if room <= 0:
            break
    return head + tail[::-1]


def cut_message(message: StoredMessage, most_bytes: int) -> StoredMessage:
    """Keep the beginning of its text; what it thought and called is left out with the rest."""
    text, left_out = cut(message.text, max(0, most_bytes - MESSAGE_BYTES))
    if not left_out and message.size <= most_bytes:
        return message
    more = len(message.reasoning) + sum(len(call.arguments) for call in message.calls)
    return msgspec.structs.replace(
        message, text=text, reasoning="", calls=(), left_out=left_out + more
    )


def cut(text: str, most_bytes: int) -> tuple[str, int]:
    """Return the beginning of a text, and how many characters are missing."""
    if len(text) * 4 <= most_bytes:
        return text, 0
    whole = utf8(text[: max(0, most_bytes)])
    kept = whole[: max(0, most_bytes)].decode(errors="ignore")
    return kept, len(text) - len(kept)


def choices_of(request: GenerateRequest, captured: CapturedContent) -> tuple[StoredChoice, ...]:
    found: dict[int, ChoicePieces] = {}
    for delta in deltas_of(request, captured):
        if delta.index in found or len(found) < MAX_MESSAGES:
            found.setdefault(delta.index, ChoicePieces()).add(delta)
    room = MAX_OUTPUT_BYTES
    kept: list[StoredChoice] = []
    for index in sorted(found):
        choice, room = found[index].bounded(index, room)
        if captured.is_cut and index == max(found):
            choice = msgspec.structs.replace(choice, left_out=choice.left_out + 1)
        kept.append(choice)
    return tuple(kept)


def deltas_of(request: GenerateRequest, captured: CapturedContent) -> Iterable[TextDelta]:
    """Yield the texts of the answer, also of one that is passed on as an upstream wrote it."""
    texts = PlainText() if request.plain is not None else UpstreamText()
    for item in captured.items:
        if isinstance(item, TextDelta):
            yield item
        else:
            try:
                yield from texts.read((item,))
            except BrokenAnswer as fault:
                raise ValueError(str(fault)) from fault


class _PlainChoice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    finish_reason: str | None = None


class _PlainAnswer(msgspec.Struct):
    choices: list[_PlainChoice] | None = None


_decode_plain = msgspec.json.Decoder(_PlainAnswer).decode


class PlainText:
    """Reads an upstream's completions of texts."""

    def read(self, items: Sequence[RawChunk | RawRun | RawBody]) -> Iterable[TextDelta]:
        for item in items:
            payload = (
                b"".join((item.before, *item.texts, item.after))
                if isinstance(item, RawRun)
                else item.payload
            )
            for choice in _decode_plain(payload).choices or ():
                yield TextDelta(
                    index=choice.index,
                    text=choice.text or "",
                    finish_reason=choice.finish_reason,  # type: ignore[arg-type]
                )


class ChoicePieces:
    """One answer while its pieces are put together."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, tuple[str, list[str]]] = {}
        self.finish_reason = ""

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.reasoning.append(delta.reasoning)
        for call in delta.calls:
            name, pieces = self.calls.get(call.index, ("", []))
            if call.index in self.calls or len(self.calls) < MAX_MESSAGES:
                self.calls[call.index] = (call.name or name, pieces)
                pieces.append(call.arguments)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def bounded(self, index: int, room: int) -> tuple[StoredChoice, int]:
        """Return it, as much as there is room for, and the room that is left."""
        left_out = 0

        def fit(text: str) -> str:
            nonlocal room, left_out
            kept, missing = cut(text, room)
            left_out += missing
            room -= len(utf8(kept))
            return kept

        text, reasoning = fit("".join(self.texts)), fit("".join(self.reasoning))
        calls = [StoredCall(fit(name), fit("".join(it))) for name, it in self.calls.values()]
        choice = StoredChoice(
            index=index,
            text=text,
            reasoning=reasoning,
            calls=tuple(calls),
            finish_reason=self.finish_reason,
            left_out=left_out,
        )
        return choice, room
