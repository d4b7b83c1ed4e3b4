"""`tollgate mcp add` and `remove`: adds a server to a running installation, or takes one away.

A server with a URL goes through the gateway's API. A program, or a document that lies on this
machine, is added by who can read the installation's secret, under which it is sealed for this home
(`gateway.cli.mcp.programs`): no API takes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit

from gateway.cli.mcp.calling import may_call
from gateway.cli.mcp.launch import launched
from gateway.cli.mcp.offers import mcp
from gateway.cli.mcp.programs import store_program
from gateway.cli.shared.command import connections, with_options
from gateway.cli.shared.stored import DRY_RUN, SETTINGS, dry_run_of, show_changes, until_in_force
from gateway.cli.shared.target import (
    Gateway,
    GatewayError,
    GatewayTarget,
    open_gateway,
    with_gateway,
    with_target,
)
from gateway.settings.load import Settings

SERVERS = f"{SETTINGS}/mcp_servers"
FIRST_KEY = "tollgate keys create --name tools --scope inference --scope mcp:call"
WHOSE = click.Choice(["none", "tenant", "user"])
ERA = click.Choice(["auto", "2026-07-28", "2025-11-25"])
NETWORK = click.Choice(["public", "private", "loopback"])


@mcp.command(short_help="Add a server to the running gateway.")
@with_target
@with_options(DRY_RUN)
@click.option("--org", "orgs", multiple=True, help="Show it to this organization. Default: to all.")
@click.option(
    *("--project", "projects"),
    multiple=True,
    help="Show it only to this project of the one --org (or of default).",
)
@click.option("--openapi", help="The OpenAPI document of an HTTP API: a file or a URL.")
@click.option(
    "--unpinned", is_flag=True, help="Accept a package or image that may change without notice."
)
@click.option(
    *("--env", "variables"),
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of the program's environment, which is no secret; repeatable.",
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
@click.argument("server", nargs=-1, metavar="[URL | -- PROGRAM [ARGUMENT]...]")
async def add(
    settings: Settings,
    target: GatewayTarget,
    name: str,
    server: tuple[str, ...],
    orgs: tuple[str, ...],
    projects: tuple[str, ...],
    openapi: str | None,
    unpinned: bool,
    variables: tuple[str, ...],
    namespace: str | None,
    network: str,
    credential: str,
    era: str,
    recheck_s: float,
    dry_run: bool,
) -> None:
    """Add a server at URL, or a PROGRAM of this machine, to the running gateway.

    A program is pinned as it is now, and runs in this home alone. Nobody sees what a server offers
    before `tollgate mcp approve`. With --org or --project, it does not exist for anybody else.
    """
    url, program = place_of(server)
    of_programs = unpinned or variables
    if (program and openapi) or (of_programs and not program) or not (program or url or openapi):
        raise click.UsageError("name the server's URL, --openapi, or -- and its program")
    content: dict[str, Any] = {"url": url}
    if openapi is not None:
        openapi, content["url"] = described(name, openapi, url)
    if program:
        content = launched(name, program[0], program[1:], may_drift=unpinned)
        content["environment"] = dict(map(variable_of, variables))
    content |= {"openapi": openapi, "namespace": namespace}
    content["network"] = None if network == "public" else network
    content["credential"] = None if credential == "none" else credential
    content["era"] = None if era == "auto" else era
    content["recheck_s"] = None if recheck_s == 1.0 else recheck_s
    is_local = bool(program) or (openapi is not None and not is_url(openapi))
    if target.why == "--url" and (is_local or projects):
        what = "a project is looked up" if projects else "programs and files are added"
        raise GatewayError(f"--url: {what} at the machine of the home", status=2)
    async with open_gateway(target) as gateway:
        if orgs or projects:
            content |= await audience_of(gateway, settings, orgs, projects)
        content = {key: value for key, value in content.items() if value not in (None, [], {})}
        if is_local:
            changes = await store_program(settings, name, content, is_dry_run=dry_run)
        else:
            made = await gateway.send(
                "POST", SERVERS, {"name": name, "content": content}, dry_run_of(dry_run)
            )
            changes = made["changes"]
        show_changes(changes, is_dry_run=dry_run)
        if not dry_run:
            await until_in_force(gateway)
            await say_what_next(gateway, name)


def variable_of(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--env: {text}: give NAME=VALUE")
    return name, value


def place_of(server: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the URL, or the program with its arguments."""
    if server and is_url(server[0]):
        if len(server) > 1:
            raise click.UsageError(f"behind the URL stands {server[1]!r}")
        return server[0], ()
    return None, server


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


async def say_what_next(gateway: Gateway, name: str) -> None:
    """Say how a tool of it is called, and which key may do so."""
    click.echo(
        f"{name} is added. Nobody sees what it offers before it is approved:\n"
        f"  tollgate mcp diff {name}\n"
        f"  tollgate mcp approve {name} --all\n"
        f"  tollgate mcp call {name} TOOL '{{}}'"
    )
    key = gateway.target.api_key
    org = await gateway.get("/v1/admin/organization")
    if key is not None and not await may_call(gateway.target.base, org["id"], key):
        click.echo(f"The first key may call no tools; make one that may:\n  {FIRST_KEY}")


async def audience_of(
    gateway: Gateway, settings: Settings, orgs: tuple[str, ...], projects: tuple[str, ...]
) -> dict[str, list[str]]:
    """Return the keys of a server's table, by the names of whom it is for."""
    if not projects:
        return {"orgs": [str(await gateway.org_id(each)) for each in orgs]}
    if len(orgs) > 1:
        raise click.UsageError("--project is of one --org")
    from gateway.tenancy.errors import TenancyError
    from gateway.tenancy.orgs import find_org
    from gateway.tenancy.projects import find_project

    try:
        async with connections(settings) as (db, _), db.connect() as conn:
            org = await find_org(conn, name=orgs[0] if orgs else "default")
            made = [await find_project(conn, org_id=org.id, name=each) for each in projects]
    except TenancyError as error:
        raise GatewayError(str(error), status=2) from None
    return {"projects": [f"{each.org_id}/{each.id}" for each in made]}


@mcp.command(short_help="Remove a server from the running gateway.")
@with_gateway
@with_options(DRY_RUN)
@click.argument("name")
async def remove(gateway: Gateway, name: str, dry_run: bool) -> None:
    """Remove a server that was added; calls that run end.

    What was approved of it stays approved (`tollgate mcp approve NAME --revoke --all` before).
    """
    try:
        gone = await gateway.send("DELETE", f"{SERVERS}/{name}", query=dry_run_of(dry_run))
    except GatewayError as error:
        if error.http_status != 404:
            raise
        click.echo(
            f"tollgate: {name}: no such server was added; one of the settings file is taken out"
            " there (then `tollgate reload`)",
            err=True,
        )
        raise Exit(2) from None
    show_changes(gone["changes"], is_dry_run=dry_run)
    if not dry_run:
        await until_in_force(gateway)
        click.echo(f"{name} is removed.")


def described(name: str, openapi: str, url: str | None) -> tuple[str, str]:
    """Return a document's place as settings write it, and where its API is.

    A file is read: one from which no tools can be made is refused.
    """
    if is_url(openapi):
        if url is None:
            raise click.UsageError("name the API's URL, too: its document says no whole one")
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
            raise click.UsageError("name the API's URL, too: its document says no whole one")
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
    return url if isinstance(url, str) and is_url(url) and "{" not in url else None
