"""/oauth/link: where a link leads that `tollgate up` or `tollgate users link` prints. It signs its
user in, once, or makes the first owner of the operator's organization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.auth.login.login import PASSWORD, SignedIn
from gateway.auth.login.passwords import check_strength
from gateway.auth.login.sign_in_links import PATH, LinkedUser, find_link, use_link
from gateway.auth.oauth.authorization import Authorization
from gateway.db import tenant
from gateway.routes.oauth.linked_page import FormRefused, LinkedPage, SentForm
from gateway.tenancy.errors import InvalidField, NameTaken
from gateway.tenancy.members.users import create_user

BY_LINK = ("otp",)
"""How somebody proved who they are: by something good once (RFC 8176)."""


class SignInPage(LinkedPage[LinkedUser]):
    path, template = PATH, "link"
    closed = "This link was used or has expired. Make another with `tollgate users link`."

    async def find(self, auth: Authorization, token: str) -> LinkedUser:
        async with auth.system_db.connect() as conn:
            return await find_link(conn, auth.redis, token, secret=auth.secret)

    def shown(self, found: LinkedUser, typed: Mapping[str, str]) -> dict[str, Any]:
        return {
            "email": found.email,
            "role": found.role,
            "org_name": found.org_name,
            "name": typed.get("name", ""),
            "address": typed.get("email", ""),
        }

    async def use(self, found: LinkedUser, sent: SentForm) -> SignedIn:
        auth = sent.auth
        if found.user_id is None:
            return await self._become_owner(found, sent)
        async with tenant(auth.db, found.org_id) as conn:
            await use_link(conn, auth.redis, sent.token, secret=auth.secret)
            return await auth.login.start(conn, found.org_id, found.user_id, BY_LINK, sent.where)

    async def _become_owner(self, found: LinkedUser, sent: SentForm) -> SignedIn:
        """Make the first owner, and use the link up with the same transaction: of two who come at
        once, one is told that it was used."""
        auth, where, password = sent.auth, sent.where, sent.fields.get("password", "")
        email, name = (sent.fields.get(each, "").strip() for each in ("email", "name"))
        check_strength(password, email, name)
        hashed = await auth.passwords.hash(password)
        async with tenant(auth.db, found.org_id) as conn:
            try:
                made = await create_user(
                    conn,
                    org_id=found.org_id,
                    email=email,
                    name=name,
                    role=found.role,
                    actor=where.actor(found.org_id),
                    password_hash=hashed,
                )
            except (InvalidField, NameTaken) as error:
                raise FormRefused(f"{error}.") from None
            done = await auth.login.start(conn, found.org_id, made.id, PASSWORD, where)
            async with auth.system_db.connect() as others:
                await use_link(others, auth.redis, sent.token, secret=auth.secret)
        return done


routes = SignInPage().routes()
