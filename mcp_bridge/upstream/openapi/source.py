"""Fetches a server's OpenAPI document, and keeps the tools that were made of it last.

One for each server of a process: the document is the same for all tenants, so nobody's credential
is shown for it. A file is read anew when it is another one, a URL every DOCUMENT_S; while it does
not answer, what it said before holds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from mcp_bridge.upstream.http1 import Pool
from mcp_bridge.upstream.openapi.calls import HttpRequest
from mcp_bridge.upstream.openapi.document import MAX_DOCUMENT_BYTES
from mcp_bridge.upstream.openapi.errors import BadDocument, HttpFailed
from mcp_bridge.upstream.openapi.http import PoolClient
from mcp_bridge.upstream.openapi.tools import OpenApiTools
from mcp_bridge.upstream.transport import NotSent
from mcp_bridge.upstream.upstream import ServerConfig

log = logging.getLogger(__name__)

DOCUMENT_S = 60.0
"""So long what a URL said is not asked for again, be it nothing of use."""
UNAVAILABLE = "openapi_document_unavailable"
ACCEPT = "application/json, application/yaml;q=0.9, */*;q=0.1"

Stamp = tuple[int, ...]


class LoadedDocument(msgspec.Struct, frozen=True):
    """A document as it was read last. `page`: all tools as `tools/list` says them, in JSON."""

    tools: OpenApiTools
    page: bytes


class DocumentUnavailable(Exception):
    """There is no document to read. Its text is for the log."""


class DocumentSource:
    """The document of one server.

    `config`: of a server with a `document`. `open_pool`: to the host of a URL, closed here.
    """

    def __init__(self, config: ServerConfig, open_pool: Callable[[str], Pool]) -> None:
        self._config, self._open_pool = config, open_pool
        self._is_url = config.document.startswith(("http://", "https://"))
        self._turn = asyncio.Lock()
        self._stamp: Stamp = ()
        self._content: bytes | None = None
        self._found: LoadedDocument | BadDocument | DocumentUnavailable | None = None
        self._until = 0.0

    async def get(self) -> LoadedDocument:
        """Raises: NotSent."""
        async with self._turn:
            if self._is_url:
                if self._found is None or self._until < time.monotonic():
                    await self._look_at_url()
            else:
                await asyncio.to_thread(self._look_at_file)
            found = self._found
        if isinstance(found, LoadedDocument):
            return found
        reason = found.code if isinstance(found, BadDocument) else UNAVAILABLE
        raise NotSent(reason) from found

    def _look_at_file(self) -> None:
        try:
            told = os.stat(self._config.document)
            stamp = (told.st_mtime_ns, told.st_size, told.st_ino, told.st_dev)
            if self._found is not None and stamp == self._stamp:
                return
            if not stat.S_ISREG(told.st_mode):
                raise OSError("no regular file")
            with Path(self._config.document).open("rb") as file:
                content = file.read(MAX_DOCUMENT_BYTES + 1)
        except OSError as error:
            self._stamp, self._content = (), None
            self._keep(DocumentUnavailable(error.strerror or str(error)))
            return
        self._stamp = stamp
        self._make(content)

    async def _look_at_url(self) -> None:
        try:
            content = await self._fetch()
        except DocumentUnavailable as error:
            if isinstance(self._found, LoadedDocument):
                log.warning("mcp: %s: its document is not renewed: %s", self._config.name, error)
            else:
                self._keep(error)
        else:
            await asyncio.to_thread(self._make, content)
        self._until = time.monotonic() + DOCUMENT_S

    async def _fetch(self) -> bytes:
        """Raises: Unavailable."""
        pool = self._open_pool(self._config.document)
        request = HttpRequest(
            method="GET", url=self._config.document, headers=(("accept", ACCEPT),), body=b""
        )
        try:
            answer = await PoolClient(pool).send(request, max_body_bytes=MAX_DOCUMENT_BYTES)
        except HttpFailed as error:
            raise DocumentUnavailable(str(error)) from error
        finally:
            await pool.aclose()
        if answer.status != 200:
            raise DocumentUnavailable(f"status_{answer.status}")
        return answer.body

    def _make(self, content: bytes) -> None:
        """Make the tools of a document; it blocks."""
        if content == self._content and isinstance(self._found, LoadedDocument | BadDocument):
            return
        self._content = content
        try:
            tools = OpenApiTools(self._config.name, content, self._config.url)
        except BadDocument as error:
            self._keep(error)
            return
        listed = [
            tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools.tools
        ]
        self._found = LoadedDocument(tools, msgspec.json.encode(listed))

    def _keep(self, error: BadDocument | DocumentUnavailable) -> None:
        if str(error) != str(self._found):
            log.warning("mcp: %s: its document is of no use: %s", self._config.name, error)
        self._found = error
