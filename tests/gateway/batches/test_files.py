"""Files by the official SDK, on a running worker with their bytes in rows and with a store of
objects: what goes in comes out, to its project alone."""

from __future__ import annotations

import time
from typing import Any

import anthropic
import openai
import pytest
import sqlalchemy as sa
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

from gateway.audit.tables import entries
from gateway.files.contents import CHUNK_BYTES
from gateway.files.uploads import MIN_EXPIRY_S
from gateway.wire.openai.files import ANCHOR, BATCH_EXPIRY_S, SECONDS
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.journeys.sdk.sdk_shapes import extras


@pytest.fixture(scope="module", params=["worker_in_rows", "worker_with_store"])
def worker(request: pytest.FixtureRequest) -> Running:
    """The same, wherever the bytes are."""
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, Running) else found[0]


LARGE = bytes(range(256)) * (CHUNK_BYTES // 100)
"""Several rows of it."""


def test_what_goes_in_comes_out(client: OpenAI) -> None:
    made = client.files.create(file=("täglich.bin", LARGE), purpose="user_data")
    assert extras(made) == []
    assert (made.bytes, made.filename, made.purpose) == (len(LARGE), "täglich.bin", "user_data")
    assert (made.object, made.status, made.expires_at) == ("file", "processed", None)
    assert client.files.retrieve(made.id) == made
    content = client.files.content(made.id)
    assert content.read() == LARGE
    assert content.response.headers["content-disposition"].startswith("attachment")


def test_a_file_for_a_batch_expires_after_a_month_or_when_it_says(client: OpenAI) -> None:
    now = time.time()
    month = client.files.create(file=b"{}\n", purpose="batch")
    assert month.expires_at is not None
    assert abs(month.expires_at - now - BATCH_EXPIRY_S) < 60
    hour = client.files.create(
        file=b"{}\n",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": MIN_EXPIRY_S},
    )
    assert hour.expires_at == hour.created_at + MIN_EXPIRY_S


def test_anthropics_clients_are_told_in_their_shape_that_their_files_are_not_served(
    worker: Running,
) -> None:
    options = {"base_url": worker.url, "max_retries": 0}
    with Anthropic(api_key=worker.everything, **options) as client:
        for ask in (
            client.files.list,
            client.beta.files.list,
            lambda: client.beta.files.retrieve_metadata("file-1"),
            lambda: client.beta.files.download("file-1"),
            lambda: client.beta.files.delete("file-1"),
            lambda: client.beta.files.upload(file=("a.txt", b"abc", "text/plain")),
        ):
            with pytest.raises(anthropic.NotFoundError) as refused:
                ask()
            body: Any = refused.value.body
            assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
            assert body["error"]["message"].startswith("Anthropic's Files API is not served")
    with Anthropic(api_key="sk-ant-unknown", **options) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            stranger.beta.files.list()
        assert isinstance(unknown.value.body, dict) and unknown.value.body["type"] == "error"


async def test_the_async_client_does_the_same(worker: Running) -> None:
    url = f"{worker.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=worker.everything, max_retries=0) as client:
        made = await client.files.create(file=b"abc", purpose="vision")
        assert (await client.files.content(made.id)).content == b"abc"
        assert (await client.files.delete(made.id)).deleted


def test_what_is_deleted_is_gone_and_the_audit_log_says_who(
    worker: Running, client: OpenAI
) -> None:
    made = client.files.create(file=b"abc", purpose="assistants")
    gone = client.files.delete(made.id)
    assert extras(gone) == []
    assert (gone.id, gone.object, gone.deleted) == (made.id, "file", True)
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(made.id)
        assert caught.value.code == "not_found"

    async def told() -> Any:
        async with worker.services.system_db.connect() as conn:
            found = sa.select(entries).where(entries.c.target == made.id)
            return (await conn.execute(found)).one()

    entry = worker.run(told())
    assert (entry.action, entry.project_id) == ("file.deleted", worker.project_id)


def test_a_list_is_walked_from_the_newest_on(client: OpenAI) -> None:
    ids = [client.files.create(file=b"x", purpose="fine-tune").id for _ in range(5)]
    page = client.files.list(purpose="fine-tune", limit=2)
    assert extras(page.data[0]) == []
    assert page.has_more
    assert [each.id for each in page] == ids[::-1]
    oldest = client.files.list(purpose="fine-tune", order="asc")
    assert [each.id for each in oldest.data] == ids
    client.files.create(file=b"x", purpose="user_data")
    assert {each.purpose for each in client.files.list()} > {"fine-tune"}


def test_another_project_sees_none_of_it(worker: Running, client: OpenAI) -> None:
    made = client.files.create(file=b"secret", purpose="user_data")
    project_id = worker.make_project()
    account = f"/v1/organization/projects/{project_id}/service_accounts"
    other_key = worker.post(account, name="robot")["api_key"]["value"]
    with OpenAI(base_url=f"{worker.url}/v1", api_key=other_key, max_retries=0) as other:
        assert [each.id for each in other.files.list()] == []
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
    assert client.files.content(made.id).read() == b"secret"


GOOD: dict[str, Any] = {"purpose": (None, "batch"), "file": ("a.jsonl", b"{}")}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"file": None}, "file"),
        ({"file": (None, "no name")}, "file"),
        ({"file": ("\x01.txt", b"")}, "filename"),
        ({"purpose": None}, "purpose"),
        ({"purpose": (None, "world domination")}, "purpose"),
        ({"purpose": (None, b"\xff")}, "purpose"),
        ({"colour": (None, "red")}, "colour"),
        ({ANCHOR: (None, "created_at")}, SECONDS),
        ({SECONDS: (None, "3600")}, ANCHOR),
        ({ANCHOR: (None, "created_at"), SECONDS: (None, "3")}, SECONDS),
        ({ANCHOR: (None, "birth"), SECONDS: (None, "3600")}, ANCHOR),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_name(
    worker: Running, changes: dict[str, Any], param: str
) -> None:
    form = {name: part for name, part in (GOOD | changes).items() if part is not None}
    answer = worker.session.post(
        f"{worker.url}/v1/files",
        files=form,
        headers={"authorization": f"Bearer {worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"--x\r\nno header\r\n\r\n--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; name=a\r\n"),
    ],
)
def test_what_is_no_form_is_refused(worker: Running, content_type: str, body: bytes) -> None:
    headers = {"authorization": f"Bearer {worker.everything}", "content-type": content_type}
    url = f"{worker.url}/v1/files"
    answer = worker.session.post(url, data=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 400, answer.text
