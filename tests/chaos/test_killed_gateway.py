"""kill -9 of a gateway at its work. The tests follow each other on one Tollgate, whose next worker
is the next test's; each has an organization of its own, and tells what it did from what was done
before."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import redis
import sqlalchemy as sa
from anthropic import Anthropic
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import create_engine
from gateway.home import Home
from gateway.inference.attempt import CHECKPOINT_TOKENS
from gateway.limits.output_forecast import UNKNOWN_OUTPUT_TOKENS
from gateway.principal import DAY_US
from gateway.processes import embedded_databases as embedded
from tests.budget import cycles
from tests.chaos.load import Customer, billed, body, check_books, client, new_customer, wait_idle
from tests.chaos.test_kills import balance, of_earlier_engines
from tests.stack import Stack, running

pytestmark = [pytest.mark.slow, pytest.mark.in_order]

STREAMS = cycles(200, daily=80)
TOKENS_PER_DAY = 1_000_000
"""As a limit of batches, it refills so slowly that what was taken of it can be read."""
CONFIG = f"""
[engine]
max_num_seqs = 256
batch_max_share = 1.0
batch_kv_headroom = 0.0
[plan.default]
[plan.night]
lane = "batch"
batch_tokens_per_day = {TOKENS_PER_DAY}
max_concurrent_streams = 256
"""
BEGIN_TIMEOUT_S = 90.0
SLACK_TOKENS = 100
"""Covers tokens that refill while streams are admitted, and the rounding of each."""
KEPT = 0.05
"""`ledger.lua` keeps 64 marks of a bucket's past: of more leases that are open at once it cannot
tell all apart, and keeps some of what they give back."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BOOKS_BALANCE = "The books balance.\n"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(config=CONFIG) as started:
        yield started


def kill(stack: Stack, *words: str) -> None:
    """The one process whose command line has these words."""
    (pid,) = stack.pids(*words)
    os.kill(pid, signal.SIGKILL)


class Stream:
    """One request on a connection of its own, and how many events came of it."""

    def __init__(self, stack: Stack, key: str, number: int) -> None:
        words = f"Tell me the story of bridge number {number}."
        content = json.dumps(body(words, max_tokens=3000, stream=True)).encode()
        self.port = stack.port
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (key.encode(), len(content), content)
        )
        self.head = b""
        self.num_events = 0

    async def read(self) -> None:
        """Until the server is gone."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.request)
        try:
            self.head = await reader.readuntil(b"\r\n\r\n")
            while data := await reader.read(1 << 16):
                self.num_events += data.count(b"data: {")
        except ConnectionError:
            pass  # a reset is an end as well
        finally:
            writer.close()


async def until_all_have_checkpoints(streams: list[Stream]) -> None:
    async with asyncio.timeout(BEGIN_TIMEOUT_S):
        while not all(stream.num_events > 2 * CHECKPOINT_TOKENS for stream in streams):
            await asyncio.sleep(0.1)


def missing_of_the_day(stack: Stack, key_id: str, *, since_us: int) -> float:
    """Tokens that Redis has taken of the key's bucket since it was full."""
    with redis.Redis.from_url(embedded.redis_url(Home(stack.home))) as store:
        (name,) = store.keys(f"tollgate:{{*}}:key:{key_id}")
        scope: dict[str, Any] = msgspec.msgpack.decode(store.get(name))
    full_at_us: float = scope["b"]["d"]["f"]
    return (full_at_us - since_us) * TOKENS_PER_DAY / DAY_US


def time_us(stack: Stack) -> int:
    with redis.Redis.from_url(embedded.redis_url(Home(stack.home))) as store:
        seconds, microseconds = store.time()
    return int(seconds) * 1_000_000 + int(microseconds)


async def kill_amid(stack: Stack, streams: list[Stream]) -> None:
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    await until_all_have_checkpoints(streams)
    assert await asyncio.to_thread(stack.open_leases) == STREAMS
    kill(stack, "gateway", "worker")
    await asyncio.gather(*reading)


async def test_a_killed_gateway_gives_nothing_away_of_its_streams(stack: Stack) -> None:
    """Each is billed at its last checkpoint, the rest is the house's, and the tenant gets none of
    its budget back for it."""
    customer = new_customer(stack, "--plan", "night")
    earlier, wasted = await of_earlier_engines(stack), await billed(stack, "waste")
    began_us = time_us(stack)
    streams = [Stream(stack, customer.key, number) for number in range(STREAMS)]
    await kill_amid(stack, streams)
    stack.wait_ready()
    again = await asyncio.to_thread(
        stack.client(api_key=customer.key, max_retries=0).chat.completions.create,
        model="penny",
        messages=[{"role": "user", "content": "Are you there again?"}],
        max_tokens=30,
        extra_body={"ignore_eos": True},
    )
    await balance(stack, earlier)
    rows = await stack.sql(
        "SELECT finish, output, uncached_input + cache_read AS input FROM usage_events "
        f"WHERE kind = 'usage' AND org = '{customer.org_id}'"
    )
    recovered = [row for row in rows if row.finish == "recovered"]
    assert len(recovered) == STREAMS
    assert all(row.output > 0 and row.input > 0 for row in recovered)
    assert again.usage is not None and again.usage.completion_tokens == 30
    assert [row.output for row in rows if row.finish == "done"] == [30]
    assert await billed(stack, "waste") > wasted, "what came after the last checkpoint"
    used = sum(row.input + row.output for row in rows)
    missing = missing_of_the_day(stack, customer.key_id, since_us=began_us)
    unused = STREAMS * UNKNOWN_OUTPUT_TOKENS - used
    assert used - SLACK_TOKENS <= missing <= used + SLACK_TOKENS + KEPT * unused
    assert stack.run("reconcile") == BOOKS_BALANCE


