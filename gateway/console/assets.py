"""Serves the files of the pages under addresses that name their content, so that browsers may keep
them for good: `/console/assets/console.1f0c2a….css`.

htmx and uPlot are their makers' own files (`static/vendor/NOTICE.txt`).
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent / "static"
ADDRESS = "/console/assets"
HASH_CHARS = 16
FILES = {
    "console.css": "text/css",
    "console.js": "text/javascript",
    "charts.js": "text/javascript",
    "passkeys.js": "text/javascript",
    "playground.js": "text/javascript",
    "approvals.js": "text/javascript",
    "requests.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "vendor/htmx.min.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}
"""The media type of each; the response adds the charset."""


class Asset(msgspec.Struct, frozen=True):
    content: bytes
    media_type: str


@cache
def address_of(name: str) -> str:
    """Return the address of a file; for templates. Raises: KeyError."""
    stem, _, ending = Path(name).name.rpartition(".")
    digest = hashlib.sha256(read(name).content).hexdigest()[:HASH_CHARS]
    return f"{ADDRESS}/{stem}.{digest}.{ending}"


@cache
def read(name: str) -> Asset:
    """Raises: KeyError."""
    media_type = FILES[name]
    return Asset((FOLDER / name).read_bytes(), media_type)


@cache
def by_address() -> dict[str, Asset]:
    """Return all files by what stands behind the last slash of their address."""
    return {Path(address_of(name)).name: read(name) for name in FILES}
