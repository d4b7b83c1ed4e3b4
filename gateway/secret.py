"""The one versioned secret that all gateways of an installation share, and what is derived from it:
keys that encrypt stored values (`Cipher`) and keys that hash them (`Peppers`).

Knows no key of a customer. Nothing is used as it stands in the file: each purpose has its own key,
so that one that leaks tells nothing of another. What was made under an older version of the secret
stays good while that version is in the file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SECRET_BYTES = 32
MAX_FILE_BYTES = 64 * 1024
SALT = b"tollgate/1"
NONCE_BYTES = 12


class SecretError(Exception):
    """The secret's file cannot be used; the text names it and never its content."""


class UnknownSecret(Exception):
    """The value was sealed under a secret that is no longer in the secret file."""


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

    def with_new_key(self) -> Self:
        """Return the secret with a fresh key behind the others, which nothing is made with yet."""
        return msgspec.structs.replace(self, keys=(*self.keys, _fresh_key()))

    def with_last_key_first(self) -> Self:
        return msgspec.structs.replace(self, keys=(self.keys[-1], *self.keys[:-1]))

    def write(self, path: Path) -> None:
        """Put it in the place of the file at `path`, whole and on disk. Raises: SecretError."""
        try:
            place = path.resolve(strict=True)
            beside = _write_beside(self, place)
            beside.chmod(stat.S_IMODE(place.stat().st_mode))
            beside.rename(place)
            sync_folder(place.parent)
        except OSError as error:
            raise SecretError(f"secret_key_file: {path}: {error.strerror}") from None

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


def _fresh_key() -> SecretKey:
    content = base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    return SecretKey(id=secrets.token_hex(4), secret=content)


def _create(path: Path) -> None:
    """Write the secret beside and link it into place: the name never stands for half a file."""
    beside = _write_beside(Secret(version=1, keys=(_fresh_key(),)), path)
    try:
        try:
            os.link(beside, path)
        except FileExistsError:
            return  # another gateway was faster, and its secret is whole
        sync_folder(path.parent)
    finally:
        beside.unlink()


def _write_beside(secret: Secret, path: Path) -> Path:
    """Write the whole file, on disk, for this user only. Nothing is left of one that fails."""
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(secret)) + b"\n")
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        beside.unlink()
        raise
    return beside


def sync_folder(folder: Path) -> None:
    """Make a new name in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_secret(prefix: str = "") -> str:
    """Return 256 random bits, URL-safe."""
    return prefix + secrets.token_urlsafe(SECRET_BYTES)


class Ciphertext(msgspec.Struct, frozen=True, kw_only=True):
    secret_id: str
    data: bytes


class Cipher:
    """Encrypts values that are stored and must be read back: AES-256-GCM.

    `context` binds a ciphertext to its row, so that it cannot be moved to another one.
    """

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._keys: Mapping[str, AESGCM] = {
            key.id: AESGCM(key.derive(purpose)) for key in secret.keys
        }
        self._current = secret.current.id

    def seal(self, plain: bytes, context: bytes) -> Ciphertext:
        nonce = secrets.token_bytes(NONCE_BYTES)
        data = nonce + self._keys[self._current].encrypt(nonce, plain, context)
        return Ciphertext(secret_id=self._current, data=data)

    @property
    def current_id(self) -> str:
        """The version that new things are sealed under."""
        return self._current

    def knows(self, secret_id: str) -> bool:
        return secret_id in self._keys

    def open(self, data: bytes, context: bytes, secret_id: str) -> bytes:
        """Raises: UnknownSecret; cryptography's InvalidTag if the content was tampered with."""
        if secret_id not in self._keys:
            raise UnknownSecret(secret_id)
        nonce, sealed = data[:NONCE_BYTES], data[NONCE_BYTES:]
        return self._keys[secret_id].decrypt(nonce, sealed, context)

    def seal_text(self, plain: bytes, context: bytes) -> str:
        """Return the sealed value as URL-safe text, which `open_text` reads."""
        sealed = self.seal(plain, context)
        return f"{sealed.secret_id}.{base64.urlsafe_b64encode(sealed.data).decode()}"

    def open_text(self, text: str, context: bytes) -> bytes:
        """Raises: ValueError for a text that was not sealed here, for this context."""
        secret_id, _, data = text.rpartition(".")
        try:
            sealed = base64.b64decode(data, altchars=b"-_", validate=True)
            return self.open(sealed, context, secret_id)
        except (InvalidTag, UnknownSecret):
            raise ValueError("not sealed here") from None


class Peppers:
    """The peppers of one purpose, the current one first. They hash random secrets for Postgres,
    which never sees them: HMAC-SHA256.

    It is for values with 256 random bits; a password, which can be guessed, needs `passwords`. Each
    hash names its pepper.
    """

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
