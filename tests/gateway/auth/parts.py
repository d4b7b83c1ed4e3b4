"""Holds what the tests of tokens share: a clock that a test moves, a secret, the time it all
begins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.oauth.tokens.rfc9068_access_token import AccessClaims
from gateway.auth.oauth.tokens.signing_keys import PURPOSE, KeyRing
from gateway.secret import Cipher
from tests.gateway.a_secret import a_secret

NOW = 1_800_000_000.0


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


ISSUER = "http://127.0.0.1:8000"


def claims_of(**changes: Any) -> AccessClaims:
    plain = {
        "iss": ISSUER,
        "sub": "user_1",
        "aud": f"{ISSUER}/v1",
        "client_id": "client_1",
        "jti": "jti-1",
        "iat": int(NOW),
        "exp": int(NOW) + 600,
        "scope": "inference",
        "org_id": "org_1",
        "project_id": "proj_1",
    }
    return AccessClaims(**(plain | changes))


@asynccontextmanager
async def open_ring(db: AsyncEngine, clock: Clock) -> AsyncIterator[KeyRing]:
    ring = KeyRing(db, Cipher(a_secret("one"), PURPOSE), clock=clock)
    await ring.start()
    yield ring
    await ring.close()
