"""OAuth clients: created by an admin or by themselves (RFC 7591), found, changed, archived.

A client's id is ours (`client_...`), or the https URL of its metadata document; such a client is in
no table. A secret is returned once, by the function that made it, and stored hashed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway import permissions as policy
from gateway.audit.log import Actor, record
from gateway.auth.oauth.clients.metadata import (
    CLIENT_CREDENTIALS,
    LINKS,
    MAX_NAME_LENGTH,
    SECRET_METHODS,
    ApplicationType,
    AuthMethod,
    ClientMetadata,
)
from gateway.auth.oauth.tokens.grants import record_revoked, revoke_grants
from gateway.auth.tables import oauth_clients
from gateway.ids import uuid7
from gateway.permissions import is_bound
from gateway.principal import SCOPE_USAGE_READ, Principal
from gateway.secret import Peppers, random_secret
from gateway.tenancy.changes import unchecked
from gateway.tenancy.delegation import NOBODY, administers, check_owner
from gateway.tenancy.errors import InvalidField, NotAllowed, NotFound
from gateway.tenancy.member_tables import service_accounts
from gateway.tenancy.tables import check_plan, orgs, projects

SECRET_PEPPER_PURPOSE = "oauth-client-secret"
SECRET_PREFIX = "tg-secret-"
REGISTRATION_PREFIX = "tg-registration-"
MAX_GRACE_S = 7 * 86_400
"""A secret may stay valid for at most so long after its rotation."""
MAX_ID_LENGTH = 2048
STRANGERS = policy.SERVICE_SCOPES | policy.IDENTITY_SCOPES | {SCOPE_USAGE_READ}
DESCRIPTION = (*LINKS, "contacts", "software_id", "software_version")
"""Metadata that nothing here acts on; it is stored to be shown and read back."""

CLIENT_ARCHIVED = "client_archived"
"""The `revoked_because` of an archived client's grants."""

Source = Literal["admin", "dynamic", "document"]


