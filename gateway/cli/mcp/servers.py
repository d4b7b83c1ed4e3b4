"""`tollgate mcp add`, `doctor` and `call`: adds a server, asks whether each answers, and calls a
tool.

A server is a table of the settings file; a call goes to the running gateway, as a client's does,
with all that stands in its way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.mcp.launch import launched
from gateway.cli.mcp.offers import ORG, PROJECT, mcp, names_for, offered, org_of, server_of
from gateway.cli.shared.command import JSON, STATE, connections, run, with_options, with_settings
from gateway.settings.edit import rewrite, with_server, without_server
from gateway.settings.file import Flags
from gateway.settings.load import Settings, config_path, load

if TYPE_CHECKING:
    from mcp_bridge.upstream.stdio.stderr_tail import LastWords

__all__ = ["mcp"]

CALL_TIMEOUT_S = 600.0
WHOSE = click.Choice(["none", "tenant", "user"])
ERA = click.Choice(["auto", "2026-07-28", "2025-11-25"])
NETWORK = click.Choice(["public", "private", "loopback"])
KEY = click.option(
    "--key",
    envvar="TOLLGATE_API_KEY",
    help="An API key with the scope mcp:call. Default: TOLLGATE_API_KEY.",
)


@mcp.command()
@with_options(*STATE)
@click.option("--org", "orgs", multiple=True, help="Show it to this organization. Default: to all.")
@click.option(
    *("--project", "projects"),
    multiple=True,
    help="Show it only to this project of the one --org (or of default).",
)
@click.option("--url", help="The server's URL. Default for an HTTP API: as its document says.")
@click.option("--openapi", help="The OpenAPI document of an HTTP API: a file or a URL.")
@click.option("--command", "executable", help="The program of a server that runs on this machine.")
@click.option("--arg", "arguments", multiple=True, help="An argument of the command; repeatable.")
@click.option(
    "--unpinned", is_flag=True, help="Accept a package or image that may change without notice."
)
@click.option("--namespace", help="Serve it at /mcp/ORG/PROJECT/NAMESPACE.")
@click.option(
    "--network",
    type=NETWORK,
    default="public",
    show_default=True,
    help="The server's network: the internet, a private network, or this machine.",
)
@click.option(
    "--credential",
    type=WHOSE,
    default="none",
    show_default=True,
    help="The owner of the credential that the server gets. Users sign in if it asks for that.",
)
@click.option(
    "--era",
    type=ERA,
    default="auto",
    show_default=True,
    help="The protocol revision to ask it in. auto: each client's own, if the server speaks it.",
)
@click.option(
    "--recheck-s",
    type=click.FloatRange(0, 3600),
    default=1.0,
    show_default=True,
    help="Seconds for which a list of its tools stays valid. 0: it is asked before each call.",
)
@click.argument("name")
def add(
    name: str,
    orgs: tuple[str, ...],
    projects: tuple[str, ...],
    url: str | None,
    openapi: str | None,
    executable: str | None,
    arguments: tuple[str, ...],
    unpinned: bool,
    namespace: str | None,
    network: str,
    credential: str,
    era: str,
    recheck_s: float,
    **flags: Flags,
) -> None:
    """Add a server to the settings file; `tollgate reload` tells a running gateway.

    Nobody sees what it offers before `tollgate mcp approve`. With --org or --project, it does not
    exist for anybody else. A command is pinned to its present program: a changed one does not
    start.
    """
    ways = (url if openapi is None else openapi, executable)
    if ways.count(None) != 1 or ((arguments or unpinned) and executable is None):
        raise click.UsageError("name --url, --openapi, or --command with its --arg")
    if openapi is not None:
        openapi, url = described(name, openapi, url)
    path = config_path(flags)
    written: dict[str, Any] = {"name": name, "openapi": openapi, "url": url}
    written["namespace"] = namespace
    if executable is not None:
        written |= launched(name, executable, arguments, may_drift=unpinned)
    if orgs or projects:
        written |= audience_of(load(flags), orgs, projects)
    written["network"] = None if network == "public" else network
    written["credential"] = None if credential == "none" else credential
    written["era"] = None if era == "auto" else era
    written["recheck_s"] = None if recheck_s == 1.0 else recheck_s
    rewrite(path, with_server(path.read_text() if path.exists() else "", written), flags)
    where = "" if openapi is None else f", asked at {url}"
    click.echo(f"{name} stands in {path}{where}; now: tollgate mcp diff {name}")


def audience_of(
    settings: Settings, orgs: tuple[str, ...], projects: tuple[str, ...]
) -> dict[str, list[str]]:
    """Return the keys of a server's table, by the names of whom it is for."""
    from gateway.tenancy.orgs import find_org
    from gateway.tenancy.projects import find_project

    if projects and len(orgs) > 1:
        raise click.UsageError("--project is of one --org")
    found: dict[str, list[str]] = {}

    async def work() -> None:
        async with connections(settings) as (db, _), db.connect() as conn:
            ids = [(await find_org(conn, name=each)).id for each in orgs or ("default",)]
            if projects:
                made = [await find_project(conn, org_id=ids[0], name=each) for each in projects]
                found["projects"] = [f"{each.org_id}/{each.id}" for each in made]
            else:
                found["orgs"] = ids

    run(work())
    return found


