"""Batches of messages by the official SDK, on a running worker with an engine and an upstream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anthropic
import httpx
import pytest
import sqlalchemy as sa
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from openai import OpenAI
from pydantic import BaseModel

from billing.tables import usage_events
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.journeys.sdk.sdk_shapes import extras

BATCHES = "/v1/messages/batches"


def request(custom_id: str, *, model: str = "near", **params: Any) -> Any:
    messages = [{"role": "user", "content": f"say {custom_id}"}]
    asked = {"model": model, "messages": messages, "max_tokens": 4, **params}
    return {"custom_id": custom_id, "params": asked}


@pytest.fixture
def ours(worker: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=worker.url, api_key=worker.everything, max_retries=0) as found:
        yield found


def is_theirs(model: BaseModel) -> None:
    """Each field that the SDK's type has, and no other."""
    assert extras(model) == []
    assert type(model).model_fields.keys() == model.model_fields_set


def until_ended(client: Anthropic, batch: MessageBatch) -> MessageBatch:
    deadline = time.monotonic() + TIMEOUT_S
    while (found := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        is_theirs(found)
        is_theirs(found.request_counts)
        assert found.request_counts.processing == batch.request_counts.processing
        assert found.results_url is None and found.ended_at is None
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def results_of(client: Anthropic, batch_id: str) -> dict[str, MessageBatchIndividualResponse]:
    found = list(client.messages.batches.results(batch_id))
    for each in found:
        is_theirs(each)
        is_theirs(each.result)
    by_id = {each.custom_id: each for each in found}
    assert len(by_id) == len(found)
    return by_id


def test_each_request_is_answered_and_billed_as_a_batch(worker: Running, ours: Anthropic) -> None:
    asked = [
        request("a"),
        request("b", model="far"),
        request("hot", temperature=9),
        request("lost", model="nowhere"),
        request("streamed", stream=True),
        {"custom_id": "empty", "params": {}},
    ]
    made = ours.messages.batches.create(requests=asked)
    is_theirs(made)
    assert made.id.startswith("msgbatch_") and made.processing_status == "in_progress"
    assert made.request_counts.processing == len(asked)
    assert made.expires_at - made.created_at == timedelta(hours=24)
    done = until_ended(ours, made)
    is_theirs(done)
    assert done.request_counts.to_dict() == {
        **{"processing": 0, "succeeded": 2, "errored": 4, "canceled": 0, "expired": 0}
    }
    assert done.ended_at is not None and done.archived_at is None
    assert done.results_url == f"{worker.url}{BATCHES}/{made.id}/results"
    found = results_of(ours, made.id)
    request_ids = []
    for name in ("a", "b"):
        result = found[name].result
        assert result.type == "succeeded"
        assert extras(result.message) == []
        assert result.message.id.startswith("msg_")
        request_ids.append(f"req_{result.message.id.removeprefix('msg_')}")
        assert result.message.usage.service_tier == "batch"
    why = {
        "hot": ("invalid_request_error", "temperature"),
        "lost": ("not_found_error", "nowhere"),
        "streamed": ("invalid_request_error", "stream"),
        "empty": ("invalid_request_error", "model"),
    }
    for name, (kind, named) in why.items():
        result = found[name].result
        assert result.type == "errored"
        is_theirs(result.error)
        assert result.error.error.type == kind and named in result.error.error.message
        assert str(result.error.request_id).startswith("req_")

    async def booked() -> list[Any]:
        async with worker.services.system_db.connect() as conn:
            rows = sa.select(usage_events).where(usage_events.c.request_id.in_(request_ids))
            return list(await conn.execute(rows))

    events = worker.run(booked())
    assert {(it.model, it.tier, it.lane) for it in events} == {
        ("near", "batch", "batch"),
        ("far", "batch", "batch"),
    }
    assert len(events) == 2


def test_one_that_was_deleted_is_gone_with_its_results(ours: Anthropic) -> None:
    made = ours.messages.batches.create(requests=[request("a")])
    until_ended(ours, made)
    with pytest.raises(anthropic.BadRequestError) as caught:
        ours.messages.batches.cancel(made.id)
    assert "ended" in caught.value.message
    deleted = ours.messages.batches.delete(made.id)
    is_theirs(deleted)
    assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    for gone in (ours.messages.batches.retrieve, ours.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError) as missing:
            gone(made.id)
        assert missing.value.type == "not_found_error"


async def test_the_async_client_pages_both_ways_reads_deletes_and_cancels(worker: Running) -> None:
    key = worker.everything
    async with AsyncAnthropic(base_url=worker.url, api_key=key, max_retries=0) as client:
        batches = client.messages.batches
        made = [(await batches.create(requests=[request("a")])).id for _ in range(5)]
        newest = list(reversed(made))
        listed = [each.id async for each in batches.list(limit=2)]
        assert listed[:5] == newest, "the pages that follow are asked for"
        second = await batches.list(limit=2, after_id=newest[1])
        assert [each.id for each in second.data] == newest[2:4]
        is_theirs(second.data[0])
        before = await batches.list(limit=2, before_id=newest[3])
        assert [each.id for each in before.data] == newest[1:3]
        assert before.has_more, "there is a newer one"
        first = await batches.list(limit=1, before_id=newest[1])
        assert [each.id for each in first.data] == newest[:1] and not first.has_more
        assert [each.id async for each in batches.list(limit=2, before_id=newest[4])] == [
            *newest[2:4],
            *newest[:2],
        ]
        deadline = time.monotonic() + TIMEOUT_S
        while (await batches.retrieve(made[0])).processing_status != "ended":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        (only,) = [each async for each in await batches.results(made[0])]
        is_theirs(only)
        assert (only.custom_id, only.result.type) == ("a", "succeeded")
        is_theirs(await batches.delete(made[0]))
        many = await batches.create(requests=[request(f"r{n}") for n in range(200)])
        cancelled = await batches.cancel(many.id)
        is_theirs(cancelled)
        assert cancelled.processing_status == "canceling"
        assert cancelled.cancel_initiated_at is not None


def test_neither_shape_shows_the_others_batches(ours: Anthropic, client: OpenAI) -> None:
    made = ours.messages.batches.create(requests=[request("a")])
    file = client.files.create(file=b"{}", purpose="batch")
    other = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert made.id not in [each.id for each in client.batches.list()]
    assert other.id not in [each.id for each in ours.messages.batches.list()]
    with pytest.raises(anthropic.NotFoundError):
        ours.messages.batches.retrieve(other.id)
    until_ended(ours, made)
    shown = {each.purpose for each in client.files.list()}
    assert not {purpose for purpose in shown if "message" in purpose}, "its files are its own"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 400, "'requests'"),
        ({"requests": []}, 400, "'requests'"),
        ({"requests": {}}, 400, "'requests'"),
        ({"requests": [1]}, 400, "'requests[0]'"),
        ({"requests": [request("a"), {"params": {}}]}, 400, "'requests[1].custom_id'"),
        ({"requests": [request("a b")]}, 400, "'requests[0].custom_id'"),
        ({"requests": [request("a"), request("a")]}, 400, "'requests[1].custom_id'"),
        ({"requests": [{"custom_id": "a", "params": []}]}, 400, "'requests[0].params'"),
        ({"requests": [{**request("a"), "more": 1}]}, 400, "requests[0].more"),
        ({"requests": [request("a")], "priority": 1}, 400, "priority"),
    ],
)
def test_what_cannot_be_a_batch_is_refused_by_its_name(
    worker: Running, body: dict[str, Any], status: int, named: str
) -> None:
    answer = post(worker, json.dumps(body, indent=1).encode())
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found["type"] == "error" and found["request_id"] == answer.headers["request-id"]
    assert found["error"]["type"] == "invalid_request_error"
    assert named in found["error"]["message"]


