"""`tollgate mcp`: shows what MCP servers offer, what of it is approved, and which calls wait.

A server is one of the settings in force; what is approved of it is the organization's of the
project that is named.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.cli.identity.tenancy import project_named
from gateway.cli.mcp.launch import accept_launch
from gateway.cli.shared.command import (
    STATE,
    connections,
    run,
    with_options,
)
from gateway.cli.shared.in_force import in_force, with_settings_in_force
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.settings.file import Flags
from gateway.settings.load import Settings, load

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from sqlalchemy.ext.asyncio import AsyncEngine

    from mcp_bridge.pinning import ApprovedPins, Change, Offer, Pin
    from mcp_bridge.trust.approvals import Approval
    from mcp_bridge.trust.policy import ToolRule
    from mcp_bridge.trust.scan import Finding
    from mcp_bridge.upstream.credentials import Credentials
    from mcp_bridge.upstream.stdio.stderr_tail import LastWords
    from mcp_bridge.upstream.upstream import ServerConfig

SERVER_COLUMNS = (
    Column("SERVER", "server"),
    Column("TRUST", "trust"),
    Column("APPROVED", "approved", "number"),
    Column("WAITING", "waiting", show=lambda row: row["problem"] or str(row["waiting"])),
    Column("URL", "url", gives_way=True),
)
TAINT_COLUMNS = (
    Column("CLIENT", "client", "id"),
    Column("SUBJECT", "subject", "id"),
    Column("SERVERS", "servers"),
)
CALL_COLUMNS = (
    Column("ID", "id", "id"),
    Column("STATE", "state"),
    Column("SERVER", "server"),
    Column("TOOL", "tool"),
    Column("DECIDER", "decider", gives_way=True),
    Column("CALLER", "caller", "id", gives_way=True),
    Column("ARGUMENTS", "arguments_digest", gives_way=True),
)
PROJECT = click.option(
    "--project", default="default", show_default=True, help="A project of the organization."
)
ORG = click.option("--org", default="default", show_default=True, help="Name of the organization.")


@click.group()
def mcp() -> None:
    """See and approve what MCP servers offer, and calls that wait for a person."""


@mcp.command("list")
@with_settings_in_force
@with_output
@with_options(ORG, PROJECT)
async def list_servers(settings: Settings, org: str, project: str, output: Output) -> None:
    """List the servers: how much of what they offer is approved, and how much waits for it."""
    from gateway.mcp.pins import read_pins
    from gateway.mcp.service.service import to_config

    found: list[dict[str, Any]] = []
    async with connections(settings) as (db, redis):
        org_id = await org_of(db, org, project)
        for config in map(to_config, settings.mcp.servers):
            if not config.audience.has(org_id, None):
                continue
            async with db.connect() as conn:
                approved = await read_pins(conn, org_id=org_id, server=config.name)
            changes, problem = await changes_of(settings, config, org_id, approved, db, redis)
            row: dict[str, Any] = {"server": config.name, "trust": config.trust}
            row |= {"url": config.address, "era": config.era, "recheck_s": config.recheck_s}
            counts = {"approved": len(approved.pins), "waiting": len(changes)}
            found.append({**row, **counts, "problem": problem})
    show(found, SERVER_COLUMNS, output, empty="There is no server; `tollgate mcp add` adds one.")


@mcp.command()
@with_settings_in_force
@with_options(ORG, PROJECT)
@click.argument("name")
async def diff(settings: Settings, name: str, org: str, project: str) -> None:
    """Show what a server offers that is not approved.

    With each place that changed, and what in it looks like an attack.
    """
    from gateway.mcp.admin.pins_admin import compared, of_others
    from gateway.mcp.pins import read_pins

    config = server_of(settings, name)
    async with connections(settings) as (db, redis):
        org_id = await org_of(db, org, project)
        async with db.connect() as conn:
            approved = await read_pins(conn, org_id=org_id, server=name)
            others = await of_others(conn, names_for(settings, org_id), org_id, name)
        offer = await offered(settings, config, org_id, db, redis)
    show_changes(compared(config, approved, offer, others).found())
    for one in offer.unpinnable:
        click.echo(f"never  {one.kind} {one.name}: {one.path or 'it'} {one.reason}")


@mcp.command()
@with_options(*STATE, ORG, PROJECT)
@click.option(
    *("--all", "everything"),
    is_flag=True,
    help="Approve all that waits, except what looks like an attack.",
)
@click.option("--tool", "tools", multiple=True, help="Approve this tool, whatever it looks like.")
@click.option(
    "--prompt", "prompts", multiple=True, help="Approve this prompt, whatever it looks like."
)
@click.option(
    "--instructions", is_flag=True, help="Approve its instructions, whatever they look like."
)
@click.option(
    "--launch",
    is_flag=True,
    help="Pin the present program of its command in the settings file, so that it may start.",
)
@click.option(
    "--revoke",
    is_flag=True,
    help="Revoke the approval of these instead; with --all, of the server (it is not contacted).",
)
@click.argument("name")
def approve(
    name: str,
    org: str,
    project: str,
    everything: bool,
    tools: tuple[str, ...],
    prompts: tuple[str, ...],
    instructions: bool,
    launch: bool,
    revoke: bool,
    **flags: Flags,
) -> None:
    """Approve what a server offers now, and how it is reached.

    Every worker shows it within a second.
    """
    from gateway.mcp.admin.pins_admin import chosen, compared, keys_of, of_others
    from gateway.mcp.known import announce
    from gateway.mcp.pins import approve_changes, read_pins, revoke_pins
    from gateway.tenancy.errors import InvalidField

    named = keys_of(tools, prompts, instructions)
    keys = None if everything else named
    if (everything and named) or not (everything or named or launch) or (launch and revoke):
        raise click.UsageError("name things with --tool, --prompt, --instructions, or --all")
    if launch:
        accept_launch(name, flags)
    settings = in_force(load(flags))
    config = server_of(settings, name)

    async def work() -> None:
        from gateway.audit.log import COMMAND_LINE

        async with connections(settings) as (db, redis):
            org_id = await org_of(db, org, project)
            if revoke:
                async with db.begin() as conn:
                    count = await revoke_pins(
                        conn, org_id=org_id, server=name, keys=keys, actor=COMMAND_LINE
                    )
            else:
                offer = await offered(settings, config, org_id, db, redis)
                async with db.begin() as conn:
                    approved = await read_pins(conn, org_id=org_id, server=name)
                    others = await of_others(conn, names_for(settings, org_id), org_id, name)
                    seen = compared(config, approved, offer, others)
                    try:
                        wanted = chosen(seen.found(), keys)
                    except InvalidField as error:
                        raise click.ClickException(error.message) from None
                    count = await approve_changes(
                        conn, org_id=org_id, server=name, pin_changes=wanted, actor=COMMAND_LINE
                    )
                keys_of_wanted = {(each.kind, each.name) for each in wanted}
                show_changes(
                    one for one in seen.found() if (one[0].kind, one[0].name) in keys_of_wanted
                )
            await announce(redis, org_id)
        click.echo(f"{count} {'revoked' if revoke else 'approved'}.")

    run(work())


@mcp.command()
@with_settings_in_force
@with_options(ORG, PROJECT)
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
async def rules(settings: Settings, file: Path | None, org: str, project: str) -> None:
    """Show the organization's rules for calls, or replace all of them.

    By those of a JSON file: a list, or what is shown (docs/mcp.md).
    """
    from gateway.audit.log import COMMAND_LINE
    from gateway.mcp.admin.rule_warnings import warnings_of
    from gateway.mcp.known import announce
    from gateway.mcp.rules import read_rules, replace_rules

    wanted = None if file is None else read_rules_file(file)
    async with connections(settings) as (db, redis):
        org_id = await org_of(db, org, project)
        if wanted is None:
            async with db.connect() as conn:
                known = await read_rules(conn, org_id=org_id)
            content = msgspec.json.encode({"version": known.version, "rules": known.rules})
            click.echo(msgspec.json.format(content, indent=2))
            return
        async with db.begin() as conn:
            found = await replace_rules(conn, org_id=org_id, rules=wanted, actor=COMMAND_LINE)
            warnings = await warnings_of(
                conn, org_id=org_id, rules=wanted, servers=names_for(settings, org_id)
            )
        await announce(redis, org_id)
    click.echo(f"{len(wanted)} rules, version {found.version}.")
    for warning in warnings:
        click.echo(f"Warning: {warning}.")


class RulesFile(msgspec.Struct, forbid_unknown_fields=True):
    """The rules as the API takes them, and as they are shown."""

    rules: list[Any]
    version: str | None = None
    object: str | None = None


def read_rules_file(file: Path) -> list[ToolRule]:
    """Raises: click.ClickException, OSError."""
    from mcp_bridge.trust.policy import ToolRule

    try:
        content = msgspec.json.decode(file.read_bytes())
        if isinstance(content, dict):
            content = msgspec.convert(content, RulesFile).rules
        return msgspec.convert(content, list[ToolRule])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file}: {error}") from None


@mcp.command()
@with_settings_in_force
@with_options(ORG, PROJECT)
@click.option("--allow", help="Allow the call of this id.")
@click.option("--deny", help="Deny the call of this id.")
@click.option("--show", "shown", help="Show the arguments of the call of this id.")
@with_output
async def calls(
    settings: Settings,
    org: str,
    project: str,
    allow: str | None,
    deny: str | None,
    shown: str | None,
    output: Output,
) -> None:
    """List the calls that wait for a person's approval, show one, allow or deny it."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.mcp.approvals import list_approvals
    from gateway.mcp.service.wiring import open_approvals

    if sum(each is not None for each in (allow, deny, shown)) > 1:
        raise click.UsageError("--allow, --deny or --show")
    async with connections(settings) as (db, _):
        org_id = await org_of(db, org, project)
        if shown is not None:
            click.echo(await arguments_of(settings, db, org_id, shown))
            return
        if allow is None and deny is None:
            async with db.connect() as conn:
                waiting = await list_approvals(conn, org_id=org_id)
            show([to_row(each) for each in waiting], CALL_COLUMNS, output, empty="No call waits.")
            return
        decided = await open_approvals(db).decide(
            org_id, allow or deny or "", approve=allow is not None, by=COMMAND_LINE.id
        )
        if isinstance(decided, str):
            raise click.ClickException(f"{allow or deny}: {decided}")
        click.echo(f"{decided.id} is {decided.state}.")


