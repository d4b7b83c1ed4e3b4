"""An installation that ignores unknown fields answers without them and names them in a header, on
every surface; one that refuses them says which setting does."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import pytest
import requests

from tests.gateway.routes.openapi.running import TIMEOUT_S, Running

HEADER = "x-tollgate-ignored-fields"
ODD = [{"role": "user", "content": "hi", "odd": 1}]
PLAIN = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ODD, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/messages": {"messages": ODD, "max_tokens": 3},
    "/v1/responses": {"input": ODD, "max_output_tokens": 3, "store": False},
    "/tokenize": {"messages": ODD},
    "/v1/messages/count_tokens": {"messages": ODD},
    "/v1/responses/input_tokens": {"input": ODD},
}
COUNTING = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")


def ask(worker: Running, path: str, **fields: Any) -> requests.Response:
    return worker.session.post(
        worker.url + path,
        json={"model": "near", **BODIES[path], "more": {"a": 1}, **fields},
        headers={"authorization": f"Bearer {worker.everything}"},
        timeout=TIMEOUT_S,
    )


def ignoring(worker: Running) -> AbstractContextManager[None]:
    return worker.routing(ignores_unknown=True)


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_refused_or_left_out_and_named(worker: Running, path: str) -> None:
    refused = ask(worker, path)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert ("more" in message or "odd" in message) and "`unknown_fields`" in message
    with ignoring(worker):
        answer = ask(worker, path)
    assert answer.status_code == 200, answer.text
    if path not in COUNTING:
        named = set(answer.headers[HEADER].split(", "))
        assert named - {"messages[].odd", "input[].odd"} == {"more"}


def test_a_stream_names_them_too_and_what_is_known_is_still_refused(worker: Running) -> None:
    with ignoring(worker):
        streamed = ask(worker, "/v1/chat/completions", stream=True)
        assert set(streamed.headers[HEADER].split(", ")) == {"messages[].odd", "more"}
        wrong = ask(worker, "/v1/chat/completions", temperature=9)
        assert wrong.json()["error"]["param"] == "temperature"
        later = ask(worker, "/v1/chat/completions", audio={"voice": "a"})
        assert later.json()["error"]["param"] == "audio"


def test_an_upstream_is_sent_what_nobody_here_knows(worker: Running) -> None:
    told = worker.session.post(
        f"{worker.url}/v1/chat/completions",
        data=json.dumps({"messages": PLAIN, "more": 1, "model": "far"}),
        headers={"authorization": f"Bearer {worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert HEADER not in told.headers and worker.far.exchanges[-1].body["more"] == 1
