"""Hashes random secrets for Postgres: HMAC-SHA256 under a key (pepper) that it never sees.

It is for values with 256 random bits; a password, which can be guessed, needs `passwords`. Each
hash names its pepper, so that hashes from before a rotation of the installation's secret stay good.
"""

from __future__ import annotations

import hmac
import secrets

from gateway.secret import Secret

SECRET_BYTES = 32


def random_secret(prefix: str = "") -> str:
    """Return 256 random bits, URL-safe."""
    return prefix + secrets.token_urlsafe(SECRET_BYTES)


class Peppers:
    """The peppers for one purpose, the current one first."""

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._keys = tuple((key.id, key.derive(purpose)) for key in secret.keys)

    def hash(self, value: str) -> str:
        """Return what to store: `pepper id:HMAC` in lower-case hex."""
        return self.hashes(value)[0]

    def hashes(self, value: str) -> list[str]:
        """Return the hash of `value` under each pepper, for a look-up by index."""
        data = value.encode()
        return [f"{key_id}:{hmac.digest(key, data, 'sha256').hex()}" for key_id, key in self._keys]

    def matches(self, value: str, stored: str) -> bool:
        """Compare in constant time: it does not tell where two hashes differ."""
        found = [hmac.compare_digest(each, stored) for each in self.hashes(value)]
        return any(found)
