"""`tollgate keys`: creates, lists, rotates and revokes API keys, in the database itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.cli.identity.tenancy import all_orgs
from gateway.cli.shared.command import JSON, connections, with_options, with_settings
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.times import to_day
from gateway.principal import KEY_LANES, KEY_LIMIT_NAMES
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from gateway.tenancy.keys.keys import CreatedKey, KeyRow

MAX_LIFETIME_DAYS = 36_500
KEY = click.argument("named", metavar="KEY")


@click.group()
def keys() -> None:
    """Create, list and revoke API keys, while `tollgate up` runs or not."""


OWN = "A limit of the key's own, beside that of its plan."


@keys.command("create")
@with_settings
@JSON
@click.option("--name", required=True, help="A label for people: whose key it is, or what for.")
@click.option("--org", default="default", show_default=True, help="Name of the organization.")
@click.option("--project", default="default", show_default=True, help="Name of the project.")
@click.option(
    *("--scope", "scopes"),
    multiple=True,
    default=("inference",),
    show_default=True,
    help="inference, mcp:call, usage:read or admin:*; may be given several times.",
)
@click.option(
    "--plan",
    help="A [plan.NAME] of the settings. Default: no plan of its own. The plans of its project and "
    "organization bind it in any case.",
)
@click.option(
    "--expires-in-days",
    type=click.IntRange(1, MAX_LIFETIME_DAYS),
    help="Let the key expire after this many days. Default: never.",
)
@click.option(
    *("--model", "models"),
    multiple=True,
    help="A model that the key may use; may be given several times. Default: all.",
)
@click.option(
    *("--ip-range", "ip_ranges"),
    multiple=True,
    help="A network (CIDR) or address that may use the key. Default: anywhere.",
)
@with_options(
    *(click.option(f"--{name.replace('_', '-')}", type=int, help=OWN) for name in KEY_LIMIT_NAMES)
)
@click.option(
    "--lane", type=click.Choice(KEY_LANES), help="The highest lane that its requests may use."
)
async def create(
    settings: Settings,
    name: str,
    org: str,
    project: str,
    scopes: tuple[str, ...],
    plan: str | None,
    expires_in_days: int | None,
    models: tuple[str, ...],
    ip_ranges: tuple[str, ...],
    lane: str | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Create a key and print it.

    It is shown only this once and stored nowhere.
    """
    from gateway.audit.log import COMMAND_LINE
    from gateway.secret import Secret
    from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
    from gateway.tenancy.keys.restrictions import Restrictions
    from gateway.tenancy.orgs import find_org
    from gateway.tenancy.projects import find_project

    lifetime = None if expires_in_days is None else timedelta(days=expires_in_days)
    async with connections(settings) as (db, _), db.begin() as conn:
        pepper = Secret.load(settings.secret_key_file).current
        org_id = (await find_org(conn, name=org)).id
        owner = await find_project(conn, org_id=org_id, name=project)
        made = await create_key(
            conn,
            org_id=org_id,
            project_id=owner.id,
            name=name,
            scopes=scopes,
            pepper=pepper.derive(PEPPER_PURPOSE),
            pepper_id=pepper.id,
            plan=plan,
            expires_at=None if lifetime is None else datetime.now(tz=UTC) + lifetime,
            restrictions=Restrictions(
                models=list(models) or None,
                ip_ranges=list(ip_ranges) or None,
                lane=lane,
                **limits,
            ),
            actor=COMMAND_LINE,
        )
    show_once(made, as_json)


KEY_COLUMNS = (
    Column("ID", "id", "id"),
    Column("KEY", "hint", show=lambda row: f"{row['prefix']}...{row['last_four']}"),
    Column("STATE", "state"),
    Column(
        "CREATED", "created_at", "time", gives_way=True, show=lambda row: to_day(row["created_at"])
    ),
    Column("PROJECT", "project_id", "id", gives_way=True),
    Column("PLAN", "plan", gives_way=True),
    Column("SCOPES", "scopes", gives_way=True, show=lambda row: ",".join(row["scopes"])),
    Column("NAME", "name"),
)


