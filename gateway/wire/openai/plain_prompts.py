"""Reads `prompt` and `input` of OpenAI's older routes: a text, several, token ids, or several lists
of them.

Token ids are counted here and read later, by whoever knows the model's context and vocabulary: of
the values of a body they are the ones that may be a million. Knows no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from foundation.json_values import MAX_VALUES
from gateway.generate_request import PlainPrompt, WrittenIds
from gateway.request_errors import BadField, UnsupportedField
from gateway.wire.shared.refusals import TokenId, check_numbers, check_values, decode

DIGITS = tuple(b"%d" % digit for digit in range(10))
SPACE = b" \t\n\r"
PlainPrompts = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
"""As a client writes one or several."""


def decoders_of(kind: Any) -> dict[str, msgspec.json.Decoder[Any]]:
    """Return decoders of one field: all else in a body is passed over."""
    names = ("prompt", "input", "tokens")
    return {name: msgspec.json.Decoder(msgspec.defstruct(name, [(name, kind)])) for name in names}


_written, _plain = decoders_of(msgspec.Raw), decoders_of(PlainPrompts)
_LIST = re.compile(
    rb'\[((?:[^\[\]"]++|"(?:[^"\\]++|\\.)*+")*+)\][ \t\n\r]*+(?:,[ \t\n\r]*+|\Z)', re.DOTALL
)
"""One list among several, without another one in it."""


def check_other_values(body: bytes, field: str) -> None:
    """As `check_values`, without the token ids of one field: those are not decoded here. Raises
    BadField."""
    if len(body) > MAX_VALUES:
        try:
            written = bytes(getattr(_written[field].decode(body), field))
        except (msgspec.DecodeError, RecursionError):
            written = b""  # told when all of it is decoded
        if is_ids(written) and b'"' not in written:
            check_numbers(body)
            body = body.replace(written, b"[]", 1)
    check_values(body)


def is_ids(written: bytes) -> bool:
    """Tell whether this is an array that begins with a number, or with another array."""
    text = written.lstrip(SPACE)
    return text[:1] == b"[" and text[1:].lstrip(SPACE)[:1] in (*DIGITS, b"-", b"[")


def to_ids(written: bytes, param: str) -> WrittenIds:
    """Raises BadField unless it is an array."""
    text = written.strip(SPACE)
    if text[:1] != b"[":
        message = f"Invalid type for '{param}': expected an array of token ids."
        raise BadField(message, param=param, detail="This must be an array of token ids.")
    return WrittenIds(text[1:-1].strip(SPACE), param)


def to_prompts(sent: msgspec.Raw, field: str, most: int) -> tuple[PlainPrompt, ...]:
    """Return the prompts, at most so many and none of them empty. Raises BadField, which names the
    place."""
    written = bytes(sent)
    found: Sequence[PlainPrompt]
    if not is_ids(written):
        found = _to_texts(written, field)
    else:
        ids = to_ids(written, field)
        found = _to_lists(ids.text, field, most) if ids.text[:1] == b"[" else (ids,)
    check_number(len(found), field, most)
    for index, each in enumerate(found):
        if not each:
            param = field if len(found) == 1 else f"{field}[{index}]"
            raise BadField(f"Invalid value for '{param}': it is empty.", param=param)
    return tuple(found)


def _to_lists(text: bytes, field: str, most: int) -> Sequence[WrittenIds]:
    """Take lists apart, of which `text` is the first and all others. Raises BadField."""
    check_number(text.count(b"["), field, most)
    found: list[WrittenIds] = []
    position = 0
    while position < len(text):
        param = f"{field}[{len(found)}]"
        matched = _LIST.match(text, position)
        if matched is not None:
            found.append(WrittenIds(matched[1].strip(SPACE), param))
            position = matched.end()
        elif text[position : position + 1] == b"[":  # with a list in it, which it is refused for
            return [*found, WrittenIds(text[position + 1 :], param)]
        else:
            reason = "the first one says that all are lists of token ids"
            raise BadField(f"Invalid type for '{param}': {reason}.", param=param)
    return found


def check_number(num_prompts: int, field: str, most: int) -> None:
    """Raises BadField."""
    if num_prompts > most:
        raise BadField(
            f"Invalid value for '{field}': {num_prompts} prompts, of which at most {most} can stand"
            " here.",
            param=field,
            detail="This is more than can stand here.",
        )


def _to_texts(written: bytes, field: str) -> Sequence[str]:
    """Return one or several texts. Raises BadField."""
    found: str | list[Any]
    found = getattr(decode(_plain[field], b'{"%b":%b}' % (field.encode(), written)), field)
    if isinstance(found, str):
        return (found,)
    for index, each in enumerate(found):
        if not isinstance(each, str):
            param = f"{field}[{index}]"
            message = f"Invalid type for '{param}': the first one says that all are texts."
            raise BadField(message, param=param)
    return found


def not_of_an_upstream() -> UnsupportedField:
    message = "Unsupported parameter: 'model' is an upstream's, whose tokens are not known here."
    return UnsupportedField(message, param="model")
