"""The external issuers that a tenant lists: each for one audience, with the meaning of its claims.

An audience of an issuer belongs to one tenant, so that each token is for one tenant alone. Our
client secret at the issuer is stored encrypted, because it must be sent.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.auth.federation.issuer_keys import ALGORITHMS
from gateway.auth.tables import issuers
from gateway.ids import uuid7
from gateway.net.egress_targets import Forbidden, parse_target
from gateway.permissions import ADMIN_SCOPES, SERVICE_SCOPES
from gateway.principal import SCOPE_USAGE_READ, Role
from gateway.secret import Cipher
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound
from gateway.tenancy.pages import FIRST, Cursor, read_page
from gateway.tenancy.tables import check_name, projects

CIPHER_PURPOSE = "external-issuer-client-secret"
MAX_ISSUERS_PER_ORG = 16
MAX_CLAIMS = 16
MAX_ROLES = 64
MAX_TEXT_LENGTH = 512
MAX_LEEWAY_S = 120
SCOPES = SERVICE_SCOPES | ADMIN_SCOPES | {SCOPE_USAGE_READ}
"""The scopes that an issuer's tokens can be allowed; the role of a token's subject limits it
further."""

USAGE_SCOPES = SERVICE_SCOPES | {SCOPE_USAGE_READ}
"""The default of `scopes`."""

ClaimValue = str | bool | int


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that an admin gives for an issuer."""

    name: str
    issuer: str
    """The exact `iss` of its tokens."""
    audience: str
    """The value that `aud` of a token must contain."""
    project_id: str
    """The project that is billed."""
    algorithms: list[str] = msgspec.field(default_factory=lambda: ["RS256", "ES256"])
    required_claims: dict[str, ClaimValue] = {}
    """Claims that a token must have with exactly these values, such as the issuer's tenant id."""
    role_claim: str | None = None
    """A claim, or a path of names with dots between them: a string or a list of them."""
    roles: dict[str, Role] = {}
    """Maps values of `role_claim` to roles. Of several the strongest counts."""
    default_role: Role | None = None
    """The role if `roles` gives none; None: such a token is refused."""
    scopes: list[str] = msgspec.field(default_factory=lambda: sorted(USAGE_SCOPES))
    scope_claim: str | None = None
    """The claim that lists a token's scopes; None: a token has all of `scopes`."""
    leeway_s: int = 30
    client_id: str | None = None
    """Our client id at the issuer, for logins by a browser; None: there are no logins."""
    provisions_users: bool = False
    """True: a subject that logs in for the first time and maps to a role becomes a user."""


class Issuer(Rules, frozen=True, kw_only=True):
    id: str
    org_id: str
    has_client_secret: bool
    client_secret_digest: str | None
    """SHA-256 of the encrypted secret: it changes when the secret does."""
    created_at: datetime
    archived_at: datetime | None


_COMPUTED = ("has_client_secret", "client_secret_digest")
_STORED = [name for name in Issuer.__struct_fields__ if name not in _COMPUTED]
COLUMNS: list[sa.ColumnElement[Any]] = [
    *(issuers.c[name] for name in _STORED),
    issuers.c.client_secret_id.is_not(None).label("has_client_secret"),
    sa.func.encode(sa.func.sha256(issuers.c.client_secret_sealed), "hex").label(
        "client_secret_digest"
    ),
]


