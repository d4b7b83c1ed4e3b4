"""A message at `/mcp` reaches a collector as a span of the conventions of MCP."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.routes.asgi.request_metrics import ACCESS_LOG
from mcp_bridge.server.http import place_of
from tests.gateway.auth.browsing import live_app
from tests.gateway.auth.conftest import make_tenant
from tests.gateway.mcp.calling import Caller, caller_of
from tests.gateway.traces.collectors import http_collector, said
from tests.mcp_bridge.counting import counting
from tests.mcp_bridge.processes import ACCEPT, LEGACY, MODERN, last_of

CONFIG = """
[[mcp.servers]]
name = "shop"
url = "{server}"
network = "loopback"
trust = "all"

[traces]
endpoint = "{collector}"
ratio = 1
"""
RESOURCE = "db://ann:a-secret@host/orders?token=a-secret"


async def ask_legacy(caller: Caller) -> None:
    """Open a session, and call a tool that says it failed."""
    asked = {
        "protocolVersion": LEGACY,
        "capabilities": {},
        "clientInfo": {"name": "c", "version": "1"},
    }
    message = {"jsonrpc": "2.0", "id": "a", "method": "initialize", "params": asked}
    opened = await caller.http.post(caller.url, json=message, headers=ACCEPT)
    assert "result" in last_of(opened)
    headers = {**ACCEPT, "mcp-session-id": opened.headers["mcp-session-id"]}
    called = {"name": "shop__fail", "arguments": {}}
    message = {"jsonrpc": "2.0", "id": "b", "method": "tools/call", "params": called}
    answer = await caller.http.post(caller.url, json=message, headers=headers)
    assert last_of(answer)["result"]["isError"] is True


async def test_a_message_is_a_server_span_by_the_conventions_at_the_collector(
    tmp_path: Path, postgres_url: str, redis_url: str, db: AsyncEngine, patient: None
) -> None:
    config = tmp_path / "mcp.toml"
    with http_collector() as collector, counting() as server:
        config.write_text(CONFIG.format(server=server.url, collector=collector.url))
        named = {"config": str(config)}
        async with live_app(tmp_path, postgres_url, redis_url, None, **named) as app:
            async with AsyncExitStack() as stack:
                found = app.state.services
                app.state[ACCESS_LOG] = app.state.open_access_log(
                    stack, found.telemetry, found.request_log
                )
                caller = await caller_of(app, await make_tenant(db, "acme"), None)
                answer = await caller.call(name="shop__look", arguments={"n": 7})
                assert answer["result"]["isError"] is False, answer
                assert "error" in await caller.ask("tools/call", {"name": "shop__break"})
                assert "error" in await caller.ask("resources/read", {"uri": RESOURCE})
                await ask_legacy(caller)
                await caller.http.aclose()
    spans = {span.span_id: span for span in collector.spans}
    served = [span for span in collector.spans if "network.transport" in said(span)]
    assert {span.kind for span in served} == {Span.SPAN_KIND_SERVER}
    above = [spans[span.parent_span_id] for span in served]
    assert {span.name for span in above} == {"POST /mcp/{org_id}"}
    assert [(span.name, span.status.code == Status.STATUS_CODE_ERROR) for span in served] == [
        ("tools/call shop__look", False),
        ("tools/call shop__break", True),
        ("resources/read", True),
        ("initialize", False),
        ("tools/call shop__fail", True),
    ]
    look, broken, read, opened, failed = map(said, served)
    on_http = {"network.protocol.name": "http", "network.transport": "tcp"}
    newer, older = ({"mcp.protocol.version": version} for version in (MODERN, LEGACY))
    calls = {"mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool"}
    expected: dict[str, Any] = {**calls, **on_http, **newer, "jsonrpc.request.id": "1"}
    assert look == {**expected, "gen_ai.tool.name": "shop__look"}
    assert broken.items() >= {**expected, "gen_ai.tool.name": "shop__break"}.items()
    assert broken["error.type"] == broken["rpc.response.status_code"] == "-32000"
    assert read["mcp.resource.uri"] == "db://host/orders"
    assert opened == {
        **on_http, **older, "mcp.method.name": "initialize", "jsonrpc.request.id": "a",
    }  # fmt: skip
    assert failed == {
        **calls,
        **on_http,
        **older,
        "gen_ai.tool.name": "shop__fail",
        "jsonrpc.request.id": "b",
        "error.type": "tool_error",
        "tollgate.outcome": "tool_error",
    }
    below = [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
    assert [span.name for span in below] == [
        *("tools/call look", "tools/call break", "resources/read", "tools/call fail"),
    ]
    for span, parent in zip(below, (*served[:3], served[4]), strict=True):
        assert (span.parent_span_id, span.trace_id) == (parent.span_id, parent.trace_id)
    assert "a-secret" not in str(collector.spans)


def test_a_resource_is_named_without_what_may_be_secret() -> None:
    assert place_of("file:///etc/hosts?a#b") == "file:///etc/hosts"
    assert place_of("https://ann:pw@host/a@b#c") == "https://host/a@b"
    assert place_of("note:1?x") == "note:1"
