"""Batches of conversations that hypothesis makes up: each line ends once, answered or refused, and
what was answered is billed once, on OpenAI's surfaces and on Anthropic's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.gateway.fuzz.asking import EXAMPLES
from tests.gateway.fuzz.conversations import SURFACES, bodies, to_raw
from tests.gateway.fuzz.speaking import counted
from tests.gateway.fuzz.world import World
from tests.gateway.routes.openapi.running import TIMEOUT_S

NUM_LINES, FEW = 24, 4
"""Lines in a batch, and batches for each surface."""
ENDED = ("completed", "failed")
MESSAGES_BATCHES = "/v1/messages/batches"


class Client:
    def __init__(self, world: World) -> None:
        self.world, self.url = world, world.worker.url
        self.headers = {"authorization": f"Bearer {world.worker.everything}"}

    def ask(self, method: str, path: str, **options: Any) -> requests.Response:
        answer = self.world.worker.session.request(
            method, self.url + path, headers=self.headers, timeout=TIMEOUT_S, **options
        )
        assert answer.ok, answer.text
        return answer

    def until(self, path: str, field: str, ends: Sequence[str]) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while (found := self.ask("GET", path).json())[field] not in ends:
            assert time.monotonic() < deadline, f"it hangs: {found}"
            time.sleep(0.05)
        return found

    def lines(self, path: str) -> list[Any]:
        return [json.loads(each) for each in self.ask("GET", path).content.splitlines()]

    def of_file(self, file_id: str | None) -> list[Any]:
        return [] if file_id is None else self.lines(f"/v1/files/{file_id}/content")


@pytest.fixture
def client(world: World) -> Client:
    return Client(world)


def drawn(surface: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Draw the lines of one batch, each of which can be checked by itself."""
    body = bodies(SURFACES[surface]).map(lambda body: {**body, "model": "near"})
    return st.lists(body, min_size=NUM_LINES, max_size=NUM_LINES)


def readable(asked: Sequence[dict[str, Any]]) -> list[bytes]:
    """But for what is no JSON to anybody, which refuses the whole batch."""
    return [raw for raw in map(to_raw, asked) if is_json(raw)]


def is_json(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def run_all(world: World, surface: str, run: Callable[[list[dict[str, Any]]], list[bool]]) -> None:
    """`run` says of each line of a batch whether it was answered."""
    seen: list[bool] = []

    @settings(
        max_examples=EXAMPLES // NUM_LINES or FEW,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn(surface))
    def run_one(asked: list[dict[str, Any]]) -> None:
        seen.extend(run(asked))

    run_one()
    world.check_books()
    assert sum(seen) >= NUM_LINES and not all(seen), "of both kinds, or little was tried"


@pytest.mark.slow
@pytest.mark.parametrize("surface", ["chat", "completions", "embeddings", "responses"])
def test_each_line_ends_once(world: World, client: Client, surface: str) -> None:
    path = SURFACES[surface].path

    def run(asked: list[dict[str, Any]]) -> list[bool]:
        line = b'{"custom_id":"%d","method":"POST","url":"%b","body":%b}'
        raw = list(enumerate(readable(asked)))
        written = [line % (number, path.encode(), each) for number, each in raw]
        made = client.ask(
            "POST",
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", b"\n".join(written))},
        ).json()
        wanted = {"input_file_id": made["id"], "endpoint": path, "completion_window": "24h"}
        batch = client.ask("POST", "/v1/batches", json=wanted).json()
        batch = client.until(f"/v1/batches/{batch['id']}", "status", ENDED)
        assert batch["status"] == "completed", batch["errors"]
        good, bad = client.of_file(batch["output_file_id"]), client.of_file(batch["error_file_id"])
        assert sorted(int(each["custom_id"]) for each in good + bad) == list(range(len(raw)))
        assert all(each["response"]["status_code"] == 200 for each in good)
        assert all(400 <= each["response"]["status_code"] < 500 for each in bad)
        for each in good:
            answer = each["response"]
            world.asker.told[answer["request_id"]] = counted(answer["body"]["usage"])
        world.asker.refused |= {each["response"]["request_id"] for each in bad}
        return [True] * len(good) + [False] * len(bad)

    run_all(world, surface, run)


def test_each_request_for_a_message_ends_once(world: World, client: Client) -> None:
    def run(asked: list[dict[str, Any]]) -> list[bool]:
        wanted = [
            b'{"custom_id":"%d","params":%b}' % (number, raw)
            for number, raw in enumerate(readable(asked))
        ]
        content = b'{"requests":[%b]}' % b",".join(wanted)
        batch = client.ask("POST", MESSAGES_BATCHES, data=content).json()
        path = f"{MESSAGES_BATCHES}/{batch['id']}"
        client.until(path, "processing_status", ("ended",))
        found = client.lines(f"{path}/results")
        assert sorted(int(each["custom_id"]) for each in found) == list(range(len(wanted)))
        results = [each["result"] for each in found]
        for each in results:
            if each["type"] == "succeeded":
                request_id = each["message"]["id"].replace("msg_", "req_")
                world.asker.told[request_id] = counted(each["message"]["usage"])
            else:
                assert each["error"]["error"]["type"] == "invalid_request_error"
                world.asker.refused.add(each["error"]["request_id"])
        return [each["type"] == "succeeded" for each in results]

    run_all(world, "messages", run)
