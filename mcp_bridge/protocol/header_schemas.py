"""Remembers which arguments of a server's tools are sent as headers.

Pure. The rest of each schema is dropped: the whole schemas of a hostile server would be gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from mcp_bridge.protocol.envelope import HeaderSchema, header_schema, names_headers
from mcp_bridge.protocol.eras import LISTS

MAX_TOOLS = 10_000
MAX_KEPT_BYTES = 4 * 1024 * 1024
"""Bytes of names and header schemas of one server. The oldest are dropped first, and listed again
when they are needed."""


class HeaderSchemas:
    """The header schemas of a server's tools, by the names of the tools."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[HeaderSchema, int]] = {}
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> HeaderSchema | None:
        """Return the header schema of a tool; None: unknown."""
        found = self._kept.get(name)
        return None if found is None else found[0]

    def keep(self, name: str, schema: HeaderSchema) -> None:
        size = len(name.encode(errors="surrogatepass")) + len(msgspec.json.encode(schema))
        self._forget(name)
        if size > MAX_KEPT_BYTES:
            return
        while len(self._kept) >= MAX_TOOLS or self.kept_bytes + size > MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept)))
        self._kept[name] = schema, size
        self.kept_bytes += size

    def _forget(self, name: str) -> None:
        _, size = self._kept.pop(name, (None, 0))
        self.kept_bytes -= size

    def clear(self) -> None:
        self._kept.clear()
        self.kept_bytes = 0


def header_schemas_of(page: dict[str, Any]) -> Iterator[tuple[str, HeaderSchema]]:
    """Yield the tools of a page of `tools/list` with their header schemas."""
    tools = page.get(LISTS["tools/list"])
    has_any = isinstance(tools, list) and names_headers(tools)
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            yield tool["name"], header_schema(tool.get("inputSchema")) if has_any else {}
