"""Remembers what a user consented to: one row for (user, client, redirect URI, resource).

A consent only saves the user a question; tokens need a grant. Consent to an application on the
user's own machine is never remembered (RFC 8252, 8.6), which the caller decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.tables import oauth_consents

NO_RESOURCE = ""
"""The row of a client that names no resource."""


async def is_remembered(
    conn: AsyncConnection,
    *,
    org_id: str,
    user_id: str,
    client_id: str,
    redirect_uri: str,
    resources: Sequence[str],
    scopes: Iterable[str],
) -> bool:
    """True if the user consented to all the scopes for each of the resources."""
    c = oauth_consents.c
    requested = list(resources) or [NO_RESOURCE]
    found = sa.select(c.resource, c.scopes).where(
        c.org_id == org_id,
        c.user_id == user_id,
        c.client_id == client_id,
        c.redirect_uri == redirect_uri,
        c.resource.in_(requested),
        c.revoked_at.is_(None),
    )
    rows = (await conn.execute(found)).all()
    allowed = {row.resource for row in rows if set(scopes) <= set(row.scopes)}
    return allowed == set(requested)


async def remember(
    conn: AsyncConnection,
    *,
    org_id: str,
    user_id: str,
    client_id: str,
    redirect_uri: str,
    resources: Sequence[str],
    scopes: Iterable[str],
    now: datetime,
) -> None:
    """Add the scopes to those of the user's earlier consents that are not revoked."""
    c = oauth_consents.c
    for resource in sorted(set(resources)) or [NO_RESOURCE]:
        key = {
            "user_id": user_id,
            "client_id": client_id,
            "redirect_uri": redirect_uri,
            "resource": resource,
        }
        known = sa.select(c.scopes).filter_by(**key, org_id=org_id, revoked_at=None)
        before = await conn.scalar(known.with_for_update()) or []
        values = {"scopes": sorted({*before, *scopes}), "updated_at": now, "revoked_at": None}
        added = insert(oauth_consents).values(org_id=org_id, **key, **values)
        await conn.execute(added.on_conflict_do_update(index_elements=list(key), set_=values))


async def forget(
    conn: AsyncConnection, *, org_id: str, user_id: str, client_id: str | None, now: datetime
) -> None:
    """Revoke a user's consents to a client, or to all clients (None): they are asked again."""
    c = oauth_consents.c
    live = sa.update(oauth_consents).where(
        c.org_id == org_id, c.user_id == user_id, c.revoked_at.is_(None)
    )
    if client_id is not None:
        live = live.where(c.client_id == client_id)
    await conn.execute(live.values(revoked_at=now))
