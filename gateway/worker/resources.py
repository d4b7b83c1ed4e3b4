"""Opens what one worker process needs before its services: each `open_*` takes of it what it
needs."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from foundation.tasks import TaskSet
from gateway.secret import Secret
from gateway.telemetry.metrics import Telemetry
from gateway.worker.work_listener import WorkListener


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    stack: AsyncExitStack
    """The exit stack on which each opener pushes its closing; closed in reverse order."""
    secret: Secret
    tasks: TaskSet
    db: AsyncEngine
    """Shows the rows of the org that `gateway.db.tenant` named."""
    system_db: AsyncEngine
    """Shows the rows of all orgs."""
    redis: Redis
    telemetry: Telemetry
    price_book: PriceBook
    spool: Spool
    listener: WorkListener
