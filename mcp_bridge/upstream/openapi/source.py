"""Loads a server's OpenAPI document and caches its tools.

There is one source for each server of a process: the document is the same for all tenants, so no
credential is sent for it. A file is read again when it changes, a URL every DOCUMENT_S; if it does
not answer, the previous document stays valid.
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

from mcp_bridge.upstream.http import ServerPool
from mcp_bridge.upstream.openapi.calls import HttpRequest
from mcp_bridge.upstream.openapi.document import MAX_DOCUMENT_BYTES
from mcp_bridge.upstream.openapi.errors import BadDocument, HttpFailed
from mcp_bridge.upstream.openapi.http import PoolClient
from mcp_bridge.upstream.openapi.tools import OpenApiTools
from mcp_bridge.upstream.transport import NotSent
from mcp_bridge.upstream.upstream import ServerConfig

log = logging.getLogger(__name__)

DOCUMENT_S = 60.0
"""How long an answer of a URL is used, even if it is unusable."""
UNAVAILABLE = "openapi_document_unavailable"
ACCEPT = "application/json, application/yaml;q=0.9, */*;q=0.1"

Stamp = tuple[int, ...]


class LoadedDocument(msgspec.Struct, frozen=True):
    """A document in use. `page`: its tools as `tools/list` returns them, in JSON."""

    tools: OpenApiTools
    page: bytes


class DocumentUnavailable(Exception):
    """The document cannot be read. The text is for the log."""


class DocumentSource:
    """The document of one server. `open_pool`: opens connections to the host of a URL."""

    def __init__(self, config: ServerConfig, open_pool: Callable[[str], ServerPool]) -> None:
        self._config, self._open_pool = config, open_pool
        self._is_url = config.document.startswith(("http://", "https://"))
        self._lock = asyncio.Lock()
        self._stamp: Stamp = ()
        self._content: bytes | None = None
        self._found: LoadedDocument | BadDocument | DocumentUnavailable | None = None
        self._until = 0.0

    async def get(self) -> LoadedDocument:
        """Raises: NotSent."""
        async with self._lock:
            if self._is_url:
                if self._found is None or self._until < time.monotonic():
                    await self._load_url()
            else:
                await asyncio.to_thread(self._load_file)
            found = self._found
        if isinstance(found, LoadedDocument):
            return found
        reason = found.code if isinstance(found, BadDocument) else UNAVAILABLE
        raise NotSent(reason) from found

    def _load_file(self) -> None:
        try:
            status = os.stat(self._config.document)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
            if self._found is not None and stamp == self._stamp:
                return
            if not stat.S_ISREG(status.st_mode):
                raise OSError("no regular file")
            with Path(self._config.document).open("rb") as file:
                content = file.read(MAX_DOCUMENT_BYTES + 1)
        except OSError as error:
            self._stamp, self._content = (), None
            self._keep(DocumentUnavailable(error.strerror or str(error)))
            return
        self._stamp = stamp
        self._parse(content)

    async def _load_url(self) -> None:
        try:
            content = await self._fetch()
        except DocumentUnavailable as error:
            if isinstance(self._found, LoadedDocument):
                log.warning("mcp: %s: its document is not renewed: %s", self._config.name, error)
            else:
                self._keep(error)
        else:
            await asyncio.to_thread(self._parse, content)
        self._until = time.monotonic() + DOCUMENT_S

    async def _fetch(self) -> bytes:
        """Raises: DocumentUnavailable."""
        pool = self._open_pool(self._config.document)
        request = HttpRequest(
            method="GET", url=self._config.document, headers=(("accept", ACCEPT),), body=b""
        )
        try:
            answer = await PoolClient(pool).send(request, max_body_bytes=MAX_DOCUMENT_BYTES)
        except HttpFailed as error:
            raise DocumentUnavailable(str(error)) from error
        finally:
            pool.close()
        if answer.status != 200:
            raise DocumentUnavailable(f"status_{answer.status}")
        return answer.body

    def _parse(self, content: bytes) -> None:
        """Read the tools of a document; it blocks."""
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
