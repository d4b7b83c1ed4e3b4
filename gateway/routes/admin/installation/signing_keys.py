"""/v1/admin/signing_keys: the keys that sign tokens, for who runs the installation.

A rotation is the ordinary thing; a revocation is for a key that may be in the wrong hands, and ends
every token that it signed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import sqlalchemy as sa

from gateway.audit.log import record
from gateway.auth.bearer.revocations import announcing
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.signing_keys import SigningKeyRow
from gateway.auth.tables import signing_keys as table
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of


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


def shown(row: SigningKeyRow) -> SigningKey:
    return view_of(SigningKey, row, id=row.kid)


keys = AdminResource[SigningKeyRow](
    path="/v1/admin/signing_keys",
    id_name="kid",
    tag="Signing keys",
    read=needs("operator:signing_keys"),
    change=needs("operator:signing_keys"),
    view=SigningKey,
    show=shown,
    in_system=True,
    checks_ids=False,
)

list_signing_keys = keys.list_all(
    "The keys that sign tokens",
    PageQuery,
    select=lambda _org_id, _query: sa.select(*signing_keys.public_columns()),
    row=SigningKeyRow,
    key=table.c.kid,
    name="list_signing_keys",
)


@keys.route("POST", keys.path + "/rotate", "The next key signs from now on")
async def rotate(request: AdminRequest) -> SigningKeyRow:
    signers = request.services.authority.keys
    async with request.system_db.begin() as conn:
        row = await signing_keys.rotate(conn, signers.cipher, signers.now())
        assert row is not None
        await record(
            conn,
            org_id=request.org_id,
            actor=request.actor,
            action="signing_key.rotated",
            target=row.kid,
            after=msgspec.structs.asdict(shown(row)),
        )
    await signers.reload()
    return row


@keys.act("/revoke", "A key verifies nothing within a second")
async def revoke(request: AdminRequest) -> SigningKeyRow:
    """`If-Match`: the tag of the key as its element of the list, or its rotation, shows it."""
    authority, kid = request.services.authority, request.id
    signers = authority.keys
    async with announcing(authority.redis, clock=authority.clock) as announcement:
        async with request.system_db.begin() as conn:
            row = await signing_keys.revoke(
                conn, signers.cipher, kid, signers.now(), check=request.check
            )
            await record(
                conn,
                org_id=request.org_id,
                actor=request.actor,
                action="signing_key.revoked",
                target=kid,
                after=msgspec.structs.asdict(shown(row)),
            )
            await announcement.revoke(conn, org_id=request.org_id, kind="key", subject=kid)
    await signers.reload()
    return row


routes = [list_signing_keys, rotate, revoke]
