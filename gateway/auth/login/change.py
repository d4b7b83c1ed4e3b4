"""Changes the password of a user, and ends all that the old one gave access to.

Sessions end first: the authorization endpoint locks the session in which it makes a grant, so no
grant is made after that. Consents are locked before grants, as in all transactions that lock both.
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
    """Set a user's password, and end their sessions, consents, grants and tokens.

    Raises: NotFound, also if the password is no longer the one to replace.
    """
    await end_sessions_of(conn, org_id=org_id, user_id=user_id)
    now = datetime.now(tz=UTC)
    await forget(conn, org_id=org_id, user_id=user_id, client_id=None, now=now)
    ended = await revoke_grants(conn, because=PASSWORD_CHANGED, org_id=org_id, user_id=user_id)
    await set_password(
        conn,
        org_id=org_id,
        user_id=user_id,
        password_hash=password_hash,
        replacing=replacing,
        actor=actor,
    )
    await record_revoked(conn, ended, target=user_id, because=PASSWORD_CHANGED, actor=actor)
    await announcement.revoke(conn, org_id=org_id, kind="user", subject=user_id)