def check_rules(rules: Rules, *, allow_loopback: bool = False) -> None:
    """Raises: InvalidField."""
    check_name(rules.name)
    try:
        parse_target(rules.issuer, allow_loopback=allow_loopback)
    except Forbidden as error:
        message = f"is not allowed: {error}"
        raise InvalidField("issuer", message, detail="is not allowed") from None
    if "?" in rules.issuer:
        raise InvalidField("issuer", "must have no query")
    _check_text("audience", rules.audience)
    if not rules.algorithms or not ALGORITHMS.keys() >= set(rules.algorithms):
        raise InvalidField("algorithms", f"must be some of {', '.join(ALGORITHMS)}")
    if not rules.scopes or not set(rules.scopes) <= SCOPES:
        raise InvalidField("scopes", f"must be some of {', '.join(sorted(SCOPES))}")
    if not 0 <= rules.leeway_s <= MAX_LEEWAY_S:
        raise InvalidField("leeway_s", f"must be 0 to {MAX_LEEWAY_S}")
    if len(rules.required_claims) > MAX_CLAIMS:
        raise InvalidField("required_claims", f"must have at most {MAX_CLAIMS} claims")
    for claim, value in rules.required_claims.items():
        _check_text("required_claims", claim)
        _check_text("required_claims", str(value))
    _check_roles(rules)
    for field in ("role_claim", "scope_claim", "client_id"):
        value = getattr(rules, field)
        if value is not None:
            _check_text(field, value)


def _check_roles(rules: Rules) -> None:
    if len(rules.roles) > MAX_ROLES:
        raise InvalidField("roles", f"must have at most {MAX_ROLES} values")
    for value in rules.roles:
        _check_text("roles", value)
    if (rules.role_claim is None) != (not rules.roles):
        raise InvalidField("roles", "must be given together with role_claim")
    if not rules.roles and rules.default_role is None:
        raise InvalidField("default_role", "is required without roles")


def _check_text(field: str, value: str) -> None:
    if not 1 <= len(value) <= MAX_TEXT_LENGTH:
        raise InvalidField(field, f"must have 1 to {MAX_TEXT_LENGTH} characters")
    if any(unicodedata.category(c)[0] == "C" for c in value):
        raise InvalidField(field, "must be printable")


async def create_issuer(
    conn: AsyncConnection,
    cipher: Cipher,
    *,
    org_id: str,
    rules: Rules,
    actor: Actor,
    client_secret: str | None = None,
    allow_loopback: bool = False,
) -> Issuer:
    """Create an issuer; the caller announces it.

    Raises: InvalidField, NameTaken (audience), NotFound (project_id).
    """
    check_rules(rules, allow_loopback=allow_loopback)
    await _check_project(conn, org_id=org_id, project_id=rules.project_id)
    live = sa.select(sa.func.count()).select_from(issuers)
    live = live.where(issuers.c.org_id == org_id, issuers.c.archived_at.is_(None))
    if (await conn.scalar(live) or 0) >= MAX_ISSUERS_PER_ORG:
        raise InvalidField("issuer", f"an organization lists at most {MAX_ISSUERS_PER_ORG}")
    issuer_id = f"issuer_{uuid7().hex}"
    row = msgspec.structs.asdict(rules) | seal(cipher, issuer_id, rules.client_id, client_secret)
    added = insert(issuers).values(id=issuer_id, org_id=org_id, **row).on_conflict_do_nothing()
    made = (await conn.execute(added.returning(*COLUMNS))).one_or_none()
    if made is None:
        raise NameTaken("audience", "this audience of this issuer is listed already")
    issuer = Issuer(**made._mapping)
    after = describe(issuer)
    await record(
        conn, org_id=org_id, actor=actor, action="issuer.created", target=issuer_id, after=after
    )
    return issuer


