"""Writes errors in the shape that the path speaks: our own `/v1/admin/...` speaks RFC 9457 problem
details; `/v1/organizations/...` and `/v1/messages` speak Anthropic's shape, all others OpenAI's.
Whoever names Anthropic's version is answered in its shape on every path of the API.

A handler has nothing to do: it raises what `gateway.http_errors` knows.

    {"type": "urn:tollgate:problem:name_taken", "title": "Conflict", "status": 409,
     "detail": "...", "instance": "urn:tollgate:request:req_...", "code": "name_taken",
     "param": "name"}

`code`, `param` and `scope` are extension members (RFC 9457, 3.2): the code of the type, for people
who would rather not take a URN apart, the field that is to blame, and what a credential lacks.
`detail` is one of a closed set of texts: it repeats nothing that the caller wrote.

Whoever asks for a path that is not there is told which one may be meant: the base URL that it was
given lacks `/v1`, has it twice, or has something else before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus

import msgspec

from foundation import sse
from gateway.http_errors.table import HttpError
from gateway.routes.shared.media_types import JSON
from gateway.wire.anthropic.reports import to_anthropic_error, to_error_type, to_status

MEDIA_TYPE = "application/problem+json"
OURS = "/v1/admin"
ANTHROPIC = ("/v1/organizations/", "/v1/messages/")
API, MESSAGES = "/v1/", "/v1/messages"
API_BASE = "/v1"
OF_BOTH = ("/v1/models", "/v1/files")
VERSION_HEADER = b"anthropic-version"
ERROR_EVENT = b"error"
BLANK = "about:blank"
"""The type of what its status says already (RFC 9457, 4.2.1)."""
PARAMETER = re.compile(r"\\\{[^}]*?(:path)?\\\}")
MAX_PATH_CHARS = 512
"""Nothing is suggested for a longer path."""

PathFinder = Callable[[str], str | None]


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    code: str | None = None
    param: str | None = None
    scope: str | None = None


def speaks_problems(path: str) -> bool:
    return path == OURS or path.startswith(OURS + "/")


def speaks_anthropic(path: str) -> bool:
    return path == MESSAGES or path.startswith(ANTHROPIC)


def speaks_both(path: str) -> bool:
    """Tell whether both vendors have something at a path."""
    return any(path == each or path.startswith(each + "/") for each in OF_BOTH)


def is_anthropics(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether a request is one of Anthropic's API."""
    return any(name == VERSION_HEADER for name, _ in headers)


def asked_as(path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the path whose shape a refusal has."""
    if path.startswith(API) and not speaks_problems(path) and is_anthropics(headers):
        return MESSAGES
    return path


def to_problem(http_error: HttpError, request_id: str | None) -> Problem:
    code = http_error.body.code
    return Problem(
        type=BLANK if code is None else f"urn:tollgate:problem:{code}",
        title=HTTPStatus(http_error.status).phrase,
        status=http_error.status,
        detail=http_error.detail or http_error.body.message,
        instance=None if request_id is None else f"urn:tollgate:request:{request_id}",
        code=code,
        param=http_error.body.param,
        scope=http_error.scope,
    )


def with_vendor_status(http_error: HttpError, path: str) -> HttpError:
    """Return the error with the status that the vendor whose shape `path` speaks has for it."""
    if not speaks_anthropic(path):
        return http_error
    return msgspec.structs.replace(
        http_error, status=to_status(http_error.status, http_error.body.code)
    )


def code_of(http_error: HttpError, path: str) -> str:
    """Return the code that the client reads, in the shape that `path` speaks, of an error with that
    vendor's status; where there is none, the type."""
    return to_error_type(http_error.status) if speaks_anthropic(path) else http_error.code


def encode_error(http_error: HttpError, path: str, request_id: str | None) -> tuple[bytes, str]:
    """Return the body and its media type, in the shape that `path` speaks, of an error with that
    vendor's status."""
    if speaks_problems(path):
        return msgspec.json.encode(to_problem(http_error, request_id)), MEDIA_TYPE
    if speaks_anthropic(path):
        error = to_anthropic_error(
            http_error.status, http_error.body.message, request_id, http_error.body.param
        )
        return msgspec.json.encode(error), JSON
    return http_error.encode(), JSON


def encode_error_event(http_error: HttpError, path: str, request_id: str | None) -> bytes:
    """Return an error as a server-sent event, for a stream whose headers are gone."""
    body, _ = encode_error(http_error, path, request_id)
    return sse.encode(body, ERROR_EVENT) if speaks_anthropic(path) else sse.encode(body)


def path_finder(templates: Iterable[str]) -> PathFinder:
    """Return a function from a path that is not there to one below `/v1` that is, if it is near.
    `templates`: the paths of all routes."""
    known = [to_pattern(each) for each in set(templates) if each.startswith(API)]

    def find(path: str) -> str | None:
        if len(path) > MAX_PATH_CHARS:
            return None
        return next(
            (near for near in near_paths(path) if any(each.fullmatch(near) for each in known)), None
        )

    return find


def near_paths(path: str) -> Iterator[str]:
    """Yield what may be meant: with the prefix, and from its last place on."""
    path = path.rstrip("/")
    last = path.rfind(API)
    if last > 0:
        yield path[last:]
    elif last < 0:
        yield API_BASE + path


def to_pattern(template: str) -> re.Pattern[str]:
    def parameter(found: re.Match[str]) -> str:
        return "[^/]+" if found[1] is None else ".+"

    return re.compile(PARAMETER.sub(parameter, re.escape(template)))
