"""Somebody gives themselves another password: in a browser, by the old one or by a link.

Knows no HTTP.
"""

from __future__ import annotations

import logging

from gateway.auth.bearer.revocations import announcing
from gateway.auth.login.change import change_password
from gateway.auth.login.login import PASSWORD, LoginOrigin, SignedIn, WrongCredentials
from gateway.auth.oauth.authorization import Authorization
from gateway.db import tenant
from gateway.tenancy.errors import ChangeNotAnnounced, NotFound

log = logging.getLogger(__name__)


async def renew_password(
    desk: Authorization,
    *,
    org_id: str,
    user_id: str,
    replacing: str | None,
    password: str,
    where: LoginOrigin,
) -> SignedIn:
    """Set another password and start a session; `replacing`: the hash of the password that was
    shown, or that the link is for.

    Raises: WrongCredentials (there is another one by now), PasswordsBusy.
    """
    hashed = await desk.passwords.hash(password)
    try:
        async with announcing(desk.redis) as announcement, tenant(desk.db, org_id) as conn:
            await change_password(
                conn,
                announcement,
                org_id=org_id,
                user_id=user_id,
                password_hash=hashed,
                replacing=replacing,
                actor=where.actor(user_id),
            )
            done = await desk.login.start(conn, org_id, user_id, PASSWORD, where)
    except NotFound:
        raise WrongCredentials from None
    except ChangeNotAnnounced:
        # It is committed, and cannot be asked for again: the old password is no longer right.
        log.warning("a new password was not announced; every process reads of it in Postgres")
    return done
