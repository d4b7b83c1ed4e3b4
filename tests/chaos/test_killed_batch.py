"""kill -9 of a gateway that runs two batches, one in each vendor's shape: each line is in the
output once and on the bill once; what the dead one generated for the others is on nobody's, and
what it had reserved for them is given back. (That it becomes the house's waste, once no event of it
can come any more, tests of `billing.ingestion.settle_late` say.)"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from anthropic import Anthropic
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.chaos.load import body, check_books, wait_idle
from tests.stack import Stack

pytestmark = pytest.mark.slow

NUM_LINES = 12
"""Each batch has this many lines."""
MAX_TOKENS = 100
CHAT = "/v1/chat/completions"
TIMEOUT_S = 120.0
STATES = sa.text("""
    SELECT count(*) FILTER (WHERE state = 'done') AS done,
        count(*) FILTER (WHERE state = 'open' AND leased_by IS NOT NULL) AS running
    FROM batch_lines
""")
LEASES_END = (
    "UPDATE batch_lines SET leased_until = now() WHERE leased_by IS NOT NULL",
    "UPDATE batches SET leased_until = now() WHERE leased_by IS NOT NULL",
)
"""As if half a minute had passed."""


def chat_line(number: int) -> bytes:
    asked = body(f"Count to {number}.", max_tokens=MAX_TOKENS, stream=False)
    line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": asked}
    return json.dumps(line).encode()


def message(number: int) -> Any:
    asked = body(f"Count to {number}.", max_tokens=MAX_TOKENS, stream=False)
    del asked["ignore_eos"]
    return {"custom_id": f"line-{number}", "params": asked}


async def until_amid(db: AsyncEngine) -> None:
    """Some lines are done, and others run."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with db.connect() as conn:
                found = (await conn.execute(STATES)).one()
            if found.done >= 3 and found.running >= 3:
                return
            await asyncio.sleep(0.02)


@pytest.mark.nightly
async def test_lines_of_a_killed_gateway_are_answered_and_billed_once(stack: Stack) -> None:
    client = stack.client(max_retries=5)
    key = stack.credentials["api_key"]
    with Anthropic(base_url=stack.base_url, api_key=key, max_retries=5) as anthropic:
        content = b"\n".join(map(chat_line, range(NUM_LINES)))
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        chats = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batches = anthropic.messages.batches
        messages = batches.create(requests=[message(number) for number in range(NUM_LINES)])
        db = create_engine(embedded.postgres_url(Home(stack.home)))
        await until_amid(db)
        (worker,) = stack.pids("gateway", "worker")
        os.kill(worker, signal.SIGKILL)
        stack.wait_ready()
        async with db.begin() as conn:
            lost = [(await conn.execute(sa.text(each))).rowcount for each in LEASES_END]
        await db.dispose()
        assert lost[0] >= 1, "nothing ran when it was killed"

        def has_ended() -> bool:
            states = client.batches.retrieve(chats.id), batches.retrieve(messages.id)
            return (states[0].status, states[1].processing_status) == ("completed", "ended")

        await asyncio.to_thread(stack.wait, "both have ended", has_ended, TIMEOUT_S)
        done = client.batches.retrieve(chats.id)
        assert done.error_file_id is None and done.usage is not None
        output = client.files.content(str(done.output_file_id)).text.splitlines()
        answers = [json.loads(line) for line in output]
        results = list(batches.results(messages.id))
    expected = Counter(f"line-{number}" for number in range(NUM_LINES))
    assert Counter(each["custom_id"] for each in answers) == expected
    assert Counter(each.custom_id for each in results) == expected
    used = {}
    for each in answers:
        response = each["response"]
        used[response["request_id"]] = response["body"]["usage"]["completion_tokens"]
    for each in results:
        assert each.result.type == "succeeded"
        found = each.result.message
        used[f"req_{found.id.removeprefix('msg_')}"] = found.usage.output_tokens
    assert len(used) == 2 * NUM_LINES
    await asyncio.to_thread(wait_idle, stack)
    await check_books(stack)
    events = await stack.sql("SELECT request_id, output FROM usage_events WHERE kind = 'usage'")
    assert len(events) == len(used) and {it.request_id: it.output for it in events} == used
    assert done.usage.output_tokens == NUM_LINES * MAX_TOKENS
    generated = int(stack.metric("tollgate_generation_tokens"))
    assert sum(used.values()) < generated, "it had generated something for lines that ran"
