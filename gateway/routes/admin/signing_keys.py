"""/v1/admin/signing_keys: the keys that sign tokens, for who runs the installation.

A rotation is the ordinary thing; a revocation is for a key that may be in the wrong hands, and ends
every token that it signed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import sqlalchemy as sa
from litestar import Response, get, post
from litestar.params import FromPath

from gateway.audit.log import record
from gateway.auth.bearer.revocations import announcing
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.signing_keys import SigningKeyRow
from gateway.auth.tables import signing_keys as table
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.wire.organization.organization import to_unix, to_unix_or_none
from gateway.wire.organization.usage import parse_query

SCOPE = "operator:signing_keys"
PATH = "/v1/admin/signing_keys"
TAGS = ["Signing keys"]


class SigningKey(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["signing_key"] = "signing_key"
    id: str
    """The `kid` of what it signs."""
    state: str
    created_at: int
    """This and the others: Unix seconds."""
    activated_at: int | None
    retired_at: int | None
    verify_until: int | None


@get(
    PATH,
    opt=needs(SCOPE),
    tags=TAGS,
    summary="The keys that sign tokens",
    operation_class=describes(query=PageQuery, answer=Listing[SigningKey]),
)
async def list_signing_keys(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, PageQuery)
    async with services(request).system_db.connect() as conn:
        rows = await conn.execute(
            keyset(sa.select(*signing_keys.public_columns()), table.c.kid, query)
        )
        keys = [shown(SigningKeyRow(**row._mapping)) for row in rows]
    return answer(request, to_listing(keys, query))


@post(
    f"{PATH}/rotate",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="The next key signs from now on",
    operation_class=describes(answer=SigningKey, idempotent=True),
)
async def rotate(request: AuthenticatedRequest) -> Response[bytes]:
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
    return answer(request, shown(row))


@post(
    f"{PATH}/{{kid:str}}/revoke",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="A key verifies nothing within a second",
    operation_class=describes(answer=SigningKey, idempotent=True, conditional=True),
)
async def revoke(request: AuthenticatedRequest, kid: FromPath[str]) -> Response[bytes]:
    """`If-Match`: the tag of the key as its element of the list, or its rotation, shows it."""
    authority, org_id = services(request).authority, request.user.org_id
    keys, precondition = authority.keys, if_match(request)
    async with announcing(authority.redis, clock=authority.clock) as announcement:
        async with services(request).system_db.begin() as conn:
            row = await signing_keys.revoke(
                conn,
                keys.cipher,
                kid,
                keys.now(),
                check=lambda before: precondition.check(shown(before)),
            )
            await record(
                conn,
                org_id=org_id,
                actor=actor_of(request),
                action="signing_key.revoked",
                target=kid,
                after=msgspec.structs.asdict(shown(row)),
            )
            await announcement.revoke(conn, org_id=org_id, kind="key", subject=kid)
    await keys.reload()
    return answer(request, shown(row))


def shown(row: SigningKeyRow) -> SigningKey:
    return SigningKey(
        id=row.kid,
        state=row.state,
        created_at=to_unix(row.created_at),
        activated_at=to_unix_or_none(row.activated_at),
        retired_at=to_unix_or_none(row.retired_at),
        verify_until=to_unix_or_none(row.verify_until),
    )


routes = [list_signing_keys, rotate, revoke]
