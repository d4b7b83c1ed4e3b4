"""Loops are billed by the round, whoever leaves, and for no more of a prompt than is new."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from openai import AsyncOpenAI, InternalServerError, OpenAI

from engine.config import BLOCK_SIZE
from gateway.responses.store import ResponseStore
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.gateway.tools.scripted import ENDLESS, SEEN, OneUsage, Servers, mcp, script

LOOK = ("maps__look", {"place": "a"})
NUM_ROUNDS = 5
OF_REQUEST = sa.text(
    "SELECT uncached_input, cache_read, output FROM usage_events"
    " WHERE request_id = :request_id AND kind = 'usage' ORDER BY id"
)


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "near", "input": text, "tools": [mcp()], **more}


def booked(worker: Running, request_id: str, num_rounds: int) -> list[OneUsage]:
    """Once so many are in the books."""

    async def read() -> list[OneUsage]:
        async with worker.services.system_db.connect() as conn:
            rows = (await conn.execute(OF_REQUEST, {"request_id": request_id})).all()
        return [OneUsage(*map(int, row)) for row in rows]

    deadline = time.monotonic() + TIMEOUT_S
    while len(found := worker.run(read())) < num_rounds:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_each_round_is_billed_and_reads_only_what_is_new(
    worker: Running, client: OpenAI, servers: Servers
) -> None:
    raw = client.responses.with_raw_response.create(**asked(script(*[[LOOK]] * NUM_ROUNDS)))
    made, request_id = raw.parse(), raw.headers["x-request-id"]
    rounds = booked(worker, request_id, NUM_ROUNDS + 1)
    assert len(rounds) == NUM_ROUNDS + 1
    usage = made.usage
    assert usage is not None
    prompts = [each.uncached + each.cached for each in rounds]
    assert usage.input_tokens == sum(prompts)
    assert usage.output_tokens == sum(each.output for each in rounds)
    assert usage.input_tokens_details.cached_tokens == sum(each.cached for each in rounds)
    for before, prompt, each in zip(prompts, prompts[1:], rounds[1:], strict=False):
        assert each.uncached <= prompt - before + BLOCK_SIZE


def test_a_round_begins_with_all_tokens_of_the_one_before(client: OpenAI, servers: Servers) -> None:
    """Its prompt and its answer, so that whatever keeps both computes what is behind them alone."""
    SEEN.clear()
    peek = ("maps__peek", {"place": "b", "far": [1, {"x": None}]})
    client.responses.create(**asked(script([LOOK], [LOOK, peek], [peek])))
    assert len(SEEN) == 4
    for (prompt, answer), (following, _) in pairwise(SEEN):
        before = prompt + answer
        assert following[: len(before)] == before


def left(worker: Running, text: str, until: str) -> str:
    """The id of the request of somebody who leaves at an event of that type."""

    async def leave() -> str:
        async with AsyncOpenAI(
            api_key=worker.everything, base_url=f"{worker.url}/v1", max_retries=0
        ) as client:
            stream = await client.responses.create(**asked(text), stream=True)
            request_id = stream.response.headers["x-request-id"]
            async for event in stream:
                if event.type == until:
                    break
            await stream.close()
        return request_id

    return asyncio.run(leave())


def test_who_leaves_during_a_call_ends_it(worker: Running, servers: Servers) -> None:
    request_id = left(worker, script([("maps__hold", {})]), "response.mcp_call_arguments.done")
    deadline = time.monotonic() + TIMEOUT_S
    while servers.toolbox.cancelled != ["maps__hold"]:
        assert time.monotonic() < deadline, servers.toolbox.called
        time.sleep(0.02)
    [only] = booked(worker, request_id, 1)
    assert only.output > 0
    while worker.services.generation.open_calls:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_who_leaves_during_a_later_round_is_billed_for_both(
    worker: Running, servers: Servers
) -> None:
    text = script([LOOK], said=ENDLESS)
    request_id = left(worker, text, "response.output_text.delta")
    first, second = booked(worker, request_id, 2)
    assert first.output > 0 and 0 < second.output < 14_000


@pytest.mark.parametrize("error", [ConnectionError("no database"), AssertionError("a bug")])
def test_rounds_stay_on_the_bill_of_an_answer_that_cannot_be_kept(
    worker: Running,
    client: OpenAI,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """Their calls were made. Without a database the answer goes out all the same."""

    async def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ResponseStore, "keep", fails)
    if isinstance(error, OSError):
        raw = client.responses.with_raw_response.create(**asked(script([LOOK])))
        request_id = raw.headers["x-request-id"]
        assert raw.parse().output_text == "Done after 1 rounds."
    else:
        with pytest.raises(InternalServerError) as raised:
            client.responses.create(**asked(script([LOOK])))
        request_id = raised.value.response.headers["x-request-id"]
    assert len(servers.toolbox.called) == 1
    first, second = booked(worker, request_id, 2)
    assert first.output > 0 and second.output > 0


def test_a_client_that_repeats_with_its_key_is_answered_once(
    worker: Running, client: OpenAI, servers: Servers
) -> None:
    text, headers = script([LOOK]), {"Idempotency-Key": "loop-once"}
    one = client.responses.create(**asked(text), extra_headers=headers)
    other = client.responses.create(**asked(text), extra_headers=headers)
    assert one.to_dict() == other.to_dict()
    assert len(servers.toolbox.called) == 1