@keys.command("list")
@with_settings
@with_output
async def list_(settings: Settings, output: Output) -> None:
    """List all keys, revoked and expired ones too.

    By organization, oldest first; never the keys themselves.
    """
    from gateway.tenancy.keys.keys import KeyRow, select_keys
    from gateway.tenancy.pages import read_all
    from gateway.tenancy.tables import api_keys

    rows: list[dict[str, Any]] = []
    async with connections(settings) as (db, _), db.connect() as conn:
        async for owner in all_orgs(conn, archived=True):
            rows += [
                msgspec.structs.asdict(key) | {"state": state_of(key)}
                async for key in read_all(conn, select_keys(owner.id), api_keys.c.id, KeyRow)
            ]
    show(rows, KEY_COLUMNS, output)


def show_once(made: CreatedKey, as_json: bool) -> None:
    if as_json:
        fields = msgspec.structs.asdict(made.row) | {"key": made.secret}
        click.echo(msgspec.json.encode(fields).decode())
    else:
        click.echo(to_record(made.row, made.secret))


def to_record(key: KeyRow, secret: str) -> str:
    """Show a new key as a person reads it."""
    given = {name: getattr(key, name) for name in KEY_LIMIT_NAMES}
    limits = [f"{name}={value}" for name, value in given.items() if value is not None]
    fields = {
        "id": key.id,
        "name": key.name,
        "project": key.project_id or "-",
        "plan": key.plan or "-",
        "limits": ", ".join(limits) or "-",
        "scopes": ", ".join(key.scopes),
        "expires": "never" if key.expires_at is None else key.expires_at.isoformat(" ", "minutes"),
        "key": secret,
    }
    lines = [f"{name:<9}{value}" for name, value in fields.items()]
    return "\n".join((*lines, "", "Keep the key: it is stored nowhere and not shown again."))


def state_of(key: KeyRow) -> str:
    expired = key.expires_at is not None and key.expires_at <= datetime.now(tz=UTC)
    return "revoked" if key.revoked_at is not None else "expired" if expired else "active"


@keys.command("rotate")
@with_settings
@JSON
@click.option(
    "--grace-s",
    type=int,
    help="How many seconds the old key stays valid. Default: one day. 0: it ends at once.",
)
@KEY
async def rotate(settings: Settings, named: str, grace_s: int | None, as_json: bool) -> None:
    """Give a key another secret, and print it.

    It is shown only this once; the old one stays valid for a while. KEY: its id, the ending that
    `list` shows of it, or its name where no other key has it.
    """
    from gateway.audit.log import COMMAND_LINE
    from gateway.secret import Secret
    from gateway.tenancy.keys.changes import DEFAULT_GRACE_S, rotate_key
    from gateway.tenancy.keys.keys import PEPPER_PURPOSE, find_named_key

    grace = DEFAULT_GRACE_S if grace_s is None else grace_s
    async with connections(settings) as (db, redis):
        pepper = Secret.load(settings.secret_key_file).current
        async with db.connect() as conn:
            key_id, org_id = await find_named_key(conn, named)
        made = await rotate_key(
            db,
            redis,
            key_id,
            org_id=org_id,
            grace_s=grace,
            pepper=pepper.derive(PEPPER_PURPOSE),
            pepper_id=pepper.id,
            actor=COMMAND_LINE,
        )
    show_once(made, as_json)
    if not as_json:
        ends = datetime.now(tz=UTC) + timedelta(seconds=grace)
        old = f"stays valid until {ends:%Y-%m-%d %H:%M} UTC" if grace else "is refused from now on"
        click.echo(f"The one before {old}.")


@keys.command("revoke")
@with_settings
@KEY
async def revoke(settings: Settings, named: str) -> None:
    """Take a key back; every worker refuses it within a second.

    KEY: its id, the ending that `list` shows of it, or its name where no other key has it.
    """
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy.keys.keys import find_named_key, revoke_key

    async with connections(settings) as (db, redis):
        async with db.connect() as conn:
            key_id, org_id = await find_named_key(conn, named)
        await revoke_key(db, redis, key_id, org_id=org_id, actor=COMMAND_LINE)
    click.echo(f"{key_id} is revoked.")
