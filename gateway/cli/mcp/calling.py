"""`tollgate mcp call`: calls a tool through the running gateway, as a client does, with all that
stands in its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.mcp.offers import ORG, PROJECT, mcp, org_of
from gateway.cli.shared.command import STATE, connections, run, with_options
from gateway.cli.shared.target import GatewayError, end, find_target
from gateway.settings.load import load

CALL_TIMEOUT_S = 600.0
DENIED = (401, 403)
"""Statuses of a key that may call no tools here."""


@mcp.command("call")
@with_options(*STATE, ORG, PROJECT)
@click.option("--url", help="The address of the gateway. Default: that of the home.")
@click.option("--port", type=int, help="The gateway's port, where it is not that of the home.")
@click.option(
    "--key",
    envvar="TOLLGATE_API_KEY",
    help="An API key with the scope mcp:call. Default: TOLLGATE_API_KEY, or that of the home.",
)
@click.argument("name")
@click.argument("tool")
@click.argument("arguments", default="{}")
def call_tool(
    home: Path | None,
    config: Path | None,
    url: str | None,
    port: int | None,
    key: str | None,
    name: str,
    tool: str,
    arguments: str,
    org: str,
    project: str,
) -> None:
    """Call a server's tool with ARGUMENTS, a JSON object, through the running gateway.

    The rules, limits and prices of the key apply. Exits with 1 if the call or the tool fails.
    """
    settings = load({"home": home, "config": config, "port": port})
    try:
        target = find_target(settings, url=url, port=port, key=None)
    except GatewayError as error:
        end(error)
    api_key = key or target.api_key
    if api_key is None:
        raise click.UsageError("an API key is needed: --key, or TOLLGATE_API_KEY")
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(str(error), param_hint="ARGUMENTS") from None

    async def work() -> None:
        async with connections(settings) as (db, _):
            org_id = await org_of(db, org, project)
        params = {"name": f"{name}__{tool}", "arguments": given}
        status, answer = await post(f"{target.base}/mcp/{org_id}", api_key, "tools/call", params)
        result = answer.get("result")
        click.echo(json.dumps(result if isinstance(result, dict) else answer, indent=2))
        if status in DENIED:
            raise click.ClickException(
                "this key may call no tools; make one that may: tollgate keys create"
                " --name tools --scope inference --scope mcp:call"
            )
        waits = answer.get("error", {}).get("data", {}).get("approvalId")
        if waits is not None:
            click.echo(
                f"Somebody else may say yes: tollgate mcp calls --allow {waits}; or in the console,"
                " under MCP. Then make the same call again.",
                err=True,
            )
        if not isinstance(result, dict) or result.get("isError") is True:
            raise Exit(1)

    run(work())


async def may_call(base: str, org_id: str, key: str) -> bool:
    """Tell whether a key may call tools, by listing them. Raises: click.ClickException."""
    status, _ = await post(f"{base}/mcp/{org_id}", key, "tools/list", {})
    return status not in DENIED


async def post(
    url: str, key: str, method: str, params: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Send a request of the protocol; return the status and the object that is answered. Raises:
    click.ClickException."""
    import httpx

    from foundation import sse
    from mcp_bridge.protocol.envelope import Envelope
    from mcp_bridge.protocol.eras import MODERN
    from mcp_bridge.protocol.translation import to_modern_params

    envelope = Envelope(version=MODERN, capabilities={}, info={"name": "tollgate", "version": "0"})
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": method,
        "params": to_modern_params(params, envelope),
    }
    headers = {
        "authorization": f"Bearer {key}",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": MODERN,
        "mcp-method": method,
    }
    if "name" in params:
        headers["mcp-name"] = params["name"]
    try:
        async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S) as client:
            answer = await client.post(url, json=body, headers=headers)
    except httpx.HTTPError as error:
        raise click.ClickException(f"no gateway answers at {url}: {error}") from None
    said = answer.content
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [one.data for one in sse.EventParser(2**27, with_ids=True).feed(said) if one.data]
        said = events[-1] if events else b""
    try:
        return answer.status_code, msgspec.json.decode(said, type=dict[str, Any])
    except msgspec.DecodeError:
        raise click.ClickException(f"{url}: status {answer.status_code}, and no JSON") from None
