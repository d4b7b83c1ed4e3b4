"""The tools of an OpenAPI document, and calls of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_types import CallToolResult, Tool

from mcp_bridge.upstream.openapi.calls import (
    MAX_ANSWER_BYTES,
    NO_SECRETS,
    HttpClient,
    Secrets,
    checked_base_url,
    request_of,
    result_of,
)
from mcp_bridge.upstream.openapi.document import Document
from mcp_bridge.upstream.openapi.errors import BadArguments
from mcp_bridge.upstream.openapi.operations import OmittedOperation, operations_of

log = logging.getLogger(__name__)


class OpenApiTools:
    """The tools of a document.

    `content`: the document, JSON or YAML; parsing it blocks. `base_url`: where all requests go.
    Raises: BadDocument.
    """

    def __init__(self, name: str, content: bytes, base_url: str) -> None:
        self.name = name
        self._base_url = checked_base_url(base_url)
        self._operations = operations_of(Document.parse(content))
        for each in self._operations.left_out:
            log.info("%s: %s is no tool: %s", name, each.operation, each.reason)

    @property
    def tools(self) -> Sequence[Tool]:
        return [each.tool for each in self._operations.by_name.values()]

    def __contains__(self, tool: str) -> bool:
        return tool in self._operations.by_name

    @property
    def left_out(self) -> Sequence[OmittedOperation]:
        """Return the operations that are not tools."""
        return self._operations.left_out

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        http: HttpClient,
        secrets: Secrets = NO_SECRETS,
    ) -> CallToolResult:
        """Raises: BadArguments, also for an unknown tool; HttpFailed."""
        operation = self._operations.by_name.get(tool)
        if operation is None:
            raise BadArguments("name", "is no tool of this upstream")
        request = request_of(operation, arguments, self._base_url, secrets)
        answer = await http.send(request, max_body_bytes=MAX_ANSWER_BYTES)
        return result_of(operation, answer)
