"""POST /oauth/account/admin-keys: somebody who is signed in, and owns the org, makes a key of
administration for themselves. It is how an owner who came by an invite gets to the API.

The key is its user's: it never has more power than they have, and ends with them.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, Response

from gateway.audit.errors import CredentialInAudit
from gateway.db import tenant
from gateway.routes.oauth.login import (
    ADMIN_KEYS,
    account_page,
    may_make_admin_key,
    read_account_form,
)
from gateway.routes.organization.keys import ADMIN_KEY_SCOPES
from gateway.routes.shared.access import services
from gateway.routes.shared.browser import BadForm, FormRoute, desk_of, stale_form
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys.keys import create_key


@FormRoute(ADMIN_KEYS, status_code=200)
async def make_admin_key(request: Request[Any, Any, Any]) -> Response[bytes]:
    desk = desk_of(request)
    try:
        browser, session, form = await read_account_form(request)
    except BadForm:
        return stale_form()
    if not may_make_admin_key(session):
        return stale_form()
    pepper_id, pepper = services(request).authenticator.pepper
    try:
        async with tenant(desk.db, session.org_id) as conn:
            made = await create_key(
                conn,
                org_id=session.org_id,
                project_id=None,
                user_id=session.user_id,
                name=form.get("name", "").strip(),
                scopes=ADMIN_KEY_SCOPES,
                pepper=pepper,
                pepper_id=pepper_id,
                actor=browser.where.actor(session.user_id),
            )
    except (InvalidField, CredentialInAudit):
        problem = "A key needs a name of 1 to 100 printable characters."
        return await account_page(desk, browser, session, problem=problem)
    return await account_page(desk, browser, session, admin_key=made.secret)


routes = [make_admin_key]