@mcp.command()
@with_options(*STATE)
@click.argument("name")
def remove(name: str, **flags: Flags) -> None:
    """Take a server out of the settings file; a running gateway asks it until it is started anew.
    What was approved of it stays approved (`tollgate mcp approve NAME --revoke --all` before)."""
    path = config_path(flags)
    if name not in [each.name for each in load(flags).mcp.servers]:
        raise click.ClickException(f"{name}: the settings file has no such server")
    rewrite(path, without_server(path.read_text(), name), flags)
    click.echo(f"{name} stands in {path} no more.")


def described(name: str, openapi: str, url: str | None) -> tuple[str, str]:
    """Return a document's place as the settings file writes it, and where its API is.

    A file is read: one from which no tools can be made is refused.
    """
    if openapi.startswith(("http://", "https://")):
        if url is None:
            raise click.UsageError("--url: where the API is, of which only its document has a URL")
        return openapi, url
    from mcp_bridge.text_safety.hidden_text import visible
    from mcp_bridge.upstream.openapi.document import MAX_DOCUMENT_BYTES, Document
    from mcp_bridge.upstream.openapi.errors import BadDocument
    from mcp_bridge.upstream.openapi.tools import OpenApiTools

    try:
        with Path(openapi).open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
        found = url or first_server(Document.parse(content).root)
        if found is None:
            raise click.UsageError("--url: where the API is; the document does not say it")
        OpenApiTools(name, content, found)
    except OSError as error:
        raise click.ClickException(f"{openapi}: {error.strerror}") from None
    except BadDocument as error:
        raise click.ClickException(visible(f"{openapi}: {error}")) from None
    return str(Path(openapi).absolute()), found


def first_server(root: dict[str, Any]) -> str | None:
    """Return the first address that the document names; None: it names none."""
    servers = root.get("servers")
    first = servers[0] if isinstance(servers, list) and servers else None
    url = first.get("url") if isinstance(first, dict) else None
    is_whole = isinstance(url, str) and url.startswith(("http://", "https://")) and "{" not in url
    return url if is_whole else None


@mcp.command()
@with_settings
@with_options(ORG, PROJECT, JSON)
async def doctor(settings: Settings, org: str, project: str, as_json: bool) -> None:
    """Ask each server what it offers, and say what keeps it from being used.

    For a process that ended, also says how, and shows its last complaints. Exits with 1 if a server
    does not answer.
    """
    failed = False
    async with connections(settings) as (db, redis):
        org_id = await org_of(db, org, project)
        for name in names_for(settings, org_id):
            report = await examined(settings, db, redis, org_id, name)
            failed = failed or report["problem"] is not None
            click.echo(msgspec.json.encode(report) if as_json else in_words(report))
    if failed:
        raise Exit(1)


