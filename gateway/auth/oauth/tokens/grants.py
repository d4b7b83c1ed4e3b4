"""Grants, and their authorization codes (RFC 6749, 4.1).

A grant is what one user allowed one client once; its tokens are revoked with it. A code is stored
as a hash, and redeemed by one UPDATE: of concurrent attempts one succeeds, and the others get the
grant to revoke.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.auth.tables import oauth_codes, oauth_grants
from gateway.db import delete_some
from gateway.ids import uuid7
from gateway.secret import Peppers, random_secret
from gateway.tenancy.errors import NotFound

CODE_PEPPER_PURPOSE = "oauth-code"
CODE_LIFETIME_S = 60
CODE_KEPT_S = 3600
"""Codes are kept for so long after their expiry, to detect replays."""
MAX_PURGED = 100
"""The maximum of old codes that are deleted when a new one is issued."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    user_id: str
    client_id: str
    project_id: str | None
    """The project that is billed: the client's, or else one of the user's. None: no scope of it
    costs money."""
    resources: list[str]
    """The resources that it is for (RFC 8707); empty: the client named none."""
    scopes: list[str]
    created_at: datetime
    revoked_at: datetime | None
    revoked_because: str | None


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The grant and the request that a code was issued for."""

    org_id: str
    grant_id: str
    user_id: str
    client_id: str
    project_id: str | None
    redirect_uri: str
    """As in the authorization request; a token request that has one must repeat it."""
    code_challenge: str
    """By the method S256."""
    resources: list[str]
    scopes: list[str]
    nonce: str | None
    auth_time: datetime
    """When the user last authenticated."""
    amr: list[str]
    """The methods by which the user authenticated (RFC 8176)."""
    dpop_jkt: str | None
    expires_at: datetime
    redeemed_at: datetime | None


class CodeReplayed(msgspec.Struct, frozen=True):
    """The code was redeemed before: the caller revokes this grant, and commits that."""

    org_id: str
    grant_id: str


async def create_grant(
    conn: AsyncConnection,
    *,
    org_id: str,
    user_id: str,
    client_id: str,
    project_id: str | None,
    resources: Sequence[str],
    scopes: Sequence[str],
    actor: Actor,
) -> Grant:
    row: dict[str, Any] = {
        "id": f"grant_{uuid7().hex}",
        "org_id": org_id,
        "user_id": user_id,
        "client_id": client_id,
        "project_id": project_id,
        "resources": list(resources),
        "scopes": sorted(scopes),
    }
    added = sa.insert(oauth_grants).values(**row).returning(oauth_grants)
    made = (await conn.execute(added)).one()
    seen = {name: value for name, value in row.items() if name != "org_id"}
    await record(
        conn, org_id=org_id, actor=actor, action="oauth_grant.created", target=row["id"], after=seen
    )
    return Grant(**made._mapping)


async def issue_code(
    conn: AsyncConnection,
    peppers: Peppers,
    *,
    grant: Grant,
    redirect_uri: str,
    code_challenge: str,
    nonce: str | None,
    auth_time: datetime,
    amr: Sequence[str],
    dpop_jkt: str | None,
    now: datetime,
) -> str:
    """Issue a code and return it, the only time it is readable; delete some old ones of the org."""
    code = random_secret()
    await conn.execute(
        sa.insert(oauth_codes).values(
            code_hash=peppers.hash(code),
            org_id=grant.org_id,
            grant_id=grant.id,
            user_id=grant.user_id,
            client_id=grant.client_id,
            project_id=grant.project_id,
            redirect_uri=redirect_uri,
            code_challenge=code_challenge,
            resources=grant.resources,
            scopes=grant.scopes,
            nonce=nonce,
            auth_time=auth_time,
            amr=list(amr),
            dpop_jkt=dpop_jkt,
            expires_at=now + timedelta(seconds=CODE_LIFETIME_S),
        )
    )
    await delete_some(
        conn,
        oauth_codes.c.code_hash,
        oauth_codes.c.org_id == grant.org_id,
        oauth_codes.c.expires_at < now - timedelta(seconds=CODE_KEPT_S),
        limit=MAX_PURGED,
    )
    return code


async def redeem_code(
    conn: AsyncConnection, peppers: Peppers, *, code: str, client_id: str, now: datetime
) -> Code | CodeReplayed | None:
    """Redeem a code, and return what it was issued for. None: it is unknown, expired, of another
    client, or its grant is revoked.

    The redemption commits with the caller's transaction.
    """
    found = sa.and_(
        oauth_codes.c.code_hash.in_(peppers.hashes(code)), oauth_codes.c.client_id == client_id
    )
    live = sa.exists().where(
        oauth_grants.c.id == oauth_codes.c.grant_id, oauth_grants.c.revoked_at.is_(None)
    )
    redeemed = sa.update(oauth_codes).where(
        found, oauth_codes.c.redeemed_at.is_(None), oauth_codes.c.expires_at > now, live
    )
    columns = [oauth_codes.c[name] for name in Code.__struct_fields__]
    row = (await conn.execute(redeemed.values(redeemed_at=now).returning(*columns))).one_or_none()
    if row is not None:
        return Code(**row._mapping)
    replayed = sa.select(oauth_codes.c.org_id, oauth_codes.c.grant_id)
    replayed = replayed.where(found, oauth_codes.c.redeemed_at.is_not(None))
    replay = (await conn.execute(replayed)).one_or_none()
    return None if replay is None else CodeReplayed(replay.org_id, replay.grant_id)


async def find_grant(
    conn: AsyncConnection, *, org_id: str, grant_id: str, lock: bool = False
) -> Grant:
    """Return a grant, revoked or not; `lock`: lock it until the transaction ends.

    Raises: NotFound.
    """
    found = sa.select(oauth_grants)
    found = found.where(oauth_grants.c.id == grant_id, oauth_grants.c.org_id == org_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NotFound("grant_id", f"no grant {grant_id!r}")
    return Grant(**row._mapping)


def select_grants(
    org_id: str, *, user_id: str | None = None, client_id: str | None = None
) -> sa.Select[Any]:
    """Select the grants of an org, revoked ones too, for a page of them."""
    listed = sa.select(oauth_grants).where(oauth_grants.c.org_id == org_id)
    for name, value in (("user_id", user_id), ("client_id", client_id)):
        if value is not None:
            listed = listed.where(oauth_grants.c[name] == value)
    return listed


async def revoke_grant(
    conn: AsyncConnection, *, org_id: str, grant_id: str, because: str, actor: Actor
) -> bool:
    """Mark a grant as revoked; False if it was before. It does not reach access tokens that were
    issued: `revocations.end_grant` does both.

    Raises: NotFound.
    """
    live = sa.and_(oauth_grants.c.id == grant_id, oauth_grants.c.org_id == org_id)
    revoked = sa.update(oauth_grants).where(live, oauth_grants.c.revoked_at.is_(None))
    done = await conn.execute(revoked.values(revoked_at=sa.func.now(), revoked_because=because))
    if done.rowcount == 0:
        await find_grant(conn, org_id=org_id, grant_id=grant_id)
        return False
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="oauth_grant.revoked",
        target=grant_id,
        after={"revoked_because": because},
    )
    return True


async def revoke_grants(
    conn: AsyncConnection,
    *,
    because: str,
    org_id: str | None = None,
    client_id: str | None = None,
    user_id: str | None = None,
) -> Mapping[str, int]:
    """Mark all live grants of a client or user as revoked; return how many, by org.

    The caller holds a lock that prevents new grants, and records the change afterwards
    (`record_revoked`): grants are locked before the audit log.
    """
    assert client_id is not None or user_id is not None
    c = oauth_grants.c
    live = sa.update(oauth_grants).where(c.revoked_at.is_(None))
    for column, value in ((c.org_id, org_id), (c.client_id, client_id), (c.user_id, user_id)):
        if value is not None:
            live = live.where(column == value)
    ended = live.values(revoked_at=sa.func.now(), revoked_because=because)
    return Counter(await conn.scalars(ended.returning(c.org_id)))


async def record_revoked(
    conn: AsyncConnection, ended: Mapping[str, int], *, target: str, because: str, actor: Actor
) -> None:
    """Record the end of grants in each org's audit log; `target`: the client or user."""
    for org_id in sorted(ended):
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="oauth_grants.revoked",
            target=target,
            after={"revoked_because": because, "grants": ended[org_id]},
        )
