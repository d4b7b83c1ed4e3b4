"""Translates a tool call into an HTTP request, and the answer into a result. Pure.

The host is always that of the operator's base URL, whatever the document's `servers` or the
arguments say.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec
from mcp_types import AudioContent, CallToolResult, ContentBlock, ImageContent, TextContent

from foundation.json_numbers import slow_number
from foundation.json_values import has_more_values
from mcp_bridge.protocol.rpc import MAX_SERVER_VALUES
from mcp_bridge.upstream.openapi.errors import BadArguments, BadDocument
from mcp_bridge.upstream.openapi.operations import BODY, RESULT, Operation, Parameter, is_json
from mcp_bridge.upstream.openapi.serialization import (
    CONTROL,
    cookie_pair,
    encoded,
    filled_path,
    form_pairs,
    header_value,
    json_text,
    query_pairs,
)

MAX_URL_CHARS = 8_192
MAX_REQUEST_BYTES = 4 * 1024 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_ERROR_CHARS = 4_096
"""Characters of an error's body that are passed on."""
BASE_URL: Final = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?")


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case, each once."""
    body: bytes


class HttpAnswer(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class HttpClient(Protocol):
    async def send(self, request: HttpRequest, *, max_body_bytes: int) -> HttpAnswer:
        """Return the answer, whatever its status; redirects are not followed. Raises: HttpFailed,
        also for a larger body."""
        ...


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials of the upstream, which replace arguments of the same name."""

    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    query: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        return "Secrets(...)"


NO_SECRETS = Secrets()


def checked_base_url(url: str) -> str:
    """Return a valid base URL without a slash at its end. Raises: BadDocument."""
    try:
        parts = urlsplit(url)
        is_plain = BASE_URL.fullmatch(url) is not None and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_plain = False
    if not is_plain:
        raise BadDocument("/servers", "the base URL must be http(s)://host/path and nothing else")
    if any(segment in (".", "..") for segment in parts.path.split("/")):
        raise BadDocument("/servers", "the base URL has a `.` or `..` in it")
    return url.rstrip("/")


def request_of(
    operation: Operation,
    arguments: Mapping[str, Any],
    base_url: str,
    secrets: Secrets = NO_SECRETS,
) -> HttpRequest:
    """Return the request for a call. The arguments conform to the input schema already.

    Raises: BadArguments, which names the argument.
    """
    known = {each.argument for each in operation.parameters} | ({BODY} if operation.body else set())
    for name in arguments:
        if name not in known:
            raise BadArguments(name[:MAX_ERROR_CHARS], "is no argument of this tool")
    by_place: dict[str, list[tuple[Parameter, Any]]] = {}
    for parameter in operation.parameters:
        if parameter.argument in arguments:
            given = arguments[parameter.argument]
            by_place.setdefault(parameter.place, []).append((parameter, given))
        elif parameter.required:
            raise BadArguments(parameter.argument, "is missing")
    query = [
        pair
        for parameter, value in by_place.get("query", [])
        for pair in query_pairs(parameter, value)
    ]
    own = {encoded(name): encoded(value) for name, value in secrets.query.items()}
    query = [pair for pair in query if pair[0] not in own] + list(own.items())
    url = base_url + filled_path(operation.path, by_place.get("path", []))
    if query:
        url += "?" + "&".join(f"{name}={value}" for name, value in query)
    if len(url) > MAX_URL_CHARS:
        raise BadArguments("the arguments", f"make a URL of more than {MAX_URL_CHARS} characters")
    body, content_type = _body_of(operation, arguments)
    headers = {p.name.lower(): header_value(p, v) for p, v in by_place.get("header", [])}
    pairs = [pair for p, v in by_place.get("cookie", []) if (pair := cookie_pair(p, v))]
    headers |= {"cookie": "; ".join(pairs)} if pairs else {}
    headers |= {"content-type": content_type} if content_type else {}
    headers |= {"accept": "application/json, text/plain;q=0.5, */*;q=0.1"}
    headers |= {name.lower(): value for name, value in secrets.headers.items()}
    return HttpRequest(method=operation.method, url=url, headers=tuple(headers.items()), body=body)


def _body_of(operation: Operation, arguments: Mapping[str, Any]) -> tuple[bytes, str | None]:
    body = operation.body
    if body is None or BODY not in arguments:
        if body is not None and body.required:
            raise BadArguments(BODY, "is missing")
        return b"", None
    value = arguments[BODY]
    if body.form == "json":
        data = msgspec.json.encode(value)
    elif body.form == "form":
        if not isinstance(value, dict):
            raise BadArguments(BODY, "must be an object: it is sent as a form")
        data = "&".join(f"{name}={each}" for name, each in form_pairs(value)).encode()
    elif not isinstance(value, str):
        raise BadArguments(BODY, "must be a string: it is sent as plain text")
    else:
        data = value.encode("utf-8", "replace")
    if len(data) > MAX_REQUEST_BYTES:
        raise BadArguments(BODY, f"larger than {MAX_REQUEST_BYTES} bytes")
    return data, body.media_type


def result_of(operation: Operation, answer: HttpAnswer) -> CallToolResult:
    """Return a result for a status of 2xx, and a tool error for all others, also redirects."""
    media_type = answer.headers.get("content-type", "")
    if not 200 <= answer.status < 300:
        text = _text_of(answer.body, media_type)[:MAX_ERROR_CHARS]
        return _failed(f"HTTP {answer.status}" + (f": {text}" if text else ""))
    if len(answer.body) > MAX_ANSWER_BYTES:
        return _failed(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
    if is_json(media_type) and answer.body:
        return _json_result(operation, answer.body)
    if operation.tool.output_schema is not None:
        return _failed("the answer is no JSON, which the tool's output schema promises")
    content = _content(answer.body, media_type.partition(";")[0].strip().lower())
    if content is None:
        return _failed(f"an answer of {len(answer.body)} bytes that is neither text nor a picture")
    return CallToolResult(content=[content])


def _json_result(operation: Operation, body: bytes) -> CallToolResult:
    if slow := slow_number(body):
        return _failed(f"the answer has {slow.reason}")
    if has_more_values(body, MAX_SERVER_VALUES) is not None:
        return _failed(f"the answer has more than {MAX_SERVER_VALUES} values")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _failed("the answer says that it is JSON, and is not")
    text = TextContent(type="text", text=json_text(value))
    if operation.wraps:
        return CallToolResult(content=[text], structured_content={RESULT: value})
    if isinstance(value, dict):
        return CallToolResult(content=[text], structured_content=value)
    if operation.tool.output_schema is not None:
        return _failed("the answer is no object, which the tool's output schema promises")
    return CallToolResult(content=[text])


def _content(body: bytes, media_type: str) -> ContentBlock | None:
    if media_type.startswith("image/"):
        data = base64.b64encode(body).decode()
        return ImageContent(type="image", data=data, mime_type=media_type)
    if media_type.startswith("audio/"):
        data = base64.b64encode(body).decode()
        return AudioContent(type="audio", data=data, mime_type=media_type)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return TextContent(type="text", text=text)


def _text_of(body: bytes, media_type: str) -> str:
    """Return the beginning of an error's body as text without control characters."""
    if media_type.startswith(("image/", "audio/", "video/")):
        return ""
    start = body[: 4 * MAX_ERROR_CHARS].decode("utf-8", "replace")
    return CONTROL.sub(" ", start).strip()


def _failed(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
