"""The services behind the pages of the authorization server, and the grants that they make.

Knows no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import datetime

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway import permissions as policy
from gateway.audit.log import Actor
from gateway.auth.bearer.revocations import announcing
from gateway.auth.federation.external_login import ExternalLogin
from gateway.auth.login.change import change_password
from gateway.auth.login.login import PASSWORD, Login, LoginOrigin, SignedIn, WrongCredentials
from gateway.auth.login.passkeys import Passkeys
from gateway.auth.login.passwords import Passwords
from gateway.auth.login.sessions import Seals, Session, holds_session
from gateway.auth.login.throttle import Throttle
from gateway.auth.oauth.clients.store import Clients
from gateway.auth.oauth.rfc6749_authorize import AuthorizationRequest
from gateway.auth.oauth.tokens.consents import is_remembered, remember
from gateway.auth.oauth.tokens.grants import create_grant, issue_code
from gateway.db import tenant
from gateway.principal import SCOPE_INFERENCE
from gateway.secret import Peppers, Secret
from gateway.tenancy.errors import ChangeNotAnnounced, NotFound
from gateway.tenancy.member_tables import project_members
from gateway.tenancy.tables import projects

log = logging.getLogger(__name__)

BILLED = frozenset({SCOPE_INFERENCE, policy.SCOPE_MCP_CALL})
"""Scopes whose use costs money, so a grant with them needs a project."""


class Authorization(msgspec.Struct, frozen=True, kw_only=True):
    """One per process."""

    issuer: str
    db: AsyncEngine
    system_db: AsyncEngine
    redis: Redis
    secret: Secret
    clients: Clients
    codes: Peppers
    """Hashes authorization codes."""
    sessions: Peppers
    seals: Seals
    passwords: Passwords
    throttle: Throttle
    login: Login
    passkeys: Passkeys
    external: ExternalLogin
    clock: Callable[[], datetime]

    @property
    def secure(self) -> bool:
        """True unless the issuer is this machine itself, where cookies may be sent over http."""
        return self.issuer.startswith("https://")


async def renew_password(
    authorization: Authorization,
    *,
    org_id: str,
    user_id: str,
    replacing: str | None,
    password: str,
    origin: LoginOrigin,
) -> SignedIn:
    """Set a new password for a user, and start a session.

    `replacing`: the hash of the password that the user showed, or that their reset link is for.
    Raises: WrongCredentials (the password was changed meanwhile), PasswordsBusy.
    """
    hashed = await authorization.passwords.hash(password)
    try:
        async with (
            announcing(authorization.redis) as announcement,
            tenant(authorization.db, org_id) as conn,
        ):
            await change_password(
                conn,
                announcement,
                org_id=org_id,
                user_id=user_id,
                password_hash=hashed,
                replacing=replacing,
                actor=origin.actor(user_id),
            )
            signed_in = await authorization.login.start(conn, org_id, user_id, PASSWORD, origin)
    except NotFound:
        raise WrongCredentials from None
    except ChangeNotAnnounced:
        # The change is committed and cannot be repeated: the old password is no longer right.
        log.warning("a new password was not announced; every process reads of it in Postgres")
    return signed_in


async def was_allowed(
    authorization: Authorization,
    request: AuthorizationRequest,
    session: Session,
    scopes: Collection[str],
) -> bool:
    """True if the user consented to this before, so the consent page is not shown."""
    if not request.remembers or "consent" in request.prompts:
        return False
    async with tenant(authorization.db, session.org_id) as conn:
        return await is_remembered(
            conn,
            org_id=session.org_id,
            user_id=session.user_id,
            client_id=request.client.id,
            redirect_uri=request.registered_uri,
            resources=[each.uri for each in request.resources],
            scopes=scopes,
        )


async def authorize(
    authorization: Authorization,
    request: AuthorizationRequest,
    session: Session,
    scopes: Collection[str],
    actor: Actor,
) -> str:
    """Make a grant of what the user allowed, and return the authorization code for it.

    Raises: AuthorizationRefused if a scope costs money and there is no project to bill, or if the
    session has ended: the end of a session must also reach the grants that were made in it.
    """
    now = authorization.clock()
    resources = [each.uri for each in request.resources]
    async with tenant(authorization.db, session.org_id) as conn:
        if not await holds_session(conn, session):
            raise request.refuse("login_required")
        project_id = request.client.project_id or await _project_of(conn, session)
        if project_id is None and BILLED & set(scopes):
            raise request.refuse("access_denied")
        if request.remembers:
            await remember(
                conn,
                org_id=session.org_id,
                user_id=session.user_id,
                client_id=request.client.id,
                redirect_uri=request.registered_uri,
                resources=resources,
                scopes=scopes,
                now=now,
            )
        grant = await create_grant(
            conn,
            org_id=session.org_id,
            user_id=session.user_id,
            client_id=request.client.id,
            project_id=project_id,
            resources=resources,
            scopes=sorted(scopes),
            actor=actor,
        )
        return await issue_code(
            conn,
            authorization.codes,
            grant=grant,
            redirect_uri=request.redirect_uri,
            code_challenge=request.code_challenge,
            nonce=request.nonce,
            auth_time=session.auth_time,
            amr=session.amr,
            dpop_jkt=request.dpop_jkt,
            now=now,
        )


async def _project_of(conn: AsyncConnection, session: Session) -> str | None:
    """Return the oldest live project that the user is a member of; else, for who administers the
    org, its oldest live project."""
    live = sa.select(sa.func.min(projects.c.id)).where(projects.c.org_id == session.org_id)
    live = live.where(projects.c.archived_at.is_(None))
    joined = sa.select(project_members.c.project_id).where(
        project_members.c.user_id == session.user_id, project_members.c.removed_at.is_(None)
    )
    project_id: str | None = await conn.scalar(live.where(projects.c.id.in_(joined)))
    if project_id is None and session.role in ("owner", "admin"):
        project_id = await conn.scalar(live)
    return project_id
