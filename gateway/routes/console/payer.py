"""Finds who pays for what somebody who is signed in asks of a model: their own key in a project, or
another one that they may manage. What that key is refused, they are refused."""

from __future__ import annotations

from typing import Any

from litestar import Request
from msgspec.structs import replace

from gateway.auth.bearer.api_keys import principal_of
from gateway.auth.errors import AuthError, WrongNetwork
from gateway.auth.login.sessions import Session
from gateway.db import tenant
from gateway.permissions import SCOPE_MCP_CALL, SCOPES_OF, may
from gateway.principal import SCOPE_INFERENCE, Principal
from gateway.routes.shared.access import services
from gateway.routes.shared.browser import Browser
from gateway.routes.shared.guards import check_network
from gateway.tenancy.errors import NotAllowed, NotFound
from gateway.tenancy.keys.console_keys import ensure_console_key, find_key_to_pay
from gateway.tenancy.keys.keys import ID_FORM

PAYER = "payer"
"""The name of the choice in queries, forms and errors."""
KEY_PREFIX, PROJECT_PREFIX = "key_", "proj_"
NO_ROLE = "your role may not use models; a key that you may manage can"
ENDED = "this key was revoked, has expired, or may not use its project any more"
ELSEWHERE = "this key may not be used from the address that you are at"


async def find_payer(
    request: Request[Any, Any, Any], browser: Browser, session: Session, chosen: str
) -> Principal:
    """Return the principal of a key (`key_...`), or of one's own in a project (`proj_...`).

    Raises: NotFound, NotAllowed.
    """
    found, key_id = services(request), await find_key(request, browser, session, chosen)
    try:
        async with found.system_db.connect() as conn:
            principal = await principal_of(conn, org_id=session.org_id, key_id=key_id)
        check_network(request, principal)
    except WrongNetwork:
        raise NotAllowed(PAYER, ELSEWHERE) from None
    except AuthError:
        raise NotAllowed(PAYER, ENDED) from None
    if not may(principal, SCOPE_INFERENCE):
        raise NotAllowed(PAYER, NO_ROLE)
    if principal.user_id not in (None, session.user_id):
        # Servers would be shown the credentials of the key's owner, who is somebody else.
        principal = replace(principal, scopes=principal.scopes - {SCOPE_MCP_CALL})
    found.authenticator.on_use(key_id)
    return principal


async def find_key(
    request: Request[Any, Any, Any], browser: Browser, session: Session, chosen: str
) -> str:
    """Return the id of the key. Raises: NotFound, NotAllowed."""
    if ID_FORM.fullmatch(chosen) is None or not chosen.startswith((KEY_PREFIX, PROJECT_PREFIX)):
        raise NotFound(PAYER, "choose a project, or a key")
    found, who = services(request), {"org_id": session.org_id, "user_id": session.user_id}
    if chosen.startswith(KEY_PREFIX):
        async with tenant(found.db, session.org_id) as conn:
            return (await find_key_to_pay(conn, key_id=chosen, **who)).id
    if SCOPE_INFERENCE not in SCOPES_OF[session.role]:
        raise NotAllowed(PAYER, NO_ROLE)
    pepper_id, pepper = found.authenticator.pepper
    own = await ensure_console_key(
        found.system_db,
        project_id=chosen,
        pepper=pepper,
        pepper_id=pepper_id,
        actor=browser.where.actor(session.user_id),
        **who,
    )
    return own.id
