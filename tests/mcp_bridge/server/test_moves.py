"""Sessions, continuations and open calls between two workers, and when one of them dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.mcp_bridge.processes import (
    Eras,
    LegacyClient,
    Process,
    answered_on,
    ask_modern,
    asked_on,
    messages_of,
    modern,
    running,
)

pytestmark = pytest.mark.slow

ACCEPTED = {"action": "accept", "content": {"name": "Ann", "ok": True}}
WHO = {"name": "test_input_required_result_request_state", "arguments": {}}


def counted(key: str, **more: Any) -> dict[str, Any]:
    """Return a call of a tool that counts how often it is called with a key; with `wait`, and
    asks."""
    return {"name": "test_count_calls", "arguments": {"key": key, **more}}


async def times_called(http: httpx.AsyncClient, eras: Eras, key: str) -> str:
    found = await ask_modern(http, eras.second.url, "tools/call", counted(key, peek=True))
    said: str = found["result"]["content"][0]["text"]
    return said


def answers_to(result: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return what a client sends when it comes back."""
    answers = dict.fromkeys(result["inputRequests"], ACCEPTED)
    return {"inputResponses": answers, "requestState": result["requestState"], **more}


@asynccontextmanager
async def third_worker(eras: Eras) -> AsyncIterator[Process]:
    """To be killed."""
    command = ("plain_bridge", "--redis", eras.redis_url, "--server", eras.server.url)
    with running(command) as (worker,):
        yield worker


async def test_a_session_goes_on_at_another_worker(http: httpx.AsyncClient, eras: Eras) -> None:
    client = await LegacyClient.open(http, eras.first.url)
    assert "tools" in (await client.ask(eras.first.url, "tools/list"))["result"]
    assert "tools" in (await client.ask(eras.second.url, "tools/list"))["result"]
    ended = await http.request("DELETE", eras.second.url, headers=client.headers)
    assert ended.status_code == 200
    gone = await client.send(eras.first.url, {"jsonrpc": "2.0", "id": 2, "method": "ping"})
    assert gone.status_code == 404


async def test_a_session_is_nobody_elses(http: httpx.AsyncClient, eras: Eras) -> None:
    client = await LegacyClient.open(http, eras.first.url)
    stolen = LegacyClient(http, client.id, "mallory", "2025-11-25")
    refused = await stolen.send(eras.first.url, {"jsonrpc": "2.0", "id": 1, "method": "ping"})
    assert refused.status_code == 404
    ended = await http.request("DELETE", eras.first.url, headers=stolen.headers)
    assert ended.status_code == 404
    assert (await client.ask(eras.first.url, "ping"))["result"] == {}


async def test_an_answer_finds_its_call_at_another_worker(
    http: httpx.AsyncClient, eras: Eras
) -> None:
    client = await LegacyClient.open(http, eras.first.url)
    async with client.stream(eras.first.url, "tools/call", WHO) as events:
        _, asked = await asked_on(events)
        assert asked["method"] == "elicitation/create"
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": ACCEPTED}
        mallory = await LegacyClient.open(http, eras.second.url, caller="mallory")
        await mallory.send(eras.second.url, {**answer, "result": {"action": "decline"}})
        other = await LegacyClient.open(http, eras.first.url)
        assert (await other.send(eras.first.url, answer)).status_code == 400
        assert (await client.send(eras.second.url, answer)).status_code == 202
        found = await answered_on(events)
    assert '"ok": true' in found["result"]["content"][0]["text"]


async def test_a_lost_stream_is_read_on_at_another_worker(
    http: httpx.AsyncClient, eras: Eras
) -> None:
    """Also what the server asked meanwhile; nothing that was read before comes again."""
    client = await LegacyClient.open(http, eras.first.url)
    async with client.stream(eras.first.url, "tools/call", counted("lost", wait=True)) as events:
        last, _ = await asked_on(events)
    async with client.listen(eras.second.url, last) as events:
        _, asked = await asked_on(events)
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": ACCEPTED}
        await client.send(eras.second.url, answer)
        found = await answered_on(events)
    assert found["result"]["content"][0]["text"] == "1"


async def test_a_call_is_cancelled_from_another_worker(http: httpx.AsyncClient, eras: Eras) -> None:
    client = await LegacyClient.open(http, eras.first.url)
    async with client.stream(eras.first.url, "tools/call", counted("no", wait=True)) as events:
        await asked_on(events)
        params = {"requestId": 1, "reason": "enough"}
        said = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        await client.send(eras.second.url, said)
        found = await answered_on(events)
    assert found["error"]["code"] == -32800


@pytest.mark.parametrize("era", ["2025-11-25", "2026-07-28"])
async def test_a_call_whose_worker_dies_fails_by_name_and_is_not_sent_again(
    http: httpx.AsyncClient, all_eras: dict[str, Eras], era: str
) -> None:
    eras, key = all_eras[era], f"dies-{era}"
    async with third_worker(eras) as worker:
        client = await LegacyClient.open(http, worker.url)
        last = ""
        with pytest.raises(httpx.HTTPError):
            async with client.stream(worker.url, "tools/call", counted(key, wait=True)) as events:
                last, asked = await asked_on(events)
                worker.kill()
                await answered_on(events)
    answer = {"jsonrpc": "2.0", "id": asked["id"], "result": ACCEPTED}
    assert (await client.send(eras.first.url, answer)).status_code == 400
    async with client.listen(eras.first.url, last) as events:
        found = await answered_on(events)
    assert found["error"]["data"] == {"reason": "owner_gone"}
    assert await times_called(http, eras, key) == "1"
    assert "tools" in (await client.ask(eras.first.url, "tools/list"))["result"], (
        "the session lives"
    )


