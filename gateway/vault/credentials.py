"""Keeps the credential that an upstream of the MCP bridge is to be shown: a tenant's, or one
user's.

A user's own stands before the tenant's. What goes out is only ever the upstream's own credential:
nothing here takes or knows the one that the caller has shown us. Names of values are known to
people, values come out for the upstream alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.columns import moment, moment_made, text, texts
from gateway.ids import uuid7
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound
from gateway.vault.envelope import SealedEnvelope, Unreadable, Vault
from gateway.vault.errors import CannotOpen

MAX_PER_ORG = 10_000
MAX_VALUES = 16
MAX_VALUE_BYTES = 16 * 1024
REWRAP_BATCH = 100
UPSTREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
VALUE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}", re.ASCII)
"""Matches the name of an environment variable or of a header."""
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Neither has one in it but a tab."""

Kind = Literal["static", "oauth"]

log = logging.getLogger(__name__)

metadata = sa.MetaData()

credentials = sa.Table(
    "upstream_credentials",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("upstream"),
    text("user_id", nullable=True),
    text("kind"),
    texts("names"),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("wrapped_key", sa.LargeBinary, nullable=False),
    text("secret_id"),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
    moment("expires_at"),
    moment("refused_at"),
    moment_made(),
    moment_made("updated_at"),
)


class UpstreamCredential(msgspec.Struct, frozen=True, kw_only=True):
    """All of it but the values."""

    id: str
    org_id: str
    upstream: str
    user_id: str | None
    """None: the tenant's, for all who have none of their own."""
    kind: Kind
    names: list[str]
    version: int
    """Higher whenever somebody gives other values: what was started with the old ones is to be
    ended. Fresh tokens of the same consent change nothing of it."""
    expires_at: datetime | None
    """The moment at which the access token expires."""
    refused_at: datetime | None
    """The moment since which the upstream's authorization server refuses it."""
    created_at: datetime
    updated_at: datetime

    @property
    def credential_set(self) -> str:
        """Names exactly these values: two that differ never share a process or a connection."""
        return f"{self.id}.{self.version}"


class OpenCredential(msgspec.Struct, frozen=True):
    credential: UpstreamCredential
    values: Mapping[str, str]

    def __repr__(self) -> str:
        return f"OpenCredential({self.credential.id})"


class RewrapResult(msgspec.Struct, frozen=True, kw_only=True):
    done: int
    last: str | None
    """The id after which the next call goes on; None: no credentials are left."""


COLUMNS = [credentials.c[name] for name in UpstreamCredential.__struct_fields__]
SEALED = [credentials.c.sealed, credentials.c.wrapped_key, credentials.c.secret_id]


async def put_credential(
    conn: AsyncConnection,
    vault: Vault,
    *,
    org_id: str,
    upstream: str,
    user_id: str | None,
    values: Mapping[str, str],
    actor: Actor,
    kind: Kind = "static",
    expires_at: datetime | None = None,
) -> UpstreamCredential:
    """Store a credential in the place of what was there.

    Raises: InvalidField; NameTaken where another one did it at the same time.
    """
    check_upstream(upstream)
    check_values(values)
    before = await _find_exactly(conn, org_id, upstream, user_id)
    if before is None:
        await _check_room(conn, org_id)
        credential_id, version = f"upcred_{uuid7().hex}", 1
    else:
        credential_id, version = before.id, before.version + 1
    context = context_of(org_id, credential_id, version)
    envelope = vault.seal(msgspec.json.encode(dict(values)), context)
    row: dict[str, Any] = {
        "kind": kind,
        "names": sorted(values),
        "version": version,
        "expires_at": expires_at,
        "refused_at": None,
        "updated_at": sa.func.now(),
        **msgspec.structs.asdict(envelope),
    }
    change: sa.Executable
    if before is None:
        key = {"id": credential_id, "org_id": org_id, "upstream": upstream, "user_id": user_id}
        added = insert(credentials).values(**key, **row).on_conflict_do_nothing()
        change = added.returning(*COLUMNS)
    else:
        changed = sa.update(credentials).where(*_is(org_id, credential_id)).values(**row)
        change = changed.returning(*COLUMNS)
    made = (await conn.execute(change)).one_or_none()
    if made is None:
        raise NameTaken("upstream", "another one was given a credential for it just now")
    credential = UpstreamCredential(**made._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="upstream_credential.created" if before is None else "upstream_credential.updated",
        target=credential.id,
        before=None if before is None else described(before),
        after=described(credential),
    )
    return credential


