"""/v1/admin/signing_keys: the keys that sign tokens, for who runs the installation.

Above: `app`. Below: `auth.signing_keys`. A rotation is the ordinary thing; a revocation is for a
key that may be in the wrong hands, and ends every token that it signed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath

from gateway.audit.log import record
from gateway.auth import signing_keys
from gateway.auth.signing_keys import SigningKeyRow
from gateway.principal import Principal
from gateway.routes.access import actor_of, needs, services
from gateway.tenancy.errors import InvalidField

SCOPE = "operator:signing_keys"
PATH = "/v1/admin/signing_keys"
JSON = "application/json"
DEFAULT_LIMIT = 20
MAX_LIMIT = 100


class SigningKey(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "signing_key"
    id: str
    state: str
    created_at: datetime
    activated_at: datetime | None
    retired_at: datetime | None
    verify_until: datetime | None


class SigningKeyList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[SigningKey]
    first_id: str | None
    last_id: str | None
    has_more: bool


@get(PATH, opt=needs(SCOPE), tags=["Signing keys"], summary="The keys, newest first")
async def list_signing_keys(request: Request[Principal, Any, Any]) -> Response[bytes]:
    limit = read_limit(request.query_params.get("limit", str(DEFAULT_LIMIT)))
    after = request.query_params.get("after", "")
    async with services(request).system_db.connect() as conn:
        rows = await signing_keys.list_keys(conn, after=after, limit=limit + 1)
    data = [shown(row) for row in rows[:limit]]
    body = SigningKeyList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(rows) > limit,
    )
    return Response(msgspec.json.encode(body), media_type=JSON)


@post(
    f"{PATH}/rotate",
    opt=needs(SCOPE),
    status_code=200,
    tags=["Signing keys"],
    summary="The next key signs from now on",
)
async def rotate(request: Request[Principal, Any, Any]) -> Response[bytes]:
    keys = services(request).authority.keys
    async with services(request).system_db.begin() as conn:
        row = await signing_keys.rotate(conn, keys.cipher, keys.now())
        assert row is not None
        await record(
            conn,
            org_id=request.user.org_id,
            actor=actor_of(request),
            action="signing_key.rotated",
            target=row.kid,
            after=msgspec.structs.asdict(shown(row)),
        )
    await keys.reload()
    return Response(msgspec.json.encode(shown(row)), media_type=JSON)


@post(
    f"{PATH}/{{kid:str}}/revoke",
    opt=needs(SCOPE),
    status_code=200,
    tags=["Signing keys"],
    summary="A key verifies nothing from now on",
)
async def revoke(request: Request[Principal, Any, Any], kid: FromPath[str]) -> Response[bytes]:
    keys = services(request).authority.keys
    async with services(request).system_db.begin() as conn:
        row = await signing_keys.revoke(conn, keys.cipher, kid, keys.now())
        await record(
            conn,
            org_id=request.user.org_id,
            actor=actor_of(request),
            action="signing_key.revoked",
            target=kid,
            after=msgspec.structs.asdict(shown(row)),
        )
    await keys.reload()
    return Response(msgspec.json.encode(shown(row)), media_type=JSON)


def read_limit(value: str) -> int:
    """Raises: InvalidField."""
    if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= MAX_LIMIT):
        raise InvalidField("limit", f"must be 1 to {MAX_LIMIT}")
    return int(value)


def shown(row: SigningKeyRow) -> SigningKey:
    return SigningKey(
        id=row.kid,
        state=row.state,
        created_at=row.created_at,
        activated_at=row.activated_at,
        retired_at=row.retired_at,
        verify_until=row.verify_until,
    )


routes = [list_signing_keys, rotate, revoke]
