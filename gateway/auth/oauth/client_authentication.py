"""Authenticates clients (RFC 6749, section 2.3): by a secret in the header or body, by an
assertion, or by their id alone (public clients). Each uses the method that it registered.

Secrets have 256 random bits; guesses are bounded all the same, per client and address, so that
nobody locks out a client at another address. A client at the same address is not locked out either:
a secret that was right before is checked however many guesses failed. Assertions and public clients
have no secret to guess, and are not counted. All processes share the count (`throttle`); each has
its own too, for while Redis is away.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import unquote_plus

import msgspec
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.errors import AuthUnavailable
from gateway.auth.login.throttle import FailureCount, Throttle
from gateway.auth.oauth import rfc7523_assertion
from gateway.auth.oauth.clients.metadata import SECRET_METHODS
from gateway.auth.oauth.clients.store import Client, Clients
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError, invalid_client, too_often, unavailable
from gateway.auth.oauth.rfc7523_assertion import FetchKeys
from gateway.db import DATABASE_ERRORS
from gateway.lru import Lru

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_FAILURES = 10
FAILURE_WINDOW_S = 60.0
"""The window of MAX_FAILURES, per process, client and address; `throttle.FAILED` bounds all
processes."""
SHARED_TIMEOUT_S = 0.25
"""A token request waits for Redis no longer than this."""
KIND = "client"
MAX_COUNTED = 16_384
MAX_KNOWN = 16_384
"""The maximum of right secrets that each process remembers."""
MAX_HEADER_BYTES = 8 * 1024


class PresentedCredentials(msgspec.Struct, frozen=True):
    method: str
    client_id: str
    secret: str = ""
    """The secret, or the assertion."""

    def __repr__(self) -> str:
        return f"PresentedCredentials({self.method})"


class ClientFailures:
    """Counts failures by client and address, in windows of FAILURE_WINDOW_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Lru[tuple[str, str], tuple[float, int]] = Lru(MAX_COUNTED)

    def wait_s(self, client_id: str, address: str) -> int:
        """Return the seconds until the next attempt may come."""
        started, count = self._current(client_id, address)
        if count < MAX_FAILURES:
            return 0
        return max(1, round(started + FAILURE_WINDOW_S - self._clock()))

    def count(self, client_id: str, address: str) -> None:
        started, count = self._current(client_id, address)
        self._counts.put((client_id, address), (started, count + 1))

    def forget(self, client_id: str, address: str) -> None:
        self._counts.drop((client_id, address))

    def _current(self, client_id: str, address: str) -> tuple[float, int]:
        found = self._counts.get((client_id, address))
        if found is None or self._clock() - found[0] >= FAILURE_WINDOW_S:
            return self._clock(), 0
        return found


