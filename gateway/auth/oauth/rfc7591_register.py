"""Dynamic client registration (RFC 7591), and the reading and deletion of a registration by its
client (RFC 7592).

Anybody may register, bounded in rate and size. Such a client belongs to no org, gets no scope of
administration, and needs each user's consent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.audit.log import Actor
from gateway.auth.bearer.revocations import announcing
from gateway.auth.login.login import LoginOrigin
from gateway.auth.login.throttle import AttemptLimit
from gateway.auth.oauth.authorization import Authorization
from gateway.auth.oauth.clients.metadata import (
    GRANT_TYPES_OF_STRANGERS,
    InvalidMetadata,
    check_urls,
    from_document,
)
from gateway.auth.oauth.clients.store import (
    Client,
    CreatedClient,
    archive_registered,
    create_client,
    scopes_of_a_stranger,
)
from gateway.net.egress import Egress
from gateway.tenancy.orgs import find_operator

KIND = "registration"
EACH = AttemptLimit(name="address", free=20, first_s=60.0, longest_s=3_600.0, lifetime_s=3_600.0)
ALL = AttemptLimit(name="all", free=2_000, first_s=1.0, longest_s=60.0, lifetime_s=600.0)
PATH = "/oauth/register"
MAX_BODY_BYTES = 64 * 1024


def read_body(body: bytes) -> Any:
    """Raises: InvalidMetadata."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidMetadata("body", "must be a JSON object") from None


async def register(
    authorization: Authorization, egress: Egress, document: Any, origin: LoginOrigin
) -> CreatedClient:
    """Raises: InvalidMetadata, TooManyAttempts, redis.exceptions.RedisError."""
    metadata = from_document(document, grant_types=GRANT_TYPES_OF_STRANGERS)
    await authorization.throttle.count(KIND, address=origin.address, each=EACH, all_=ALL)
    await check_urls(metadata, egress)
    async with authorization.system_db.begin() as conn:
        return await create_client(
            conn,
            authorization.clients.peppers,
            metadata=metadata,
            scopes=scopes_of_a_stranger(metadata),
            actor=_stranger(origin),
            org_id=None,
            audit_org=await find_operator(conn),
        )


async def unregister(authorization: Authorization, client: Client, origin: LoginOrigin) -> None:
    """Raises: ChangeNotAnnounced."""
    async with (
        announcing(authorization.redis) as announcement,
        authorization.system_db.begin() as conn,
    ):
        orgs = await archive_registered(
            conn, client, actor=_stranger(origin), audit_org=await find_operator(conn)
        )
        if orgs:
            # It revokes the client's tokens in all orgs; the row needs one of them.
            await announcement.revoke(conn, org_id=min(orgs), kind="client", subject=client.id)


def to_information(
    client: Client,
    issuer: str,
    *,
    client_secret: str | None = None,
    registration_access_token: str | None = None,
) -> dict[str, Any]:
    """Return the registered metadata, which may differ from the requested (RFC 7591, 3.2.1 and RFC
    7592, 3)."""
    assert client.created_at is not None
    optional = {
        "client_secret": client_secret,
        "client_secret_expires_at": None if client_secret is None else 0,
        "registration_access_token": registration_access_token,
        "jwks": client.jwks,
        "jwks_uri": client.jwks_uri,
        **client.metadata,
    }
    return {
        "client_id": client.id,
        "client_id_issued_at": int(client.created_at.timestamp()),
        "client_name": client.name,
        "redirect_uris": client.redirect_uris,
        "grant_types": client.grant_types,
        "response_types": ["code"],
        "token_endpoint_auth_method": client.token_endpoint_auth_method,
        "application_type": client.application_type,
        "scope": " ".join(client.scopes),
        "dpop_bound_access_tokens": client.dpop_bound,
        "registration_client_uri": f"{issuer}{PATH}/{client.id}",
        **{name: value for name, value in optional.items() if value is not None},
    }


def _stranger(origin: LoginOrigin) -> Actor:
    return Actor(kind="system", id="registration", ip=origin.address, request_id=origin.request_id)
