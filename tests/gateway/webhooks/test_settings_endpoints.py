"""Endpoints of the settings: the table follows them, and nobody changes them elsewhere."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.secret import Cipher
from gateway.settings.file import SettingsError, WrittenWebhook
from gateway.settings.load import load
from gateway.tenancy.errors import InvalidField, ReadOnly
from gateway.tenancy.orgs import create_org
from gateway.webhooks.endpoints import (
    CIPHER_PURPOSE,
    archive_endpoint,
    disable_endpoint,
    update_endpoint,
)
from gateway.webhooks.settings_endpoints import read_endpoints, sync_endpoints
from gateway.webhooks.tables import endpoints
from tests.gateway.webhooks.conftest import SECRET

CIPHER = Cipher(SECRET, CIPHER_PURPOSE)
ONE, OTHER = (f"whsec_{base64.b64encode(bytes([n]) * 32).decode()}" for n in (1, 2))


class Installed:
    """An organization, and the settings of a file."""

    def __init__(self, db: AsyncEngine, folder: Path, org_id: str) -> None:
        self.db, self.org_id = db, org_id
        self.file = folder / "secret"
        self.file.write_text(ONE + "\n")
        self.ops = WrittenWebhook(
            name="ops",
            url="https://hooks.example/a",
            event_types=["spend.unusual"],
            secret_file=self.file,
        )

    async def take_up(self, *written: WrittenWebhook) -> None:
        wanted = read_endpoints(written, self.org_id, allow_loopback=False)
        async with self.db.begin() as conn:
            await sync_endpoints(conn, CIPHER, wanted)

    async def row(self) -> sa.Row:  # type: ignore[type-arg]
        async with self.db.connect() as conn:
            return (await conn.execute(sa.select(endpoints))).one()

    async def actions(self) -> list[str]:
        query = "SELECT action FROM audit_entries WHERE org_id = :org ORDER BY sequence"
        async with self.db.connect() as conn:
            found = await conn.scalars(sa.text(query), {"org": self.org_id})
            return [each for each in found if each.startswith("webhook")]


@pytest.fixture
async def installed(db: AsyncEngine, tmp_path: Path) -> Installed:
    async with db.begin() as conn:
        org = await create_org(conn, name="acme", plan=None, actor=COMMAND_LINE)
    return Installed(db, tmp_path, org.id)


def good(row: sa.Row) -> str:  # type: ignore[type-arg]
    return CIPHER.open(row.secret_sealed, row.id.encode(), row.secret_id).decode()


async def test_the_table_follows_the_settings(installed: Installed) -> None:
    await installed.take_up(installed.ops)
    first = await installed.row()
    assert (first.org_id, first.url, first.settings_name) == (
        installed.org_id,
        installed.ops.url,
        "ops",
    )
    assert good(first) == ONE and first.older_secret_sealed is None
    await installed.take_up(installed.ops)
    assert await installed.row() == first, "what is in force changes nothing"

    installed.file.write_text(OTHER)
    await installed.take_up(msgspec.structs.replace(installed.ops, event_types=["credits.low"]))
    second = await installed.row()
    assert second.id == first.id and second.event_types == ["credits.low"]
    assert good(second) == OTHER and second.older_secret_sealed == first.secret_sealed
    assert second.older_secret_expires_at is not None, "both sign for a while"

    await installed.take_up()
    assert (await installed.row()).archived_at is not None
    await installed.take_up(installed.ops)
    back = await installed.row()
    assert back.id == first.id and back.archived_at is None
    made, *rest = await installed.actions()
    assert made == "webhook_endpoint.created" and "webhook_endpoint.archived" in rest


async def test_one_whose_receiver_wanted_no_more_goes_on_when_the_settings_are_read_anew(
    installed: Installed,
) -> None:
    await installed.take_up(installed.ops)
    row = await installed.row()
    async with installed.db.begin() as conn:
        await disable_endpoint(
            conn, org_id=installed.org_id, endpoint_id=row.id, actor=COMMAND_LINE
        )
    assert (await installed.row()).disabled_at is not None
    await installed.take_up(installed.ops)
    assert (await installed.row()).disabled_at is None
    assert (await installed.actions())[-2:] == [
        "webhook_endpoint.disabled",
        "webhook_endpoint.updated",
    ]


async def test_nobody_changes_it_elsewhere(installed: Installed) -> None:
    await installed.take_up(installed.ops)
    row = await installed.row()
    where = {"org_id": installed.org_id, "endpoint_id": row.id, "actor": COMMAND_LINE}
    async with installed.db.begin() as conn:
        with pytest.raises(ReadOnly, match="follows the settings"):
            await update_endpoint(conn, fields={"enabled": False}, **where)
        with pytest.raises(ReadOnly, match="follows the settings"):
            await archive_endpoint(conn, **where)
    assert await installed.row() == row


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"url": "http://hooks.example/a"}, "webhook ops: url: cannot be sent to"),
        ({"event_types": ["nonsense"]}, "webhook ops: event_types: there is no event 'nonsense'"),
        ({"secret_file": Path("/nowhere")}, "webhook ops: secret_file: /nowhere: No such file"),
    ],
)
async def test_what_cannot_be_is_named(
    installed: Installed, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(SettingsError, match=f"^{reason}"):
        await installed.take_up(msgspec.structs.replace(installed.ops, **change))


@pytest.mark.parametrize("secret", ["whsec_", "whsec_c2hvcnQ=", "x" * 50, "whsec_" + "%" * 40])
async def test_a_secret_is_one_of_standard_webhooks(installed: Installed, secret: str) -> None:
    installed.file.write_text(secret)
    with pytest.raises(SettingsError, match="must hold whsec_ and 24 to 64 bytes"):
        await installed.take_up(installed.ops)


async def test_an_organization_that_is_not_there_is_named(installed: Installed) -> None:
    nobody = msgspec.structs.replace(installed.ops, org="org_" + "0" * 32)
    with pytest.raises(InvalidField, match="no organization"):
        await installed.take_up(installed.ops, nobody)


def test_the_file_names_each_once(tmp_path: Path) -> None:
    config = tmp_path / "tollgate.toml"
    table = """[[webhook]]
name = "ops"
url = "https://hooks.example/a"
event_types = ["spend.unusual"]
secret_file = "ops.whsec"
"""
    config.write_text(table)
    (found,) = load({"config": config}, {}).webhooks
    assert found.name == "ops" and found.secret_file.is_absolute() and found.org is None
    config.write_text(table * 2)
    with pytest.raises(SettingsError, match="webhook: two are named 'ops'"):
        load({"config": config}, {})
