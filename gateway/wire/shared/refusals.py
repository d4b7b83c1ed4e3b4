"""From the decoder's words to OpenAI's: a body or a query that is refused, by the name of the field
that is in the way.

It looks at a body a second time only after it was refused, but for a NUL, where one would be kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from foundation.json_numbers import slow_number
from foundation.json_values import MAX_VALUES, has_more_values
from gateway.request_errors import BadField, UnknownField, UnsupportedField
from gateway.wire.shared.json_place import (
    MAX_PATH_CHARS,
    describe,
    escaped_nul,
    invalid_utf8,
    locate,
    lone_surrogate,
    number_out_of_range,
    start_of_literal,
)

T = TypeVar("T")
NotYet = Mapping[str, frozenset[str]]
"""By the path of a field, without indices: values that its vendor knows and nobody here honours."""

MAX_LOGIT_BIASES = 1024
MAX_INT64 = 2**63 - 1
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[dict[TokenId, Bias], Meta(max_length=MAX_LOGIT_BIASES)]
NOT_YET = {
    "messages[].tool_calls[].type": frozenset({"custom"}),
    "tools[].type": frozenset({"custom"}),
    "tool_choice.type": frozenset({"custom"}),
    "messages[].content[].type": frozenset(
        {"image_url", "input_audio", "file", "refusal", "audio_url", "video_url"}
    ),
    "modalities[]": frozenset({"audio", "image"}),
    "response_format.type": frozenset({"structural_tag"}),
    "service_tier": frozenset({"scale"}),
    "verbosity": frozenset({"low", "high"}),
}
"""Values that OpenAI or vLLM know and our engine cannot honour: refused as such. Others nobody
knows."""

BROKEN_JSON = "We could not parse the JSON body of your request."

_AT = re.compile(r"^(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$")
_TYPE = re.compile(r"^Expected `(?P<wanted>.*)`, got `(?P<found>.*)`$")
_ONE_OF = re.compile(r"^Expected `str` matching regex '\^\((?P<names>[a-z_|]+)\|tag:.*'$")
_VALUE = re.compile(r"^Invalid (?:enum )?value '(?P<value>.*)'$", re.DOTALL)
_BYTE = re.compile(r"^(?:JSON is malformed: )?(?P<reason>.*) \(byte (?P<byte>[0-9]+)\)$")
_INDEX = re.compile(r"\[[0-9]+\]")
_RANGE = ("Number out of range", "Integer value out of range")
_BIAS = re.compile(rb'"(?P<key>[^"\\]*+(?:\\.[^"\\]*+)*+)"\s*+:\s*+[^,}]*+', re.DOTALL)

WORDS = {
    "array": "an array",
    "bool": "a boolean",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
FORMS = {
    "custom_id": "1 to 64 letters and digits of ASCII, underscores and hyphens",
    "amount_usd": 'a decimal text in USD such as "12.50", of at most 7 digits before the point and'
    " 9 behind it",
    "model": "the name of a model, which has no NUL and is not too long",
    "models": "the name of a model, which has no NUL and is not too long",
}
"""Plain descriptions of fields whose pattern only machines can read."""
FOUND = WORDS | {"float": "a decimal number"}
"""Beside an integer that was wanted: `256.0` is none."""


class _BiasedBody(msgspec.Struct):
    logit_bias: msgspec.Raw = msgspec.Raw(b"")


_biased_decoder = msgspec.json.Decoder(_BiasedBody)
_biases_decoder = msgspec.json.Decoder(Biases)


def decode(decoder: msgspec.json.Decoder[T], body: bytes, not_yet: NotYet = NOT_YET) -> T:
    """Raises BadField for what is not JSON, not UTF-8, nested too deep or of another shape."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise to_bad_value(str(error), body, not_yet) from error
    except msgspec.DecodeError as error:
        raise to_bad_json(str(error), body) from error
    except UnicodeDecodeError as error:
        raise broken_at(body, "invalid UTF-8", invalid_utf8(body)) from error
    except RecursionError as error:
        raise broken("it is nested too deep", locate(body, len(body))) from error