def to_row(approval: Approval) -> dict[str, Any]:
    from mcp_bridge.text_safety.hidden_text import visible

    call = approval.call
    row = {"id": approval.id, "state": approval.state, "server": call.server}
    row |= {"tool": visible(approval.tool), "decider": call.decider, "caller": visible(call.caller)}
    return row | {"arguments_digest": call.arguments_digest}


async def arguments_of(settings: Settings, db: AsyncEngine, org_id: str, approval_id: str) -> str:
    """Return the arguments in readable form, with what is hidden in them made visible, and how
    they spell what can be spelled in several ways.

    Raises: ClickException, SecretError.
    """
    from gateway.mcp.approvals import PostgresApprovals
    from gateway.mcp.call_arguments import CallArguments
    from gateway.secret import Secret
    from mcp_bridge.text_safety.hidden_text import visible, visible_marks

    shown = CallArguments(Secret.load(settings.secret_key_file))
    found = await PostgresApprovals(db, shown=shown).arguments(org_id, approval_id, time.time())
    if found is None:
        raise click.ClickException(f"{approval_id}: no arguments are kept of it")
    return visible(visible_marks(msgspec.json.format(found, indent=2).decode()))


@mcp.command()
@with_settings_in_force
@with_options(ORG, PROJECT)
@click.option(
    "--lift", "client", metavar="CLIENT", help="Lift the taint of this key or OAuth client (id)."
)
@with_output
async def taints(
    settings: Settings, org: str, project: str, client: str | None, output: Output
) -> None:
    """List callers whose calls need approval after a tainting answer; --lift ends that."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.mcp.calls import lift, lifting, taints_of

    async with connections(settings) as (db, redis):
        org_id = await org_of(db, org, project)
        if client is None:
            tainted = await taints_of(redis, org_id=org_id, now_s=time.time())
            rows = [
                {
                    "client": each.caller.client,
                    "subject": each.caller.subject,
                    "servers": each.servers,
                }
                for each in tainted
            ]
            show(rows, TAINT_COLUMNS, output, empty="Nobody is tainted.")
            return
        async with db.begin() as conn:
            found = await lifting(conn, redis, org_id=org_id, client=client, actor=COMMAND_LINE)
        await lift(redis, org_id=org_id, taints=found)
        click.echo(f"{client}: lifted of {len(found)}.")


async def org_of(db: AsyncEngine, org: str, project: str) -> str:
    """Find the org. Raises: NotFound."""
    return (await project_named(db, org, project)).org_id


def server_of(settings: Settings, name: str) -> ServerConfig:
    from gateway.mcp.service.service import to_config

    for each in settings.mcp.servers:
        if each.name == name:
            return to_config(each)
    raise click.ClickException(f"{name}: there is no such server")


def names_for(settings: Settings, org_id: str) -> list[str]:
    """Return the servers that exist for this org."""
    from gateway.settings.mcp_servers import to_audience

    return [each.name for each in settings.mcp.servers if to_audience(each).has(org_id, None)]


async def offered(
    settings: Settings,
    config: ServerConfig,
    org_id: str,
    db: AsyncEngine,
    redis: Redis,
    on_end: Callable[[LastWords], None] | None = None,
) -> Offer:
    """Ask a server for its listing as the tenant is shown it, with the tenant's credential.

    `on_end`: is told how a process ended that was started for it; None: the error of a server that
    cannot be asked says it.
    """
    from gateway.mcp.service.service import NAME, own_version
    from gateway.mcp.upstreams import open_transports
    from mcp_bridge.errors import BridgeError
    from mcp_bridge.protocol.rpc import RpcError
    from mcp_bridge.routing.offer_reader import read_offer
    from mcp_bridge.text_safety.hidden_text import visible

    if not config.audience.has(org_id, None):
        raise click.ClickException(f"{config.name}: is not there for {org_id} (orgs, projects)")
    ends: list[LastWords] = []
    try:
        async with AsyncExitStack() as stack:
            credentials = await stack.enter_async_context(shown_by(settings, config, db, redis))
            told = ends.append if on_end is None else on_end
            transports = stack.enter_context(open_transports(settings, credentials, told))
            return await read_offer(
                config, {"name": NAME, "version": own_version()}, transports, org_id
            )
    except RpcError as error:
        said = f"{config.name}: {error.message}: {error.data}"
        lines = [f"{said}{refusal_behind(error)}", *last_words(ends)]
        raise click.ClickException("\n".join(map(visible, lines))) from None
    except BridgeError as error:
        lines = [f"{config.name}: {error}", *last_words(ends)]
        raise click.ClickException("\n".join(map(visible, lines))) from None


def last_words(ends: Sequence[LastWords]) -> list[str]:
    """Return what the last process that ended wrote to stderr, a line each."""
    if not ends:
        return []
    return [f"ended: {ends[-1].ended}", *(f"stderr: {line}" for line in ends[-1].lines)]


@asynccontextmanager
async def shown_by(
    settings: Settings, config: ServerConfig, db: AsyncEngine, redis: Redis
) -> AsyncIterator[Credentials | None]:
    """Return what a server is shown; where it is shown nothing, no secret is needed.

    Raises: SecretError.
    """
    if config.credential == "none":
        yield None
        return
    from gateway.mcp.admin.credentials_admin import vault_credentials
    from gateway.secret import Secret

    secret = Secret.load(settings.secret_key_file)
    async with vault_credentials(settings, secret, db, redis) as credentials:
        yield credentials


def refusal_behind(error: BaseException) -> str:
    """Return our own reason if we refused what a server is made of: callers are told a word, the
    operator which place of it."""
    from mcp_bridge.errors import BridgeError
    from mcp_bridge.upstream.launch_errors import DigestMismatch

    while error.__cause__ is not None:
        error = error.__cause__
    hint = ""
    if isinstance(error, DigestMismatch):
        hint = f"; `tollgate mcp approve {error.param} --launch` takes what is there now"
    return f": {error}{hint}" if isinstance(error, BridgeError) else ""


async def changes_of(
    settings: Settings,
    config: ServerConfig,
    org_id: str,
    approved: ApprovedPins,
    db: AsyncEngine,
    redis: Redis,
) -> tuple[list[Change], str | None]:
    """Return the listing that waits, or why it cannot be seen."""
    from mcp_bridge.routing.catalog import changes_of as changes_from

    try:
        offer = await offered(settings, config, org_id, db, redis)
    except click.ClickException:
        return [], "no answer"
    return [] if config.trust == "all" else list(changes_from(config, approved, offer)), None


def show_changes(found: Iterable[tuple[Change, tuple[Finding, ...]]]) -> None:
    """Show text on a terminal, with hidden characters made visible."""
    from mcp_bridge.pinning import differences
    from mcp_bridge.text_safety.hidden_text import visible

    for change, findings in found:
        name = visible(change.name)
        before = (
            f" (was {visible(change.was.name)})" if change.state == "renamed" and change.was else ""
        )
        click.echo(f"{change.state:9} {change.kind} {name}{before}".rstrip())
        for one in differences(value_of(change.was), value_of(change.now)):
            if one.was is not None:
                click.echo(f"    - {one.path or '(all)'}: {one.was}")
            if one.now is not None:
                click.echo(f"    + {one.path or '(all)'}: {one.now}")
        for finding in findings:
            click.echo(f"    ! {finding.severity} {finding.code} {finding.path}: {finding.detail}")


def value_of(pin: Pin | None) -> object:
    return {} if pin is None else pin.value()
