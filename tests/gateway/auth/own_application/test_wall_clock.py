"""Without a test's clock people sign in by the one on the wall."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.tables import oauth_sessions
from gateway.tenancy.member_tables import users
from tests.gateway.auth.browsing import PASSWORD, desk_of, live_app, new_browser, sign_in
from tests.gateway.auth.conftest import Tenant


async def test_a_session_begins_when_its_user_signs_in(
    tmp_path: Path, postgres_url: str, redis_url: str, db: AsyncEngine, acme: Tenant
) -> None:
    async with live_app(tmp_path, postgres_url, redis_url, None) as app:
        hashed = await desk_of(app).passwords.hash(PASSWORD)
        async with db.begin() as conn:
            await conn.execute(sa.update(users).values(password_hash=hashed))
        async with new_browser(app) as browser:
            before = datetime.now(tz=UTC)
            await sign_in(browser, "/oauth/login", org="acme", email=acme.email)
            after = datetime.now(tz=UTC)
    async with db.connect() as conn:
        auth_time = await conn.scalar(sa.select(oauth_sessions.c.auth_time))
    assert auth_time is not None and before <= auth_time <= after
