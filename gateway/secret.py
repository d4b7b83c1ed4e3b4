"""The one versioned secret that all gateways of an installation share, and what is derived from it.

Knows no key of a customer. Nothing is used as it stands in the file: each purpose has its own key,
so that one that leaks tells nothing of another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal, Self

import msgspec

SECRET_BYTES = 32
MAX_FILE_BYTES = 64 * 1024
SALT = b"tollgate/1"


class SecretError(Exception):
    """The secret's file cannot be used; the text names it and never its content."""


class SecretKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. `secret`: base64 of at least `SECRET_BYTES` random bytes."""

    id: str
    secret: str

    def __repr__(self) -> str:
        return f"SecretKey(id={self.id!r})"

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for `purpose`: HKDF-SHA256 (RFC 5869), one block."""
        extracted = hmac.digest(SALT, base64.b64decode(self.secret), hashlib.sha256)
        return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)


class Secret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the secret's file. To rotate, put a new key first and keep the old ones behind
    it."""

    version: Literal[1]
    keys: tuple[SecretKey, ...]

    @property
    def current(self) -> SecretKey:
        """The key that new things are made with."""
        return self.keys[0]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises: SecretError."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            found = msgspec.json.decode(content, type=cls)
        except OSError as error:
            raise SecretError(f"secret_key_file: {path}: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise SecretError(f"secret_key_file: {path}: {error}") from None
        found._check(path)
        return found

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """The secret at `path`; made, whole and on disk, where there is none. Raises: SecretError.

        Of gateways that start at once on a shared folder one makes it and all read that one.
        """
        if not path.exists():
            try:
                _create(path)
            except OSError as error:
                raise SecretError(f"secret_key_file: {path}: {error.strerror}") from None
        return cls.load(path)

    def _check(self, path: Path) -> None:
        if not self.keys:
            raise SecretError(f"secret_key_file: {path}: keys: at least one is needed")
        if len({key.id for key in self.keys}) != len(self.keys):
            raise SecretError(f"secret_key_file: {path}: keys: an id stands there twice")
        for position, key in enumerate(self.keys):
            where = f"secret_key_file: {path}: keys[{position}].secret"
            try:
                length = len(base64.b64decode(key.secret, validate=True))
            except binascii.Error:
                raise SecretError(f"{where}: not base64") from None
            if length < SECRET_BYTES:
                raise SecretError(f"{where}: shorter than {SECRET_BYTES} bytes")


def _create(path: Path) -> None:
    """Write the secret beside and link it into place: the name never stands for half a file."""
    fresh_key = base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    fresh = Secret(version=1, keys=(SecretKey(id=secrets.token_hex(4), secret=fresh_key),))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(fresh)) + b"\n")
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(beside, path)
        except FileExistsError:
            return  # another gateway was faster, and its secret is whole
        sync_folder(path.parent)
    finally:
        beside.unlink()


def sync_folder(folder: Path) -> None:
    """Make a new name in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
