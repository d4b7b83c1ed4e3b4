"""Encrypts the records of a tier with AES-256-GCM, so that who can read its files reads no prompts.

    secret, of a file --HKDF--> key of a tier --HKDF, with the random id of a segment--> its key

Each record is encrypted under the key of its segment, with a nonce that counts what was encrypted
under that key. No nonce can come twice under one key: an id is drawn for each segment that is
begun, and only who began it writes to it; what is found at a start is never appended to.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from engine.errors import ConfigError
from engine.tiers.segments import NONCE_BYTES, TAG_BYTES

KEY_BYTES = 32
MAX_RECORDS = 1 << 32
"""NIST SP 800-38D allows so many under one key with nonces drawn at random; counted ones are safer
still."""
MAX_FILE_BYTES = 4096

_OF_THREAD = threading.local()


class SegmentCipher:
    """The cipher of one segment. Encrypting is for one thread; decrypting is thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._num_encrypted = 0

    def encrypt(self, payload: memoryview, about: bytes) -> tuple[bytes, bytes]:
        """Encrypt in place, bound to `about`. Return the nonce and the tag."""
        assert self._num_encrypted < MAX_RECORDS
        nonce = self._num_encrypted.to_bytes(NONCE_BYTES, "little")
        self._num_encrypted += 1
        sealed = _scratch(len(payload))
        self._aead.encrypt_into(nonce, payload, about, sealed)
        payload[:] = sealed[:-TAG_BYTES]
        return nonce, bytes(sealed[-TAG_BYTES:])

    def decrypt(self, payload: memoryview, about: bytes, nonce: bytes, tag: bytes) -> bool:
        """Undo `encrypt`. False where anything is not as it was then; the payload is of no use."""
        sealed = _scratch(len(payload))
        sealed[:-TAG_BYTES] = payload
        sealed[-TAG_BYTES:] = tag
        try:
            self._aead.decrypt_into(nonce, sealed, about, payload)
        except InvalidTag:
            return False
        return True


class TierKey:
    """The key that those of segments are derived from."""

    def __init__(self, secret: bytes) -> None:
        """secret: at least KEY_BYTES that nobody can guess."""
        assert len(secret) >= KEY_BYTES
        self._key = _derive(secret, salt=None, purpose=b"tollgate kv tier")
        named = _derive(secret, salt=None, purpose=b"tollgate kv tier name")
        self.name = hashlib.blake2b(named, digest_size=16).digest()
        """Tells keys apart, and nothing of them."""

    @classmethod
    def read(cls, path: Path) -> TierKey:
        """Read the secret, once: the file may be a pipe. Raises ConfigError, which says nothing of
        what is in it."""
        try:
            with path.open("rb") as file:
                secret = file.read(MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError(f"kv_key_file {path}: {error.strerror}") from error
        if len(secret) < KEY_BYTES:
            raise ConfigError(
                f"kv_key_file {path} has {len(secret)} bytes; a key takes {KEY_BYTES} at least"
            )
        return cls(secret)

    def __repr__(self) -> str:
        return f"TierKey({self.name.hex()})"

    def layout_of(self, layout: bytes) -> bytes:
        """Return the name of blocks of a layout under this key: what another wrote is not seen."""
        return hashlib.blake2b(layout + self.name, digest_size=len(layout)).digest()

    def cipher_of(self, segment_id: bytes) -> SegmentCipher:
        return SegmentCipher(_derive(self._key, salt=segment_id, purpose=b"tollgate kv segment"))


def _scratch(payload_bytes: int) -> memoryview:
    """Return memory of this thread: the library does not write to what it reads."""
    size = payload_bytes + TAG_BYTES
    memory: memoryview | None = getattr(_OF_THREAD, "memory", None)
    if memory is None or len(memory) != size:
        memory = _OF_THREAD.memory = memoryview(bytearray(size))
    return memory


def _derive(secret: bytes, *, salt: bytes | None, purpose: bytes) -> bytes:
    """Derive a key by HKDF-SHA256 (RFC 5869)."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=purpose).derive(secret)