async def find_credential(
    conn: AsyncConnection, *, org_id: str, upstream: str, user_id: str | None
) -> UpstreamCredential | None:
    """The user's own, or the tenant's, or None."""
    row = (await conn.execute(_select_best(org_id, upstream, user_id, COLUMNS))).first()
    return None if row is None else UpstreamCredential(**row._mapping)


async def open_credential(
    conn: AsyncConnection,
    vault: Vault,
    *,
    org_id: str,
    upstream: str,
    user_id: str | None,
    lock: bool = False,
) -> OpenCredential | None:
    """Find a credential like `find_credential`, with its values. lock: nobody else changes it
    before the transaction ends. Raises: CannotOpen."""
    asked = _select_best(org_id, upstream, user_id, [*COLUMNS, *SEALED])
    row = (await conn.execute(asked.with_for_update() if lock else asked)).first()
    if row is None:
        return None
    fields = dict(row._mapping)
    envelope = SealedEnvelope(**{column.name: fields.pop(column.name) for column in SEALED})
    credential = UpstreamCredential(**fields)
    context = context_of(org_id, credential.id, credential.version)
    try:
        plain = vault.open(envelope, context)
    except Unreadable as error:
        raise CannotOpen(upstream, f"its credential cannot be read: {error}") from None
    return OpenCredential(credential, msgspec.json.decode(plain, type=dict[str, str]))


async def delete_credential(
    conn: AsyncConnection, *, org_id: str, credential_id: str, actor: Actor
) -> UpstreamCredential:
    """Delete a credential with its key: nothing of it can be read any more, by nobody.

    Raises: NotFound.
    """
    deleted = sa.delete(credentials).where(*_is(org_id, credential_id)).returning(*COLUMNS)
    row = (await conn.execute(deleted)).one_or_none()
    if row is None:
        raise NotFound("credential_id", "no such credential")
    gone = UpstreamCredential(**row._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="upstream_credential.deleted",
        target=gone.id,
        before=described(gone),
    )
    return gone


async def refresh_credential(
    conn: AsyncConnection,
    vault: Vault,
    *,
    org_id: str,
    credential_id: str,
    version: int,
    values: Mapping[str, str],
    expires_at: datetime | None,
) -> bool:
    """Store newer tokens of the same consent: its version stays, and no entry is made.

    False: it has other values now.
    Raises: InvalidField.
    """
    check_values(values)
    context = context_of(org_id, credential_id, version)
    envelope = vault.seal(msgspec.json.encode(dict(values)), context)
    changed = sa.update(credentials).where(
        *_is(org_id, credential_id), credentials.c.version == version
    )
    row: dict[str, Any] = {"names": sorted(values), "expires_at": expires_at, "refused_at": None}
    row |= {"updated_at": sa.func.now(), **msgspec.structs.asdict(envelope)}
    return (await conn.execute(changed.values(**row))).rowcount == 1


async def mark_refused(
    conn: AsyncConnection, *, org_id: str, credential_id: str, version: int
) -> bool:
    """Mark a credential whose authorization server wants its owner's consent again.

    False: it has other values now.
    """
    marked = sa.update(credentials).values(refused_at=sa.func.now(), updated_at=sa.func.now())
    marked = marked.where(*_is(org_id, credential_id), credentials.c.version == version)
    return (await conn.execute(marked)).rowcount == 1


