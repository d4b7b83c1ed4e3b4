"""Serializes parameters for a URL, a header or a cookie (OpenAPI 3.1, "Style Values"). Pure.

All but unreserved characters (RFC 3986, section 2.3) are percent-encoded, so that no value leaves
its part of the URL. Dot segments in a path are refused, since they keep their meaning when encoded.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec

from mcp_bridge.upstream.openapi.errors import BadArguments
from mcp_bridge.upstream.openapi.operations import TEMPLATE, Parameter

MAX_VALUE_CHARS = 16_384
"""Characters of one parameter before encoding."""
RESERVED_KEPT: Final = ":/?@!$'()*,;"
"""Characters that `allowReserved` leaves as they are; those that end or split a query are encoded.
"""
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
DELIMITERS: Final = {"form": ",", "spaceDelimited": "%20", "pipeDelimited": "%7C"}

Pair = tuple[str, str]


def filled_path(template: str, parameters: list[tuple[Parameter, Any]]) -> str:
    """Return the path of a request. Raises: BadArguments, for dot segments."""
    values = {
        parameter.name: _in_path(parameter, value, template) for parameter, value in parameters
    }
    filled = TEMPLATE.sub(lambda each: values[each.group(1)], template)
    for segment in filled.split("/"):
        for piece in re.split(r"[/\\]", unquote(segment)):
            if piece.partition(";")[0] in (".", ".."):
                name = parameters[0][0].argument if parameters else "path"
                raise BadArguments(name, "makes a path with a `.` or `..` in it")
    return filled


def query_pairs(parameter: Parameter, value: Any) -> list[Pair]:
    """Return encoded names and values, in order. Raises: BadArguments."""
    name = encoded(parameter.name)

    def one(each: Any) -> str:
        return encoded(text_of(parameter, each), RESERVED_KEPT if parameter.allow_reserved else "")

    if parameter.as_json:
        return [(name, encoded(json_text(value)))]
    if isinstance(value, dict):
        pairs = [(encoded(key), one(each)) for key, each in value.items()]
        if parameter.style == "deepObject":
            return [(f"{name}%5B{key}%5D", each) for key, each in pairs]
        if parameter.explode:
            return pairs
        flat = [part for pair in pairs for part in pair]
        return [(name, DELIMITERS[parameter.style].join(flat))]
    if isinstance(value, list):
        if parameter.explode or parameter.style == "deepObject":
            return [(name, one(each)) for each in value]
        return [(name, DELIMITERS[parameter.style].join(map(one, value)))] if value else []
    return [(name, one(value))]


def header_value(parameter: Parameter, value: Any) -> str:
    """Return a header's value, in style `simple`. Raises: BadArguments, for invalid characters."""
    if parameter.as_json:
        text = json_text(value)
    elif isinstance(value, dict):
        between = "=" if parameter.explode else ","
        pairs = [f"{key}{between}{text_of(parameter, each)}" for key, each in value.items()]
        text = ",".join(pairs)
    elif isinstance(value, list):
        text = ",".join(text_of(parameter, each) for each in value)
    else:
        text = text_of(parameter, value)
    if CONTROL.search(text) or not text.isascii():
        raise BadArguments(parameter.argument, "holds a character that no header can")
    return text.strip()


def cookie_pair(parameter: Parameter, value: Any) -> str:
    """Return a cookie's pair, in style `form`. Raises: BadArguments."""
    return "&".join("=".join(pair) for pair in query_pairs(parameter, value))


def form_pairs(body: dict[str, Any]) -> list[Pair]:
    """Return the pairs of a form: lists repeat their name, objects are JSON ("Encoding Object",
    defaults)."""
    return [
        (encoded(name), encoded(plain_text(each)))
        for name, value in body.items()
        for each in (value if isinstance(value, list) else [value])
    ]


def text_of(parameter: Parameter, value: Any) -> str:
    """Return the text of a value inside a parameter. Raises: BadArguments, if it is nested or too
    long."""
    if isinstance(value, dict | list):
        raise BadArguments(parameter.argument, "is nested too deep for a parameter")
    text = plain_text(value)
    if len(text) > MAX_VALUE_CHARS:
        raise BadArguments(parameter.argument, f"longer than {MAX_VALUE_CHARS} characters")
    return text


def plain_text(value: Any) -> str:
    """Return a string as it is, None as the empty string, and other values as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def encoded(text: str, safe: str = "") -> str:
    """Return a text percent-encoded; a lone surrogate, which has no UTF-8, becomes `?`."""
    return quote(text.encode("utf-8", "replace"), safe=safe)


def _in_path(parameter: Parameter, value: Any, template: str) -> str:
    """Return a path parameter, in style `simple`, `label` or `matrix`."""
    name, explode = encoded(parameter.name), parameter.explode

    def one(each: Any) -> str:
        text = text_of(parameter, each)
        if CONTROL.search(text):
            raise BadArguments(parameter.argument, "holds a control character")
        return encoded(text)

    if parameter.as_json:
        parts = [encoded(json_text(value))]
    elif isinstance(value, dict):
        between = "=" if explode else ","
        parts = [f"{encoded(key)}{between}{one(each)}" for key, each in value.items()]
    elif isinstance(value, list):
        parts = [one(each) for each in value]
    else:
        parts = [one(value)]
    if not any(parts):
        raise BadArguments(parameter.argument, "is empty, and stands in a path")
    if parameter.style == "label":
        return "." + ("." if explode else ",").join(parts)
    if parameter.style == "matrix":
        if explode and isinstance(value, dict):
            return "".join(f";{part}" for part in parts)
        if explode:
            return "".join(f";{name}={part}" for part in parts)
        return f";{name}={','.join(parts)}"
    return ",".join(parts)
