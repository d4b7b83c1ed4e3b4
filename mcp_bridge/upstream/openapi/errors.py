"""The errors between an OpenAPI document and a call.

OpenApiError (a BridgeError)   code
├── BadDocument                openapi_document_refused   the document, or a part (names its place)
├── BadArguments               openapi_arguments_refused  what no request is made of (names it)
└── HttpFailed                 openapi_http_failed        no answer; raised by the client handed in

No text quotes an argument.
"""

from __future__ import annotations

from foundation.errors import LocatedError
from mcp_bridge.errors import BridgeError

MAX_POINTER_CHARS = 300
"""Its parts are the document's own words."""


class OpenApiError(BridgeError):
    code = "openapi_error"


class BadDocument(OpenApiError, LocatedError):
    """The document cannot be used.

    `param`: a JSON pointer (RFC 6901) into the document; empty: all of it.
    """

    code = "openapi_document_refused"
    whole = "the document"

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(pointer[:MAX_POINTER_CHARS], message)


class BadArguments(OpenApiError, LocatedError):
    code = "openapi_arguments_refused"


class HttpFailed(OpenApiError):
    """Its text is for the log: the client reads that the upstream gave no answer."""

    code = "openapi_http_failed"
