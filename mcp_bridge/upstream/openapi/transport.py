"""The transport to an HTTP API that an OpenAPI document describes. It answers as a server of
2026-07-28 does, so its tools are pinned, ruled and recorded like all others.

An answer of the API is a result, whatever its status; no answer is a failure of the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from mcp_types import CallToolResult, TextContent

from foundation.http1 import PoolTimeout
from foundation.trace_context import TRACE_HEADERS
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import MODERN
from mcp_bridge.protocol.rpc import INVALID_PARAMS, METHOD_NOT_FOUND, Message, RpcError
from mcp_bridge.upstream.credentials import CredentialSet, Refusal, ask_with_credential
from mcp_bridge.upstream.http import FRAMING, HttpTarget, refusal_of
from mcp_bridge.upstream.openapi.calls import Secrets
from mcp_bridge.upstream.openapi.errors import BadArguments, HttpFailed
from mcp_bridge.upstream.openapi.http import PoolClient
from mcp_bridge.upstream.openapi.source import DocumentSource, LoadedDocument
from mcp_bridge.upstream.redaction import spellings
from mcp_bridge.upstream.transport import (
    NotSent,
    ReadCount,
    TransportAnswer,
    TransportFailed,
    TransportRequest,
)
from mcp_bridge.upstream.upstream import DEFAULT_RETRY_MS


class OpenApiAnswer:
    """A complete answer."""

    kind = "application/json"
    is_stream = False
    last_id: str | None = None
    retry_ms = DEFAULT_RETRY_MS
    message_bytes: int | None = None
    headers: Mapping[str, str] = {}

    def __init__(self, status: int, message: Message | None = None) -> None:
        self.status, self._message = status, message

    async def body(self) -> bytes:
        return b"" if self._message is None else rpc.encode(self._message)

    async def messages(self, spent: ReadCount | None = None) -> AsyncGenerator[Message | None]:
        if self._message is not None:
            yield self._message


class OpenApiTransport:
    """The transport to an HTTP API. `source`: its document, shared by all owners."""

    def __init__(self, target: HttpTarget, source: DocumentSource) -> None:
        self._config, self._pool = target.config, target.pool
        self._credentials, self._source = target.credentials, source

    async def close(self) -> None:
        self._pool.close()

    @asynccontextmanager
    async def ask(self, request: TransportRequest) -> AsyncIterator[TransportAnswer]:
        body = request.message
        if request.method != "POST" or body is None:
            yield OpenApiAnswer(405)
        elif not rpc.is_request(body):
            yield OpenApiAnswer(202)
        else:
            yield await self._answer(body, request.on_sent)

    async def _answer(self, asked: Message, on_sent: Callable[[], None]) -> OpenApiAnswer:
        try:
            result = await self._result(asked["method"], rpc.params_of(asked), on_sent)
        except RpcError as error:
            return OpenApiAnswer(rpc.STATUS.get(error.code, 200), rpc.failure(asked["id"], error))
        return OpenApiAnswer(200, rpc.result(asked["id"], {"resultType": "complete", **result}))

    async def _result(
        self, method: str, params: dict[str, Any], on_sent: Callable[[], None]
    ) -> dict[str, Any]:
        """Raises: RpcError, TransportFailed."""
        if method not in ("server/discover", "tools/list", "tools/call"):
            raise RpcError(METHOD_NOT_FOUND, "Method not found")
        loaded = await self._source.get()
        if method == "tools/call":
            return await self._call(loaded, params, on_sent)
        if method == "tools/list":
            tools = msgspec.json.decode(loaded.page)
            return {"tools": tools, "ttlMs": 0, "cacheScope": "public"}
        info = {"name": self._config.name, "version": "1"}
        return {
            "supportedVersions": [MODERN],
            "capabilities": {"tools": {}},
            "_meta": {"io.modelcontextprotocol/serverInfo": info},
        }

    async def _call(
        self, loaded: LoadedDocument, params: dict[str, Any], on_sent: Callable[[], None]
    ) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or name not in loaded.tools:
            raise RpcError(INVALID_PARAMS, "name: is no tool of this server")
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "arguments: must be an object")
        meta = rpc.meta_of(params)
        trace = {each: str(meta[each]) for each in TRACE_HEADERS if each in meta}
        send = partial(self._send, on_sent, trace, loaded, name, arguments)
        result = await ask_with_credential(self._credentials, send)
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)

    async def _send(
        self,
        on_sent: Callable[[], None],
        trace: Mapping[str, str],
        loaded: LoadedDocument,
        name: str,
        arguments: dict[str, Any],
        credential: CredentialSet,
    ) -> tuple[CallToolResult, Refusal | None]:
        # An API that refuses a key may repeat it, and callers must not learn it.
        client = PoolClient(self._pool, spellings(credential.values.values()), on_sent, trace)
        secrets = self._secrets(credential)
        try:
            result = await loaded.tools.call(name, arguments, client, secrets)
        except BadArguments as error:
            text = TextContent(type="text", text=str(error))
            return CallToolResult(content=[text], is_error=True), None
        except HttpFailed as error:
            is_busy = isinstance(error.__cause__, PoolTimeout)
            raise (NotSent("busy") if is_busy else TransportFailed(str(error))) from error
        return result, refusal_of(client.status, client.headers, credential)

    def _secrets(self, credential: CredentialSet) -> Secrets:
        """Return what a request sends of a credential: no headers that frame a message."""
        in_query = self._config.query_credentials
        given = {**self._config.headers, **credential.values}
        return Secrets(
            headers={
                name: value
                for name, value in given.items()
                if name not in in_query and name.lower() not in FRAMING
            },
            query={name: given[name] for name in in_query if name in given},
        )
