"""Another password for a user: whoever had the old one keeps nothing that it gave.

Sessions end first: an authorization endpoint that is about to make a grant holds its session, so
that none comes to be behind the end of them. Consents go before grants, as where one grant is
revoked: who locks both does so in this order. Knows no HTTP and no hashing.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor
from gateway.auth.bearer.revocations import Announcement
from gateway.auth.login.sessions import end_sessions_of
from gateway.auth.oauth.tokens.consents import forget
from gateway.auth.oauth.tokens.grants import record_revoked, revoke_grants
from gateway.tenancy.members.users import ANY, AnyPassword, set_password

PASSWORD_CHANGED = "password_changed"


async def change_password(
    conn: AsyncConnection,
    announcement: Announcement,
    *,
    org_id: str,
    user_id: str,
    password_hash: str,
    actor: Actor,
    replacing: str | AnyPassword | None = ANY,
) -> None:
    """Change a password: the user's sessions, what they allowed to applications, and its tokens
    end.

    Raises: NotFound, also where their password is no longer the one to replace.
    """
    because = PASSWORD_CHANGED
    await end_sessions_of(conn, org_id=org_id, user_id=user_id)
    now = datetime.now(tz=UTC)
    await forget(conn, org_id=org_id, user_id=user_id, client_id=None, now=now)
    ended = await revoke_grants(conn, because=because, org_id=org_id, user_id=user_id)
    await set_password(
        conn,
        org_id=org_id,
        user_id=user_id,
        password_hash=password_hash,
        replacing=replacing,
        actor=actor,
    )
    await record_revoked(conn, ended, target=user_id, because=because, actor=actor)
    await announcement.revoke(conn, org_id=org_id, kind="user", subject=user_id)