async def test_a_continuation_goes_on_at_another_worker(
    http: httpx.AsyncClient, eras: Eras
) -> None:
    first = await ask_modern(http, eras.first.url, "tools/call", WHO)
    assert first["result"]["resultType"] == "input_required"
    params = {**WHO, **answers_to(first["result"])}
    second = await ask_modern(http, eras.second.url, "tools/call", params, id=2)
    assert second["id"] == 2 and '"ok": true' in second["result"]["content"][0]["text"]


async def test_a_call_that_waits_dies_with_its_worker(http: httpx.AsyncClient, old: Eras) -> None:
    """At a server of the older era it is open; the newer era's is the client's to bring back."""
    call = counted("waits", wait=True)
    async with third_worker(old) as worker:
        first = await ask_modern(http, worker.url, "tools/call", call)
        worker.kill()
    params = {**call, **answers_to(first["result"])}
    second = await ask_modern(http, old.first.url, "tools/call", params)
    assert second["error"]["data"] == {"reason": "owner_gone"}
    assert await times_called(http, old, "waits") == "1"


async def test_a_continuation_outlives_its_worker(http: httpx.AsyncClient, new: Eras) -> None:
    async with third_worker(new) as worker:
        first = await ask_modern(http, worker.url, "tools/call", WHO)
        worker.kill()
    params = {**WHO, **answers_to(first["result"])}
    second = await ask_modern(http, new.first.url, "tools/call", params)
    assert "state-ok" in second["result"]["content"][0]["text"]


async def test_a_continuation_is_good_once_for_whom_and_what_it_was(
    http: httpx.AsyncClient, eras: Eras
) -> None:
    first = await ask_modern(http, eras.first.url, "tools/call", WHO)
    good = {**WHO, **answers_to(first["result"])}
    state = good["requestState"]
    for params, caller in (
        (good, "mallory"),
        ({**good, "arguments": {"other": 1}}, "alice"),
        ({**good, "name": "test_input_required_result_elicitation"}, "alice"),
        ({**good, "requestState": state[:-1] + ("A" if state[-1] != "A" else "B")}, "alice"),
        ({**good, "requestState": "v1."}, "alice"),
    ):
        refused = await ask_modern(http, eras.first.url, "tools/call", params, caller=caller)
        assert refused["error"]["code"] == -32602, params
        assert refused["error"]["data"] == {"reason": "invalid_request_state"}
    assert "result" in await ask_modern(http, eras.first.url, "tools/call", good)


async def test_a_call_that_waits_takes_one_answer(http: httpx.AsyncClient, old: Eras) -> None:
    call = counted("once", wait=True)
    first = await ask_modern(http, old.first.url, "tools/call", call)
    params = {**call, **answers_to(first["result"])}
    both = await asyncio.gather(
        ask_modern(http, old.first.url, "tools/call", params),
        ask_modern(http, old.second.url, "tools/call", params),
    )
    assert sorted("result" in each for each in both) == [False, True]
    assert await times_called(http, old, "once") == "1"


async def test_what_is_not_answered_is_asked_again(http: httpx.AsyncClient, old: Eras) -> None:
    call = counted("again", wait=True)
    first = await ask_modern(http, old.first.url, "tools/call", call)
    wrong = {**answers_to(first["result"]), "inputResponses": {"other": ACCEPTED}}
    second = await ask_modern(http, old.second.url, "tools/call", {**call, **wrong})
    assert second["result"]["inputRequests"] == first["result"]["inputRequests"]
    assert second["result"]["requestState"] != first["result"]["requestState"]
    params = {**call, **answers_to(second["result"])}
    third = await ask_modern(http, old.first.url, "tools/call", params)
    assert third["result"]["content"][0]["text"] == "1"


async def test_who_leaves_cancels_the_call_of_the_newer_era(
    http: httpx.AsyncClient, eras: Eras
) -> None:
    """So that a subscription ends, and the worker has room for as many again."""
    for _ in range(3):
        filter_ = {"notifications": {"toolsListChanged": True}}
        message, headers = modern("subscriptions/listen", filter_)
        async with http.stream("POST", eras.first.url, json=message, headers=headers) as answer:
            first = await anext(answer.aiter_bytes())
        assert b"notifications/subscriptions/acknowledged" in first


async def test_a_body_is_one_message(http: httpx.AsyncClient, eras: Eras) -> None:
    headers = {"accept": "*/*", "content-type": "application/json"}
    for body, status, code in (
        (b"{", 400, -32700),
        (b"[]", 400, -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', 400, -32600),
        (b" " * (4 * 1024 * 1024 + 1), 413, -32600),
    ):
        answer = await http.post(eras.first.url, content=body, headers=headers)
        assert answer.status_code == status, body[:40]
        error = messages_of(answer)[0]["error"]
        assert error["code"] == code
        assert ("more than 4194304 bytes" in error["message"]) == (status == 413)
    for more, status in (({"accept": "text/html"}, 406), ({"content-type": "text/plain"}, 415)):
        given = {**headers, **more}
        assert (await http.post(eras.first.url, content=b"{}", headers=given)).status_code == status
    for name, value in (("host", "evil.example.com"), ("origin", "http://evil.example.com")):
        refused = await http.post(eras.first.url, json={}, headers={**headers, name: value})
        assert refused.status_code == 403
