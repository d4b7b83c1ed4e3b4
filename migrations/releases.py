"""Reads which releases there are: what the next one must still serve, and what it may take away."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

FILE = Path(__file__).parent / "releases.toml"


class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One release. `releases.toml` says what its fields mean."""

    version: str
    revision: str
    commit: str
    permits: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        return f"v{self.version}"


@cache
def releases() -> tuple[Release, ...]:
    """Return all releases, oldest first."""
    found = tomllib.loads(FILE.read_text())
    return msgspec.convert(found["release"], tuple[Release, ...])


def last_release() -> Release:
    return releases()[-1]
