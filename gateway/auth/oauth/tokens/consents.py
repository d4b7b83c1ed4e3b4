"""Remembers what a user allowed: one row for (user, client, redirect URI, resource).

A consent saves the user a question, and is no grant: nothing can be had with it. Consent to an
application on the user's own machine is asked for each time (RFC 8252, 8.6), which is decided
above.
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
    """True if all of it was allowed before, for each of the resources."""
    c = oauth_consents.c
    wanted = list(resources) or [NO_RESOURCE]
    found = sa.select(c.resource, c.scopes).where(c.user_id == user_id, c.client_id == client_id)
    found = found.where(c.org_id == org_id, c.redirect_uri == redirect_uri, c.resource.in_(wanted))
    rows = (await conn.execute(found.where(c.revoked_at.is_(None)))).all()
    allowed = {row.resource for row in rows if set(scopes) <= set(row.scopes)}
    return allowed == set(wanted)


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
    """The scopes are added to those allowed before, unless that was taken back."""
    c = oauth_consents.c
    primary = [c.user_id, c.client_id, c.redirect_uri, c.resource]
    for resource in sorted(set(resources)) or [NO_RESOURCE]:
        values = (user_id, client_id, redirect_uri, resource)
        key = {column.name: value for column, value in zip(primary, values, strict=True)}
        same = [column == key[column.name] for column in primary]
        known = sa.select(c.scopes).where(*same, c.org_id == org_id, c.revoked_at.is_(None))
        before = await conn.scalar(known.with_for_update()) or []
        allowed = {"scopes": sorted({*before, *scopes}), "updated_at": now, "revoked_at": None}
        added = insert(oauth_consents).values(org_id=org_id, **key, **allowed)
        await conn.execute(added.on_conflict_do_update(index_elements=primary, set_=allowed))


async def forget(
    conn: AsyncConnection, *, org_id: str, user_id: str, client_id: str | None, now: datetime
) -> None:
    """A grant was revoked: the client has to ask again; None: all of them have to."""
    c = oauth_consents.c
    theirs = sa.update(oauth_consents).where(c.org_id == org_id, c.user_id == user_id)
    if client_id is not None:
        theirs = theirs.where(c.client_id == client_id)
    await conn.execute(theirs.where(c.revoked_at.is_(None)).values(revoked_at=now))