def decode_kept(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """As `decode`, of a body whose texts come to Postgres, which knows no NUL."""
    check_values(body)
    found = decode(decoder, body)
    offset = escaped_nul(body)
    if offset is not None:
        param = locate(body, offset) or "body"
        detail = "This has a NUL character in it."
        message = f"Invalid value for '{param}': it has a NUL character in it."
        raise BadField(message, param=param, detail=detail)
    return found


def check_values(body: bytes) -> None:
    """Before a body is decoded, because that keeps the event loop. Raises BadField."""
    offset = has_more_values(body)
    if offset is not None:
        raise slow_at(body, offset, f"more than {MAX_VALUES} values in arrays and objects")
    check_numbers(body)


def check_numbers(body: bytes) -> None:
    """As `check_values`, of the numbers alone. Raises BadField."""
    found = slow_number(body)
    if found is not None:
        raise slow_at(body, found.offset, found.reason)


def slow_at(body: bytes, offset: int, reason: str) -> BadField:
    param = locate(body, offset)
    place = f", at '{param}' already" if param else ""
    return BadField(
        f"The request body has {reason}{place}.",
        param=param,
        detail=f"The request body has {reason}.",
    )


# ---- what is no JSON


def to_bad_json(text: str, body: bytes) -> BadField:
    """msgspec says "JSON is malformed: invalid character (byte 6)" or "Input data was truncated",
    the latter of half a surrogate pair near the end, too."""
    found = _BYTE.match(text)
    if found is None:
        lone = lone_surrogate(body)
        if lone is not None:
            return broken_at(body, "invalid utf-16 surrogate pair", lone)
        return broken_at(body, "it ends too early", len(body))
    reason, offset = found["reason"], int(found["byte"])
    if reason == "trailing characters":
        return broken(f"{reason} at {describe(body, offset)}", None)
    return broken_at(body, reason, offset)


def broken_at(body: bytes, reason: str, offset: int | None) -> BadField:
    if offset is None:
        return broken(reason, None)
    param = locate(body, start_of_literal(body, offset))
    return broken(f"{reason} at {describe(body, offset)}", param)


def broken(reason: str, param: str | None) -> BadField:
    where = f", in or after '{param}'" if param else ""
    return BadField(f"{BROKEN_JSON} ({reason}{where})", param=param, detail=BROKEN_JSON)


# ---- what has another shape


def to_bad_value(text: str, body: bytes | None = None, not_yet: NotYet = NOT_YET) -> BadField:
    """msgspec says "Expected `int`, got `str` - at `$.n`". Of what stands in a map it does not say
    the key; that is in the body."""
    found = _AT.match(text)
    assert found is not None  # the pattern takes any text
    reason, path = found["reason"], found["path"] or ""
    if unknown := _UNKNOWN.match(reason):
        param = under(path.replace("[...]", ""), unknown["field"][:MAX_PATH_CHARS])
        return UnknownField(
            f"Unrecognized request argument supplied: {param}",
            param=param,
            place=path,
            field=unknown["field"],
            detail="This request argument is not recognized.",
        )
    if missing := _MISSING.match(reason):
        param = under(path.replace("[...]", ""), missing["field"])
        return BadField(
            f"Missing required parameter: '{param}'.",
            param=param,
            detail="This required parameter is missing.",
        )
    if body is not None and path.removesuffix("[...]") == "logit_bias":
        path = biased(body)
    elif body is not None and "[...]" in path and reason in _RANGE:
        path = locate(body, number_out_of_range(body) or 0) or ""
    path = path.replace("[...]", "")
    wrong = _TYPE.match(reason)
    if not path:
        return (
            broken(reason, None) if wrong is None else wrong_body(wrong["wanted"], wrong["found"])
        )
    if wrong:
        return wrong_type(path, wrong["wanted"], wrong["found"])
    if value := _VALUE.match(reason):
        return wrong_value(path, value["value"], not_yet)
    if reason.startswith("Expected `str` matching regex"):
        form = form_of(path, reason)
        detail = f"This must be {form}."
        return BadField(f"Invalid value for '{path}': expected {form}.", param=path, detail=detail)
    # What msgspec expected stands in our own types; what else it says may be the client's.
    known = {"detail": f"{reason}."} if reason.startswith("Expected ") else {}
    return BadField(f"Invalid value for '{path}': {reason}.", param=path, **known)


def form_of(path: str, reason: str) -> str:
    """Say in words what a text must be like."""
    if names := _ONE_OF.match(reason):
        return f"one of {names['names'].replace('|', ', ')} or tag:KEY"
    field = _INDEX.sub("", path).rpartition(".")[2]
    return FORMS.get(field, "a text of another form")


def wrong_body(wanted: str, found: str) -> BadField:
    kinds, got = WORDS.get(wanted, wanted), FOUND.get(found, found)
    message = f"The JSON body of your request must be {kinds}, and is {got}."
    return BadField(message, detail=message)


def wrong_type(path: str, wanted: str, found: str) -> BadField:
    if wanted == "null":
        return unsupported(path, "not supported by this model yet")
    kinds = " or ".join(WORDS.get(kind, kind) for kind in wanted.split(" | "))
    got = FOUND.get(found, found)
    return BadField(
        f"Invalid type for '{path}': expected {kinds}, but got {got} instead.",
        param=path,
        detail=f"This must be {kinds}, and is {got}.",
    )


def wrong_value(path: str, value: str, not_yet: NotYet) -> BadField:
    """One that OpenAI knows and this model cannot honour, or one that nobody knows."""
    value = value[:MAX_PATH_CHARS]
    if value in not_yet.get(_INDEX.sub("[]", path), ()):
        return UnsupportedField(
            f"Unsupported value: '{path}' does not support '{value}' with this model yet.",
            param=path,
        )
    detail = "This is not one of the values that can stand here."
    return BadField(f"Invalid value for '{path}': '{value}'.", param=path, detail=detail)


def biased(body: bytes) -> str:
    """The first entry of `logit_bias` that is none."""
    raw = bytes(_biased_decoder.decode(body).logit_bias)
    for entry in islice(_BIAS.finditer(raw), MAX_LOGIT_BIASES):
        try:
            _biases_decoder.decode(b"{%b}" % entry[0])
        except msgspec.DecodeError:
            key = entry["key"].decode(errors="replace")
            return f"logit_bias.{key}"[:MAX_PATH_CHARS]
    return "logit_bias"


def under(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def unsupported(param: str, reason: str) -> UnsupportedField:
    return UnsupportedField(f"Unsupported parameter: '{param}' is {reason}.", param=param)
