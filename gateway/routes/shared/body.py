"""Reads a request's body as it was sent, or refuses to look at it.

Knows no JSON.
"""

from __future__ import annotations

from collections.abc import Iterable

from litestar.exceptions import InternalServerException

from gateway.http_errors.table import EncodedBody, RequestTooLarge
from gateway.routes.shared.access import AuthenticatedRequest


async def plain_body(request: AuthenticatedRequest) -> bytes:
    """Return the body. Raises: EncodedBody."""
    refuse_coded(request.scope["headers"])
    return await request.body()


def refuse_coded(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a content coding. Raises: EncodedBody."""
    for name, value in headers:
        if name == b"content-encoding":
            codings = value.decode("latin-1").lower().split(",")
            if any(coding.strip() not in ("", "identity") for coding in codings):
                raise EncodedBody


async def read_once(request: AuthenticatedRequest) -> bytes:
    """Read the body like `plain_body`, which can be asked again, and for that takes an object of
    all headers and a generator. Raises: EncodedBody, RequestTooLarge."""
    headers = request.scope["headers"]
    refuse_coded(headers)
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
