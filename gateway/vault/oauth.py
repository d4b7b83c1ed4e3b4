"""The gateway as an OAuth client of its upstreams: consent, tokens that do not end, exchanges.

A token is refreshed by one worker, behind the lock of its row: an authorization server that rotates
refresh tokens takes a second use of one for a theft, and ends the consent (RFC 9700, 4.14.2). In a
process one call asks for all that wait, and goes on when they leave: what it gets is the only token
left. What is sent is the upstream's own credential, or what we have signed for it; the one that the
caller has shown us is not known here.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from authlib.common.urls import add_params_to_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.tasks import SharedTasks
from gateway.audit.log import Actor
from gateway.auth.federation.external_login import digest
from gateway.db import tenant
from gateway.lru import Lru
from gateway.secret import Cipher, random_secret
from gateway.vault.credentials import (
    OpenCredential,
    UpstreamCredential,
    mark_refused,
    open_credential,
    put_credential,
    refresh_credential,
)
from gateway.vault.envelope import Vault
from gateway.vault.errors import ConsentNeeded, IssuerUnavailable, NoCredential, SignInRefused
from gateway.vault.token_endpoint import TokenEndpoint, TokenRefusal, TokenResponse, UpstreamClient

STATE_PURPOSE = "upstream-consent-state"
SIGN_IN_S = 600.0
"""A sign-in may take this long, from the first redirect to the last."""
REFRESH_BEFORE_S = 60.0
"""A token that ends within it is not begun with."""
EXCHANGED_S = 300.0
"""An exchanged token is used again for this long at most."""
MAX_EXCHANGED = 10_000
MAX_REFRESHING = 256
"""Tokens that are asked for at once, by one process."""
MAX_AT_ONCE = 4
"""This many of the requests for tokens may hold a connection to Postgres."""
MAX_STATE_LENGTH = 6_144
MAX_CODE_LENGTH = 2_048

Mint = Callable[[], Awaitable[str]]
"""Signs a JWT about the user, for the upstream's authorization server alone."""


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """A consent that was begun, as its state holds it: by whom, for whom."""

    org_id: str
    upstream: str
    user_id: str | None
    """The user who will own the credential; None: the tenant owns it."""
    began: str
    code_verifier: str
    browser: str
    """The digest of the browser's cookie."""
    expires_at: float
    client: UpstreamClient | None = None
    """The client that asks, if it is recorded nowhere but in this state."""
    needs_iss: bool = False
    """Its issuer says that it always names itself (RFC 9207)."""

    def __repr__(self) -> str:
        return f"Consent({self.upstream!r})"


class UpstreamToken(msgspec.Struct, frozen=True, kw_only=True):
    access_token: str
    credential_set: str

    def __repr__(self) -> str:
        return f"UpstreamToken({self.credential_set!r})"


