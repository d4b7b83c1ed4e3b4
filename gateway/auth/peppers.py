"""How a random secret stands in the database: as its HMAC-SHA256 under a key Postgres never sees.

Knows no table. For values with 256 random bits; a password, which can be guessed, needs
`passwords`. Each hash names its pepper, so that what was made before the installation's secret was
rotated stays good.
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
    """The keys for one purpose, the current one first."""

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._keys = tuple((key.id, key.derive(purpose)) for key in secret.keys)

    def hash(self, value: str) -> str:
        """Return what to store: `pepper id:HMAC` in lower-case hex."""
        return self.hashes(value)[0]

    def hashes(self, value: str) -> list[str]:
        """Return all that may be stored for `value`, for an index to look up."""
        data = value.encode()
        return [f"{key_id}:{hmac.digest(key, data, 'sha256').hex()}" for key_id, key in self._keys]

    def matches(self, value: str, stored: str) -> bool:
        """Compare in a time that does not tell where two hashes differ."""
        found = [hmac.compare_digest(each, stored) for each in self.hashes(value)]
        return any(found)
