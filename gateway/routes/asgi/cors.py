"""Decides which web pages may call, and read the answers (the Fetch standard's CORS protocol).

An ASGI layer inside `response_headers`, around Litestar. Origins are exact and each tenant's own. A
preflight carries no credential, so it is answered for an origin that any tenant lists; what a page
may read is decided with the answer itself, when the guard knows whose key it was: then the origin
must be that tenant's. What failed before that is readable for the pages of every tenant. No cookie
is ever asked for: credentials come in a header that no browser adds by itself. An origin that
nobody lists gets no header, and its preflight the route's own 405.

What a client in a browser needs of the authorization server is open to every origin, `*` and so
without cookies: they take none, and who has no token to show learns nothing there that is not
public. Sign-in, consent and introspection are not among them.
"""

from __future__ import annotations

import re

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth.cors_origins import CorsOrigins
from gateway.auth.oauth.rfc8414_metadata import (
    JWKS_PATH,
    METADATA_PATHS,
    REGISTRATION_PATH,
    REVOCATION_PATH,
    TOKEN_PATH,
    USERINFO_PATH,
)
from gateway.auth.oauth.rfc9728_protected_resource import WELL_KNOWN

PREFIXES = ("/v1/", "/mcp/")
"""Web pages of a tenant may call paths with these prefixes. Sign-in and consent are missing: only
our own pages call those."""
OPEN = frozenset(
    {
        *METADATA_PATHS,
        WELL_KNOWN,
        JWKS_PATH,
        TOKEN_PATH,
        REVOCATION_PATH,
        USERINFO_PATH,
        REGISTRATION_PATH,
    }
)
OPEN_PREFIXES = (WELL_KNOWN + "/", REGISTRATION_PATH + "/")
"""Web pages of any origin may call paths with these prefixes."""
ANY_ORIGIN = b"*"
METHODS = b"GET, POST, PUT, PATCH, DELETE"
MAX_AGE_S = b"600"
MAX_HEADERS_BYTES = 2048
"""Bounds the header names that a preflight asks for; the official SDK asks for some 300 bytes."""
NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")
EXPOSED = b", ".join(
    (
        *(b"x-request-id", b"request-id", b"openai-processing-ms", b"openai-version", b"etag"),
        *(b"retry-after", b"retry-after-ms", b"x-should-retry", b"www-authenticate"),
        b"x-tollgate-cost",
        b"x-tollgate-ignored-fields",
        b"x-tollgate-model-version",
        b"x-tollgate-tags",
        *(
            name % parts
            for kind in (b"requests", b"tokens", b"input-tokens", b"output-tokens")
            for what in (b"limit", b"remaining", b"reset")
            for name, parts in (
                (b"x-ratelimit-%b-%b", (what, kind)),
                (b"anthropic-ratelimit-%b-%b", (kind, what)),
            )
        ),
    )
)

OPEN_EXPOSED = b"www-authenticate, dpop-nonce, retry-after, x-request-id"

Header = tuple[bytes, bytes]


class Cors:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.HTTP and is_open(scope["path"]):
            await self.call_open(scope, receive, send)
            return
        called = scope["type"] == ScopeType.HTTP and scope["path"].startswith(PREFIXES)
        origin = single(scope, b"origin") if called else None
        if origin is None:
            await self.app(scope, receive, send)
            return
        known: CorsOrigins = scope["litestar_app"].state.services.cors_origins
        orgs = await known.orgs_of(origin.decode("latin-1"))
        if orgs and (allowed := preflight(scope, origin)):
            await send_preflight(send, allowed)
            return

        async def send_shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (b"vary", b"origin")]
                principal = scope.get("user")
                if principal.org_id in orgs if principal is not None else orgs:
                    headers.append((b"access-control-allow-origin", origin))
                    headers.append((b"access-control-expose-headers", EXPOSED))
                message["headers"] = headers
            await send(message)

        await self.app(scope, receive, send_shared)

    async def call_open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for every origin, whether a page asks or not: so a cache that keeps an answer
        keeps it for all."""
        if allowed := preflight(scope, ANY_ORIGIN):
            await send_preflight(send, allowed)
            return

        async def send_open(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"access-control-allow-origin", ANY_ORIGIN),
                    (b"access-control-expose-headers", OPEN_EXPOSED),
                ]
            await send(message)

        await self.app(scope, receive, send_open)


def is_open(path: str) -> bool:
    return path.rstrip("/") in OPEN or path.startswith(OPEN_PREFIXES)


async def send_preflight(send: Send, allowed: list[Header]) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def preflight(scope: Scope, origin: bytes) -> list[Header]:
    """Return the answer's headers; none where the request is no preflight, or asks for something
    that is no list of header names."""
    if scope.get("method") != "OPTIONS" or single(scope, b"access-control-request-method") is None:
        return []
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", METHODS),
        (b"access-control-max-age", MAX_AGE_S),
        (b"vary", b"origin, access-control-request-method, access-control-request-headers"),
    ]
    wanted = single(scope, b"access-control-request-headers")
    if wanted is not None and wanted.strip():
        if len(wanted) > MAX_HEADERS_BYTES or NAMES.fullmatch(wanted.strip()) is None:
            return []
        headers.append((b"access-control-allow-headers", wanted.strip()))
    return headers


def single(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header that stands there once."""
    found = [value for each, value in scope["headers"] if each == name]
    return found[0] if len(found) == 1 else None
