"""A worker whose files are on a store of objects: a batch from its input to its results, and what
it says while the store is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from gateway.files.store import FileStore
from gateway.files.uploads import Upload
from tests.gateway.batches.object_store import HeldRoad
from tests.gateway.batches.test_batches import create, line, lines_of, until_ended
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running


@pytest.fixture(scope="module")
def worker(worker_with_store: tuple[Running, HeldRoad]) -> Running:
    return worker_with_store[0]


@pytest.fixture
def road(worker_with_store: tuple[Running, HeldRoad]) -> Iterator[HeldRoad]:
    yield worker_with_store[1]
    worker_with_store[1].mend()


def test_while_the_store_is_away_it_says_so_and_loses_nothing(
    client: OpenAI, road: HeldRoad
) -> None:
    kept = client.files.create(file=b"kept", purpose="user_data")
    with road.cut():
        for ask in (
            lambda: client.files.create(file=b"lost", purpose="user_data"),
            lambda: client.files.content(kept.id),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                ask()
            assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
        assert client.files.retrieve(kept.id) == kept
    assert client.files.content(kept.id).read() == b"kept"
    assert [each.id for each in client.files.list(purpose="user_data")] == [kept.id]


def test_a_batch_waits_for_the_store(
    client: OpenAI, worker: Running, road: HeldRoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are in Postgres until the files of its results are whole."""
    monkeypatch.setattr(worker.services.batches, "_lease_s", 1.0)
    begin, failed = FileStore.begin_output, threading.Event()

    async def cuts(files: FileStore, *where: str, most_bytes: int) -> Upload:
        made = await begin(files, *where, most_bytes=most_bytes)
        if not failed.is_set():  # a later one may come here when the road is mended
            road.cut_now()
            failed.set()
        return made

    monkeypatch.setattr(FileStore, "begin_output", cuts)
    batch = create(client, line("a"), line("b", temperature=9))
    try:
        assert failed.wait(TIMEOUT_S)
        assert client.batches.retrieve(batch.id).status == "finalizing"
    finally:
        road.mend()
    done = until_ended(client, batch)
    assert done.status == "completed"
    assert set(lines_of(client, done.output_file_id)) == {"a"}
    assert set(lines_of(client, done.error_file_id)) == {"b"}


def test_a_batch_whose_input_is_lost_has_failed(client: OpenAI, worker: Running) -> None:
    file = client.files.create(file=line("a").encode(), purpose="batch")
    worker.run(worker.services.files._contents.delete(worker.org_id, file.id))
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = until_ended(client, made)
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert [each.code for each in done.errors.data] == ["file_lost"]
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.content(file.id)
    assert (caught.value.status_code, caught.value.code) == (410, "content_lost")
