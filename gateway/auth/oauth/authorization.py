"""Wires what the pages of the authorization server work with, and makes grants.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway import permissions as policy
from gateway.audit.log import Actor
from gateway.auth.federation.external_login import ExternalLogin
from gateway.auth.login.login import Login
from gateway.auth.login.passkeys import Passkeys
from gateway.auth.login.passwords import Passwords
from gateway.auth.login.sessions import SESSION_PEPPER_PURPOSE, Seals, Session, holds_session
from gateway.auth.login.throttle import Throttle
from gateway.auth.oauth.clients.document_clients import fetching
from gateway.auth.oauth.clients.metadata_documents import ClientDocuments
from gateway.auth.oauth.clients.store import SECRET_PEPPER_PURPOSE, Clients
from gateway.auth.oauth.rfc6749_authorize import AuthorizationRequest
from gateway.auth.oauth.tokens.consents import is_remembered, remember
from gateway.auth.oauth.tokens.grants import CODE_PEPPER_PURPOSE, create_grant, issue_code
from gateway.auth.peppers import Peppers
from gateway.db import tenant
from gateway.principal import SCOPE_INFERENCE
from gateway.secret import Secret
from gateway.tenancy.member_tables import project_members
from gateway.tenancy.tables import projects

BILLED = frozenset({SCOPE_INFERENCE, policy.SCOPE_MCP_CALL})
"""Scopes that cost something, so that somebody has to be billed."""


class Authorization(msgspec.Struct, frozen=True, kw_only=True):
    """One per process."""

    issuer: str
    db: AsyncEngine
    system_db: AsyncEngine
    redis: Redis
    secret: Secret
    clients: Clients
    codes: Peppers
    """Of authorization codes."""
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
        """True but on this machine alone, where cookies may travel in the clear."""
        return self.issuer.startswith("https://")


async def was_allowed(
    desk: Authorization, asked: AuthorizationRequest, session: Session, scopes: Collection[str]
) -> bool:
    """True if the user need not be asked."""
    if not asked.remembers or "consent" in asked.prompts:
        return False
    async with tenant(desk.db, session.org_id) as conn:
        return await is_remembered(
            conn,
            org_id=session.org_id,
            user_id=session.user_id,
            client_id=asked.client.id,
            redirect_uri=asked.registered_uri,
            resources=[each.uri for each in asked.resources],
            scopes=scopes,
        )


async def authorize(
    desk: Authorization,
    asked: AuthorizationRequest,
    session: Session,
    scopes: Collection[str],
    actor: Actor,
) -> str:
    """A grant with what the user allowed, and the code for it.

    Raises: AuthorizationRefused, where it costs something and there is nobody to bill, and where
    the session ended meanwhile: a grant that its end does not see would outlive it.
    """
    now = desk.clock()
    resources = [each.uri for each in asked.resources]
    async with tenant(desk.db, session.org_id) as conn:
        if not await holds_session(conn, session):
            raise asked.refuse("login_required")
        project_id = asked.client.project_id or await _project_of(conn, session)
        if project_id is None and BILLED & set(scopes):
            raise asked.refuse("access_denied")
        if asked.remembers:
            await remember(
                conn,
                org_id=session.org_id,
                user_id=session.user_id,
                client_id=asked.client.id,
                redirect_uri=asked.registered_uri,
                resources=resources,
                scopes=scopes,
                now=now,
            )
        grant = await create_grant(
            conn,
            org_id=session.org_id,
            user_id=session.user_id,
            client_id=asked.client.id,
            project_id=project_id,
            resources=resources,
            scopes=sorted(scopes),
            actor=actor,
        )
        return await issue_code(
            conn,
            desk.codes,
            grant=grant,
            redirect_uri=asked.redirect_uri,
            code_challenge=asked.code_challenge,
            nonce=asked.nonce,
            auth_time=session.auth_time,
            amr=session.amr,
            dpop_jkt=asked.dpop_jkt,
            now=now,
        )


async def _project_of(conn: AsyncConnection, session: Session) -> str | None:
    """The oldest live project that the user is a member of; who administers the org has them
    all."""
    live = sa.select(sa.func.min(projects.c.id)).where(projects.c.org_id == session.org_id)
    live = live.where(projects.c.archived_at.is_(None))
    member = sa.select(project_members.c.project_id).where(
        project_members.c.user_id == session.user_id, project_members.c.removed_at.is_(None)
    )
    own: str | None = await conn.scalar(live.where(projects.c.id.in_(member)))
    if own is not None or session.role not in ("owner", "admin"):
        return own
    found: str | None = await conn.scalar(live)
    return found


def utc_now() -> datetime:
    return datetime.now(tz=UTC)


def open_authorization(
    stack: AsyncExitStack,
    *,
    issuer: str,
    db: AsyncEngine,
    system_db: AsyncEngine,
    redis: Redis,
    secret: Secret,
    documents: ClientDocuments,
    external: ExternalLogin,
    clock: Callable[[], datetime] = utc_now,
) -> Authorization:
    passwords = Passwords()
    stack.callback(passwords.close)
    seals, throttle = Seals(secret), Throttle(redis)
    sessions = Peppers(secret, SESSION_PEPPER_PURPOSE)
    login = Login(
        db=db,
        system_db=system_db,
        passwords=passwords,
        throttle=throttle,
        sessions=sessions,
        seals=seals,
        clock=clock,
    )
    return Authorization(
        issuer=issuer,
        db=db,
        system_db=system_db,
        redis=redis,
        secret=secret,
        clients=Clients(
            db=system_db, peppers=Peppers(secret, SECRET_PEPPER_PURPOSE), fetch=fetching(documents)
        ),
        codes=Peppers(secret, CODE_PEPPER_PURPOSE),
        sessions=sessions,
        seals=seals,
        passwords=passwords,
        throttle=throttle,
        login=login,
        external=external,
        passkeys=Passkeys(
            db=db,
            system_db=system_db,
            redis=redis,
            seals=seals,
            login=login,
            public_url=issuer,
            clock=clock,
        ),
        clock=clock,
    )
