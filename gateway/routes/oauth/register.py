"""POST /oauth/register, and GET and DELETE of what was registered.

Errors are RFC 7591's, with constant descriptions; a member of ours names the field (3.2.2 allows
for others), and nothing repeats its value.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.params import FromPath
from redis.exceptions import RedisError

from gateway.auth.errors import MissingCredential
from gateway.auth.login.throttle import TooManyAttempts
from gateway.auth.oauth.clients.metadata import ClientMetadata, InvalidMetadata
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.rfc6749_errors import DESCRIPTIONS
from gateway.auth.oauth.rfc7591_register import (
    MAX_BODY_BYTES,
    PATH,
    read_body,
    register,
    to_information,
    unregister,
)
from gateway.routes.shared.access import PUBLIC, services
from gateway.routes.shared.browser import auth_of, where_of
from gateway.routes.shared.guards import read_bearer
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.wire.admin.oauth import OAuthErrorBody, RegisteredClient, RegistrationRefused

log = logging.getLogger(__name__)

NO_STORE = {"cache-control": "no-store", "pragma": "no-cache"}
REGISTERED = PATH + "/{client_id:str}"
MAX_TOKEN_LENGTH = 256
oauth = RouteGroup(tag="OAuth", opt=PUBLIC)


def reply(
    content: dict[str, Any], status: int, headers: dict[str, str] | None = None
) -> Response[bytes]:
    return Response(
        msgspec.json.encode(content),
        status_code=status,
        media_type=JSON,
        headers={**NO_STORE, **(headers or {})},
    )


def refusal(
    error: str, status: int, headers: dict[str, str] | None = None, **more: str
) -> Response[bytes]:
    content = {"error": error, "error_description": DESCRIPTIONS[error], **more}
    return reply(content, status, headers)


@oauth.post(
    PATH,
    "Register a client",
    body=ClientMetadata,
    answer=RegisteredClient,
    status=201,
    said={
        400: {JSON: RegistrationRefused},
        **{status: {JSON: OAuthErrorBody} for status in (429, 503)},
    },
    options={"request_max_body_size": MAX_BODY_BYTES},
)
async def register_client(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        document, egress = read_body(await request.body()), services(request).federation.named_urls
        made = await register(auth, egress, document, where_of(request, auth))
    except InvalidMetadata as error:
        log.info("a registration was refused: %s", error)
        return refusal(error.error, 400, field=error.param)
    except TooManyAttempts as waits:
        headers = {"retry-after": str(math.ceil(waits.delay_s))}
        return refusal("temporarily_unavailable", 429, headers)
    except (RedisError, OSError):
        return refusal("temporarily_unavailable", 503, {"retry-after": "1"})
    information = to_information(
        made.client,
        auth.issuer,
        client_secret=made.client_secret,
        registration_access_token=made.registration_access_token,
    )
    return reply(information, 201)


async def find_itself(request: Request[Any, Any, Any], client_id: str) -> Client | None:
    try:
        token = read_bearer(request.headers.get("authorization", ""))
    except MissingCredential:
        return None
    if len(token) > MAX_TOKEN_LENGTH or "\0" in client_id:
        return None
    return await auth_of(request).clients.find_registered(client_id, token)


def nobody() -> Response[bytes]:
    """Give one answer for an unknown client and a wrong token (RFC 7592, 2.1)."""
    return refusal("invalid_token", 401, {"www-authenticate": 'Bearer error="invalid_token"'})


@oauth.get(
    REGISTERED,
    "What is registered of a client",
    answer=RegisteredClient,
    said={401: {JSON: OAuthErrorBody}},
)
async def read_client(request: Request[Any, Any, Any], client_id: FromPath[str]) -> Response[bytes]:
    client = await find_itself(request, client_id)
    if client is None:
        return nobody()
    return reply(to_information(client, auth_of(request).issuer), 200)


@oauth.delete(
    REGISTERED,
    "End a registration",
    status=204,
    said={401: {JSON: OAuthErrorBody}},
    options={"status_code": 200},
)
async def delete_client(
    request: Request[Any, Any, Any], client_id: FromPath[str]
) -> Response[bytes]:
    client, auth = await find_itself(request, client_id), auth_of(request)
    if client is None:
        return nobody()
    await unregister(auth, client, where_of(request, auth))
    return Response(b"", status_code=204, headers=NO_STORE)


routes = [register_client, read_client, delete_client]