async def examined(
    settings: Settings, db: Any, redis: Any, org_id: str, name: str
) -> dict[str, Any]:
    """Ask a server.

    `problem`: why it cannot be asked; `ended` and `stderr`: of its process then, if there was one.
    """
    from gateway.mcp.admin.pins_admin import compared, of_others
    from gateway.mcp.pins import read_pins
    from mcp_bridge.trust.scan import worst
    from mcp_bridge.upstream.stdio.package_refs import unpinned

    config = server_of(settings, name)
    said: dict[str, Any] = {"server": name, "trust": config.trust, "problem": None}
    if config.launch is not None:
        said["unpinned"] = unpinned(config.launch.command, config.launch.args)
    ends: list[LastWords] = []
    async with db.connect() as conn:
        approved = await read_pins(conn, org_id=org_id, server=name)
        others = await of_others(conn, names_for(settings, org_id), org_id, name)
    try:
        offer = await offered(settings, config, org_id, db, redis, ends.append)
    except click.ClickException as error:
        said |= {"approved": len(approved.pins), "problem": error.message}
        return said | ({"ended": ends[-1].ended, "stderr": ends[-1].lines} if ends else {})
    waiting = (
        [] if config.trust == "all" else list(compared(config, approved, offer, others).found())
    )
    suspicious = [change.name for change, found in waiting if worst(found) == "high"]
    tools = [pin for pin in offer.pins.values() if pin.kind == "tool"]
    return said | {
        "tools": len(tools),
        "approved": len(approved.pins),
        "waiting": len(waiting),
        "suspicious": suspicious,
    }


def in_words(said: dict[str, Any]) -> str:
    """Show a report on a terminal."""
    from mcp_bridge.text_safety.hidden_text import visible

    drifts = [f"       not pinned: {each}" for each in said.get("unpinned", ())]
    if said["problem"] is not None:
        lines = [f"FAILS  {said['server']}: {said['problem']}"]
        if "ended" in said:
            lines += [f"       ended: {said['ended']}"]
            lines += [f"       stderr: {line}" for line in said["stderr"]]
        return "\n".join(map(visible, [*lines, *drifts]))
    parts = [f"{said['tools']} tools", f"{said['approved']} approved", f"{said['waiting']} wait"]
    if said["suspicious"]:
        parts.append("looks like an attack: " + ", ".join(said["suspicious"]))
    found = f"ok     {said['server']} ({said['trust']}): {', '.join(parts)}"
    return "\n".join(map(visible, [found, *drifts]))


@mcp.command("call")
@with_settings
@with_options(ORG, PROJECT, KEY)
@click.option("--address", help="The URL of the running gateway. Default: as the settings say.")
@click.argument("name")
@click.argument("tool")
@click.argument("arguments", default="{}")
async def call_tool(
    settings: Settings,
    name: str,
    tool: str,
    arguments: str,
    org: str,
    project: str,
    key: str | None,
    address: str | None,
) -> None:
    """Call a server's tool with ARGUMENTS, a JSON object, through the running gateway.

    The rules, limits and prices of the key apply. Exits with 1 if the call or the tool fails.
    """
    if key is None:
        raise click.UsageError("an API key is needed: --key, or TOLLGATE_API_KEY")
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(str(error), param_hint="ARGUMENTS") from None
    async with connections(settings) as (db, _):
        org_id = await org_of(db, org, project)
    url = f"{(address or settings.issuer).rstrip('/')}/mcp/{org_id}"
    answer = await post_call(url, key, {"name": f"{name}__{tool}", "arguments": given})
    result = answer.get("result")
    click.echo(json.dumps(result if isinstance(result, dict) else answer, indent=2))
    if not isinstance(result, dict) or result.get("isError") is True:
        raise Exit(1)


async def post_call(url: str, key: str, params: dict[str, Any]) -> dict[str, Any]:
    """Send the request and return the answer, whatever it is."""
    import httpx

    from foundation import sse
    from mcp_bridge.protocol.envelope import Envelope
    from mcp_bridge.protocol.eras import MODERN
    from mcp_bridge.protocol.translation import to_modern_params

    envelope = Envelope(version=MODERN, capabilities={}, info={"name": "tollgate", "version": "0"})
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": to_modern_params(params, envelope),
    }
    headers = {
        "authorization": f"Bearer {key}",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": MODERN,
        "mcp-method": "tools/call",
        "mcp-name": params["name"],
    }
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
        return msgspec.json.decode(said, type=dict[str, Any])
    except msgspec.DecodeError:
        raise click.ClickException(f"{url}: status {answer.status_code}, and no JSON") from None
