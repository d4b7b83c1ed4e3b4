"""May this principal do that? The one answer for every route.

Pure: it knows no HTTP, no table and no credential.

A credential holds scopes; who it acts for has a role, looked up when the credential is resolved.
Both have to confer what is asked for, so a credential never has more than its owner, and a demotion
takes effect with the next lookup. Who owns a project may, in it alone, do what `PROJECT_OWNER`
holds, whatever their role in the org. A scope that does not stand here is conferred by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gateway.principal import (
    SCOPE_ADMIN,
    SCOPE_INFERENCE,
    SCOPE_USAGE_READ,
    Principal,
    Role,
)

SCOPE_MCP_CALL = "mcp:call"
SCOPE_ADMIN_READ = "admin:read"
"""Any GET of administration."""
ADMIN_AREAS = (
    *("projects", "members", "keys", "clients", "issuers", "audit", "billing", "mcp", "content"),
)
OPERATOR_AREAS = ("plans", "prices", "models", "servers", "signing_keys", "orgs")
"""Areas that the whole installation shares: only an operator org may change them."""
ADMIN, OPERATOR = "admin:", "operator:"

SCOPE_CONTENT = "admin:content"
"""Read the texts of requests and answers, where their project stores them."""
PROJECT_OWNER = frozenset(
    ADMIN + area for area in ("projects", "members", "keys", "billing", "content")
)
"""The scopes that an owner of a project has in it: its members, service accounts, keys, rate limits
and stored texts, on routes of one project (`routes.access.needs_in_project`) or of its request."""

SERVICE_SCOPES = frozenset({SCOPE_INFERENCE, SCOPE_MCP_CALL})
ADMIN_SCOPES = frozenset({SCOPE_ADMIN, SCOPE_ADMIN_READ, *(ADMIN + area for area in ADMIN_AREAS)})
OPERATOR_SCOPES = frozenset(OPERATOR + area for area in OPERATOR_AREAS)
ALL_ADMINISTRATION = ADMIN_SCOPES | OPERATOR_SCOPES | {SCOPE_USAGE_READ}
"""The scopes that `admin:*` expands to in an operator org."""
IDENTITY_SCOPES = frozenset({"openid", "profile", "email", "offline_access"})
"""OpenID Connect's; they speak of the person and open nothing of the org."""
KEY_SCOPES = SERVICE_SCOPES | ADMIN_SCOPES | OPERATOR_SCOPES | {SCOPE_USAGE_READ}
"""The scopes that an API key can hold: it belongs to nobody who could log in."""
SCOPES = KEY_SCOPES | IDENTITY_SCOPES

_READER = IDENTITY_SCOPES | {SCOPE_ADMIN_READ, SCOPE_USAGE_READ}
_ISSUERS = ADMIN + "issuers"
SCOPES_OF: Mapping[Role, frozenset[str]] = MappingProxyType(
    {
        "reader": _READER,
        "billing": _READER | {ADMIN + "billing"},
        "developer": _READER | SERVICE_SCOPES,
        # Who names an issuer decides who everybody is: that, and the installation, are the owner's.
        "admin": _READER | SERVICE_SCOPES | (ADMIN_SCOPES - {SCOPE_ADMIN, _ISSUERS}),
        "owner": _READER | SERVICE_SCOPES | ADMIN_SCOPES,
    }
)


def may(principal: Principal, scope: str, *, project_id: str | None = None) -> bool:
    """True if the principal's credential confers `scope` and, where it acts for somebody, their
    role does, or their owning the project that it is all about; None: it is about the org."""
    if not _confers(principal.scopes, scope, principal.is_operator):
        return False
    role = principal.role
    if role is None or _confers(SCOPES_OF[role], scope, principal.is_operator):
        return True
    return scope in PROJECT_OWNER and project_id in principal.owned_projects


def _confers(held: frozenset[str], scope: str, is_operator: bool) -> bool:
    """True if `held` confers `scope`: `admin:*` is every `admin:...`, `usage:read` and, in an
    operator org, every `operator:...`; elsewhere those are conferred by nothing."""
    if scope not in SCOPES or (scope in OPERATOR_SCOPES and not is_operator):
        return False
    if scope in held:
        return True
    return SCOPE_ADMIN in held and scope in ALL_ADMINISTRATION


def may_give(principal: Principal, scopes: Iterable[str]) -> bool:
    """True if a credential that the principal makes may hold `scopes`: no more than it has itself,
    but for the use of models and tools, which who administers need not have."""
    freely = SERVICE_SCOPES | IDENTITY_SCOPES
    return all(scope in freely or may(principal, scope) for scope in scopes)


def is_bound(principal: Principal) -> bool:
    """True for a key that is good for some networks, for some models or for a time alone."""
    bounds = (principal.allowed_networks, principal.key_models, principal.expires_at)
    return principal.kind == "key" and any(each is not None for each in bounds)


def may_appoint(principal: Principal, role: Role) -> bool:
    """True if the principal may give somebody `role`, or take it from them: somebody who is not
    bound to what a key is bound to."""
    return not is_bound(principal) and may_give(principal, SCOPES_OF[role])


def expanded(scopes: Iterable[str]) -> frozenset[str]:
    """Add what `admin:*` stands for in every org, so that a part of it can be asked for.

    What is the operator's is asked for by whom it was named for.
    """
    held = frozenset(scopes)
    return held | ADMIN_SCOPES | {SCOPE_USAGE_READ} if SCOPE_ADMIN in held else held


def common(scopes: Iterable[str], others: Iterable[str]) -> frozenset[str]:
    """Return the scopes that both hold: of `admin:*` and a part of it, the part."""
    one, other = frozenset(scopes), frozenset(others)
    return (one & expanded(other)) | (other & expanded(one))


def within(
    role: Role, scopes: Iterable[str], *, is_operator: bool = False, owns_project: bool = False
) -> frozenset[str]:
    """The part of `scopes` that `role` confers, or owning some project: what a credential of its
    holder may be given."""
    return frozenset(
        scope
        for scope in scopes
        if _confers(SCOPES_OF[role], scope, is_operator)
        or (owns_project and scope in PROJECT_OWNER)
    )
