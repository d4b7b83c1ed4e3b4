"""The application opens a sender that works by itself, and counts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from standardwebhooks.webhooks import Webhook

from billing.events import Price, Quantities
from billing.ingestion.ingest import ingest
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.telemetry.metrics import Telemetry
from gateway.webhooks.sender import open_webhooks
from gateway.worker.work_listener import WorkListener
from tests.billing.alerts.test_alerts import cap
from tests.billing.samples import an_attempt, an_event
from tests.gateway.webhooks.conftest import SECRET, Receiver, add_endpoint


@pytest.mark.parametrize("allow_loopback", [True, False])
async def test_what_is_spent_arrives_where_it_may_go(
    db: AsyncEngine,
    postgres_url: str,
    system_db: AsyncEngine,
    org_id: str,
    receiver: Receiver,
    allow_loopback: bool,
) -> None:
    telemetry = Telemetry(models=())
    await cap(db, 1_000_000_000_000, org=org_id, period="month")
    attempt = an_attempt(org=org_id, prices={"output": Price("one", 250_000_000_125)})
    listening = create_engine(postgres_url, role=ROLE_SYSTEM, pool_size=1)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(listening.dispose)
        listener = WorkListener(listening)
        stack.push_async_callback(listener.close)
        webhooks = open_webhooks(
            stack,
            SECRET,
            system_db,
            telemetry,
            allow_loopback=allow_loopback,
            mail_server=None,
            public_url="http://localhost",
            listener=listener,
        )
        listener.start()
        made = await add_endpoint(db, webhooks.secrets, org_id, receiver.url)
        await ingest(system_db, [an_event(attempt, Quantities(output=2))])
        outcome = "delivered" if allow_loopback else "failed"
        async with asyncio.timeout(30):
            while f'outcome="{outcome}"}} 1.0'.encode() not in telemetry.render().content:
                await asyncio.sleep(0.01)
    if not allow_loopback:
        assert receiver.received == [], "it dialled this machine"
        return
    [got] = receiver.received
    said = Webhook(made.secret).verify(got.body, got.headers)
    assert said["type"] == "budget.threshold_reached"
    assert said["data"]["cap_id"].startswith("cap_")
    assert said["data"]["scope"] == {"type": "org", "id": org_id}
    assert said["data"]["limit"] == {"value": "1", "unit": "usd"}
    assert said["data"]["used"] == {"value": "0.50000000025", "unit": "usd"}
