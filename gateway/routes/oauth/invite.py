"""/invites/accept: where the link of an invite leads. Whoever has it becomes the user it was made
for, with a password of their own, and is signed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from gateway.auth.login.login import PASSWORD, SignedIn
from gateway.auth.login.passwords import check_strength
from gateway.auth.oauth.authorization import Authorization
from gateway.db import tenant
from gateway.routes.oauth.linked_page import FormRefused, LinkedPage, SentForm
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound
from gateway.tenancy.members.invites import ACCEPT_PATH, Invite, accept_invite, find_invite
from gateway.tenancy.tables import orgs


class InvitePage(LinkedPage[tuple[Invite, str]]):
    """Shows an invite, with the name of its organization."""

    path, template = ACCEPT_PATH, "invite"
    closed = "This invitation was used, withdrawn or has expired. Ask for another one."

    async def find(self, auth: Authorization, token: str) -> tuple[Invite, str]:
        async with auth.system_db.connect() as conn:
            invite = await find_invite(conn, token, secret=auth.secret, now=auth.clock())
            name = await conn.scalar(sa.select(orgs.c.name).where(orgs.c.id == invite.org_id))
        assert name is not None, "an open invite is of a live org"
        return invite, name

    def shown(self, found: tuple[Invite, str], typed: Mapping[str, str]) -> dict[str, Any]:
        invite, org_name = found
        return {
            "org_name": org_name,
            "role": invite.role,
            "email": invite.email,
            "name": typed.get("name", "").strip(),
        }

    async def use(self, found: tuple[Invite, str], sent: SentForm) -> SignedIn:
        auth, where, [invite, _] = sent.auth, sent.where, found
        name, password = sent.fields.get("name", "").strip(), sent.fields.get("password", "")
        check_strength(password, invite.email, name)
        hashed = await auth.passwords.hash(password)
        try:
            async with tenant(auth.db, invite.org_id) as conn:
                user = await accept_invite(
                    conn,
                    sent.token,
                    secret=auth.secret,
                    name=name,
                    password_hash=hashed,
                    ip=where.address,
                    request_id=where.request_id,
                    now=auth.clock(),
                )
                return await auth.login.start(conn, user.org_id, user.id, PASSWORD, where)
        except InvalidField as error:
            raise FormRefused(f"Your name {error.message}.") from None
        except NameTaken:  # somebody added them meanwhile
            raise NotFound("token", "no open invite") from None


routes = InvitePage().routes()
