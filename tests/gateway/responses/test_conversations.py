"""/v1/conversations by the official SDK, on a worker as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.gateway.responses.test_responses import ASKED, neighbour, to_client
from tests.gateway.routes.openapi.running import Running
from tests.journeys.sdk.sdk_shapes import extras


@pytest.fixture
def client(worker: Running) -> Iterator[OpenAI]:
    with to_client(worker, worker.everything) as client:
        yield client


def text_of(item: Any) -> str:
    assert extras(item) == []
    return str(item.to_dict()["content"][0]["text"])


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_a_conversation_is_made_changed_and_forgotten(client: OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"}, items=[user("hi")])
    assert extras(made) == [] and made.id.startswith("conv_") and made.metadata == {"a": "b"}
    changed = client.conversations.update(made.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"} and changed.created_at == made.created_at
    assert client.conversations.retrieve(made.id).to_dict() == changed.to_dict()
    gone = client.conversations.delete(made.id)
    assert extras(gone) == [] and gone.deleted
    for ask in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(made.id)


def test_items_are_added_listed_and_forgotten(client: OpenAI) -> None:
    made = client.conversations.create()
    added = client.conversations.items.create(made.id, items=[user(str(n)) for n in range(5)])
    assert extras(added) == [] and not added.has_more
    assert [text_of(item) for item in added.data] == list("01234")
    for order, wanted in (("asc", "01234"), ("desc", "43210")):
        listed = client.conversations.items.list(made.id, order=order, limit=2)  # type: ignore[arg-type]
        assert [text_of(item) for item in listed] == list(wanted)
    first = added.data[0]
    assert first.id is not None
    one = client.conversations.items.retrieve(first.id, conversation_id=made.id)
    assert one.to_dict() == first.to_dict()
    again = client.conversations.items.create(made.id, items=[first.to_dict()])  # type: ignore[list-item]
    assert again.first_id == first.id
    left = client.conversations.items.delete(first.id, conversation_id=made.id)
    assert left.id == made.id
    assert [text_of(item) for item in client.conversations.items.list(made.id)] == list("4321")
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(first.id, conversation_id=made.id)


def test_a_response_reads_a_conversation_and_is_added_to_it(client: OpenAI) -> None:
    made = client.conversations.create(items=[user("My name is Ann.")])
    first = client.responses.create(**ASKED, input="Who am I?", conversation=made.id)
    assert first.conversation is not None and first.conversation.id == made.id
    said = list(client.conversations.items.list(made.id, order="asc"))
    assert [text_of(item) for item in said] == [
        "My name is Ann.",
        "Who am I?",
        first.output_text,
    ]
    assert said[-1].id == first.output[0].id
    with client.responses.stream(**ASKED, input="And now?", conversation={"id": made.id}) as stream:
        events = list(stream)
    second = events[-1].response  # type: ignore[union-attr]
    assert second.usage.input_tokens > first.usage.input_tokens  # type: ignore[union-attr]
    assert len(list(client.conversations.items.list(made.id))) == 5
    unkept = client.responses.create(**ASKED, input="x", conversation=made.id, store=False)
    assert len(list(client.conversations.items.list(made.id))) == 7
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_conversation_that_is_not_there_is_named(client: OpenAI, worker: Running) -> None:
    made = client.conversations.create(items=[user("hi")])
    with to_client(worker, neighbour(worker)) as other:
        for ask in (other.conversations.retrieve, other.conversations.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.NotFoundError):
            other.conversations.items.create(made.id, items=[user("x")])
        with pytest.raises(openai.APIStatusError) as caught:
            other.responses.create(**ASKED, input="x", conversation=made.id)
        assert caught.value.status_code == 404
    response = client.responses.create(**ASKED, input="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            **ASKED, input="x", conversation=made.id, previous_response_id=response.id
        )
    assert refused.value.param == "conversation"
    assert len(list(client.conversations.items.list(made.id))) == 1


def test_a_project_that_keeps_nothing_has_none(worker: Running) -> None:
    with to_client(worker, neighbour(worker, zero_retention=True)) as client:
        with pytest.raises(openai.BadRequestError):
            client.conversations.create()
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**ASKED, input="x", conversation="conv_1")
        assert caught.value.param == "conversation"
