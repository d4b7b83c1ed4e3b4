"""/v1/responses by the official SDK, sync and async, on a worker as it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from openai import AsyncOpenAI, OpenAI

from gateway.responses import background, running
from gateway.responses.tables import responses as table
from tests.gateway.routes.openapi.running import Running
from tests.journeys.sdk.sdk_shapes import extras, said_in

ASKED: dict[str, Any] = {"model": "near", "max_output_tokens": 6, "extra_body": {"seed": 7}}


@pytest.fixture
def client(worker: Running) -> Iterator[OpenAI]:
    with to_client(worker, worker.everything) as client:
        yield client


def to_client(worker: Running, key: str) -> OpenAI:
    return OpenAI(
        api_key=key,
        base_url=f"{worker.url}/v1",
        max_retries=0,
        _strict_response_validation=True,
    )


def neighbour(worker: Running, **project: Any) -> str:
    """A key of another project of the same org."""
    number = next(worker._numbers)
    body = {"name": f"project {number}", **project}
    made = worker.post("/v1/admin/projects", **body)["id"]
    mine, worker.project_id = worker.project_id, made
    try:
        return worker.run(worker.new_key(["inference"]))
    finally:
        worker.project_id = mine


def test_an_answer_is_found_again_as_it_was_until_it_is_deleted(client: OpenAI) -> None:
    made = client.responses.create(**ASKED, input="Hello", metadata={"a": "b"}, user="u")
    assert extras(made) == [] and made.id.startswith("resp_")
    assert (made.status, made.output_text != "") == ("incomplete", True)
    assert made.usage is not None and made.usage.output_tokens == 6
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    [item] = client.responses.input_items.list(made.id)
    assert extras(item) == [] and item.to_dict()["content"] == [
        {"type": "input_text", "text": "Hello"}
    ]
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_a_stream_adds_up_to_the_whole_answer_and_is_found_again(client: OpenAI) -> None:
    whole = client.responses.create(**ASKED, input="Hello")
    with client.responses.stream(**ASKED, input="Hello") as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert said_in(last.response) == said_in(whole)
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == whole.output_text


def test_a_response_is_continued(client: OpenAI) -> None:
    first = client.responses.create(**ASKED, input="Hello", instructions="Be brief.")
    second = client.responses.create(**ASKED, input="And?", previous_response_id=first.id)
    again = client.responses.create(
        **ASKED,
        input=[
            {"role": "user", "content": "Hello"},
            *(item.to_dict() for item in first.output),  # type: ignore[list-item]
            {"role": "user", "content": "And?"},
        ],
    )
    assert second.previous_response_id == first.id and second.instructions is None
    assert second.output_text == again.output_text
    assert second.usage is not None and again.usage is not None
    assert second.usage.input_tokens == again.usage.input_tokens
    third = client.responses.create(
        **ASKED,
        previous_response_id=second.id,
        input=[{"type": "item_reference", "id": first.output[0].id}],
    )
    assert [item.id for item in client.responses.input_items.list(third.id)] == [first.output[0].id]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, input="x", previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"


def test_input_items_are_paged_in_both_orders(client: OpenAI) -> None:
    texts = [str(number) for number in range(5)]
    items: Any = [{"role": "user", "content": text} for text in texts]
    made = client.responses.create(**ASKED, input=items)
    for order, wanted in (("asc", texts), ("desc", texts[::-1])):
        listed = client.responses.input_items.list(made.id, order=order, limit=2)  # type: ignore[arg-type]
        assert [item.to_dict()["content"][0]["text"] for item in listed] == wanted  # type: ignore[index]
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(made.id, after="msg_nobody")


def test_what_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    made = client.responses.create(**ASKED, input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_another_projects_response_is_none(client: OpenAI, worker: Running) -> None:
    made = client.responses.create(**ASKED, input="Hello")
    with to_client(worker, neighbour(worker)) as other:
        for ask in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.input_items.list(made.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**ASKED, input="x", previous_response_id=made.id)
    assert client.responses.retrieve(made.id).id == made.id


def test_a_project_that_keeps_nothing(worker: Running) -> None:
    with to_client(worker, neighbour(worker, zero_retention=True)) as client:
        made = client.responses.create(**ASKED, input="Hello", store=True)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**ASKED, input="x", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"


def test_refusals_name_fields_of_this_surface(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="near", input="x", max_output_tokens=10**9)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="near", input="x", reasoning={"effort": "low"}, stream=True)
    assert caught.value.param == "reasoning.effort"


def test_async_too(worker: Running) -> None:
    async def ask() -> None:
        async with AsyncOpenAI(
            api_key=worker.everything,
            base_url=f"{worker.url}/v1",
            max_retries=0,
            _strict_response_validation=True,
        ) as client:
            whole = await client.responses.create(**ASKED, input="Hello")
            async with client.responses.stream(**ASKED, input="Hello") as stream:
                last = [event async for event in stream][-1]
            assert last.type == "response.incomplete"
            assert said_in(last.response) == said_in(whole)
            assert (await client.responses.retrieve(whole.id)).to_dict() == whole.to_dict()
            assert [item async for item in client.responses.input_items.list(whole.id)]
            await client.responses.delete(whole.id)

    asyncio.run(ask())


def test_an_upstreams_model_is_as_good(client: OpenAI) -> None:
    whole = client.responses.create(model="far", input="Hello", store=False)
    assert extras(whole) == [] and whole.output_text
    with client.responses.stream(model="far", input="Hello", store=False) as stream:
        text = stream.get_final_response().output_text
    assert text and whole.output_text.startswith(text), "as its script says it"


def test_in_the_background_it_ends_by_itself(client: OpenAI) -> None:
    whole = client.responses.create(**ASKED, input="Hello")
    made = client.responses.create(**ASKED, input="Hello", background=True)
    assert extras(made) == [] and made.status == "queued" and made.background
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert extras(found) == [] and said_in(found) == said_in(whole) | {"background": True}
    assert client.responses.cancel(made.id).to_dict() == found.to_dict(), "it has ended"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASKED, input="x", background=True, store=False)


def test_in_the_background_its_events_are_followed_from_any_of_them_on(client: OpenAI) -> None:
    with client.responses.create(**ASKED, input="Hello", background=True, stream=True) as stream:
        events = [each.to_dict() for each in stream]
    names = [each["type"] for each in events]
    assert names[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert names[-1] == "response.incomplete"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    answer = events[-1]["response"]
    assert isinstance(answer, dict)
    assert client.responses.retrieve(answer["id"]).to_dict() == answer
    assert [each["response"]["status"] for each in events[:3]] == [  # type: ignore[index]
        "queued",
        "queued",
        "in_progress",
    ]
    text = "".join(str(each.get("delta", "")) for each in events)
    assert text == client.responses.retrieve(answer["id"]).output_text
    for after in (None, 0, 4, len(events) - 2, len(events) - 1, 1000):
        asked = {} if after is None else {"starting_after": after}
        found = client.responses.retrieve(
            answer["id"], stream=True, include=["message.output_text.logprobs"], **asked
        )
        following = events[(-1 if after is None else after) + 1 :]
        assert [each.to_dict() for each in found] == following
    with client.responses.stream(response_id=answer["id"], starting_after=2) as resumed:
        assert [each.type for each in resumed] == names[3:]


def test_what_cannot_be_followed_is_refused_by_name(client: OpenAI, worker: Running) -> None:
    whole = client.responses.create(**ASKED, input="Hello")
    background = client.responses.create(**ASKED, input="Hello", background=True)
    for response_id, asked, param in (
        (whole.id, {}, "stream"),
        (background.id, {"starting_after": -1}, "starting_after"),
        (background.id, {"starting_after": 2**63}, "starting_after"),
        (background.id, {"include_obfuscation": True}, "include_obfuscation"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.retrieve(response_id, stream=True, **asked)  # type: ignore[call-overload]
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(background.id, extra_query={"starting_after": 3})
    with to_client(worker, neighbour(worker)) as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(background.id, stream=True)


def test_in_the_background_it_is_streamed_once(client: OpenAI) -> None:
    """A retry of a stream follows the response that was made."""
    once = {"Idempotency-Key": "streamed"}
    asked = {**ASKED, "background": True, "stream": True, "extra_headers": once}
    found = [
        [each.to_dict() for each in client.responses.create(**asked, input="Hello")]
        for _ in range(2)
    ]
    assert found[0] == found[1]


def test_in_the_background_it_is_made_once(client: OpenAI) -> None:
    once = {"Idempotency-Key": "background"}
    asked = {**ASKED, "background": True, "extra_headers": once}
    first = client.responses.with_raw_response.create(**asked, input="Hello")
    again = client.responses.with_raw_response.create(**asked, input="Hello")
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert first.parse().to_dict() == again.parse().to_dict()
    assert first.parse().status == "queued"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked, input="Something else")
    assert caught.value.code == "idempotency_key_reused"


def test_what_was_not_added_in_the_background_lets_go_of_its_key(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**ASKED, "background": True, "extra_headers": {"Idempotency-Key": "full"}}
    with monkeypatch.context() as patch:
        patch.setattr(running, "MAX_IN_BACKGROUND", 0)
        with pytest.raises(openai.RateLimitError):
            client.responses.create(**asked, input="Hello")
    made = client.responses.with_raw_response.create(**asked, input="Hello")
    assert "idempotent-replayed" not in made.headers


@pytest.mark.parametrize(
    "bound, refusal",
    [
        ("MAX_FOLLOWERS", openai.InternalServerError),
        ("MAX_FOLLOWERS_OF_ORG", openai.RateLimitError),
    ],
)
def test_what_cannot_be_followed_is_not_begun(
    client: OpenAI,
    worker: Running,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    refusal: type[openai.APIStatusError],
) -> None:
    """An SDK asks again after it, and would have two on its bill."""

    async def num_kept() -> int:
        async with worker.services.system_db.connect() as conn:
            return await conn.scalar(sa.select(sa.func.count()).select_from(table)) or 0

    before = worker.run(num_kept())
    monkeypatch.setattr(background, bound, 0)
    with pytest.raises(refusal):
        client.responses.create(**ASKED, input="Hello", background=True, stream=True)
    assert worker.run(num_kept()) == before


def test_input_is_counted_as_it_is_billed(client: OpenAI) -> None:
    first = client.responses.create(**ASKED, input="Hello")
    for asked in ({"input": "Hello"}, {"input": "And?", "previous_response_id": first.id}):
        counted = client.responses.input_tokens.count(model="near", **asked)  # type: ignore[arg-type]
        assert extras(counted) == []
        usage = client.responses.create(**ASKED, **asked).usage
        assert usage is not None and counted.input_tokens == usage.input_tokens
