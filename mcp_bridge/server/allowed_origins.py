"""Checks by which names we are called, and from which pages: so that a page whose name was made to
mean this machine gets nothing (DNS rebinding).

Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec

from mcp_bridge.protocol.rpc import INVALID_REQUEST, RpcError

PAGES = frozenset({"http", "https"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


class AllowedOrigins(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts and origins that may call.

    `public_url`: how clients reach us; where that is this machine, any of its own names will do.
    """

    public_url: str

    def check(self, host: str | None, origin: str | None, pages: Collection[str] = ()) -> None:
        """Check the host and the origin of a request.

        `pages`: origins that the tenant lets in. Raises: RpcError.
        """
        own = urlsplit(self.public_url)
        local = name_of(own.netloc) in LOOPBACK
        if local and name_of(host or "") not in LOOPBACK:
            raise RpcError(INVALID_REQUEST, "Host: not ours", status=403)
        if origin is None or origin in pages:
            return
        try:
            page = urlsplit(origin)
        except ValueError:
            raise RpcError(INVALID_REQUEST, "Origin: not allowed", status=403) from None
        is_ours = (page.scheme, page.netloc.lower()) == (own.scheme, own.netloc.lower())
        is_local = local and page.scheme in PAGES and name_of(page.netloc) in LOOPBACK
        if not is_ours and not is_local:
            raise RpcError(INVALID_REQUEST, "Origin: not allowed", status=403)


def name_of(authority: str) -> str:
    """Return a host without its port."""
    name, colon, port = authority.lower().rpartition(":")
    return name if colon and port.isdigit() else authority.lower()
