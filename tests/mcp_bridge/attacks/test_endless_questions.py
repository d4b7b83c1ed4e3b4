"""A server that asks its client again and again: each answer is a request that nobody pays for."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from mcp_bridge.protocol.continuation import MAX_ROUNDS
from tests.mcp_bridge.processes import ask_modern
from tests.mcp_bridge.test_hostile import CALL, Server, bridged, whole

QUESTION = {"message": "And now?", "requestedSchema": {"type": "object", "properties": {}}}
WANTED = {"again": {"method": "elicitation/create", "params": QUESTION}}
ANSWERED = {"again": {"action": "accept", "content": {}}}


def asks(server: Server, writer: Any, message: dict[str, Any]) -> bytes:
    state = f"state-{len(server.calls)}"
    result = {"resultType": "input_required", "inputRequests": WANTED, "requestState": state}
    return whole({"jsonrpc": "2.0", "id": message["id"], "result": result})


async def test_a_server_that_always_asks_once_more_is_given_up(redis: redis.asyncio.Redis) -> None:
    server = Server(asks)
    async with bridged(redis, server) as client:
        params: dict[str, Any] = CALL
        for _ in range(MAX_ROUNDS):
            found = (await ask_modern(client, "/mcp", "tools/call", params))["result"]
            assert found["inputRequests"].keys() == WANTED.keys()
            state = found["requestState"]
            params = {**CALL, "inputResponses": ANSWERED, "requestState": state}
        ended = await ask_modern(client, "/mcp", "tools/call", params)
        assert ended["error"]["message"] == "The server asked too often"
        assert len(server.calls) == MAX_ROUNDS + 1
        anew = await ask_modern(client, "/mcp", "tools/call", CALL)
        assert anew["result"]["resultType"] == "input_required", "another call is another one"
