"""Brings Postgres to what this version needs: the schema, the plans, the first keys.

Idempotent, and safe when several gateways do it at once. Knows no process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.ingestion.settle_late import reprice_suspense
from billing.ledger.price_sets import (
    sync_price_book,
    sync_prices,
    to_price_changed,
)
from billing.pricing.price_book import PriceBook
from gateway.audit.log import SETTINGS, record
from gateway.audit.tables import entries
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.home import Home
from gateway.installation.price_changes import record_prices
from gateway.limits.recounts import recounting
from gateway.processes import credentials_file as credentials
from gateway.processes.bootstrap import BOOTSTRAP_LOCK, bootstrap
from gateway.processes.credentials_file import Credentials
from gateway.secret import Cipher, Secret
from gateway.settings.load import DEFAULT_PLAN, Settings
from gateway.settings.prices import load_prices
from gateway.tenancy.changes import EVERYTHING, announce
from gateway.tenancy.errors import ChangeNotAnnounced
from gateway.tenancy.keys.keys import PEPPER_PURPOSE
from gateway.tenancy.money.plans import check_price_lists, record_changes, sync_plans
from gateway.tenancy.orgs import find_operator
from gateway.webhooks.endpoints import CIPHER_PURPOSE
from gateway.webhooks.settings_endpoints import has_endpoints, read_endpoints, sync_endpoints
from migrations.runner import migrate

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 5.0
TELL_TIMEOUT_S = 1.0
"""A change of settings is in force within two seconds, also where Redis is silent."""


async def prepare(
    settings: Settings, database_url: str, redis_url: str, base_url: str
) -> Credentials | None:
    """Returns what HOME/credentials.json says, written anew where the first keys were made or the
    address changed; None where there is no such file and the keys were made earlier.

    Raises: SecretError, PriceBookError, MigrationError, TenancyError, OSError,
    sqlalchemy.exc.SQLAlchemyError.
    """
    prices = load_prices(settings)
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
        async with engine.begin() as conn:
            await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(BOOTSTRAP_LOCK)))
            await bring_up_webhooks(conn, settings)
            await record_release(conn)
        await sync_price_book(engine, prices, note=record_prices)
        await price_what_waited(engine, redis_url, prices)
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


async def record_release(conn: AsyncConnection) -> None:
    """Record in the operator's audit log that another release was started than before."""
    from importlib.metadata import version

    operator, release = await find_operator(conn), version("tollgate")
    if operator is None:
        return
    newest = (
        sa.select(entries.c.target)
        .where(entries.c.org_id == operator, entries.c.action == "release.started")
        .order_by(entries.c.sequence.desc())
        .limit(1)
    )
    if await conn.scalar(newest) != release:
        await record(
            conn, org_id=operator, actor=SETTINGS, action="release.started", target=release
        )


async def take_up(
    settings: Settings,
    database_url: str,
    redis_url: str,
    *,
    changes: Sequence[str] = (),
    keeps: bool = True,
    is_taken_back: bool = False,
) -> int:
    """Bring plans and prices to what other settings say, in one transaction, with the `changes` in
    the operator's audit log; tell all workers. Return the number of prices added. `keeps`: False
    tries it and changes nothing. `is_taken_back`: these are the settings before, and prices, which
    are never taken back, stay.

    Raises: PriceBookError, TenancyError, OSError, sqlalchemy.exc.SQLAlchemyError.
    """
    prices = await asyncio.to_thread(load_prices, settings)
    engine = create_engine(database_url, role=ROLE_SYSTEM)
    try:
        async with engine.connect() as conn, conn.begin() as transaction:
            await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(BOOTSTRAP_LOCK)))
            added = 0
            if not is_taken_back:
                added = await sync_prices(conn, prices, note=record_prices)
            await _bring_up_plans(conn, settings, prices, changes)
            await bring_up_webhooks(conn, settings)
            if not keeps:
                await transaction.rollback()
                return added
        if await _tell_workers(redis_url):
            await price_what_waited(engine, redis_url, prices)
    except IntegrityError as error:
        raise to_price_changed(error) from error
    finally:
        await engine.dispose()
    return added


async def _bring_up_plans(
    conn: AsyncConnection, settings: Settings, prices: PriceBook, changes: Sequence[str]
) -> None:
    """Under the lock of a start, which is taken before that of prices and those of audit logs."""
    plans = await sync_plans(conn, settings.plans)
    await check_price_lists(conn, prices.lists.names)
    operator = await find_operator(conn)
    if operator is not None:
        await record_changes(conn, plans, operator_org=operator)
    if operator is not None and changes:
        await record(
            conn,
            org_id=operator,
            actor=SETTINGS,
            action="settings.reloaded",
            target="settings",
            after={"changes": list(changes)},
        )


async def bring_up_webhooks(conn: AsyncConnection, settings: Settings) -> None:
    """Bring the endpoints of the settings up. Raises: SettingsError, InvalidField, SecretError."""
    operator = await find_operator(conn)
    if operator is None or not (settings.webhooks or await has_endpoints(conn)):
        return
    wanted = await asyncio.to_thread(
        read_endpoints, settings.webhooks, operator, allow_loopback=settings.egress_to_loopback
    )
    secret = await asyncio.to_thread(Secret.load, settings.secret_key_file)
    await sync_endpoints(conn, Cipher(secret, CIPHER_PURPOSE), wanted)


async def _tell_workers(redis_url: str) -> bool:
    """Have workers read plans again at once, and return True. Without Redis, which other settings
    do not wait for, they do by themselves, a little later."""
    redis = Redis.from_url(
        redis_url, socket_timeout=TELL_TIMEOUT_S, socket_connect_timeout=TELL_TIMEOUT_S
    )
    try:
        await announce(redis, EVERYTHING)
    except ChangeNotAnnounced as error:
        log.warning("workers hear of plans later: %s", error.message)
        return False
    finally:
        await redis.aclose()
    return True


async def price_what_waited(db: AsyncEngine, redis_url: str, prices: PriceBook) -> None:
    """Price usage that had no price, where it has one by now.

    Counters of spending have to hear of it, so without Redis it waits for the next start.
    """
    redis = Redis.from_url(
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
    try:
        async with recounting(db, redis) as announce:
            await reprice_suspense(db, prices, announce)
    except RedisError as error:
        log.warning("what had no price waits for the next start: %r", error)
    finally:
        await redis.aclose()
