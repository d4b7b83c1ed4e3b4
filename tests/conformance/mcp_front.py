"""A client of either era before our bridge, which calls whatever it is shown and says yes to what
it is asked. It checks nothing and hides nothing: what reaches a server is the bridge's doing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import httpx

from mcp_bridge.protocol.envelope import param_headers
from tests.mcp_bridge.processes import ACCEPT, LEGACY, events_of, last_of, modern

CLIENT = {"name": "conformance", "version": "1"}
CAPABILITIES = {"elicitation": {"form": {}}, "sampling": {}, "roots": {}}
MAX_ROUNDS = 4
LISTED = {"tools/list": "tools", "resources/list": "resources", "prompts/list": "prompts"}


class Refused(Exception):
    """`error`: of JSON-RPC."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error))
        self.error = error


class Front(Protocol):
    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Raises: Refused."""
        ...


async def items(front: Front, method: str) -> AsyncIterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        page = await front.ask(method, {} if cursor is None else {"cursor": cursor})
        for item in page[LISTED[method]]:
            yield item
        cursor = page.get("nextCursor")
        if cursor is None:
            return


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer as somebody who accepts with what the form holds already."""
    if asked["method"] == "roots/list":
        return {"roots": [{"uri": "file:///here"}]}
    if asked["method"] == "sampling/createMessage":
        return {"role": "assistant", "content": {"type": "text", "text": "Yes"}, "model": "m"}
    fields = asked["params"]["requestedSchema"].get("properties", {})
    given = {name: each["default"] for name, each in fields.items() if "default" in each}
    return {"action": "accept", "content": given}


class ModernFront:
    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http, self._url, self._ids = http, url, 0
        self._schemas: dict[str, Any] = {}

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        given = params
        named = {}
        if method == "tools/call":
            named = param_headers(self._schemas[params["name"]], params["arguments"])
        for _ in range(MAX_ROUNDS):
            self._ids += 1
            message, headers = modern(method, given, capabilities=CAPABILITIES, id=self._ids)
            headers |= named
            message["params"]["_meta"]["io.modelcontextprotocol/clientInfo"] = CLIENT
            found = last_of(await self._http.post(self._url, json=message, headers=headers))
            result = result_of(found)
            if method == "tools/list":
                self._schemas |= {tool["name"]: tool["inputSchema"] for tool in result["tools"]}
            if result["resultType"] != "input_required":
                return result
            asked = result.get("inputRequests", {})
            given = {**params, "inputResponses": {key: answer(each) for key, each in asked.items()}}
            if "requestState" in result:
                given["requestState"] = result["requestState"]
        raise AssertionError("it asks without end")


class LegacyFront:
    def __init__(self, http: httpx.AsyncClient, url: str, session: str) -> None:
        self._http, self._url, self._ids = http, url, 0
        self._headers = {**ACCEPT, "mcp-session-id": session, "mcp-protocol-version": LEGACY}

    @classmethod
    async def open(cls, http: httpx.AsyncClient, url: str) -> LegacyFront:
        params = {"protocolVersion": LEGACY, "capabilities": CAPABILITIES, "clientInfo": CLIENT}
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        said = await http.post(url, json=message, headers=ACCEPT)
        result_of(last_of(said))
        front = cls(http, url, said.headers["mcp-session-id"])
        await front._say({"method": "notifications/initialized"})
        return front

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._ids += 1
        message = {"jsonrpc": "2.0", "id": self._ids, "method": method, "params": params}
        async with self._http.stream(
            "POST", self._url, json=message, headers=self._headers
        ) as found:
            if found.headers["content-type"].startswith("application/json"):
                await found.aread()
                return result_of(found.json())
            async for _, said in events_of(found):
                if said is not None and "method" in said and "id" in said:
                    await self._say({"id": said["id"], "result": answer(said)})
                elif said is not None and said.get("id") == self._ids:
                    return result_of(said)
        raise AssertionError("no answer")

    async def _say(self, message: dict[str, Any]) -> None:
        sent = {"jsonrpc": "2.0", **message}
        (await self._http.post(self._url, json=sent, headers=self._headers)).raise_for_status()


def result_of(message: dict[str, Any]) -> dict[str, Any]:
    """Raises: Refused."""
    if "error" in message:
        raise Refused(message["error"])
    result: dict[str, Any] = message["result"]
    return result