class Client(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str | None
    """None: it registered itself, or has a metadata document; users of any org may allow it."""
    project_id: str | None
    """The project that is billed; None: a project of the user."""
    service_account_id: str | None
    """The account that it acts for with client credentials."""
    plan: str | None
    """The limits that all its tokens share; None: no limits of its own."""
    name: str
    source: Source
    token_endpoint_auth_method: AuthMethod
    application_type: ApplicationType
    redirect_uris: list[str]
    grant_types: list[str]
    scopes: list[str]
    """The scopes that it can be granted."""
    jwks: dict[str, Any] | None
    jwks_uri: str | None
    dpop_bound: bool
    """True: it must use DPoP (RFC 9449, `dpop_bound_access_tokens`)."""
    metadata: dict[str, Any]
    version: int
    created_at: datetime | None
    archived_at: datetime | None

    @property
    def native(self) -> bool:
        return self.application_type == "native"

    @property
    def confidential(self) -> bool:
        return self.token_endpoint_auth_method != "none"


class CreatedClient(msgspec.Struct, frozen=True, kw_only=True):
    client: Client
    client_secret: str | None
    """Shown once; None if its authentication method needs none."""
    registration_access_token: str | None = None
    """The token of RFC 7592, for a client that registered itself."""

    def __repr__(self) -> str:
        return f"CreatedClient({self.client.id})"


COLUMNS = [oauth_clients.c[name] for name in Client.__struct_fields__]
Check = Callable[[Client], None]
"""Called with the locked row before a change; raises to refuse the change."""
FetchDocument = Callable[[str], Awaitable[Client | None]]
"""Returns the client with a metadata document at the URL. Raises: AuthUnavailable."""


class Clients:
    """Finds the client of a request, whatever kind it is. `db` sees all orgs. `fetch` reads client
    metadata documents; None: they are not supported."""

    def __init__(
        self, *, db: AsyncEngine, peppers: Peppers, fetch: FetchDocument | None = None
    ) -> None:
        self._db = db
        self._fetch = fetch
        self.peppers = peppers

    async def find(self, client_id: str) -> Client | None:
        """Return a live client. Raises: what `fetch` raises."""
        if len(client_id) > MAX_ID_LENGTH or "\0" in client_id:
            return None
        if client_id.startswith(("https://", "http://")):
            return None if self._fetch is None else await self._fetch(client_id)
        async with self._db.connect() as conn:
            row = (await conn.execute(_live(*COLUMNS, client_id=client_id))).one_or_none()
        return None if row is None else Client(**row._mapping)

    async def has_secret(self, client_id: str, secret: str, *, now: datetime) -> bool:
        """True if a live client has this secret, also during the grace period of a rotation."""
        c = oauth_clients.c
        columns = (c.secret_hash, c.older_secret_hash, c.older_secret_expires_at)
        if len(secret) > MAX_ID_LENGTH or "\0" in client_id:
            return False
        async with self._db.connect() as conn:
            row = (await conn.execute(_live(*columns, client_id=client_id))).one_or_none()
        if row is None:
            return False
        stored = [row.secret_hash]
        if row.older_secret_expires_at is not None and row.older_secret_expires_at > now:
            stored.append(row.older_secret_hash)
        matches = [self.peppers.matches(secret, each) for each in stored if each is not None]
        return any(matches)

    async def find_registered(
        self, client_id: str, registration_access_token: str
    ) -> Client | None:
        """Return a live client that registered itself, by its registration access token (RFC
        7592)."""
        known = oauth_clients.c.registration_hash
        hashes = self.peppers.hashes(registration_access_token)
        found = _live(*COLUMNS, client_id=client_id).where(known.in_(hashes))
        async with self._db.connect() as conn:
            row = (await conn.execute(found)).one_or_none()
        return None if row is None else Client(**row._mapping)


def _live(*columns: sa.ColumnElement[Any], client_id: str) -> sa.Select[Any]:
    """Select clients that are not archived, nor is their org or their project."""
    joined = oauth_clients.outerjoin(orgs, oauth_clients.c.org_id == orgs.c.id)
    joined = joined.outerjoin(projects, oauth_clients.c.project_id == projects.c.id)
    found = sa.select(*columns).select_from(joined).where(oauth_clients.c.id == client_id)
    for table in (oauth_clients, orgs, projects):
        found = found.where(table.c.archived_at.is_(None))
    return found


async def create_client(
    conn: AsyncConnection,
    peppers: Peppers,
    *,
    metadata: ClientMetadata,
    scopes: Sequence[str],
    actor: Actor,
    org_id: str | None,
    project_id: str | None = None,
    service_account_id: str | None = None,
    plan: str | None = None,
    audit_org: str | None = None,
    by: Principal | None = None,
) -> CreatedClient:
    """Create a client of checked `metadata` and known `scopes`.

    `org_id` None: the client registers itself, and gets a token of RFC 7592; the audit log of
    `audit_org` records it. `by`: who will have its secret, and so must have the rights that the
    client gets with client credentials (`tenancy.delegation`).
    Raises: NotFound (project_id, service_account_id, plan), NotAllowed.
    """
    if by is not None:
        check_client(by, scopes, metadata.grant_types, service_account_id)
    await _check_owners(conn, org_id, project_id, service_account_id)
    secret = random_secret(SECRET_PREFIX)
    needs_secret = metadata.token_endpoint_auth_method in SECRET_METHODS
    token = random_secret(REGISTRATION_PREFIX) if org_id is None else None
    row = {
        "id": f"client_{uuid7().hex}",
        "org_id": org_id,
        "project_id": project_id,
        "service_account_id": service_account_id,
        "plan": await check_plan(conn, plan),
        "source": "dynamic" if org_id is None else "admin",
        "secret_hash": peppers.hash(secret) if needs_secret else None,
        "registration_hash": None if token is None else peppers.hash(token),
        **_columns(metadata, scopes),
    }
    added = sa.insert(oauth_clients).values(**row).returning(*COLUMNS)
    client = Client(**(await conn.execute(added)).one()._mapping)
    owner = org_id or audit_org
    if owner is not None:
        await record(
            conn,
            org_id=owner,
            actor=actor,
            action="oauth_client.created",
            target=client.id,
            after=_seen(client),
        )
    return CreatedClient(
        client=client,
        client_secret=secret if needs_secret else None,
        registration_access_token=token,
    )


async def get_client(conn: AsyncConnection, *, org_id: str, client_id: str) -> Client:
    """Return a client, archived or not. Raises: NotFound."""
    found = sa.select(*COLUMNS).where(_of(org_id, client_id))
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("client_id", f"no client {client_id!r}")
    return Client(**row._mapping)


def select_clients(org_id: str, *, archived: bool = False) -> sa.Select[Any]:
    """Select the clients of an org, for a page of them; archived: those too."""
    listed = sa.select(*COLUMNS).where(oauth_clients.c.org_id == org_id)
    return listed if archived else listed.where(oauth_clients.c.archived_at.is_(None))


async def update_client(
    conn: AsyncConnection,
    *,
    org_id: str,
    client_id: str,
    metadata: ClientMetadata,
    scopes: Sequence[str],
    actor: Actor,
    project_id: str | None,
    service_account_id: str | None,
    plan: str | None = None,
    check: Check = unchecked,
    by: Principal | None = None,
) -> Client:
    """Replace the metadata and owners of a client. Its authentication method cannot change from one
    with to one without a secret, or back. `by`: as in `create_client`. The caller announces the
    change, since workers cache the plan.

    Raises: NotFound, InvalidField, NotAllowed, what `check` raises.
    """
    before = await _locked(conn, org_id, client_id)
    check(before)
    if by is not None:
        check_client(by, scopes, metadata.grant_types, service_account_id)
    await _check_owners(conn, org_id, project_id, service_account_id)
    method = metadata.token_endpoint_auth_method
    if (method in SECRET_METHODS) != (before.token_endpoint_auth_method in SECRET_METHODS):
        raise InvalidField(
            "token_endpoint_auth_method", "cannot change between with and without a secret"
        )
    values = _columns(metadata, scopes)
    values |= {"project_id": project_id, "service_account_id": service_account_id}
    values["plan"] = await check_plan(conn, plan)
    return await _change(conn, before, actor, "oauth_client.updated", values)


async def rotate_secret(
    conn: AsyncConnection,
    peppers: Peppers,
    *,
    org_id: str,
    client_id: str,
    grace_s: int,
    actor: Actor,
    now: datetime,
    check: Check = unchecked,
    by: Principal | None = None,
) -> CreatedClient:
    """Make a new secret; the old one stays valid for `grace_s`. `by`: as in `create_client`.

    Raises: NotFound, InvalidField, NotAllowed, what `check` raises.
    """
    before = await _locked(conn, org_id, client_id)
    check(before)
    if by is not None:
        check_client(by, before.scopes, before.grant_types, before.service_account_id)
    if before.token_endpoint_auth_method not in SECRET_METHODS:
        raise InvalidField("token_endpoint_auth_method", "this client has no secret")
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidField("grace_s", f"must be 0 to {MAX_GRACE_S}")
    secret = random_secret(SECRET_PREFIX)
    values = {
        "secret_hash": peppers.hash(secret),
        "older_secret_hash": oauth_clients.c.secret_hash if grace_s else None,
        "older_secret_expires_at": now + timedelta(seconds=grace_s) if grace_s else None,
    }
    client = await _change(conn, before, actor, "oauth_client.secret_rotated", values)
    return CreatedClient(client=client, client_secret=secret)


async def archive_client(
    conn: AsyncConnection,
    *,
    org_id: str,
    client_id: str,
    actor: Actor,
    check: Check = unchecked,
) -> Client:
    """Archive a client: it gets no further tokens, and its grants and refresh tokens are revoked.
    Idempotent. The caller revokes its access tokens (`revocations`).

    Raises: NotFound, what `check` raises.
    """
    known = await get_client(conn, org_id=org_id, client_id=client_id)
    if known.archived_at is not None:
        check(known)
        return known
    before = await _locked(conn, org_id, client_id)
    check(before)
    ended = await revoke_grants(conn, because=CLIENT_ARCHIVED, org_id=org_id, client_id=client_id)
    values = {"archived_at": sa.func.now()}
    after = await _change(conn, before, actor, "oauth_client.archived", values)
    await record_revoked(conn, ended, target=client_id, because=CLIENT_ARCHIVED, actor=actor)
    return after


async def archive_registered(
    conn: AsyncConnection, client: Client, *, actor: Actor, audit_org: str | None
) -> Collection[str]:
    """Archive a client that registered itself, at its own request (RFC 7592, 2.3).

    Return the orgs in which grants were revoked. The caller revokes its access tokens.
    """
    archived = sa.update(oauth_clients).where(oauth_clients.c.id == client.id)
    await conn.execute(archived.values(archived_at=sa.func.now()))
    ended = await revoke_grants(conn, because=CLIENT_ARCHIVED, client_id=client.id)
    if audit_org is not None:
        await record(
            conn,
            org_id=audit_org,
            actor=actor,
            action="oauth_client.archived",
            target=client.id,
            before={"name": client.name, "archived_at": None},
            after={"archived_at": datetime.now(UTC)},
        )
    await record_revoked(conn, ended, target=client.id, because=CLIENT_ARCHIVED, actor=actor)
    return ended.keys()


def _of(org_id: str, client_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(oauth_clients.c.id == client_id, oauth_clients.c.org_id == org_id)


async def _locked(conn: AsyncConnection, org_id: str, client_id: str) -> Client:
    """Lock a live client, and return it. Raises: NotFound."""
    found = sa.select(*COLUMNS).where(_of(org_id, client_id), oauth_clients.c.archived_at.is_(None))
    row = (await conn.execute(found.with_for_update())).one_or_none()
    if row is None:
        raise NotFound("client_id", f"no client {client_id!r}")
    return Client(**row._mapping)


async def _change(
    conn: AsyncConnection, before: Client, actor: Actor, action: str, values: Mapping[str, Any]
) -> Client:
    assert before.org_id is not None
    changed = sa.update(oauth_clients).where(_of(before.org_id, before.id))
    changed = changed.values(**values, version=oauth_clients.c.version + 1)
    after = Client(**(await conn.execute(changed.returning(*COLUMNS))).one()._mapping)
    await record(
        conn,
        org_id=before.org_id,
        actor=actor,
        action=action,
        target=before.id,
        before=_seen(before),
        after=_seen(after),
    )
    return after


async def _check_owners(
    conn: AsyncConnection,
    org_id: str | None,
    project_id: str | None,
    service_account_id: str | None,
) -> None:
    """Check that both are live and belong to the org; they are locked, so that they stay so."""
    owners = (
        ("project_id", projects, project_id),
        ("service_account_id", service_accounts, service_account_id),
    )
    for field, table, value in owners:
        if value is None:
            continue
        live = sa.select(table.c.id).where(table.c.id == value, table.c.org_id == org_id)
        live = live.where(table.c.archived_at.is_(None)).with_for_update(read=True)
        if await conn.scalar(live) is None:
            raise NotFound(field, f"no {field.removesuffix('_id').replace('_', ' ')} {value!r}")


def _columns(metadata: ClientMetadata, scopes: Sequence[str]) -> dict[str, Any]:
    described = {name: getattr(metadata, name) for name in DESCRIPTION}
    return {
        "name": (metadata.client_name or "unnamed client")[:MAX_NAME_LENGTH],
        "token_endpoint_auth_method": metadata.token_endpoint_auth_method,
        "application_type": "native" if metadata.native else "web",
        "redirect_uris": metadata.redirect_uris,
        "grant_types": sorted(set(metadata.grant_types)),
        "scopes": sorted(set(scopes)),
        "jwks": metadata.jwks,
        "jwks_uri": metadata.jwks_uri,
        "dpop_bound": metadata.dpop_bound_access_tokens,
        "metadata": {name: value for name, value in described.items() if value},
    }


def scopes_of_a_stranger(metadata: ClientMetadata) -> list[str]:
    """Return the scopes of a client that no admin created: those of STRANGERS that it requests, or
    all of them. Unknown ones are ignored, which RFC 7591, section 2 allows."""
    return sorted(STRANGERS & set(metadata.scopes) or STRANGERS)


def from_metadata(client_id: str, metadata: ClientMetadata, scopes: Sequence[str]) -> Client:
    """Return the client that the document at the URL `client_id` describes."""
    return Client(
        id=client_id,
        org_id=None,
        project_id=None,
        service_account_id=None,
        plan=None,
        source="document",
        version=1,
        created_at=None,
        archived_at=None,
        **_columns(metadata, scopes),
    )


def _seen(client: Client) -> dict[str, Any]:
    """Describe a client for the audit log."""
    left_out = {"id", "org_id", "version", "created_at", "archived_at"}
    fields = msgspec.structs.asdict(client)
    return {name: value for name, value in fields.items() if name not in left_out}


def check_client(
    maker: Principal,
    scopes: Iterable[str],
    grant_types: Collection[str],
    service_account_id: str | None,
) -> None:
    """Check that `maker` may create a client with client credentials and these scopes.

    Other clients get nothing without a user's consent, so they are not checked.
    Raises: NotAllowed.
    """
    if CLIENT_CREDENTIALS not in grant_types:
        return
    if is_bound(maker):
        raise NotAllowed("grant_types", "a restricted key cannot allow client_credentials")
    if service_account_id is None and administers(scopes):
        check_owner(maker, NOBODY, "service_account_id")
