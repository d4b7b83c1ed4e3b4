"""Resolves an access token that an external issuer signed to a `Principal`.

The hot path makes no query and no request to the issuer: a verified token is cached for a minute,
unless the tenant's rules change.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.auth.errors import AuthUnavailable, InvalidToken
from gateway.auth.federation.external_tokens import (
    UnverifiedToken,
    audiences,
    check_claims,
    issuer_of,
    read,
    texts_at,
    verify,
)
from gateway.auth.federation.issuer_directory import IssuerDirectory, ListedIssuer, Snapshot
from gateway.auth.federation.issuer_keys import IssuerKeys, LoginIssuerUnavailable
from gateway.auth.federation.issuers import Rules
from gateway.auth.resources import API_PATH
from gateway.lru import Lru
from gateway.permissions import within
from gateway.principal import Principal, Role
from gateway.tenancy.keys.restrictions import ModelPermissions

MAX_VERIFIED = 16_384
VERIFIED_S = 60.0
"""A signature is verified again after it: its key may have been withdrawn."""
STRENGTH: tuple[Role, ...] = ("owner", "admin", "developer", "billing", "reader")
HINT_LENGTH = 64


class VerifiedToken(msgspec.Struct, frozen=True):
    principal: Principal
    listed: ListedIssuer
    """The issuer as listed when the token was verified."""
    until: float
    """Unix seconds."""


class ExternalIssuers:
    """The external tokens that one process knows. `public_url`: our own issuer. `wall_clock`: Unix
    seconds."""

    def __init__(
        self,
        *,
        directory: IssuerDirectory,
        keys: IssuerKeys,
        public_url: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._keys = keys
        self._public_url = public_url
        self._wall_clock = wall_clock
        self._verified: Lru[bytes, VerifiedToken] = Lru(MAX_VERIFIED)

    def is_foreign(self, token: str) -> bool:
        """True if the token names another issuer than ours; nothing of it is verified."""
        return issuer_of(token) not in (None, self._public_url)

    async def authenticate(self, token: str, *, jkt: str | None = None) -> Principal:
        """Return the principal of a token. `jkt`: the thumbprint of the key that a DPoP proof came
        with; a token of another issuer cannot be bound to one.

        Raises: InvalidToken (an AuthError); AuthUnavailable.
        """
        if jkt is not None:
            raise InvalidToken("a token of another issuer cannot be used with DPoP")
        snapshot = await self._directory.snapshot()
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(digest)
        if known is not None and self._wall_clock() < known.until and is_unchanged(known, snapshot):
            return known.principal
        unverified = read(token)
        listed = choose(snapshot, unverified)
        rules = listed.issuer
        try:
            claims = await verified_claims(self._keys, rules, unverified)
        except LoginIssuerUnavailable as error:
            raise AuthUnavailable(str(error)) from error
        ends = check_claims(
            claims,
            issuer=rules.issuer,
            audience=rules.audience,
            leeway_s=rules.leeway_s,
            now=self._wall_clock(),
        )
        principal = self._to_principal(listed, claims, ends)
        until = min(ends, self._wall_clock() + VERIFIED_S)
        self._verified.put(digest, VerifiedToken(principal, listed, until))
        return principal

    def _to_principal(
        self, listed: ListedIssuer, claims: Mapping[str, Any], ends: float
    ) -> Principal:
        if "cnf" in claims:
            raise InvalidToken("bound to a key (cnf), which cannot be proved here")
        rules = listed.issuer
        role = role_of(rules, claims)
        if role is None:
            raise InvalidToken("no claim maps to a role")
        scopes = set(rules.scopes)
        if rules.scope_claim is not None:
            texts = texts_at(claims, rules.scope_claim)
            scopes &= {scope for text in texts for scope in text.split()}
        project = listed.project
        permitted = ModelPermissions(mode=project["models_mode"], models=project["models"] or [])
        return Principal(
            org_id=rules.org_id,
            org_name=listed.org_name,
            project_id=rules.project_id,
            project_name=project["name"],
            key_id=rules.id,
            key_hint=f"{rules.name}: {claims['sub']}"[:HINT_LENGTH],
            scopes=within(role, scopes, is_operator=listed.is_operator),
            project_plan=listed.project_plan,
            org_plan=listed.org_plan,
            model_plans=listed.model_plans,
            expires_at=ends,
            kind="token",
            role=role,
            client_id=rules.id,
            audiences=self._resources(rules.org_id),
            is_operator=listed.is_operator,
            suspended_by=listed.suspended_by,
            allowed_models=permitted.allowed,
            denied_models=permitted.denied,
            zero_retention=project["zero_retention"],
            store_content=project["store_content"],
        )

    def _resources(self, org_id: str) -> frozenset[str]:
        """Return the `aud` that a token of ours with the same rights would have (RFC 9068)."""
        base = self._public_url
        return frozenset({base, base + API_PATH, f"{base}/mcp/{org_id}"})


async def verified_claims(
    keys: IssuerKeys, rules: Rules, unverified: UnverifiedToken
) -> dict[str, Any]:
    """Verify the signature by a key of the issuer. Raises: InvalidToken, LoginIssuerUnavailable."""
    if unverified.alg not in rules.algorithms:
        raise InvalidToken("the tenant does not list its algorithm")
    key = await keys.find(rules.issuer, unverified.kid, unverified.alg)
    if key is None:
        raise InvalidToken("no such key")
    return verify(unverified, key)


def is_unchanged(known: VerifiedToken, snapshot: Snapshot) -> bool:
    """True if the tenant's rules are as they were when the token was verified."""
    current = snapshot.by_id.get(known.listed.issuer.id)
    return current is known.listed or current == known.listed


def choose(snapshot: Snapshot, unverified: UnverifiedToken) -> ListedIssuer:
    """Return the listed issuer, and so the tenant, that a token is for. Raises: InvalidToken."""
    claims = unverified.claims
    issuer = claims.get("iss")
    listed = snapshot.by_issuer.get(issuer, ()) if isinstance(issuer, str) else ()
    named = set(audiences(claims))
    fit = [each for each in listed if each.issuer.audience in named and fits(each.issuer, claims)]
    if len(fit) != 1:
        raise InvalidToken("no tenant, or more than one, lists its issuer and audience")
    return fit[0]


def fits(rules: Rules, claims: Mapping[str, Any]) -> bool:
    """True if the token has the claims that the tenant requires."""
    return all(
        claim in claims and type(claims[claim]) is type(value) and claims[claim] == value
        for claim, value in rules.required_claims.items()
    )


def role_of(rules: Rules, claims: Mapping[str, Any]) -> Role | None:
    """Return the strongest role that the claims map to, or else the default."""
    texts = [] if rules.role_claim is None else texts_at(claims, rules.role_claim)
    roles = {rules.roles[each] for each in texts if each in rules.roles}
    return next((role for role in STRENGTH if role in roles), rules.default_role)
