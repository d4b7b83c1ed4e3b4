"""The calls of earlier turns, in the form in which a chat template takes them.

Knows no template's text.

Published templates disagree: whether arguments are an object or its text, whether a turn without
content has none or an empty one, and how long an id may be. What does not suit is refused, or left
out without a word. So a template is tried once, and gets what it shows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from engine.errors import InvalidRequest

Message = Mapping[str, Any]

SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
"""Mistral's templates take no other."""


ArgumentsForm: TypeAlias = Literal["text", "object"]
ARGUMENTS: tuple[ArgumentsForm, ...] = ("text", "object")


class CallForm(NamedTuple):
    arguments: ArgumentsForm
    """As text they are shown as the model wrote them, which is what its KV is of."""
    empty_content: str | None
    """The content of an assistant message that calls tools and has no text."""
    short_ids: bool


FORMS = [
    CallForm(arguments, empty, short)
    for short, arguments, empty in itertools.product((False, True), ARGUMENTS, ("", None))
]
"""In the order in which they are tried."""
ODDLY_SPACED = '{"probe" :  "shown"}'
EVENLY_SPACED = '{"probe": "shown"}'
_CALL = {"function": {"name": "look", "arguments": ODDLY_SPACED}, "id": "call_0123456789abcdef"}
_PROBE: list[Message] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **_CALL}]},
    {"role": "tool", "name": "look", "content": "1", "tool_call_id": _CALL["id"]},
]


def find_form(render: Callable[[list[Message]], str]) -> CallForm:
    """The first form in which a call is shown with its arguments as JSON, or else with its name and
    what they say; of a template that shows none, the first one."""
    shown: dict[CallForm, str] = {}
    for form in FORMS:
        try:
            shown[form] = render(in_form(_PROBE, form))
        except InvalidRequest:
            continue
    for form, text in shown.items():
        if (ODDLY_SPACED if form.arguments == "text" else EVENLY_SPACED) in text:
            return form
    for form, text in shown.items():
        if form.arguments == "object" and "look" in text and "shown" in text:
            return form
    return FORMS[0]


def in_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """Messages whose calls have their arguments as text or as an object."""
    return [_message_in_form(message, form) for message in messages]


def _message_in_form(message: Message, form: CallForm) -> Message:
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [_call_in_form(call, form) for call in message["tool_calls"]]
        if not message.get("content"):
            changed["content"] = form.empty_content
    if form.short_ids and isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    return changed


def _call_in_form(call: Message, form: CallForm) -> Message:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments", {})
    into = _to_text if form.arguments == "text" else _to_object
    changed = {**call, "function": {**function, "arguments": into(arguments)}}
    if form.short_ids and isinstance(call.get("id"), str):
        changed["id"] = _short_id(call["id"])
    return changed


def _to_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _to_object(arguments: Any) -> Any:
    """Return the object; what a model wrote that is none stays as it is, so that it sees its
    mistake.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _short_id(call_id: str) -> str:
    if SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(errors="replace")).hexdigest()[:9]
