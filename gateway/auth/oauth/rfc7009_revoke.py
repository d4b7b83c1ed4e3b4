"""Token revocation (RFC 7009), by the client that a token was issued to.

A refresh token is revoked with its grant (section 2.1), an access token with the tokens that were
exchanged from it. Unknown and expired tokens count as revoked (section 2.2).
"""

from __future__ import annotations

from gateway.audit.log import Actor
from gateway.auth.bearer.revocations import announcing, end_grant
from gateway.auth.errors import AuthUnavailable, InvalidToken
from gateway.auth.oauth.authority import Authority
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError, unavailable
from gateway.auth.oauth.tokens import rfc9068_access_token
from gateway.db import DATABASE_ERRORS
from gateway.tenancy.errors import ChangeNotAnnounced

REVOKED_BY_CLIENT = "revoked_by_client"


async def revoke(authority: Authority, form: Form, client: Client, actor: Actor) -> None:
    """Revoke a token: it is refused within a second of the return. Raises: OAuthError."""
    token = form.require("token")
    try:
        async with announcing(authority.redis, clock=authority.clock) as announcement:
            async with authority.db.begin() as conn:
                held = await authority.refresh_tokens.find(conn, token, client_id=None)
                if held is not None:
                    _check_owner(held.client_id, client)
                    await end_grant(
                        conn,
                        announcement,
                        org_id=held.org_id,
                        grant_id=held.grant_id,
                        because=REVOKED_BY_CLIENT,
                        actor=actor,
                    )
                    return
                try:
                    claims = await rfc9068_access_token.read(
                        authority.keys, token, issuer=authority.issuer, now=authority.clock()
                    )
                except InvalidToken:
                    return
                _check_owner(claims.client_id, client)
                await announcement.revoke(
                    conn, org_id=claims.org_id, kind="token", subject=claims.jti
                )
    except ChangeNotAnnounced as error:
        raise unavailable("the revocation was not announced; it must be repeated") from error
    except (*DATABASE_ERRORS, AuthUnavailable) as error:
        raise unavailable(type(error).__name__) from error


def _check_owner(client_id: str, client: Client) -> None:
    if client_id != client.id:
        raise OAuthError("invalid_grant", "a token of another client")