async def rewrap_credentials(
    conn: AsyncConnection, vault: Vault, *, after: str = "", most: int = REWRAP_BATCH
) -> RewrapResult:
    """Wrap up to `most` keys, of all tenants, that are wrapped under an older secret, under the
    current one.

    after: the id that the last call ended with. Where a whole walk has done all of them the older
    secrets can leave the file. Workers that do it at once take other rows.
    """
    older = credentials.c.secret_id != vault.current_secret_id
    asked = sa.select(credentials.c.id, credentials.c.org_id, credentials.c.version, *SEALED)
    asked = asked.where(older, credentials.c.id > after).order_by(credentials.c.id).limit(most)
    rows = (await conn.execute(asked.with_for_update(skip_locked=True))).all()
    done = 0
    for row in rows:
        envelope = SealedEnvelope(
            sealed=row.sealed, wrapped_key=row.wrapped_key, secret_id=row.secret_id
        )
        try:
            fresh = vault.rewrap(envelope, context_of(row.org_id, row.id, row.version))
        except Unreadable as error:
            log.error("credential %s cannot be read: %s", row.id, error)
            continue
        changed = sa.update(credentials).where(*_is(row.org_id, row.id))
        await conn.execute(changed.values(wrapped_key=fresh.wrapped_key, secret_id=fresh.secret_id))
        done += 1
    return RewrapResult(done=done, last=rows[-1].id if len(rows) == most else None)


def context_of(org_id: str, credential_id: str, version: int) -> bytes:
    """Return the context that binds sealed values to this row and this version of it."""
    return f"{org_id}\n{credential_id}\n{version}".encode()


def described(credential: UpstreamCredential) -> dict[str, Any]:
    """Describe a credential for the audit log."""
    return {
        "upstream": credential.upstream,
        "user_id": credential.user_id,
        "kind": credential.kind,
        "names": credential.names,
        "version": credential.version,
    }


def check_upstream(upstream: str) -> None:
    """Raises: InvalidField."""
    if UPSTREAM_NAME.fullmatch(upstream) is None:
        raise InvalidField("upstream", "must have 1 to 128 letters, digits, `.`, `_` or `-`")


def check_values(values: Mapping[str, str]) -> None:
    """Raises: InvalidField, whose text holds no value."""
    if not 1 <= len(values) <= MAX_VALUES:
        raise InvalidField("values", f"must be 1 to {MAX_VALUES}")
    for name, value in values.items():
        if VALUE_NAME.fullmatch(name) is None:
            raise InvalidField("values", "a name must be that of a variable or of a header")
        if not value or len(value.encode(errors="replace")) > MAX_VALUE_BYTES:
            raise InvalidField("values", f"each must have 1 to {MAX_VALUE_BYTES} bytes")
        if CONTROL.search(value):
            raise InvalidField("values", "none may hold a control character")


async def _check_room(conn: AsyncConnection, org_id: str) -> None:
    live = sa.select(sa.func.count()).select_from(credentials).where(credentials.c.org_id == org_id)
    if (await conn.scalar(live) or 0) >= MAX_PER_ORG:
        raise InvalidField("upstream", f"an organization keeps at most {MAX_PER_ORG} credentials")


async def _find_exactly(
    conn: AsyncConnection, org_id: str, upstream: str, user_id: str | None
) -> UpstreamCredential | None:
    asked = sa.select(*COLUMNS).where(
        credentials.c.org_id == org_id,
        credentials.c.upstream == upstream,
        credentials.c.user_id.is_not_distinct_from(user_id),
    )
    row = (await conn.execute(asked.with_for_update())).one_or_none()
    return None if row is None else UpstreamCredential(**row._mapping)


def _select_best(
    org_id: str, upstream: str, user_id: str | None, columns: list[sa.Column[Any]]
) -> sa.Select[Any]:
    owner: sa.ColumnElement[bool] = credentials.c.user_id.is_(None)
    if user_id is not None:
        owner = sa.or_(owner, credentials.c.user_id == user_id)
    usable = sa.select(*columns).where(
        credentials.c.org_id == org_id, credentials.c.upstream == upstream, owner
    )
    return usable.order_by(credentials.c.user_id.nulls_last()).limit(1)


def _is(org_id: str, credential_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return credentials.c.org_id == org_id, credentials.c.id == credential_id
