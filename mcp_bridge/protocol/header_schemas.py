"""Remembers which arguments of a server's tools travel as headers, as the tools were listed last.

Pure. Of each tool's schema only that is kept: whole schemas of a hostile server would be gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from mcp_bridge.protocol.eras import LISTS
from mcp_bridge.protocol.inbound import HeaderSchema, header_schema, names_headers

MAX_TOOLS = 10_000
MAX_KEPT_BYTES = 4 * 1024 * 1024
"""Of one server: names, and what is kept of schemas, as JSON. Beyond it who was listed first goes,
and is asked for again."""


class HeaderSchemas:
    """The header schemas of a server's tools, by the names of the tools."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[HeaderSchema, int]] = {}
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> HeaderSchema | None:
        """Return the schema of a tool; None: it is not known."""
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


def listed(page: dict[str, Any]) -> Iterator[tuple[str, HeaderSchema]]:
    """Yield the tools of a page of `tools/list` with their header schemas."""
    tools = page.get(LISTS["tools/list"])
    has_any = isinstance(tools, list) and names_headers(tools)
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            yield tool["name"], header_schema(tool.get("inputSchema")) if has_any else {}