async def update_issuer(
    conn: AsyncConnection,
    cipher: Cipher,
    *,
    org_id: str,
    issuer_id: str,
    rules: Rules,
    actor: Actor,
    client_secret: str | None = None,
    allow_loopback: bool = False,
    check: Callable[[Issuer], None] = lambda _current: None,
) -> Issuer:
    """Update an issuer; the caller announces it.

    `client_secret` None keeps the present one. The field `issuer` cannot change: the users who
    logged in from there are known by it. `check` gets the locked row, and may raise.
    Raises: InvalidField, NameTaken (audience), NotFound.
    """
    before = await find_issuer(conn, org_id=org_id, issuer_id=issuer_id, lock=True)
    check(before)
    check_rules(rules, allow_loopback=allow_loopback)
    if rules.issuer != before.issuer:
        raise InvalidField("issuer", "cannot be changed; list another issuer instead")
    await _check_project(conn, org_id=org_id, project_id=rules.project_id)
    row = msgspec.structs.asdict(rules)
    if client_secret is not None or rules.client_id is None:
        row |= seal(cipher, issuer_id, rules.client_id, client_secret)
    changed = sa.update(issuers).where(issuers.c.id == issuer_id, issuers.c.org_id == org_id)
    changed = changed.values(**row).returning(*COLUMNS)
    try:
        # A savepoint instead of a look-up: row-level security hides other tenants' audiences.
        async with conn.begin_nested():
            made = (await conn.execute(changed)).one()
    except sa.exc.IntegrityError:
        raise NameTaken("audience", "this audience of this issuer is listed already") from None
    issuer = Issuer(**made._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="issuer.updated",
        target=issuer_id,
        before=describe(before),
        after=describe(issuer),
    )
    return issuer


async def archive_issuer(
    conn: AsyncConnection,
    *,
    org_id: str,
    issuer_id: str,
    actor: Actor,
    check: Callable[[Issuer], None] = lambda _current: None,
) -> Issuer:
    """Archive an issuer: its tokens and logins are refused, and its client secret is deleted. The
    caller announces it.

    Raises: NotFound.
    """
    before = await find_issuer(conn, org_id=org_id, issuer_id=issuer_id, lock=True)
    check(before)
    gone = sa.update(issuers).where(issuers.c.id == issuer_id, issuers.c.org_id == org_id)
    gone = gone.values(archived_at=sa.func.now(), client_secret_sealed=None, client_secret_id=None)
    made = (await conn.execute(gone.returning(*COLUMNS))).one()
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="issuer.archived",
        target=issuer_id,
        before=describe(before),
    )
    return Issuer(**made._mapping)


async def find_issuer(
    conn: AsyncConnection, *, org_id: str, issuer_id: str, lock: bool = False
) -> Issuer:
    """Return a live issuer. Raises: NotFound."""
    found = _live(org_id).where(issuers.c.id == issuer_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NotFound("issuer_id", f"no issuer {issuer_id!r}")
    return Issuer(**row._mapping)


async def list_issuers(
    conn: AsyncConnection, *, org_id: str, cursor: Cursor = FIRST
) -> tuple[list[Issuer], bool]:
    """Return a page of live issuers, and whether there are more. Raises: InvalidField."""
    rows, more = await read_page(conn, _live(org_id), issuers.c.id, cursor)
    return [Issuer(**row._mapping) for row in rows], more


def _live(org_id: str) -> sa.Select[Any]:
    return sa.select(*COLUMNS).where(issuers.c.org_id == org_id, issuers.c.archived_at.is_(None))


async def _check_project(conn: AsyncConnection, *, org_id: str, project_id: str) -> None:
    # The lock keeps the project from being archived before this commits.
    live = sa.select(projects.c.id).where(projects.c.id == project_id)
    live = live.where(projects.c.org_id == org_id, projects.c.archived_at.is_(None))
    if await conn.scalar(live.with_for_update(read=True)) is None:
        raise NotFound("project_id", f"no project {project_id!r}")


def seal(
    cipher: Cipher, issuer_id: str, client_id: str | None, client_secret: str | None
) -> dict[str, Any]:
    """Return the values of the secret's columns. Raises: InvalidField."""
    if client_secret is None:
        return {"client_secret_sealed": None, "client_secret_id": None}
    if client_id is None:
        raise InvalidField("client_secret", "cannot be given without client_id")
    _check_text("client_secret", client_secret)
    sealed = cipher.seal(client_secret.encode(), issuer_id.encode())
    return {"client_secret_sealed": sealed.data, "client_secret_id": sealed.secret_id}


def describe(issuer: Issuer) -> Mapping[str, Any]:
    """Describe an issuer for the audit log."""
    return {name: getattr(issuer, name) for name in Rules.__struct_fields__}
