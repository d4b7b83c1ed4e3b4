"""Links that sign somebody in once: whoever runs the installation makes them on its machine, above
all for the first owner, who has no password yet.

A link holds a random token; Redis has its hash, for LIFETIME_S, until it is used. It ends early if
its user gets another link or another role. Where the operator's organization has no owner yet, the
link makes one.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.principal import Role
from gateway.secret import Peppers, Secret, random_secret
from gateway.tenancy.errors import NotFound
from gateway.tenancy.member_tables import users
from gateway.tenancy.orgs import find_operator
from gateway.tenancy.tables import orgs

LIFETIME_S = 900
PEPPER_PURPOSE = "sign-in-link"
PREFIX = "tollgate:sign-in-link"
PATH = "/oauth/link"
MAX_TOKEN_LENGTH = 256
FIRST_OWNER: Role = "owner"


class SignInLink(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a link signs in. `user_id` None: nobody yet; it makes an owner."""

    org_id: str
    user_id: str | None = None
    role: Role = FIRST_OWNER
    """The user's when the link was made."""


class LinkedUser(msgspec.Struct, frozen=True, kw_only=True):
    """The user of a good link, and the organization; None: the owner who is yet to be made."""

    org_id: str
    org_name: str
    user_id: str | None
    email: str | None
    role: Role


async def make_link(
    conn: AsyncConnection, redis: Redis, link: SignInLink, *, secret: Secret, actor: Actor
) -> str:
    """Make a link in a transaction that the caller commits; return its token, shown once. The one
    that its user had before is good no more."""
    token = random_secret()
    await record(
        conn,
        org_id=link.org_id,
        actor=actor,
        action="user.sign_in_link_created",
        target=link.user_id or link.org_id,
        after={"role": link.role, "lifetime_s": LIFETIME_S},
    )
    key = _keys(Peppers(secret, PEPPER_PURPOSE), token)[0]
    async with redis.pipeline(transaction=True) as both:
        both.set(key, msgspec.msgpack.encode(link), ex=LIFETIME_S)
        both.set(_newest_of(link), key, ex=LIFETIME_S)
        await both.execute()
    return token


async def first_owner(conn: AsyncConnection) -> SignInLink:
    """Return the link of the oldest owner of the operator's organization, or of the first one that
    it will have. Raises: NotFound: there is no such organization."""
    org_id = await find_operator(conn)
    if org_id is None:
        raise NotFound("org", "no organization operates this installation")
    owners = sa.select(users.c.id).where(users.c.org_id == org_id, users.c.role == FIRST_OWNER)
    live = owners.where(users.c.archived_at.is_(None)).order_by(users.c.id).limit(1)
    return SignInLink(org_id=org_id, user_id=await conn.scalar(live))


async def find_link(
    conn: AsyncConnection, redis: Redis, token: str, *, secret: Secret
) -> LinkedUser:
    """Return whom a link signs in; `conn` sees all orgs.

    Raises: NotFound: unknown, used, expired or followed by another; its user is gone or has another
    role.
    """
    return await _live(conn, await _read(redis, token, secret, uses_up=False))


async def use_link(
    conn: AsyncConnection, redis: Redis, token: str, *, secret: Secret
) -> LinkedUser:
    """Use a link up, once, and return whom it signs in. Raises: as `find_link`."""
    return await _live(conn, await _read(redis, token, secret, uses_up=True))


def to_link(public_url: str, token: str) -> str:
    return f"{public_url.rstrip('/')}{PATH}?token={token}"


async def _read(redis: Redis, token: str, secret: Secret, *, uses_up: bool) -> SignInLink:
    if not (1 <= len(token) <= MAX_TOKEN_LENGTH and token.isascii()):
        raise NotFound("token", "no open link")
    for key in _keys(Peppers(secret, PEPPER_PURPOSE), token):
        found = await (redis.getdel(key) if uses_up else redis.get(key))
        if found is not None:
            assert isinstance(found, bytes), "this client decodes nothing"
            link = msgspec.msgpack.decode(found, type=SignInLink)
            # A release that noted no newest one may have made it.
            if await redis.get(_newest_of(link)) in (None, key.encode()):
                return link
            break
    raise NotFound("token", "no open link")


async def _live(conn: AsyncConnection, link: SignInLink) -> LinkedUser:
    """Look the link's user and organization up. Raises: NotFound."""
    org = sa.select(orgs.c.name).where(orgs.c.id == link.org_id, orgs.c.archived_at.is_(None))
    org_name = await conn.scalar(org)
    own = sa.select(users.c.id, users.c.email).where(
        users.c.org_id == link.org_id, users.c.role == link.role, users.c.archived_at.is_(None)
    )
    if link.user_id is not None:
        own = own.where(users.c.id == link.user_id)
    row = (await conn.execute(own.limit(1))).one_or_none()
    if org_name is None or (row is None) != (link.user_id is None):
        raise NotFound("token", "no open link")
    return LinkedUser(
        org_id=link.org_id,
        org_name=org_name,
        user_id=link.user_id,
        email=None if row is None else row.email,
        role=link.role,
    )


def _newest_of(link: SignInLink) -> str:
    return f"{PREFIX}-of:{link.org_id}:{link.user_id or ''}"


def _keys(peppers: Peppers, token: str) -> list[str]:
    return [f"{PREFIX}:{each}" for each in peppers.hashes(token)]