@pytest.mark.parametrize("bound", ["of bodies", "of files"])
def test_a_body_beyond_the_bounds_is_not_read(
    worker: Running, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    if bound == "of bodies":
        monkeypatch.setattr("gateway.routes.anthropic.message_batches.MAX_BODY_BYTES", 1000)
    else:
        monkeypatch.setattr(worker.services.files, "max_file_bytes", 1000)
    for size in (1001, 100_000):
        answer = post(worker, b" " * size)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
    chunked = httpx.post(
        worker.url + BATCHES,
        content=(b" " * 400 for _ in range(4)),
        headers={"x-api-key": worker.everything},
        timeout=TIMEOUT_S,
    )
    assert chunked.status_code == 413
    monkeypatch.setattr("gateway.routes.anthropic.message_batches.MAX_REQUESTS", 2)
    body = {"requests": [{"custom_id": str(n), "params": {}} for n in range(3)]}
    answer = post(worker, json.dumps(body).encode())
    assert answer.status_code == 400 and "at most 2 requests" in answer.json()["error"]["message"]


def post(worker: Running, content: bytes) -> httpx.Response:
    headers = {"x-api-key": worker.everything, "content-type": "application/json"}
    return httpx.post(worker.url + BATCHES, content=content, headers=headers, timeout=TIMEOUT_S)


def test_the_sdks_beta_namespace_speaks_to_the_same_batches(
    worker: Running, ours: Anthropic
) -> None:
    """Older SDKs say so in every query."""
    batches = ours.beta.messages.batches
    made = batches.create(requests=[request("a")], betas=["message-batches-2024-09-24"])
    until_ended(ours, ours.messages.batches.retrieve(made.id))
    found = batches.retrieve(made.id)
    is_theirs(found)
    (only,) = batches.results(made.id)
    is_theirs(only)
    assert only.result.type == "succeeded" and extras(only.result.message) == []
    listed = batches.list(limit=1)
    assert [each.id for each in listed.data] == [made.id]
    headers = {"x-api-key": worker.everything, "anthropic-version": "2023-06-01"}
    for path in (BATCHES, f"{BATCHES}/{made.id}", f"{BATCHES}/{made.id}/results", "/v1/models"):
        answer = httpx.get(f"{worker.url}{path}?beta=true", headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
    is_theirs(batches.delete(made.id))
