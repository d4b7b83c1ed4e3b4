"""Token exchange (RFC 8693): an agent acts for a user, with a token of its own that says so.

What goes out is never more than what came in: fewer scopes or the same, the same resources or some
of them, no later an end, no refresh token. It dies with what it came from: it carries the ids of
the grant, of the tokens behind it, and of the clients that had those.
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
    token_type,
)
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError
from gateway.auth.oauth.tokens.rfc9068_access_token import (
    MAX_ACTORS,
    AccessClaims,
    ActorClaim,
    Confirmation,
    as_audience,
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
        raise OAuthError("unauthorized_client", "an agent is known to its org")
    if form.get("requested_token_type") not in (None, *TYPES):
        raise OAuthError("invalid_request", "another type of token")
    check_binding(client, jkt)
    subject = await _verified(authority, form, "subject_token")
    if subject.org_id != client.org_id:
        raise OAuthError("invalid_grant", "of another org")
    claims = await _conferred(authority, await _claims(authority, form, client, subject, jkt))
    access_token = sign(authority.keys.ring, claims)
    return IssuedTokens(
        access_token=access_token,
        token_type=token_type(jkt),
        expires_in=claims.exp - claims.iat,
        scope=claims.scope,
        issued_token_type=ACCESS_TOKEN,
    )


async def _claims(
    authority: Authority, form: Form, client: Client, subject: AccessClaims, jkt: str | None
) -> AccessClaims:
    asked = [*form.all("resource"), *form.all("audience")]
    resources = authority.narrowed_resources(asked, sorted(subject.audiences), subject.org_id)
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
        cnf=None if jkt is None else Confirmation(jkt=jkt),
    )


async def _conferred(authority: Authority, claims: AccessClaims) -> AccessClaims:
    """Raises: OAuthError where someone is gone whom they name, or who acts: a client whose service
    account is, acts for nobody."""
    try:
        async with authority.db.connect() as conn:
            return within_role(claims, await find_principal(conn, claims))
    except RevokedToken as error:
        raise OAuthError("invalid_grant", "someone is gone") from error


async def _actor(
    authority: Authority, form: Form, client: Client, subject: AccessClaims
) -> tuple[ActorClaim, dict[str, int]]:
    """Return who acts now, in front of who acted before, and the actor's token with its end, if one
    was shown: it must be the client's own, since nobody else could speak for it."""
    sub, bound = client.service_account_id or client.id, {}
    if form.get("actor_token") is not None:
        shown = await _verified(authority, form, "actor_token")
        if shown.client_id != client.id or shown.org_id != client.org_id or shown.act is not None:
            raise OAuthError("invalid_grant", "the actor is not the client")
        sub, bound = shown.sub, {shown.jti: shown.exp}
    elif form.get("actor_token_type") is not None:
        raise OAuthError("invalid_request", "an actor's type and no actor")
    depth, before = 1, subject.act
    while before is not None:
        depth, before = depth + 1, before.act
    if depth > MAX_ACTORS:
        raise OAuthError("invalid_grant", "too many actors")
    return ActorClaim(sub=sub, act=subject.act), bound


async def _verified(authority: Authority, form: Form, name: str) -> AccessClaims:
    if form.require(f"{name}_type") not in TYPES:
        raise OAuthError("invalid_request", "another type of token")
    try:
        claims = await authority.access_tokens.verify(form.require(name))
    except InvalidToken as error:
        raise OAuthError("invalid_grant", f"{name}: {error}") from error
    if claims.cnf is not None:
        raise OAuthError("invalid_grant", "bound to a key that was not shown")
    return claims
