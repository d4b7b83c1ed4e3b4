"""Stores programs that MCP servers are, and files that they are made of, for the home of this
machine.

They are sealed under the installation's secret: that, and the home's database, is what a person at
the machine has and the holder of an operator's key has not. The running `tollgate up` starts no
program of Postgres without that seal, and none that is sealed for another home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.cli.shared.command import connections
from gateway.cli.shared.in_force import find_running
from gateway.cli.shared.target import GatewayError
from gateway.home import Home
from gateway.processes.control_socket import NoSupervisor, ReloadRequest, ask
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from gateway.installation.items import StoredSettings
    from gateway.installation.merge import Merger, StoredSetting


async def store_program(
    settings: Settings, name: str, content: dict[str, Any], *, is_dry_run: bool
) -> list[str]:
    """Store a server that was not there; return what changes. Raises: GatewayError."""
    from gateway.installation.items import create_item
    from gateway.installation.merge import StoredSetting

    async def store(conn: AsyncConnection, merger: Merger, **arguments: Any) -> None:
        item = StoredSetting(kind="mcp_server", name=name, content=content)
        await create_item(conn, merger.as_program(item), **arguments)

    return await _change(settings, store, is_dry_run=is_dry_run)


async def repin_program(settings: Settings, name: str, digests: Sequence[dict[str, str]]) -> None:
    """Pin a stored program anew, in all workers when this returns. Raises: GatewayError."""
    from gateway.installation.items import replace_item

    async def store(conn: AsyncConnection, merger: Merger, **arguments: Any) -> None:
        def repinned(item: StoredSetting) -> StoredSetting:
            content = item.content | {"digests": list(digests)}
            return merger.as_program(msgspec.structs.replace(item, content=content))

        await replace_item(conn, "mcp_server", name, repinned, check=lambda _: None, **arguments)

    await _change(settings, store, is_dry_run=False)
    try:
        answer = await ask(Home(settings.home), ReloadRequest(), lambda _: None)
    except NoSupervisor as error:
        raise GatewayError(str(error), status=1) from None
    if answer.is_refused:
        raise GatewayError(answer.message, status=1)


async def _change(settings: Settings, store: Callable[..., Any], *, is_dry_run: bool) -> list[str]:
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.audit.log import COMMAND_LINE
    from gateway.installation.merge import ChangeCheck, Merger
    from gateway.secret import Secret, SecretError
    from gateway.tenancy.errors import InvalidField, TenancyError
    from gateway.tenancy.orgs import find_operator

    home = Home(settings.home)
    running = find_running(home)
    if running is None:
        raise GatewayError(
            f"no gateway runs for {home.root}: start one with `tollgate up`", status=1
        )
    try:
        merger = Merger(home.name, Secret.load(running.secret_key_file))
    except SecretError as error:
        raise GatewayError(str(error), status=2) from None
    check = ChangeCheck(running, merger)

    def check_all(stored: StoredSettings, wanted: Sequence[StoredSetting]) -> None:
        try:
            check.check(stored.items, wanted, stored.file_names)
        except SettingsError as error:
            raise InvalidField("content", str(error)) from None

    try:
        async with connections(running) as (db, _), db.connect() as conn:
            async with conn.begin() as transaction:
                operator = await find_operator(conn)
                arguments = {"operator_org": operator, "actor": COMMAND_LINE}
                await store(conn, merger, check_all=check_all, **arguments)
                if is_dry_run:
                    await transaction.rollback()
    except TenancyError as error:
        raise GatewayError(str(error), status=2) from None
    except SQLAlchemyError as error:
        raise GatewayError(f"Postgres: {getattr(error, 'orig', None) or error}", status=1) from None
    return check.lines
