"""A Carrier to an HTTP API that an OpenAPI document describes: a server of the newer era that is
nowhere but here, so that all that stands in the way of calls stands in the way of these.

An answer of the API is a result, whatever its status; the API without an answer is a server without
one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpcore
import msgspec
from mcp_types import CallToolResult, TextContent

from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import MODERN
from mcp_bridge.protocol.rpc import INVALID_PARAMS, METHOD_NOT_FOUND, Message, RpcError
from mcp_bridge.upstream.credentials import CredentialSet, Refusal
from mcp_bridge.upstream.http import FRAMING, HttpTarget, refusal_of
from mcp_bridge.upstream.openapi.calls import Secrets
from mcp_bridge.upstream.openapi.errors import BadArguments, HttpFailed
from mcp_bridge.upstream.openapi.http import PoolClient
from mcp_bridge.upstream.openapi.source import DocumentSource, LoadedDocument
from mcp_bridge.upstream.redaction import written
from mcp_bridge.upstream.transport import (
    NotSent,
    ReadCount,
    TransportAnswer,
    TransportFailed,
    TransportRequest,
)
from mcp_bridge.upstream.upstream import DEFAULT_RETRY_MS


class OpenApiAnswer:
    """An answer that is there as a whole."""

    kind = "application/json"
    is_stream = False
    last_id: str | None = None
    retry_ms = DEFAULT_RETRY_MS
    headers: Mapping[str, str] = {}

    def __init__(self, status: int, message: Message | None = None) -> None:
        self.status, self._message = status, message

    async def body(self) -> bytes:
        return b"" if self._message is None else rpc.encode(self._message)

    async def messages(self, spent: ReadCount | None = None) -> AsyncGenerator[Message | None]:
        if self._message is not None:
            yield self._message


class OpenApiTransport:
    """The transport to an HTTP API. `source`: everybody's. `dialled`: the API."""

    def __init__(self, dialled: HttpTarget, source: DocumentSource) -> None:
        self._config, self._pool, self._shown = dialled.config, dialled.pool, dialled.shown
        self._source = source

    async def close(self) -> None:
        await self._pool.aclose()

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
        once = partial(self._once, on_sent, loaded, name, arguments)
        credential = await self._shown(None)
        result, refused = await once(credential)
        again = credential if refused is None else await self._shown(refused)
        if again is not credential:
            # Refused before anything was done: a newer token may be taken.
            result, refused = await once(again)
            if refused is not None:
                await self._shown(msgspec.structs.replace(refused, is_last=True))
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)

    async def _once(
        self,
        on_sent: Callable[[], None],
        loaded: LoadedDocument,
        name: str,
        arguments: dict[str, Any],
        credential: CredentialSet,
    ) -> tuple[CallToolResult, Refusal | None]:
        # An API that refuses a key may say it back, to whoever may use it and not know it.
        client = PoolClient(self._pool, written(credential.values.values()), on_sent)
        secrets = self._secrets(credential)
        try:
            result = await loaded.tools.call(name, arguments, client, secrets)
        except BadArguments as error:
            said = TextContent(type="text", text=str(error))
            return CallToolResult(content=[said], is_error=True), None
        except HttpFailed as error:
            is_busy = isinstance(error.__cause__, httpcore.PoolTimeout)
            raise (NotSent("busy") if is_busy else TransportFailed(str(error))) from error
        return result, refusal_of(client.status, client.headers, credential)

    def _secrets(self, credential: CredentialSet) -> Secrets:
        """Return what a request shows of a credential: what frames a message is never a
        credential's to say."""
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
