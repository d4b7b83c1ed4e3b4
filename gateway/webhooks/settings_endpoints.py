"""Makes the endpoints that the settings name (`[[webhook]]`): the settings are the truth, the table
is their copy, and nobody changes them elsewhere. One whose receiver answered 410 is sent nothing
until the settings are read anew."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import SETTINGS, record
from gateway.ids import uuid7
from gateway.secret import Cipher
from gateway.settings.file import SettingsError, WrittenWebhook
from gateway.settings.load import read_secret_file
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.tables import orgs
from gateway.webhooks.endpoints import (
    COLUMNS,
    EndpointRecord,
    change_endpoint,
    check_url,
    end_endpoint,
    seen,
)
from gateway.webhooks.standard_webhooks import SECRET_PREFIX
from gateway.webhooks.tables import endpoints
from gateway.wire.admin.webhook_events import EventType

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
"""Standard Webhooks wants a secret of so many."""
GRACE_S = 86_400
"""The secret before signs so long beside the one that replaced it."""


FIELDS = EndpointRecord.__struct_fields__


class SettingsEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint of the settings, with its secret."""

    written: WrittenWebhook
    org_id: str
    secret: str

    def __repr__(self) -> str:
        return f"SettingsEndpoint({self.written.name})"


def read_endpoints(
    written: Sequence[WrittenWebhook], operator: str, *, allow_loopback: bool
) -> list[SettingsEndpoint]:
    """Return what the settings name, in the order in which rows are locked. Blocks. Raises:
    SettingsError."""
    found = []
    for each in written:
        where = f"webhook {each.name}"
        known = get_args(EventType)
        if strange := [name for name in each.event_types if name not in known]:
            raise SettingsError(f"{where}: event_types: there is no event {strange[0]!r}")
        try:
            check_url(each.url, allow_loopback=allow_loopback)
            secret = read_secret_file(each.secret_file, "secret_file")
        except InvalidField as error:
            raise SettingsError(f"{where}: url: {error.message}") from None
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from None
        if not is_secret(secret):
            raise SettingsError(
                f"{where}: secret_file: must hold {SECRET_PREFIX} and {MIN_SECRET_BYTES} to "
                f"{MAX_SECRET_BYTES} bytes as base64"
            )
        org_id = each.org or operator
        found.append(SettingsEndpoint(written=each, org_id=org_id, secret=secret))
    return sorted(found, key=lambda each: (each.org_id, each.written.name))


def is_secret(text: str) -> bool:
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return False
    return text.startswith(SECRET_PREFIX) and MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES


async def has_endpoints(conn: AsyncConnection) -> bool:
    """Tell whether earlier settings named any."""
    found = sa.select(endpoints.c.id).where(endpoints.c.settings_name.is_not(None)).limit(1)
    return await conn.scalar(found) is not None


async def sync_endpoints(
    conn: AsyncConnection, cipher: Cipher, wanted: Sequence[SettingsEndpoint]
) -> None:
    """Make the table say what `wanted` says: one that is gone from it is archived, one that comes
    back, or was disabled, goes on. Raises: InvalidField, for an organization that is not there."""
    columns = (*COLUMNS, endpoints.c.secret_sealed, endpoints.c.secret_id)
    kept = sa.select(*columns).where(endpoints.c.settings_name.is_not(None)).with_for_update()
    rows = (await conn.execute(kept.order_by(endpoints.c.org_id, endpoints.c.id))).all()
    known = {(row.org_id, row.settings_name): row for row in rows}
    for each in wanted:
        row = known.pop((each.org_id, each.written.name), None)
        if row is None:
            await _create(conn, cipher, each)
            continue
        values = _differing(cipher, each, row)
        if values:
            before = EndpointRecord(**{name: row._mapping[name] for name in FIELDS})
            await change_endpoint(conn, before, values, "webhook_endpoint.updated", SETTINGS)
    for row in known.values():
        if row.archived_at is None:
            before = EndpointRecord(**{name: row._mapping[name] for name in FIELDS})
            await end_endpoint(conn, before, SETTINGS)


def _differing(cipher: Cipher, wanted: SettingsEndpoint, row: sa.Row[Any]) -> dict[str, Any]:
    written = wanted.written
    values: dict[str, Any] = {
        "url": written.url,
        "event_types": sorted(set(written.event_types)),
        "archived_at": None,
        "disabled_at": None,
    }
    values = {name: value for name, value in values.items() if getattr(row, name) != value}
    before = cipher.open(row.secret_sealed, row.id.encode(), row.secret_id).decode()
    if before != wanted.secret:
        sealed = cipher.seal(wanted.secret.encode(), row.id.encode())
        values |= {
            "secret_sealed": sealed.data,
            "secret_id": sealed.secret_id,
            "older_secret_sealed": endpoints.c.secret_sealed,
            "older_secret_id": endpoints.c.secret_id,
            "older_secret_expires_at": sa.func.now()
            + sa.func.make_interval(0, 0, 0, 0, 0, 0, GRACE_S),
        }
    return values


async def _create(conn: AsyncConnection, cipher: Cipher, wanted: SettingsEndpoint) -> None:
    written = wanted.written
    if await conn.scalar(sa.select(orgs.c.id).where(orgs.c.id == wanted.org_id)) is None:
        raise InvalidField(f"webhook {written.name}.org", f"no organization {wanted.org_id!r}")
    endpoint_id = f"whe_{uuid7().hex}"
    sealed = cipher.seal(wanted.secret.encode(), endpoint_id.encode())
    row = {
        "id": endpoint_id,
        "org_id": wanted.org_id,
        "url": written.url,
        "event_types": sorted(set(written.event_types)),
        "settings_name": written.name,
        "secret_sealed": sealed.data,
        "secret_id": sealed.secret_id,
    }
    added = sa.insert(endpoints).values(**row).returning(*COLUMNS)
    made = EndpointRecord(**(await conn.execute(added)).one()._mapping)
    await record(
        conn,
        org_id=made.org_id,
        actor=SETTINGS,
        action="webhook_endpoint.created",
        target=made.id,
        after=seen(made),
    )
