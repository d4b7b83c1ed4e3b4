"""Carries the keys of upstreams that operators gave by API: sealed under the installation's secret,
from Postgres through the settings to the worker that opens them.

A sealed key is bound to its model's name, and holds the places that it is for: whoever changes the
URL of an upstream does not get its key.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from cryptography.exceptions import InvalidTag

from gateway.secret import Cipher, Secret, SecretError, UnknownSecret
from gateway.settings.file import SettingsError, Strict

PURPOSE = "installation-settings"
"""`Secret` derives a key for it."""


class SealedKey(Strict, frozen=True, kw_only=True):
    """A sealed key as settings hold it. `data`: base64."""

    model: str
    secret_id: str
    data: str

    def __repr__(self) -> str:
        return f"SealedKey(model={self.model!r})"


class KeyContent(msgspec.Struct, frozen=True, kw_only=True):
    """The content under the seal. `origins`: scheme, host and port of each upstream it is for."""

    api_key: str
    origins: tuple[str, ...]

    def __repr__(self) -> str:
        return f"KeyContent(origins={self.origins!r})"


def context_of(kind: str, name: str) -> bytes:
    """Return what binds a sealed value to the stored setting that it belongs to."""
    return "\n".join(("installation_items", kind, name)).encode()


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL that the settings took."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].lower()}"


def origins_of(urls: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({origin_of(each) for each in urls}))


def open_key(sealed: SealedKey, upstream: str, secret_file: Path) -> str:
    """Return the key for an upstream. Blocks. Raises: SettingsError."""
    try:
        cipher = Cipher(Secret.load(secret_file), PURPOSE)
        data = base64.b64decode(sealed.data, validate=True)
        plain = cipher.open(data, context_of("model", sealed.model), sealed.secret_id)
        found = msgspec.json.decode(plain, type=KeyContent)
    except (SecretError, UnknownSecret, InvalidTag, binascii.Error, msgspec.MsgspecError) as error:
        reason = type(error).__name__
        raise SettingsError(f"api_key: model {sealed.model!r}: does not open ({reason})") from None
    if origin_of(upstream) not in found.origins:
        raise SettingsError(f"api_key: model {sealed.model!r}: is for another upstream")
    return found.api_key
