"""Token exchange (RFC 8693): an agent acts for a user, with a token of its own that says so.

The issued token never allows more than the subject token: no further scopes or resources, no later
expiry, no refresh token. It is revoked with it: it carries the ids of the grant, of the tokens that
it was derived from, and of their clients.
"""

from __future__ import annotations

import msgspec

from gateway import permissions as policy
from gateway.auth.bearer.subjects import find_principal, within_role
from gateway.auth.errors import InvalidToken, RevokedToken
from gateway.auth.oauth.authority import (
    Authority,
    IssuedTokens,
    check_binding,
    expiry,
    narrowed_scopes,
)
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError
from gateway.auth.oauth.tokens.rfc9068_access_token import (
    MAX_ACTORS,
    AccessClaims,
    ActorClaim,
    as_audience,
    confirmation,
    sign,
    token_id,
)

ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
JWT = "urn:ietf:params:oauth:token-type:jwt"
TYPES = (ACCESS_TOKEN, JWT)


async def exchange(
    authority: Authority, form: Form, client: Client, jkt: str | None
) -> IssuedTokens:
    """Raises: OAuthError, AuthUnavailable."""
    if not client.confidential or client.org_id is None:
        raise OAuthError("unauthorized_client", "a public client, or one without an org")
    if form.get("requested_token_type") not in (None, *TYPES):
        raise OAuthError("invalid_request", "an unsupported requested_token_type")
    check_binding(client, jkt)
    subject = await _verified(authority, form, "subject_token")
    if subject.org_id != client.org_id:
        raise OAuthError("invalid_grant", "a subject token of another org")
    claims = await _checked(authority, await _claims(authority, form, client, subject, jkt))
    access_token = sign(authority.keys.ring, claims)
    return IssuedTokens.of(claims, access_token, issued_token_type=ACCESS_TOKEN)


async def _claims(
    authority: Authority, form: Form, client: Client, subject: AccessClaims, jkt: str | None
) -> AccessClaims:
    requested = [*form.all("resource"), *form.all("audience")]
    resources = authority.narrowed_resources(requested, sorted(subject.audiences), subject.org_id)
    allowed = policy.common(subject.scopes, client.scopes)
    actor, bound = await _actor(authority, form, client, subject)
    now = authority.clock()
    return msgspec.structs.replace(
        subject,
        aud=as_audience(resources),
        client_id=client.id,
        jti=token_id(),
        iat=int(now),
        exp=expiry(now, subject.exp, *bound.values()),
        scope=" ".join(narrowed_scopes(form.get("scope"), allowed)),
        derived_from=[*subject.derived_from, subject.jti, *bound],
        passed_through=[*subject.passed_through, subject.client_id],
        act=actor,
        cnf=confirmation(jkt),
    )


async def _checked(authority: Authority, claims: AccessClaims) -> AccessClaims:
    """Return the claims with the scopes that the subject still has.

    Raises: OAuthError if a user, client, ... that they name is gone, or an actor's service account.
    """
    try:
        async with authority.db.connect() as conn:
            return within_role(claims, await find_principal(conn, claims))
    except RevokedToken as error:
        raise OAuthError("invalid_grant", "a user, client or project is gone") from error


async def _actor(
    authority: Authority, form: Form, client: Client, subject: AccessClaims
) -> tuple[ActorClaim, dict[str, int]]:
    """Return the `act` claim, with the client before earlier actors, and the id and expiry of the
    actor token, if there is one: it must be the client's own."""
    sub, bound = client.service_account_id or client.id, {}
    if form.get("actor_token") is not None:
        actor = await _verified(authority, form, "actor_token")
        if actor.client_id != client.id or actor.org_id != client.org_id or actor.act is not None:
            raise OAuthError("invalid_grant", "the actor is not the client")
        sub, bound = actor.sub, {actor.jti: actor.exp}
    elif form.get("actor_token_type") is not None:
        raise OAuthError("invalid_request", "actor_token_type without actor_token")
    depth, before = 1, subject.act
    while before is not None:
        depth, before = depth + 1, before.act
    if depth > MAX_ACTORS:
        raise OAuthError("invalid_grant", "too many actors")
    return ActorClaim(sub=sub, act=subject.act), bound


async def _verified(authority: Authority, form: Form, name: str) -> AccessClaims:
    if form.require(f"{name}_type") not in TYPES:
        raise OAuthError("invalid_request", f"an unsupported {name}_type")
    try:
        claims = await authority.access_tokens.verify(form.require(name))
    except InvalidToken as error:
        raise OAuthError("invalid_grant", f"{name}: {error}") from error
    if claims.cnf is not None:
        raise OAuthError("invalid_grant", f"{name}: bound to a key that was not proven")
    return claims