LONG_LIST: Any = {
    "type": "json_schema",
    "name": "long",
    "schema": {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 1200},
}
"""An answer that does not end while it is waited for."""
FOUND_IN_S = 60.0
AGED = sa.text(
    "UPDATE responses SET beat_at = beat_at - interval '1 minute' WHERE org_id = :org_id "
    "RETURNING status"
)
"""As if nobody had worked on it for so long."""


@pytest.mark.nightly
async def test_a_response_whose_gateway_was_killed_has_failed_and_is_billed_once(
    stack: Stack,
) -> None:
    """In the background; as what was generated up to its last checkpoint."""
    customer = new_customer(stack)
    earlier = await of_earlier_engines(stack)
    asker = stack.client(api_key=customer.key, max_retries=5)
    made = asker.responses.create(
        model="penny", input="Count.", text={"format": LONG_LIST}, background=True
    )
    assert made.status == "queued"
    stack.wait("it runs", lambda: asker.responses.retrieve(made.id).status == "in_progress")
    await asyncio.sleep(1)
    kill(stack, "gateway", "worker")
    stack.wait_ready()
    db = create_engine(embedded.postgres_url(Home(stack.home)))
    async with db.begin() as conn:
        aged = (await conn.execute(AGED, {"org_id": customer.org_id})).scalars().all()
        assert aged == ["in_progress"]
    await db.dispose()
    deadline = time.monotonic() + FOUND_IN_S
    while (found := asker.responses.retrieve(made.id)).status == "in_progress":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    assert found.status == "failed" and found.error is not None
    assert asker.responses.cancel(made.id).status == "failed"
    await balance(stack, earlier)
    [event] = await stack.sql(
        f"SELECT output FROM usage_events WHERE kind = 'usage' AND org = '{customer.org_id}'"
    )
    assert event.output == await billed(stack, "usage", customer.org_id) > 0


BEGUN_TOKENS = 120
"""A stream has made several checkpoints by then; the first may know of its first prompt alone."""
MAX_HELD_BACK = 4
"""Tokens of a choice that came, and are parts of a character that is still to come."""
PROMPTS = ["Tell me of bridges.", "Count.", "Tell me of bridges, and of what is below them."]
LONG = {"model": "penny", "max_tokens": 1500, "ignore_eos": True}
WORDS: Any = [{"role": "user", "content": PROMPTS[0]}]
SEVERAL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": PROMPTS, "logprobs": 0}),
    (COMPLETION, {"prompt": PROMPTS[:2], "n": 2, "logprobs": 0}),
    (CHAT, {"messages": WORDS, "n": 3, "logprobs": True}),
]
WHOLE = (COMPLETION, {"prompt": PROMPTS, "n": 2})


