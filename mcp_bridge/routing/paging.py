"""Pages of what several servers have, and the cursors that lead from one to the next.

A page is filled by whole pages of servers, in the order of their configuration, while they are no
more than MAX_PAGE things and MAX_PAGE_BYTES; the first is taken whatever it is. A cursor is the
place of a server and where to go on there.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from mcp_bridge.protocol.rpc import INVALID_PARAMS, RpcError

MAX_PAGE = 1_000
MAX_PAGE_BYTES = 4 * 1024 * 1024
MAX_CURSOR_LENGTH = 4096
STALE_META = "tollgate/stale"
"""Names servers that do not answer, of which what was approved is listed; of resources nothing."""


class Pages:
    """Joins pages of several servers into one. `name`: of what is listed, as `tools`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pages: list[dict[str, Any]] = []
        self._items, self._bytes = 0, 0

    def take(self, page: dict[str, Any]) -> bool:
        """Take a page, and return whether it fits."""
        items = page[self._name]
        if not items:
            return self._add(page, 0, 0)
        size_bytes = len(msgspec.json.encode(items))
        is_over = self._items + len(items) > MAX_PAGE or self._bytes + size_bytes > MAX_PAGE_BYTES
        return False if self._items and is_over else self._add(page, len(items), size_bytes)

    def _add(self, page: dict[str, Any], items: int, size_bytes: int) -> bool:
        self._pages.append(page)
        self._items += items
        self._bytes += size_bytes
        return True

    def joined(self, cursor: str | None) -> dict[str, Any]:
        """Return the joined page: what one server alone says of its page (how long it is good for)
        stays; of several pages nobody has said anything."""
        filled = [page for page in self._pages if page[self._name]]
        found = dict(filled[0]) if len(filled) == 1 else {}
        found[self._name] = [item for page in filled for item in page[self._name]]
        stale = [name for page in self._pages for name in stale_of(page)]
        if stale:
            meta = found.get("_meta")
            found["_meta"] = {**(meta if isinstance(meta, dict) else {}), STALE_META: stale}
        if cursor is not None:
            found["nextCursor"] = cursor
        return found


def stale_of(page: dict[str, Any]) -> list[str]:
    meta = page.get("_meta")
    found = meta.get(STALE_META) if isinstance(meta, dict) else None
    return found if isinstance(found, list) else []


def write_cursor(index: int, cursor: str | None) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([index, cursor])).decode()


def read_cursor(cursor: Any) -> tuple[int, str | None]:
    """Raises: RpcError."""
    if cursor is None:
        return 0, None
    try:
        if not isinstance(cursor, str) or len(cursor) > MAX_CURSOR_LENGTH:
            raise ValueError
        raw = base64.urlsafe_b64decode(cursor)
        index, inner = msgspec.json.decode(raw, type=tuple[int, str | None])
    except (ValueError, binascii.Error, msgspec.DecodeError):
        raise RpcError(INVALID_PARAMS, "cursor: none of ours") from None
    if index < 0:
        raise RpcError(INVALID_PARAMS, "cursor: none of ours")
    return index, inner