class Consents:
    """Begin and end of a consent. `redirect_uri`: ours, registered with each upstream.
    `wall_clock`: Unix seconds."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        vault: Vault,
        endpoint: TokenEndpoint,
        states: Cipher,
        redirect_uri: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._vault = vault
        self._endpoint = endpoint
        self._states = states
        self._redirect_uri = redirect_uri
        self._wall_clock = wall_clock

    def start(
        self,
        client: UpstreamClient,
        *,
        org_id: str,
        upstream: str,
        user_id: str | None,
        began: str,
        browser: str,
        carries_client: bool = False,
        needs_iss: bool = False,
    ) -> str:
        """Return where to send the browser with the cookie `browser`, in which `began` (an id) is
        signed in. carries_client: sealed in the state, for `finish`. Raises: SignInRefused."""
        if client.authorization_endpoint is None:
            raise SignInRefused(upstream, "it has no authorization endpoint")
        consent = Consent(
            org_id=org_id,
            upstream=upstream,
            user_id=user_id,
            began=began,
            code_verifier=random_secret(),
            browser=digest(browser),
            expires_at=self._wall_clock() + SIGN_IN_S,
            client=client if carries_client else None,
            needs_iss=needs_iss,
        )
        parameters = {
            "response_type": "code",
            "client_id": client.client_id,
            "redirect_uri": self._redirect_uri,
            "state": self._states.seal_text(msgspec.json.encode(consent), STATE_PURPOSE.encode()),
            "code_challenge": create_s256_code_challenge(consent.code_verifier),
            "code_challenge_method": "S256",
            "scope": client.scope,
            "resource": client.resource,
        }
        pairs = [(name, value) for name, value in parameters.items() if value is not None]
        url: str = add_params_to_uri(client.authorization_endpoint, pairs)
        return url

    def read(self, state: str, *, org_id: str, began: str, browser: str) -> Consent:
        """Read the consent of a state, before the client is known. Raises: SignInRefused, for one
        that was begun by somebody else, elsewhere or too long ago."""
        try:
            if len(state) > MAX_STATE_LENGTH:
                raise ValueError("too long")
            plain = self._states.open_text(state, STATE_PURPOSE.encode())
        except ValueError:
            raise SignInRefused("upstream", "a state that is not ours") from None
        consent = msgspec.json.decode(plain, type=Consent)
        same = consent.org_id == org_id and consent.began == began
        if not same or not hmac.compare_digest(consent.browser, digest(browser)):
            raise SignInRefused(consent.upstream, "begun elsewhere")
        if self._wall_clock() >= consent.expires_at:
            raise SignInRefused(consent.upstream, "begun too long ago")
        return consent

    async def finish(
        self,
        consent: Consent,
        client: UpstreamClient | None,
        answer: Mapping[str, str],
        actor: Actor,
    ) -> UpstreamCredential:
        """Redeem the code that came back with the browser, and keep the tokens. client: None where
        the state carries it.

        Raises: SignInRefused, IssuerUnavailable, InvalidField.
        """
        upstream = consent.upstream
        client = client or consent.client
        if client is None:
            raise SignInRefused(upstream, "nobody knows any more who asked")
        unsaid = None if consent.needs_iss else client.issuer
        if client.issuer is not None and answer.get("iss", unsaid) != client.issuer:
            raise SignInRefused(upstream, "an answer of another issuer")  # RFC 9207
        code = answer.get("code", "")
        if "error" in answer or not 1 <= len(code) <= MAX_CODE_LENGTH:
            raise SignInRefused(upstream, "it did not say yes")
        found = await self._endpoint.redeem(
            upstream,
            client,
            code=code,
            verifier=consent.code_verifier,
            redirect_uri=self._redirect_uri,
        )
        if isinstance(found, TokenRefusal):
            raise SignInRefused(upstream, f"its code is not taken: {found.error}")
        async with tenant(self._db, consent.org_id) as conn:
            return await put_credential(
                conn,
                self._vault,
                org_id=consent.org_id,
                upstream=upstream,
                user_id=consent.user_id,
                values=client.to_values() | tokens_to_values(found),
                actor=actor,
                kind="oauth",
                expires_at=ends_at(found, self._wall_clock()),
            )


class UpstreamTokens:
    """One per process; to be closed. `db`: the tenants' pool. `wall_clock`: Unix seconds."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        vault: Vault,
        endpoint: TokenEndpoint,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._vault = vault
        self._endpoint = endpoint
        self._wall_clock = wall_clock
        self._requests: SharedTasks[tuple[str, ...], UpstreamToken] = SharedTasks("upstream token")
        self._refresh_slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._exchanged: Lru[tuple[str, ...], tuple[UpstreamToken, float]] = Lru(MAX_EXCHANGED)

    async def close(self) -> None:
        """Wait for requests under way: each may bring the only token left."""
        await self._requests.wait()

    async def access_token(
        self, *, org_id: str, upstream: str, user_id: str | None, refused: str | None = None
    ) -> UpstreamToken:
        """The user's own or the tenant's, good for a while. refused: a token that the upstream has
        just answered 401 to; if it is still the one that is kept it is refreshed.

        Raises: NoCredential, ConsentNeeded, IssuerUnavailable, CannotOpen.
        """
        async with tenant(self._db, org_id) as conn:
            found = await open_credential(
                conn, self._vault, org_id=org_id, upstream=upstream, user_id=user_id
            )
        usable = self._usable(upstream, found, refused)
        if usable is not None:
            return usable
        assert found is not None
        credential = found.credential
        key = ("refresh", org_id, credential.id, refused or "")

        request = partial(self._refresh, org_id, upstream, credential.user_id, refused)
        try:
            return await self._once(key, upstream, request)
        except IssuerUnavailable:
            ends = credential.expires_at
            if refused is None and ends is not None and ends.timestamp() > self._wall_clock():
                return _token(credential, found.values["access_token"])  # it lasts a little yet
            raise

    async def exchanged(
        self,
        client: UpstreamClient,
        mint: Mint,
        *,
        org_id: str,
        upstream: str,
        user_id: str,
        refused: str | None = None,
    ) -> UpstreamToken:
        """A token that the upstream's server gives for what we sign about the user; kept for some
        minutes, or until it is `refused`.

        Raises: ConsentNeeded, IssuerUnavailable, what `mint` raises.
        """
        key = ("exchange", org_id, upstream, user_id, digest(repr(client.to_values())))
        known = self._exchanged.get(key)
        lasts = known is not None and self._wall_clock() < known[1]
        if known is not None and lasts and known[0].access_token != refused:
            return known[0]

        async def request() -> UpstreamToken:
            found = await self._endpoint.exchange(upstream, client, await mint())
            if isinstance(found, TokenRefusal):
                raise ConsentNeeded(upstream, f"it gives no token for the user: {found.error}")
            lives_s = min(found.expires_in or EXCHANGED_S, EXCHANGED_S + REFRESH_BEFORE_S)
            set_ = f"exchanged.{digest(repr(key))[:32]}"
            token = UpstreamToken(access_token=found.access_token, credential_set=set_)
            self._exchanged.put(key, (token, self._wall_clock() + lives_s - REFRESH_BEFORE_S))
            return token

        return await self._once(key, upstream, request)

    async def _once(
        self,
        key: tuple[str, ...],
        upstream: str,
        request: Callable[[], Coroutine[Any, Any, UpstreamToken]],
    ) -> UpstreamToken:
        """Request a token once for all callers that want it."""
        if key not in self._requests and len(self._requests) >= MAX_REFRESHING:
            raise IssuerUnavailable(upstream, "too many tokens are asked for already")
        return await self._requests.run(key, request)

    async def _refresh(
        self, org_id: str, upstream: str, user_id: str | None, refused: str | None
    ) -> UpstreamToken:
        """Refresh the token; an answer of the server is acted on once it is committed."""
        async with self._refresh_slots, tenant(self._db, org_id) as conn:
            found = await open_credential(
                conn, self._vault, org_id=org_id, upstream=upstream, user_id=user_id, lock=True
            )
            usable = self._usable(upstream, found, refused)
            if usable is not None:
                return usable  # another worker was faster
            assert found is not None
            credential, values = found.credential, dict(found.values)
            response = await self._endpoint.refresh(
                upstream, UpstreamClient.from_values(values), values["refresh_token"]
            )
            id_, version = credential.id, credential.version
            if isinstance(response, TokenResponse):
                await refresh_credential(
                    conn,
                    self._vault,
                    org_id=org_id,
                    credential_id=id_,
                    version=version,
                    values=values | tokens_to_values(response),
                    expires_at=ends_at(response, self._wall_clock()),
                )
            else:
                await mark_refused(conn, org_id=org_id, credential_id=id_, version=version)
        if isinstance(response, TokenRefusal):
            raise ConsentNeeded(upstream, f"its owner has to sign in there again: {response.error}")
        return _token(credential, response.access_token)

    def _usable(
        self, upstream: str, found: OpenCredential | None, refused: str | None
    ) -> UpstreamToken | None:
        """Return a token that is still good; None: it is to be refreshed, and can be.

        Raises: NoCredential, ConsentNeeded.
        """
        if found is None or found.credential.kind != "oauth":
            raise NoCredential(upstream, "nobody has signed in there")
        credential, values = found.credential, found.values
        if credential.refused_at is not None:
            raise ConsentNeeded(upstream, "its owner has to sign in there again")
        ends = credential.expires_at
        lasts = ends is None or ends.timestamp() - self._wall_clock() > REFRESH_BEFORE_S
        if lasts and values["access_token"] != refused:
            return _token(credential, values["access_token"])
        if "refresh_token" not in values:
            raise ConsentNeeded(upstream, "its token has ended, and there is none to refresh it")
        return None


def _token(credential: UpstreamCredential, access_token: str) -> UpstreamToken:
    return UpstreamToken(access_token=access_token, credential_set=credential.credential_set)


def tokens_to_values(tokens: TokenResponse) -> dict[str, str]:
    """A server that sends no new refresh token leaves the old one (RFC 6749, 6)."""
    values = {"access_token": tokens.access_token}
    return values | (
        {} if tokens.refresh_token is None else {"refresh_token": tokens.refresh_token}
    )


def ends_at(tokens: TokenResponse, now: float) -> datetime | None:
    if tokens.expires_in is None:
        return None
    return datetime.fromtimestamp(now, tz=UTC) + timedelta(seconds=tokens.expires_in)