class ClientAuthentication:
    """The client authentication of one process.

    `db`: the system pool. `audiences`: the valid `aud` of assertions. `clock`: Unix seconds;
    `monotonic`: monotonic seconds, for windows.
    """

    def __init__(
        self,
        clients: Clients,
        *,
        db: AsyncEngine,
        throttle: Throttle,
        audiences: frozenset[str],
        fetch: FetchKeys | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = clients
        self._db = db
        self._throttle = throttle
        self._throttle_fails = False
        self._audiences = audiences
        self._fetch = fetch
        self._clock = clock
        self._failures = ClientFailures(monotonic)
        self._known: Lru[tuple[str, str], bool] = Lru(MAX_KNOWN)
        """Secrets that were right, by client and hash."""

    async def authenticate(self, form: Form, authorization: str | None, address: str) -> Client:
        """Raises: OAuthError."""
        presented = read(form, authorization)
        try:
            client = await self._clients.find(presented.client_id)
            if client is None:
                raise invalid_client("unknown client")
            if presented.method != client.token_endpoint_auth_method:
                raise invalid_client("another method than the registered one")
            if presented.method == "private_key_jwt":
                await rfc7523_assertion.verify(
                    presented.secret,
                    client,
                    db=self._db,
                    audiences=self._audiences,
                    now=self._clock(),
                    fetch=self._fetch,
                )
            elif presented.method in SECRET_METHODS:
                await self._check_secret(client.id, presented.secret, address)
        except (*DATABASE_ERRORS, AuthUnavailable) as error:
            raise unavailable(type(error).__name__) from error
        return client

    async def _check_secret(self, client_id: str, secret: str, address: str) -> None:
        """Raises: OAuthError."""
        digest = self._clients.peppers.hash(secret)
        counting = self._throttle.failures(KIND, account=client_id, address=address)
        shared = await self._shared(counting) or FailureCount()
        wait_s = max(self._failures.wait_s(client_id, address), math.ceil(shared.wait_s))
        if wait_s > 0 and not await self._was_right(client_id, digest):
            raise too_often("too many failures", retry_after_s=wait_s)
        now = datetime.fromtimestamp(self._clock(), UTC)
        if not await self._clients.has_secret(client_id, secret, now=now):
            await self._failed(client_id, digest, address)
            raise invalid_client("wrong secret")
        await self._remember(client_id, digest)
        if wait_s == 0 and shared.count > 0:
            self._failures.forget(client_id, address)
            forgotten = self._throttle.forget(KIND, account=client_id, address=address)
            await self._shared(forgotten)

    async def _was_right(self, client_id: str, digest: str) -> bool:
        """True if the secret was right before, here or in another process."""
        if self._known.get((client_id, digest)) is not None:
            return True
        found = await self._shared(self._throttle.knows(KIND, client_id, digest))
        return found is True

    async def _remember(self, client_id: str, digest: str) -> None:
        if self._known.get((client_id, digest)) is None:
            self._known.put((client_id, digest), True)
            await self._shared(self._throttle.know(KIND, client_id, digest))

    async def _failed(self, client_id: str, digest: str, address: str) -> None:
        """Count a failure, and forget that the secret was right: it may have been rotated."""
        self._known.drop((client_id, digest))
        self._failures.count(client_id, address)
        await self._shared(self._throttle.unknow(KIND, client_id, digest))
        await self._shared(self._throttle.failed(KIND, account=client_id, address=address))

    async def _shared(self, operation: Awaitable[T]) -> T | None:
        """Await an operation on the shared counters; None if Redis does not answer."""
        try:
            async with asyncio.timeout(SHARED_TIMEOUT_S):
                found = await operation
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            if not self._throttle_fails:
                log.warning(
                    "failed client authentications are counted per process only (%s)",
                    type(error).__name__,
                )
            self._throttle_fails = True
            return None
        self._throttle_fails = False
        return found


def read(form: Form, authorization: str | None) -> PresentedCredentials:
    """Raises: OAuthError; a request must use one method (RFC 6749, 2.3)."""
    named = form.get("client_id")
    presented: list[PresentedCredentials] = []
    if authorization:
        presented.append(_basic(authorization))
    if form.get("client_secret") is not None:
        presented.append(
            PresentedCredentials(
                "client_secret_post", form.require("client_id"), form.require("client_secret")
            )
        )
    if form.get("client_assertion") is not None or form.get("client_assertion_type") is not None:
        if form.get("client_assertion_type") != rfc7523_assertion.TYPE:
            raise invalid_client("another type of assertion")
        assertion = form.require("client_assertion")
        presented.append(
            PresentedCredentials(
                "private_key_jwt", rfc7523_assertion.stated_client(assertion), assertion
            )
        )
    if not presented:
        if named is None:
            raise invalid_client("no client")
        return PresentedCredentials("none", named)
    if len(presented) > 1:
        raise OAuthError("invalid_request", "two authentication methods")
    if named is not None and named != presented[0].client_id:
        raise OAuthError("invalid_request", "two clients")
    return presented[0]


def _basic(authorization: str) -> PresentedCredentials:
    """Read Basic credentials (RFC 6749, 2.3.1: both parts are form-encoded, then RFC 7617)."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic" or len(authorization) > MAX_HEADER_BYTES:
        raise invalid_client("another scheme")
    try:
        pair = base64.b64decode(encoded.strip(), validate=True).decode()
    except ValueError as error:
        raise invalid_client("not base64") from error
    client_id, colon, secret = pair.partition(":")
    if not colon:
        raise invalid_client("no secret")
    return PresentedCredentials(
        "client_secret_basic", unquote_plus(client_id), unquote_plus(secret)
    )
