"""Envelope encryption: values under a key of their own, that key under the installation's secret.

A new installation secret wraps the small keys anew and touches no value; of what is deleted, the
only key goes with the row. Both parts are bound to the row by `context`.
"""

from __future__ import annotations

import secrets

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.secret import NONCE_BYTES, Cipher, Secret, UnknownSecret

PURPOSE = "upstream-credential-keys"
KEY_BYTES = 32


class Unreadable(Exception):
    """Sealed under a secret that is no longer in the file, tampered with, or another row's."""


class SealedEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    sealed: bytes
    wrapped_key: bytes
    secret_id: str
    """The id of the installation's secret under which the key is wrapped."""


class Vault:
    def __init__(self, secret: Secret) -> None:
        self._wrapping = Cipher(secret, PURPOSE)
        self.current_secret_id = secret.current.id

    def seal(self, plain: bytes, context: bytes) -> SealedEnvelope:
        key, nonce = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES)
        wrapped = self._wrapping.seal(key, b"key\0" + context)
        return SealedEnvelope(
            sealed=nonce + AESGCM(key).encrypt(nonce, plain, b"values\0" + context),
            wrapped_key=wrapped.data,
            secret_id=wrapped.secret_id,
        )

    def open(self, envelope: SealedEnvelope, context: bytes) -> bytes:
        """Raises: Unreadable."""
        key = self._key(envelope, context)
        nonce, sealed = envelope.sealed[:NONCE_BYTES], envelope.sealed[NONCE_BYTES:]
        try:
            return AESGCM(key).decrypt(nonce, sealed, b"values\0" + context)
        except (InvalidTag, ValueError):
            raise Unreadable("the values") from None

    def rewrap(self, envelope: SealedEnvelope, context: bytes) -> SealedEnvelope:
        """Seal the key of the same values under the current secret. Raises: Unreadable."""
        wrapped = self._wrapping.seal(self._key(envelope, context), b"key\0" + context)
        return msgspec.structs.replace(
            envelope, wrapped_key=wrapped.data, secret_id=wrapped.secret_id
        )

    def _key(self, envelope: SealedEnvelope, context: bytes) -> bytes:
        try:
            return self._wrapping.open(envelope.wrapped_key, b"key\0" + context, envelope.secret_id)
        except (UnknownSecret, InvalidTag, ValueError) as error:
            raise Unreadable(type(error).__name__) from None
