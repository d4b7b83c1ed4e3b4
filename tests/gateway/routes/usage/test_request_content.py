"""A project that stores contents has the texts of each request on every API that writes any, as
they were sent and answered; any other project has none. On a running worker, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from gateway.request_log import content
from tests.databases import Databases
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, chunk, completion, usage_chunk
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running

STORED_WITHIN_S = 60.0
HOSTILE = "<script>alert('p')</script>"
CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "x"}'},
}


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("content")
    with fresh_worker(databases, redis_server_url, folder) as found:
        yield found


def new_key(worker: Running, *scopes: str, **project: Any) -> str:
    """Return a key of another project of the same organization."""
    body = {"name": f"project {next(worker._numbers)}", **project}
    mine, worker.project_id = worker.project_id, worker.made("/v1/admin/projects", **body)
    try:
        return worker.run(worker.new_key([*scopes]))
    finally:
        worker.project_id = mine


@pytest.fixture(scope="module")
def key(worker: Running) -> str:
    return new_key(worker, "inference", store_content=True)


def ask(worker: Running, key: str, path: str, body: dict[str, Any]) -> requests.Response:
    headers = {"authorization": f"Bearer {key}"}
    answer = worker.session.post(worker.url + path, json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer


def get(worker: Running, request_id: str, key: str = "") -> requests.Response:
    headers = {"authorization": f"Bearer {key or worker.everything}"}
    url = f"{worker.url}/v1/requests/{request_id}/content"
    return worker.session.get(url, headers=headers, timeout=TIMEOUT_S)


def row_of(worker: Running, table: str, request_id: str) -> Any:
    async def find() -> Any:
        async with worker.services.system_db.connect() as conn:
            query = sa.text(f"SELECT * FROM {table} WHERE id = CAST(:id AS uuid)")
            named = {"id": request_id.removeprefix("req_")}
            return (await conn.execute(query, named)).mappings().one_or_none()

    return worker.run(find())


def stored(worker: Running, answer: requests.Response) -> dict[str, Any]:
    request_id, deadline = answer.headers["x-request-id"], time.monotonic() + STORED_WITHIN_S
    while time.monotonic() < deadline:
        if (found := get(worker, request_id)).status_code == 200:
            view: dict[str, Any] = found.json()
            assert view["id"] == request_id
            return dict(view["content"]) | {"is_cut": view["is_cut"]}
        assert found.status_code == 404, found.text
        time.sleep(0.05)
    raise AssertionError("not stored in time")


def events_of(answer: requests.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


SAID = [{"index": 0, "role": "user", "text": HOSTILE}]
CHAT = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 6, "seed": 3}


@pytest.mark.parametrize("model", ["near", "far"])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(worker: Running, key: str, model: str, stream: bool) -> None:
    answer = ask(worker, key, "/v1/chat/completions", {**CHAT, "model": model, "stream": stream})
    found = stored(worker, answer)
    if stream:
        choices = [event["choices"][0] for event in events_of(answer) if event["choices"]]
        text = "".join(each["delta"].get("content") or "" for each in choices)
    else:
        text = answer.json()["choices"][0]["message"]["content"]
    assert found["messages"] == SAID and text
    assert [each["text"] for each in found["choices"]] == [text]
    assert found["is_cut"] is False


def test_completions(worker: Running, key: str) -> None:
    body = {"model": "near", "prompt": ["one", "two"], "max_tokens": 4}
    answer = ask(worker, key, "/v1/completions", body)
    found = stored(worker, answer)
    assert found["prompts"] == ["one", "two"]
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert [each["text"] for each in found["choices"]] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_messages(worker: Running, key: str, stream: bool) -> None:
    body = {"model": "near", "system": "be brief", **CHAT, "stream": stream}
    answer = ask(worker, key, "/v1/messages", {k: v for k, v in body.items() if k != "seed"})
    found = stored(worker, answer)
    if stream:
        deltas = [e["delta"] for e in events_of(answer) if e["type"] == "content_block_delta"]
        text = "".join(each["text"] for each in deltas)
    else:
        text = answer.json()["content"][0]["text"]
    assert [each["text"] for each in found["messages"]] == ["be brief", HOSTILE]
    assert found["choices"][0]["text"] == text


def test_a_response_in_the_background_is_stored_once_it_has_ended(
    worker: Running, key: str
) -> None:
    body = {"model": "near", "input": HOSTILE, "max_output_tokens": 6, "background": True}
    found = stored(worker, ask(worker, key, "/v1/responses", body))
    assert [each["text"] for each in found["messages"]] == [HOSTILE]
    [choice] = found["choices"]
    assert choice["text"] and choice["finish_reason"] == "length"


def test_responses(worker: Running, key: str) -> None:
    body = {"model": "near", "instructions": "be brief", "input": HOSTILE, "max_output_tokens": 6}
    answer = ask(worker, key, "/v1/responses", body)
    found = stored(worker, answer)
    [item] = answer.json()["output"]
    assert [each["text"] for each in found["messages"]] == ["be brief", HOSTILE]
    assert found["choices"][0]["text"] == item["content"][0]["text"]


def test_calls_of_tools_and_their_results(worker: Running, key: str) -> None:
    async def calls(exchange: Exchange) -> None:
        delta = {"index": 0, "delta": {"tool_calls": [CALL]}, "finish_reason": None}
        await exchange.begin_stream()
        await exchange.send({**chunk(), "choices": [delta]}, chunk(finish="tool_calls"))
        await exchange.send(usage_chunk(), "[DONE]")
        await exchange.end_stream()

    before, worker.far.script = worker.far.script, calls
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    said = {k: v for k, v in CALL.items() if k != "index"}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "content": "seen", "tool_call_id": "call_1"},
    ]
    try:
        body = {"model": "far", "messages": messages, "tools": [tool], "stream": True}
        found = stored(worker, ask(worker, key, "/v1/chat/completions", body))
    finally:
        worker.far.script = before
    assert found["tools"] == [tool]
    made = {"name": "look", "arguments": '{"at": "x"}'}
    assert found["messages"][1]["calls"] == [made | {"id": "call_1"}]
    assert found["messages"][2] == {"index": 2, "role": "tool", "text": "seen", "call_id": "call_1"}
    assert found["choices"][0]["calls"] == [made]
    assert found["choices"][0]["finish_reason"] == "tool_calls"


def test_what_is_beyond_the_bound_is_left_out_and_marked(
    worker: Running, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MAX_INPUT_BYTES", 200)
    monkeypatch.setattr(content, "MAX_OUTPUT_BYTES", 4)

    async def says(exchange: Exchange) -> None:
        await exchange.answer(completion())

    before, worker.far.script = worker.far.script, says
    try:
        messages = [{"role": "user", "content": "x" * 1000}]
        body = {"model": "far", "messages": messages}
        found = stored(worker, ask(worker, key, "/v1/chat/completions", body))
    finally:
        worker.far.script = before
    [message], [choice] = found["messages"], found["choices"]
    assert (len(message["text"]), message["left_out"]) == (136, 864)
    assert (choice["text"], choice["left_out"]) == ("Hell", len("o there"))
    assert found["is_cut"] is True


def test_a_project_stores_none_unless_it_says_so(worker: Running) -> None:
    plain, nothing = new_key(worker, "inference"), new_key(worker, "inference", zero_retention=True)
    for each in (plain, nothing):
        answer = ask(worker, each, "/v1/chat/completions", {**CHAT, "model": "near"})
        request_id, deadline = answer.headers["x-request-id"], time.monotonic() + STORED_WITHIN_S
        while row_of(worker, "request_log", request_id) is None:
            assert time.monotonic() < deadline, "not noted in time"
            time.sleep(0.05)
        worker.run(worker.services.content_log.flush())
        assert row_of(worker, "request_content", request_id) is None
        assert get(worker, request_id).status_code == 404


def test_texts_are_for_who_may_read_them(worker: Running, key: str) -> None:
    answer = ask(worker, key, "/v1/chat/completions", {**CHAT, "model": "near"})
    stored(worker, answer)
    request_id = answer.headers["x-request-id"]
    reader = worker.run(worker.new_key(["usage:read", "admin:read"]))
    refused = get(worker, request_id, reader)
    assert refused.status_code == 403 and "admin:content" in refused.text
    assert HOSTILE not in refused.text
    assert get(worker, request_id, key).status_code == 403, "not even who asked"
    reads = worker.run(worker.new_key(["usage:read", "admin:content"]))
    before = num_readings(worker, request_id)
    assert get(worker, request_id, reads).status_code == 200
    assert num_readings(worker, request_id) == before + 1, "each reading is audited"
    assert get(worker, "req_" + "0" * 32).status_code == get(worker, "x").status_code == 404


def num_readings(worker: Running, request_id: str) -> int:
    """Count the readings of a request's texts that the audit log has, which tells no text."""
    found = worker.session.get(
        f"{worker.url}/v1/organization/audit_logs",
        params={"limit": 100, "event_types[]": "request.content.read"},
        headers={"authorization": f"Bearer {worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert found.status_code == 200 and HOSTILE not in found.text
    return sum(request_id in json.dumps(entry) for entry in found.json()["data"])


def test_the_setting_is_a_projects_is_audited_and_excludes_zero_retention(worker: Running) -> None:
    path = f"/v1/admin/projects/{worker.made('/v1/admin/projects', name='settable')}"
    headers = {"authorization": f"Bearer {worker.everything}"}
    seen = worker.session.get(worker.url + path, headers=headers, timeout=TIMEOUT_S)
    assert seen.json()["store_content"] is False

    def patch(if_match: str, **body: Any) -> requests.Response:
        more = {**headers, "if-match": if_match}
        return worker.session.patch(worker.url + path, json=body, headers=more, timeout=TIMEOUT_S)

    etag = seen.headers["etag"]
    done = patch(etag, store_content=True)
    assert done.status_code == 200 and done.json()["store_content"] is True
    assert patch(etag, store_content=False).status_code == 412
    refused = patch(done.headers["etag"], zero_retention=True)
    assert refused.status_code == 400 and "store_content" in refused.text
    logged = worker.session.get(
        f"{worker.url}/v1/organization/audit_logs?limit=1", headers=headers, timeout=TIMEOUT_S
    ).json()["data"][0]
    assert logged["type"] == "project.updated" and "store_content" in json.dumps(logged)
