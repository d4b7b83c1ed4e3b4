"""API keys: made, listed, revoked.

The key itself exists in the return value of `create_key` and nowhere else: what is stored is its
HMAC-SHA256 under a pepper that Postgres never sees, so a stolen table can neither be used nor be
guessed at. A key has 256 random bits, so a slow hash would protect nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.structs import with_fields
from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.networks import Networks
from gateway.permissions import KEY_SCOPES
from gateway.principal import KEY_LIMIT_NAMES, KeyLane, Principal
from gateway.tenancy.changes import changing, unchecked
from gateway.tenancy.delegation import (
    Bounds,
    Owner,
    Power,
    administers,
    bounds_of,
    check_secret,
    owner_of_new,
)
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys.restrictions import (
    UNRESTRICTED,
    ModelLimits,
    Restrictions,
    check_restrictions,
)
from gateway.tenancy.member_tables import service_accounts, users
from gateway.tenancy.tables import (
    api_keys,
    check_name,
    check_plan,
    orgs,
    projects,
)

PEPPER_PURPOSE = "api-key-pepper"
"""`Secret` derives the pepper of key hashes for this purpose."""
PREFIX = "sk-tg-"
ADMIN_PREFIX = "sk-tg-admin-"
ALPHABET = string.digits + string.ascii_letters
RANDOM_LENGTH = 43
"""Base62 characters: 62^43 > 2^256."""
KEY_FORM = re.compile(rf"sk-tg-(?:admin-)?[0-9A-Za-z]{{{RANDOM_LENGTH}}}", re.ASCII)
MAX_SCOPES = 32
ID_FORM = re.compile(r"[A-Za-z0-9_.-]{1,100}", re.ASCII)
"""An id of any other form names no key."""
ENDING_FORM = re.compile(r"[0-9a-f]{6,32}", re.ASCII)
"""An ending that may stand for an id."""


@with_fields(KEY_LIMIT_NAMES, int | None, None, after="ip_ranges")
class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key as people may see it."""

    id: str
    org_id: str
    project_id: str | None
    """None: of the whole org, for its administration."""
    user_id: str | None = None
    service_account_id: str | None = None
    """The owner is a user or a service account, or nobody (both None)."""
    name: str
    prefix: str
    last_four: str
    scopes: list[str]
    plan: str | None
    models: list[str] | None = None
    ip_ranges: list[str] | None = None
    lane: KeyLane | None = None
    model_limits: ModelLimits | None = None
    shows_cost: bool | None = None
    for_console: bool = False
    """The console spends under it for its user; nobody has its secret (`console_keys`)."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = None
    previous_hint: str | None = None
    """The hint of the secret before this one, which is good until `previous_expires_at`."""
    previous_expires_at: datetime | None = None

    @property
    def hint(self) -> str:
        return f"{self.prefix}...{self.last_four}"


class CreatedKey(msgspec.Struct, frozen=True, kw_only=True):
    row: KeyRow
    secret: str
    """The key, for this once."""

    def __repr__(self) -> str:
        return f"CreatedKey({self.row.hint})"


def hash_key(pepper: bytes, key: str) -> str:
    """Return the HMAC-SHA256 (RFC 2104) of a key, lower-case hex."""
    return hmac.new(pepper, key.encode(), hashlib.sha256).hexdigest()


def check_scopes(scopes: Iterable[str]) -> list[str]:
    """Return the scopes sorted, without doubles. Raises: InvalidField."""
    wanted = sorted(set(scopes))
    if not 1 <= len(wanted) <= MAX_SCOPES:
        raise InvalidField("scopes", f"must be 1 to {MAX_SCOPES} scopes")
    for scope in wanted:
        if scope not in KEY_SCOPES:
            unknown = "names a scope that there is not"
            raise InvalidField("scopes", f"unknown scope {scope!r}", detail=unknown)
    return wanted


async def create_key(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str | None,
    name: str,
    scopes: Iterable[str],
    pepper: bytes,
    pepper_id: str,
    user_id: str | None = None,
    service_account_id: str | None = None,
    plan: str | None = None,
    expires_at: datetime | None = None,
    restrictions: Restrictions = UNRESTRICTED,
    for_console: bool = False,
    actor: Actor,
    by: Principal | None = None,
) -> CreatedKey:
    """A new key in a live project of the org or, without a project, of the whole org, which only a
    key of administration can be. `expires_at` must know its time zone. `by`: who will read its
    secret; what binds them binds it, and whose they are it may be (`tenancy.delegation`).

    Raises: InvalidField, NotFound (org, project, plan, owner), NotAllowed.
    """
    wanted = check_scopes(scopes)
    if by is not None:
        owner = owner_of_new(by, wanted, Owner(user_id, service_account_id))
        user_id, service_account_id = owner.user_id, owner.service_account_id
        restrictions, expires_at = _bound(by, restrictions, expires_at)
    prefix = prefix_of(wanted)
    secret = new_secret(prefix)
    if project_id is None and prefix != ADMIN_PREFIX:
        raise InvalidField("project", "only an admin key is of a whole organization")
    await _lock_place(conn, org_id=org_id, project_id=project_id)
    await _lock_owner(conn, org_id=org_id, user_id=user_id, service_account_id=service_account_id)
    row: dict[str, Any] = {
        "id": f"key_{uuid7().hex}",
        "org_id": org_id,
        "project_id": project_id,
        "user_id": user_id,
        "service_account_id": service_account_id,
        "name": check_name(name),
        "prefix": prefix,
        "last_four": secret[-4:],
        "scopes": wanted,
        "plan": await check_plan(conn, plan),
        "expires_at": check_expiry(expires_at),
        "for_console": for_console,
        **check_restrictions(restrictions),
    }
    if by is not None:
        check_secret(by, power_of(row))
    added = sa.insert(api_keys).values(
        **row, key_hash=hash_key(pepper, secret), pepper_id=pepper_id
    )
    made = await conn.execute(added.returning(api_keys.c.created_at))
    public = KeyRow(**row, created_at=made.scalar_one(), revoked_at=None)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="api_key.created",
        target=public.id,
        after=described(public),
    )
    return CreatedKey(row=public, secret=secret)


def power_of(row: Mapping[str, Any]) -> Power:
    """Return the power of a key with these columns, whose values have been checked."""
    ranges, models, ends = row["ip_ranges"], row["models"], row["expires_at"]
    return Power(
        scopes=row["scopes"],
        owner=Owner(row["user_id"], row["service_account_id"]),
        bounds=Bounds(
            networks=None if ranges is None else Networks.of(ranges),
            models=None if models is None else frozenset(models),
            expires_at=None if ends is None else ends.timestamp(),
        ),
    )


def _bound(
    by: Principal, restrictions: Restrictions, expires_at: datetime | None
) -> tuple[Restrictions, datetime | None]:
    """Fill in, where nothing was said, what binds `by`."""
    bounds, given = bounds_of(by), restrictions
    if given.ip_ranges is None and bounds.networks is not None:
        given = replace(given, ip_ranges=bounds.networks.ranges())
    if given.models is None and bounds.models is not None:
        given = replace(given, models=sorted(bounds.models))
    if expires_at is None and bounds.expires_at is not None:
        expires_at = datetime.fromtimestamp(bounds.expires_at, UTC)
    return given, expires_at


def prefix_of(scopes: Iterable[str]) -> str:
    """Return the prefix of a key, which tells keys of administration apart at a glance."""
    return ADMIN_PREFIX if administers(scopes) else PREFIX


def new_secret(prefix: str) -> str:
    return prefix + "".join(secrets.choice(ALPHABET) for _ in range(RANDOM_LENGTH))


def check_expiry(expires_at: datetime | None) -> datetime | None:
    """Raises: InvalidField."""
    if expires_at is not None and (expires_at.tzinfo is None or expires_at <= datetime.now(tz=UTC)):
        raise InvalidField("expires_at", "must have a time zone and lie in the future")
    return expires_at


def described(row: KeyRow) -> dict[str, Any]:
    """Describe for the audit log what is configured."""
    left_out = (
        "id",
        "org_id",
        "prefix",
        "last_four",
        "created_at",
        "last_used_at",
        "previous_hint",
    )
    fields = {name: getattr(row, name) for name in KeyRow.__struct_fields__ if name not in left_out}
    if not row.for_console:
        del fields["for_console"]
    given = {name: value for name, value in fields.items() if value is not None}
    return given | {"redacted_value": row.hint}


async def _lock_owner(
    conn: AsyncConnection, *, org_id: str, user_id: str | None, service_account_id: str | None
) -> None:
    """Lock the owner of a new key until this commits. Raises: InvalidField, NotFound."""
    if user_id is not None and service_account_id is not None:
        raise InvalidField("user_id", "a key is of one user or of one service account")
    for field, table, owner_id in (
        ("user_id", users, user_id),
        ("service_account_id", service_accounts, service_account_id),
    ):
        live = sa.select(table.c.id).where(table.c.org_id == org_id, table.c.id == owner_id)
        live = live.where(table.c.archived_at.is_(None)).with_for_update(read=True)
        if owner_id is not None and await conn.scalar(live) is None:
            raise NotFound(field, f"no such owner {owner_id!r}")


async def _lock_place(conn: AsyncConnection, *, org_id: str, project_id: str | None) -> None:
    """Lock the org and project of a new key, so that neither is archived before this commits.
    Raises: NotFound."""
    if project_id is None:
        live = sa.select(orgs.c.id).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
    else:
        live = sa.select(projects.c.id).where(projects.c.org_id == org_id)
        live = live.where(projects.c.id == project_id, projects.c.archived_at.is_(None))
    if await conn.scalar(live.with_for_update(read=True)) is None:
        kind, name = ("org", org_id) if project_id is None else ("project", project_id)
        raise NotFound(kind, f"no {kind} {name!r}")


def public_columns() -> list[sa.ColumnElement[Any]]:
    return [api_keys.c[field] for field in KeyRow.__struct_fields__]


def select_keys(org_id: str, *, project_id: str | None = None) -> sa.Select[Any]:
    """Select the keys of an organization, or of a project, revoked and expired ones too."""
    listed = sa.select(*public_columns()).where(api_keys.c.org_id == org_id)
    return listed if project_id is None else listed.where(api_keys.c.project_id == project_id)


async def find_named_key(conn: AsyncConnection, named: str) -> tuple[str, str]:
    """Return a key's id and its org, for who serves all orgs. `named`: the id; an ending of it that
    no other has, with what stands for the rest (`key_…`) or without; or the name of one key that
    was not revoked. Raises: NotFound.
    """
    ending = named.removeprefix("key_").removeprefix("…").removeprefix("...")
    wanted = api_keys.c.id == named
    if ENDING_FORM.fullmatch(ending) is not None:
        wanted = wanted | api_keys.c.id.like(f"%{ending}")
    found = sa.select(api_keys.c.id, api_keys.c.org_id).where(wanted).limit(2)
    rows = (await conn.execute(found)).all()
    if len(rows) > 1:
        raise NotFound("key", f"several keys end with {ending!r}: give the whole id")
    if not rows:
        by_name = sa.select(api_keys.c.id, api_keys.c.org_id).where(
            api_keys.c.name == named, api_keys.c.revoked_at.is_(None)
        )
        rows = (await conn.execute(by_name.limit(2))).all()
    if len(rows) > 1:
        raise NotFound("key", f"several keys are named {named!r}: give the id of one")
    if not rows:
        raise NotFound("key", f"no key {named!r}; `tollgate keys list` shows all")
    return rows[0].id, rows[0].org_id


async def retrieve_key(
    conn: AsyncConnection, key_id: str, *, org_id: str, lock: bool = False
) -> KeyRow:
    """Return a key; lock: nobody changes it before this commits. Raises: NotFound."""
    if ID_FORM.fullmatch(key_id) is None:
        raise NotFound("key", "no such key")
    found = sa.select(*public_columns())
    found = found.where(api_keys.c.org_id == org_id, api_keys.c.id == key_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NotFound("key", f"no key {key_id!r}")
    return KeyRow(**row._mapping)


async def revoke_key(
    db: AsyncEngine,
    redis: Redis,
    key_id: str,
    *,
    org_id: str,
    actor: Actor,
    check: Callable[[KeyRow], None] = unchecked,
) -> KeyRow:
    """Revoke a key: every worker refuses it within a second of the return. Idempotent; a repetition
    announces it again. `check` is called with the key, under its lock; what it raises ends this.

    Raises: NotFound; ChangeNotAnnounced: revoked, but repeat it (see `changes.changing`).
    """
    async with changing(db, redis, key_id, org_id=org_id) as conn:
        before = await retrieve_key(conn, key_id, org_id=org_id, lock=True)
        check(before)
        return await end_key(conn, before, actor=actor)


async def end_key(conn: AsyncConnection, before: KeyRow, *, actor: Actor, why: str = "") -> KeyRow:
    """A locked key is revoked, if it is not already; to be announced."""
    if before.revoked_at is not None:
        return before
    ended = sa.update(api_keys).where(api_keys.c.org_id == before.org_id)
    ended = ended.where(api_keys.c.id == before.id).values(revoked_at=sa.func.now())
    made = await conn.execute(ended.returning(*public_columns()))
    await record(
        conn,
        org_id=before.org_id,
        actor=actor,
        action="api_key.deleted",  # OpenAI's event for the end of a key
        target=before.id,
        before=described(before),
        after={"reason": why} if why else None,
    )
    return KeyRow(**made.one()._mapping)
