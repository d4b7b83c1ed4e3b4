"""Reads a request's body as it was sent, or refuses to look at it: it has to be said to be JSON, or
to be nothing.

Knows no JSON.
"""

from __future__ import annotations

from collections.abc import Iterable

from litestar.exceptions import InternalServerException

from gateway.http_errors.table import EncodedBody, OtherMediaType, RequestTooLarge
from gateway.routes.shared.access import AuthenticatedRequest
from gateway.routes.shared.media_types import JSON

JSON_TYPE = JSON.encode()


async def plain_body(request: AuthenticatedRequest) -> bytes:
    """Return the body. Raises: EncodedBody, OtherMediaType."""
    headers = request.scope["headers"]
    refuse_coded(headers)
    body = await request.body()
    if body:
        refuse_other_types(headers)
    return body


def refuse_coded(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a content coding. Raises: EncodedBody."""
    for name, value in headers:
        if name == b"content-encoding":
            codings = value.decode("latin-1").lower().split(",")
            if any(coding.strip() not in ("", "identity") for coding in codings):
                raise EncodedBody


def refuse_other_types(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse what is said to be something else than JSON, as vLLM does: a form that `curl -d` sends
    by default, say. Raises: OtherMediaType."""
    for name, value in headers:
        if name == b"content-type" and value != JSON_TYPE:
            media_type = value.partition(b";")[0].strip().lower()
            if media_type not in (b"", JSON_TYPE) and not media_type.endswith(b"+json"):
                raise OtherMediaType


async def read_once(request: AuthenticatedRequest) -> bytes:
    """Read the body like `plain_body`, which can be asked again, and for that takes an object of
    all headers and a generator. Raises: EncodedBody, OtherMediaType, RequestTooLarge."""
    headers = request.scope["headers"]
    refuse_coded(headers)
    refuse_other_types(headers)
    most = request.route_handler.resolve_request_max_body_size()
    for name, value in headers:
        if name == b"content-length" and most is not None and int(value) > most:
            raise RequestTooLarge(most)
    pieces: list[bytes] = []
    size_bytes, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] != "http.request":
            raise InternalServerException("the client left before its body had come")
        pieces.append(message["body"])
        size_bytes += len(message["body"])
        if most is not None and size_bytes > most:
            raise RequestTooLarge(most)
        more = message.get("more_body", False)
    return b"".join(pieces)
