"""Encrypts values that are stored and must be read back: AES-256-GCM, under keys that are derived
from the installation's secret.

`context` binds a ciphertext to its row, so that it cannot be moved to another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.secret import Secret

NONCE_BYTES = 12


class UnknownSecret(Exception):
    """The value was sealed under a secret that is no longer in the secret file."""


class Ciphertext(msgspec.Struct, frozen=True, kw_only=True):
    secret_id: str
    data: bytes


class Cipher:
    def __init__(self, secret: Secret, purpose: str) -> None:
        self._keys: Mapping[str, AESGCM] = {
            key.id: AESGCM(key.derive(purpose)) for key in secret.keys
        }
        self._current = secret.current.id

    def seal(self, plain: bytes, context: bytes) -> Ciphertext:
        nonce = secrets.token_bytes(NONCE_BYTES)
        data = nonce + self._keys[self._current].encrypt(nonce, plain, context)
        return Ciphertext(secret_id=self._current, data=data)

    def knows(self, secret_id: str) -> bool:
        return secret_id in self._keys

    def open(self, data: bytes, context: bytes, secret_id: str) -> bytes:
        """Raises: UnknownSecret; cryptography's InvalidTag if the content was tampered with."""
        if secret_id not in self._keys:
            raise UnknownSecret(secret_id)
        nonce, sealed = data[:NONCE_BYTES], data[NONCE_BYTES:]
        return self._keys[secret_id].decrypt(nonce, sealed, context)
