"""Batches by the official SDK, on a running worker with an engine and an upstream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from openai import AsyncOpenAI, OpenAI
from openai.types import Batch
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from billing.tables import AMOUNTS, usage_events
from gateway.request_log.search import FoundRequest, Search, find_request, find_requests
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.journeys.sdk.sdk_shapes import extras

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, *, model: str = "near", **body: Any) -> str:
    messages = [{"role": "user", "content": f"say {custom_id}"}]
    asked = {"model": model, "messages": messages, "max_tokens": 4, **body}
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}
    return json.dumps(request)


def create(client: OpenAI, *lines: str, **options: Any) -> Batch:
    content = "\n".join(lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **options
    )
    assert extras(made) == []
    assert (made.object, made.status, made.input_file_id) == ("batch", "validating", file.id)
    return made


def until_ended(client: OpenAI, batch: Batch) -> Batch:
    deadline = time.monotonic() + TIMEOUT_S
    while (found := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert extras(found) == []
    return found


def lines_of(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    """By their custom ids."""
    assert file_id is not None
    read = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    assert {frozenset(each) for each in read} == {
        frozenset(("id", "custom_id", "response", "error"))
    }
    return {each["custom_id"]: each for each in read}


def test_each_line_is_answered_and_billed_as_a_batch(worker: Running, client: OpenAI) -> None:
    batch = create(
        client,
        line("a"),
        line("b", model="far"),
        line("c", temperature=9),
        metadata={"night": "one"},
    )
    done = until_ended(client, batch)
    assert done.status == "completed" and done.metadata == {"night": "one"}
    assert done.request_counts is not None and done.usage is not None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    answers = lines_of(client, done.output_file_id)
    assert set(answers) == {"a", "b"}
    total = 0
    for each in answers.values():
        assert each["error"] is None and each["response"]["status_code"] == 200
        completion = ChatCompletion.model_validate(each["response"]["body"])
        assert extras(completion) == []
        assert completion.usage is not None
        total += completion.usage.total_tokens
    assert done.usage.total_tokens == total
    refused = lines_of(client, done.error_file_id)["c"]
    told = refused["response"]["body"]["error"]
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    output = client.files.retrieve(str(done.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.expires_at is not None

    async def booked() -> list[Any]:
        async with worker.services.system_db.connect() as conn:
            ids = [each["response"]["request_id"] for each in answers.values()]
            found = sa.select(usage_events).where(usage_events.c.request_id.in_(ids))
            return list(await conn.execute(found))

    events = worker.run(booked())
    assert {(it.model, it.tier, it.lane) for it in events} == {
        ("near", "batch", "batch"),
        ("far", "batch", "batch"),
    }

    async def found() -> Sequence[FoundRequest]:
        now = datetime.now(UTC)
        search = Search(start=now - timedelta(days=1), end=now, batch=batch.id)
        async with worker.services.system_db.connect() as conn:
            page = await find_requests(conn, events[0].org, search)
            answered = events[0].request_id.removeprefix("req_")
            one = await find_request(conn, events[0].org, answered)
            assert one is not None and one.batch == batch.id and one.stages
            return page.rows

    rows = {f"req_{row.id}": row for row in worker.run(found())}
    assert rows.keys() == {each["response"]["request_id"] for each in (*answers.values(), refused)}
    assert sorted(
        (row.model, row.status, row.lane, row.error_code or "") for row in rows.values()
    ) == [
        ("far", 200, "batch", ""),
        ("near", 200, "batch", ""),
        ("near", 400, "batch", told["code"] or told["type"]),
    ]
    for event in events:
        row = rows[event.request_id]
        assert row.output_tokens == event.output + event.reasoning_output
        assert row.input_tokens == event.uncached_input + event.cache_read + event.cache_write_5m
        assert row.cost_pico == sum(event._mapping[name] for name in AMOUNTS)


def test_what_is_wrong_with_the_file_is_said_by_line(client: OpenAI) -> None:
    done = until_ended(client, create(client, line("a"), "{", line("a"), line("b", stream=True)))
    assert done.status == "failed" and done.errors is not None
    assert [(each.line, each.code) for each in done.errors.data or ()] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_request"),
    ]
    assert done.output_file_id is None and done.error_file_id is None


async def test_the_async_client_lists_and_cancels(worker: Running) -> None:
    url = f"{worker.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=worker.everything, max_retries=0) as client:
        content = line("a").encode()
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        asked: Any = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file.id}
        made = [await client.batches.create(**asked) for _ in range(3)]
        listed = [each.id async for each in client.batches.list(limit=2)]
        assert listed[:3] == [each.id for each in reversed(made)]
        try:
            cancelled = await client.batches.cancel(made[2].id)
            assert cancelled.status in ("cancelling", "cancelled")
        except openai.ConflictError as error:
            assert error.code == "read_only", "it was faster"


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input_file_id": "file-nobody"}, 404, "input_file_id"),
        ({"endpoint": "/v1/videos"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, None),
        ({"priority": 1}, 400, "priority"),
    ],
)
def test_what_cannot_be_a_batch_is_refused_by_its_name(
    worker: Running, client: OpenAI, changes: dict[str, Any], status: int, param: str | None
) -> None:
    file = client.files.create(file=b"{}", purpose="batch")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    answer = worker.session.post(
        f"{worker.url}/v1/batches",
        json=good | changes,
        headers={"authorization": f"Bearer {worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]["param"]
    assert found == param if param else found.startswith("output_expires_after"), answer.text


def test_a_file_for_something_else_is_no_input(client: OpenAI) -> None:
    file = client.files.create(file=b"{}", purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert caught.value.param == "input_file_id"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}, "text_completion"),
        ("/v1/embeddings", {"input": "hi"}, "list"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "response"),
    ],
)
def test_other_surfaces_are_asked_in_the_same_way(
    client: OpenAI, path: Any, body: dict[str, Any], kind: str
) -> None:
    asked = {"custom_id": "a", "method": "POST", "url": path, "body": {"model": "near", **body}}
    file = client.files.create(file=json.dumps(asked).encode(), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
    done = until_ended(client, made)
    answered = lines_of(client, done.output_file_id or done.error_file_id)["a"]["response"]
    assert (answered["status_code"], answered["body"].get("object")) == (200, kind), answered


def test_a_response_of_a_batch_is_kept_and_can_be_continued(client: OpenAI) -> None:
    """One that a line cannot be is refused by its name, as the same request is without a batch."""
    before = client.responses.create(model="near", input="first", max_output_tokens=16)
    bodies: dict[str, Any] = {
        "kept": {},
        "continues": {"previous_response_id": before.id},
        "not kept": {"store": False},
        "background": {"background": True},
        "conversation": {"conversation": "conv_1"},
        "messages": {"max_output_tokens": 0},
    }
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": "near", "input": "hi", "max_output_tokens": 16, **body},
        }
        for name, body in bodies.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    done = until_ended(client, made)
    answers = lines_of(client, done.output_file_id)
    found = {}
    for name, each in answers.items():
        found[name] = Response.model_validate(each["response"]["body"])
        assert extras(found[name]) == []
        assert found[name].usage is not None and found[name].service_tier == "default"
    assert found.keys() == {"kept", "continues", "not kept"}
    longer, short = found["continues"], found["kept"]
    assert longer.previous_response_id == before.id
    assert longer.usage is not None and short.usage is not None
    assert longer.usage.input_tokens > short.usage.input_tokens, "it was shown what came before"
    assert client.responses.retrieve(found["kept"].id).output_text == found["kept"].output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found["not kept"].id)
    after = client.responses.create(
        model="near", input="on", previous_response_id=found["kept"].id, max_output_tokens=16
    )
    assert after.previous_response_id == found["kept"].id
    errors = lines_of(client, done.error_file_id)
    named = {name: each["response"]["body"]["error"]["param"] for name, each in errors.items()}
    assert named == {
        "background": "background",
        "conversation": "conversation",
        "messages": "max_output_tokens",
    }
