"""Bring Postgres to what this version needs: the schema, the plans, the first keys.

Above: `tollgate up` and `tollgate migrate`. Below: `migrations`, `tenancy.bootstrap`. Idempotent,
and safe when several gateways do it at once. Knows no process.
"""

from __future__ import annotations

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.price_book import PriceBook
from billing.price_sync import Loaded, sync_price_book
from billing.reconcile import reprice_suspense
from gateway import credentials
from gateway.audit.log import SETTINGS, record
from gateway.credentials import Credentials
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.home import Home
from gateway.secret import Secret
from gateway.settings import DEFAULT_PLAN, Settings
from gateway.tenancy.bootstrap import bootstrap
from gateway.tenancy.keys import PEPPER_PURPOSE
from gateway.tenancy.orgs import find_operator
from gateway.tenancy.plans import check_price_lists
from migrations.runner import migrate


async def record_prices(conn: AsyncConnection, loaded: Loaded) -> None:
    """In the operator's audit log."""
    operator = await find_operator(conn)
    if operator is not None:
        await record(
            conn,
            org_id=operator,
            actor=SETTINGS,
            action="prices.loaded",
            target="price_book",
            after={"added": loaded.added, "closed": loaded.closed},
        )


async def prepare(settings: Settings, database_url: str, base_url: str) -> Credentials | None:
    """Returns what HOME/credentials.json says, written anew where the first keys were made or the
    address changed; None where there is no such file and the keys were made earlier.

    Raises: SecretError, PriceBookError, MigrationError, TenancyError, OSError,
    sqlalchemy.exc.SQLAlchemyError.
    """
    prices = PriceBook.load(settings.price_books, bases=settings.bases)
    key = Secret.load_or_create(settings.secret_key_file).current
    await migrate(database_url)
    engine = create_engine(database_url, role=ROLE_SYSTEM)
    try:
        made = await bootstrap(
            engine,
            pepper=key.derive(PEPPER_PURPOSE),
            pepper_id=key.id,
            plans=settings.plans,
            default_plan=DEFAULT_PLAN.name,
        )
        async with engine.connect() as conn:
            await check_price_lists(conn, prices.lists.names)
        await sync_price_book(engine, prices, note=record_prices)
        await reprice_suspense(engine, prices)
    finally:
        await engine.dispose()
    path = Home(settings.home).credentials
    known = credentials.read(path)
    if made.api_key is not None and made.admin_key is not None:
        fresh = Credentials(base_url=base_url, api_key=made.api_key, admin_key=made.admin_key)
    elif known is not None:
        fresh = msgspec.structs.replace(known, base_url=base_url)
    else:
        return None
    if fresh != known:
        credentials.write(path, fresh)
    return fresh
