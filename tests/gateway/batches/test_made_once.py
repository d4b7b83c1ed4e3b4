"""`Idempotency-Key` on what makes a thing that stays: a retry is shown the first."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.gateway.batches.test_batches import CHAT, line
from tests.gateway.batches.test_message_batches import request
from tests.gateway.responses.test_responses import neighbour
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running

Send = Callable[..., httpx.Response]
CONTENT = {
    "/v1/batches": "input_file_id",
    "/v1/messages/batches": "requests",
    "/v1/files": "file",
    "/v1/conversations": "conversation",
}
"""By path, the field that would stay."""
SHAPES = tuple(CONTENT)


@pytest.fixture
def send(worker: Running, client: OpenAI) -> Send:
    """To a path: one of two bodies that it takes."""
    file = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    batch: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}

    def post(
        path: str, key: str, *, other: bool = False, secret: str = worker.everything
    ) -> httpx.Response:
        name = "b" if other else "a"
        taken: dict[str, dict[str, Any]] = {
            "/v1/batches": {"json": {**batch, "metadata": {"name": name}}},
            "/v1/messages/batches": {"json": {"requests": [request(name)]}},
            "/v1/files": {"data": {"purpose": "batch"}, "files": {"file": ("x", name.encode())}},
            "/v1/conversations": {"json": {"metadata": {"name": name}}},
        }
        headers = {"authorization": f"Bearer {secret}", "idempotency-key": key}
        return httpx.post(worker.url + path, headers=headers, timeout=TIMEOUT_S, **taken[path])

    return post


@pytest.mark.parametrize("path", SHAPES)
def test_a_retry_is_shown_what_the_first_made(path: str, send: Send) -> None:
    first, again = send(path, f"retried-{path}"), send(path, f"retried-{path}")
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content and first.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["etag"] == first.headers["etag"]
    assert "idempotent-replayed" not in first.headers
    other = send(path, f"retried-{path}", other=True)
    assert other.status_code == 400 and "'Idempotency-Key'" in other.text
    assert send(path, f"another-{path}").json()["id"] != first.json()["id"]
    spaced = send(path, "no key")
    assert spaced.status_code == 400 and "Idempotency-Key" in spaced.text


@pytest.mark.parametrize("path", SHAPES)
def test_of_many_at_once_one_makes_it(path: str, send: Send, worker: Running) -> None:
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: send(path, f"at-once-{path}"), range(6)))
    made = {each.json()["id"] for each in answers if each.status_code == 200}
    assert len(made) == 1
    assert {each.status_code for each in answers} <= {200, 409}
    new = [each for each in answers if each.status_code == 200]
    assert sum("idempotent-replayed" not in each.headers for each in new) == 1


def test_what_was_refused_lets_go_of_its_key(worker: Running, send: Send) -> None:
    asked = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}
    headers = {"authorization": f"Bearer {worker.everything}", "idempotency-key": "let-go"}
    refused = httpx.post(
        f"{worker.url}/v1/batches", content=json.dumps(asked), headers=headers, timeout=TIMEOUT_S
    )
    assert refused.status_code in (400, 404)
    made = send("/v1/batches", "let-go", other=True)
    assert made.status_code == 200 and "idempotent-replayed" not in made.headers


@pytest.mark.parametrize("path", SHAPES)
def test_nothing_stays_in_a_project_that_keeps_nothing(
    path: str, send: Send, worker: Running
) -> None:
    refused = send(path, "stays", secret=neighbour(worker, zero_retention=True))
    assert refused.status_code == 400, refused.text
    said = refused.json()["error"]["message"]
    assert f"'{CONTENT[path]}'" in said and "keeps nothing" in said