class Reading(msgspec.Struct):
    """The part of one stream that a client has."""

    tokens: dict[int, int]
    """By choice."""
    request_id: str = ""
    error: dict[str, Any] | None = None

    async def read(self, http: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> None:
        """Until it ends, or its server is gone."""
        sent = {**LONG, **asked, "stream": True}
        try:
            async with http.stream("POST", path, json=sent) as answer:
                assert answer.status_code == 200
                self.request_id = answer.headers["x-request-id"]
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        self.note(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError:
            pass  # it was cut off

    def note(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        for choice in chunk["choices"]:
            told = choice["logprobs"] or {}
            here = len(told.get("tokens") or told.get("content") or ())
            self.tokens[choice["index"]] = self.tokens.get(choice["index"], 0) + here

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())


async def killed_amid(stack: Stack, customer: Customer, *words: str) -> list[Reading]:
    """The process, once all prompts of all streams were read and a checkpoint says so; what its
    clients had."""
    found = [Reading({}) for _ in SEVERAL]
    async with client(stack, customer.key) as http:
        path, asked = WHOLE
        whole = asyncio.create_task(http.post(path, json={**LONG, **asked}))
        reading = [
            asyncio.create_task(each.read(http, *how))
            for each, how in zip(found, SEVERAL, strict=True)
        ]
        async with asyncio.timeout(BEGIN_TIMEOUT_S):
            while not all(each.num_tokens >= BEGUN_TOKENS for each in found):
                await asyncio.sleep(0.05)
        kill(stack, *words)
        await asyncio.gather(*reading)
        (ended,) = await asyncio.gather(whole, return_exceptions=True)
    assert isinstance(ended, httpx.TransportError) or ended.status_code >= 500
    return found


async def bills(stack: Stack, customer: Customer, finish: str) -> dict[str, Any]:
    """By request, of those that pay for anything."""
    rows = await stack.sql(
        "SELECT request_id, output, uncached_input + cache_read AS input FROM usage_events "
        f"WHERE kind = 'usage' AND finish = '{finish}' AND output > 0 "
        f"AND org = '{customer.org_id}'"
    )
    found = {row.request_id: row for row in rows}
    assert len(found) == len(rows), "one event each"
    return found


async def prompt_tokens(stack: Stack, customer: Customer) -> list[int]:
    async with client(stack, customer.key) as http:
        answers = [
            await http.post(path, json={"model": "penny", **asked, "max_tokens": 1})
            for path, asked in SEVERAL
        ]
    return [answer.json()["usage"]["prompt_tokens"] for answer in answers]


@pytest.mark.nightly
async def test_what_runs_in_one_request_is_one_bill_whoever_is_killed(stack: Stack) -> None:
    """The gateway, then the engine, while requests of several prompts and of several choices run:
    each is one attempt, billed once as its record says, the rest is the house's, and nothing stays
    reserved."""
    customer = new_customer(stack)
    earlier, wasted = await of_earlier_engines(stack), await billed(stack, "waste")
    readings = await killed_amid(stack, customer, "gateway", "worker")
    stack.wait_ready()
    await balance(stack, earlier)
    recovered = await bills(stack, customer, "recovered")
    assert recovered.keys() == {each.request_id for each in readings}
    asked = await prompt_tokens(stack, customer)
    for each, num_asked in zip(readings, asked, strict=True):
        bill = recovered[each.request_id]
        assert bill.input == num_asked
        assert 0 < bill.output <= each.num_tokens, "what was sent at the last checkpoint"
    more = await billed(stack, "waste") - wasted
    assert more > 0, "what came after it, and what nobody got a byte of"

    readings = await killed_amid(stack, customer, "-m engine --")
    stack.wait_ready()
    await asyncio.to_thread(wait_idle, stack)
    failed = await bills(stack, customer, "error")
    assert failed.keys() == {each.request_id for each in readings}
    for each, num_asked in zip(readings, asked, strict=True):
        assert each.error is not None and each.error["type"] == "server_error"
        bill = failed[each.request_id]
        assert bill.input == num_asked
        held_back = MAX_HELD_BACK * len(each.tokens)
        assert each.num_tokens <= bill.output <= each.num_tokens + held_back
    assert await bills(stack, customer, "recovered") == recovered
    assert stack.run("reconcile") == BOOKS_BALANCE


NUM_LINES = 12
"""Each batch has this many lines."""
MAX_TOKENS = 100
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
    """Two batches run, one in each vendor's shape: each line is in the output once and on the bill
    once; what the dead one generated for the others is on nobody's, and what it had reserved for
    them is given back. That it becomes the house's waste, once no event of it can come any more,
    tests of `billing.ingestion.settle_late` say; it would come amid a test that followed this."""
    customer = new_customer(stack)
    await asyncio.to_thread(wait_idle, stack)
    generated_before = int(stack.metric("tollgate_generation_tokens"))
    asker = stack.client(api_key=customer.key, max_retries=5)
    with Anthropic(base_url=stack.base_url, api_key=customer.key, max_retries=5) as anthropic:
        content = b"\n".join(map(chat_line, range(NUM_LINES)))
        file = asker.files.create(file=("in.jsonl", content), purpose="batch")
        chats = asker.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batches = anthropic.messages.batches
        messages = batches.create(requests=[message(number) for number in range(NUM_LINES)])
        db = create_engine(embedded.postgres_url(Home(stack.home)))
        await until_amid(db)
        kill(stack, "gateway", "worker")
        stack.wait_ready()
        async with db.begin() as conn:
            lost = [(await conn.execute(sa.text(each))).rowcount for each in LEASES_END]
        await db.dispose()
        assert lost[0] >= 1, "nothing ran when it was killed"

        def has_ended() -> bool:
            states = asker.batches.retrieve(chats.id), batches.retrieve(messages.id)
            return (states[0].status, states[1].processing_status) == ("completed", "ended")

        await asyncio.to_thread(stack.wait, "both have ended", has_ended, TIMEOUT_S)
        done = asker.batches.retrieve(chats.id)
        assert done.error_file_id is None and done.usage is not None
        output = asker.files.content(str(done.output_file_id)).text.splitlines()
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
    events = await stack.sql(
        "SELECT request_id, output FROM usage_events "
        f"WHERE kind = 'usage' AND org = '{customer.org_id}'"
    )
    assert len(events) == len(used) and {it.request_id: it.output for it in events} == used
    assert done.usage.output_tokens == NUM_LINES * MAX_TOKENS
    generated = int(stack.metric("tollgate_generation_tokens")) - generated_before
    assert sum(used.values()) < generated, "it had generated something for lines that ran"
