"""`tollgate users`: people who may sign in, and a link for the first of them.

A password is read from standard input, asked for where that is a terminal, and never from an
argument, which other users of the machine could see.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import click
import msgspec

from gateway.cli.identity.tenancy import CREATED, OF_ORG
from gateway.cli.shared.command import JSON, connections, refuse, with_options, with_settings
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.settings.load import Settings

COLUMNS = (
    Column("ID", "id", "id"),
    CREATED,
    Column("ROLE", "role"),
    Column("EMAIL", "email"),
    Column("NAME", "name", gives_way=True),
)
MAX_INPUT = 1024
EMAIL = click.option("--email", required=True, help="The address to sign in with.")


@click.group()
def users() -> None:
    """Create and list users, set their passwords, and sign them in.

    Passwords come from standard input: `tollgate users create --email me@example.com < file`, or
    are asked for.
    """


@users.command("create")
@with_settings
@with_options(JSON, OF_ORG, EMAIL)
@click.option("--name", help="The name that people see. Default: the address.")
@click.option(
    "--role",
    type=click.Choice(["owner", "admin", "developer", "billing", "reader"]),
    default="owner",
    show_default=True,
    help="The role, which says what the user may do.",
)
async def create(
    settings: Settings, org: str, email: str, name: str | None, role: str, as_json: bool
) -> None:
    """Create a user of an organization who signs in with a password."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy.members.users import create_user
    from gateway.tenancy.orgs import find_org

    hashed = await hash_password(read_password(email))
    async with connections(settings) as (db, _), db.begin() as conn:
        owner = await find_org(conn, name=org)
        made = await create_user(
            conn,
            org_id=owner.id,
            email=email,
            name=name or email,
            role=role,
            actor=COMMAND_LINE,
            password_hash=hashed,
        )
    line = f"{made.id} is {made.email}, {made.role} of {org}."
    click.echo(msgspec.json.encode(made).decode() if as_json else line)


@users.command("passwd")
@with_settings
@with_options(OF_ORG, EMAIL)
async def passwd(settings: Settings, org: str, email: str) -> None:
    """Set the password of a user.

    Whoever is signed in as them has to sign in again, and every application that acts for them to
    ask again: its tokens are refused within a second.
    """
    from gateway.audit.log import COMMAND_LINE
    from gateway.auth.bearer.revocations import announcing
    from gateway.auth.login.change import change_password
    from gateway.tenancy.members.users import find_user
    from gateway.tenancy.orgs import find_org

    hashed = await hash_password(read_password(email))
    async with (
        connections(settings) as (db, redis),
        announcing(redis) as announcement,
        db.begin() as conn,
    ):
        owner = await find_org(conn, name=org)
        user = await find_user(conn, org_id=owner.id, email=email)
        await change_password(
            conn,
            announcement,
            org_id=owner.id,
            user_id=user.id,
            password_hash=hashed,
            actor=COMMAND_LINE,
        )
    click.echo(f"{user.id} has a new password.")


@users.command("link")
@with_settings
@with_options(OF_ORG)
@click.option("--email", help="Whom it signs in. Default: the first owner.")
async def link(settings: Settings, org: str, email: str | None) -> None:
    """Print a link that signs somebody in, once, within a quarter of an hour.

    Without --email it is for the first owner of the organization that operates the installation;
    where that has none yet, who opens the link becomes it.
    """
    from gateway.audit.log import COMMAND_LINE
    from gateway.auth.login.sign_in_links import SignInLink, first_owner, make_link, to_link
    from gateway.home import Home
    from gateway.processes import credentials_file
    from gateway.secret import Secret
    from gateway.tenancy.errors import NotFound
    from gateway.tenancy.members.users import find_user
    from gateway.tenancy.orgs import find_org

    secret = Secret.load(settings.secret_key_file)
    async with connections(settings) as (db, redis), db.begin() as conn:
        if email is None:
            wanted = await first_owner(conn)
        else:
            owner = await find_org(conn, name=org)
            try:
                user = await find_user(conn, org_id=owner.id, email=email)
            except NotFound:
                raise NotFound(
                    "email", f"no user of {org} has this address; --org names another organization"
                ) from None
            wanted = SignInLink(org_id=owner.id, user_id=user.id, role=user.role)
        token = await make_link(conn, redis, wanted, secret=secret, actor=COMMAND_LINE)
    known = credentials_file.read(Home(settings.home).credentials)
    site = settings.issuer
    if settings.public_url is None and known is not None:
        site = known.base_url.removesuffix("/v1")  # where it was last started
    click.echo(to_link(site, token))


@users.command("list")
@with_settings
@with_output
@with_options(OF_ORG)
async def list_(settings: Settings, org: str, output: Output) -> None:
    """List the users of an organization, oldest first."""
    from gateway.tenancy.members.users import list_users
    from gateway.tenancy.orgs import find_org
    from gateway.tenancy.pages import MAX_LIMIT, Cursor

    rows: list[dict[str, Any]] = []
    async with connections(settings) as (db, _), db.connect() as conn:
        owner = await find_org(conn, name=org)
        cursor, more = Cursor(limit=MAX_LIMIT), True
        while more:
            found, more = await list_users(conn, org_id=owner.id, cursor=cursor)
            rows += map(msgspec.structs.asdict, found)
            cursor = Cursor(limit=MAX_LIMIT, after=found[-1].id if found else None)
    show(rows, COLUMNS, output)


def read_password(email: str) -> str:
    """Read one line; end the command if the password is too weak."""
    from gateway.auth.login.passwords import WeakPassword, check_strength

    if sys.stdin.isatty():
        # The event loop's handler only cancels a task, and the prompt would go on waiting.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            password = click.prompt("Password", hide_input=True, confirmation_prompt=True)
        finally:
            signal.signal(signal.SIGINT, handler)
    else:
        password = sys.stdin.readline(MAX_INPUT).rstrip("\r\n")
    try:
        check_strength(password, email)
    except WeakPassword as error:
        refuse(error, status=2)
    return str(password)


async def hash_password(password: str) -> str:
    from gateway.auth.login.passwords import Passwords

    passwords = Passwords()
    try:
        return await passwords.hash(password)
    finally:
        passwords.close()
