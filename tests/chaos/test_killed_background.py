"""kill -9 of a gateway that works on a response in the background: it has failed, and is billed
once, as what was generated up to its last checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.chaos.load import billed
from tests.chaos.test_kills import balance
from tests.stack import Stack

pytestmark = pytest.mark.slow

LONG: Any = {
    "type": "json_schema",
    "name": "long",
    "schema": {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 1200},
}
"""An answer that does not end while it is waited for."""
FOUND_IN_S = 60.0
AGED = sa.text("UPDATE responses SET beat_at = beat_at - interval '1 minute' RETURNING status")
"""As if nobody had worked on it for so long."""


@pytest.mark.nightly
async def test_a_response_whose_gateway_was_killed_has_failed_and_is_billed_once(
    stack: Stack,
) -> None:
    client = stack.client(max_retries=5)
    made = client.responses.create(
        model="penny", input="Count.", text={"format": LONG}, background=True
    )
    assert made.status == "queued"
    stack.wait("it runs", lambda: client.responses.retrieve(made.id).status == "in_progress")
    await asyncio.sleep(1)
    (worker,) = stack.pids("gateway", "worker")
    os.kill(worker, signal.SIGKILL)
    stack.wait_ready()
    db = create_engine(embedded.postgres_url(Home(stack.home)))
    async with db.begin() as conn:
        assert (await conn.execute(AGED)).scalars().all() == ["in_progress"]
    await db.dispose()
    deadline = time.monotonic() + FOUND_IN_S
    while (found := client.responses.retrieve(made.id)).status == "in_progress":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    assert found.status == "failed" and found.error is not None
    assert client.responses.cancel(made.id).status == "failed"
    await balance(stack)
    [event] = await stack.sql("SELECT output FROM usage_events WHERE kind = 'usage'")
    assert event.output == await billed(stack, "usage") > 0
