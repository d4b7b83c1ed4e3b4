"""Checks that a client whose base URL lacks `/v1`, or has too much, is told so in the shape of the
surface that it means."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import pytest
from litestar import Litestar

from gateway.app.create import create_app
from gateway.routes.shared.problem import path_finder
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Litestar:
    made = create_app(load({"home": tmp_path_factory.mktemp("home")}, {}))
    made.state.services = SimpleNamespace(telemetry=Telemetry(models=[]))
    return made


@pytest.fixture
async def http(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as found:
        yield found


@pytest.mark.parametrize(
    ("method", "path", "near"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/responses", "/v1/responses"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/v1/embeddings", "/v1/embeddings"),
        ("POST", "/openai/v1/chat/completions/", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/models/org/name", "/v1/models/org/name"),
        ("GET", "/files/file-1/content", "/v1/files/file-1/content"),
    ],
)
async def test_openais_paths(http: httpx.AsyncClient, method: str, path: str, near: str) -> None:
    answer = await http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_url" and error["type"] == "invalid_request_error"
    assert error["message"] == (
        f"Unknown request URL. The paths of the API begin with '/v1', once: did you mean '{near}'?"
    )


@pytest.mark.parametrize("path", ["/messages", "/v1/v1/messages", "/messages/count_tokens"])
async def test_anthropics_paths(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={}, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 404
    body = answer.json()
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert "did you mean '/v1/messages" in body["error"]["message"]


async def test_models_as_anthropics_clients_ask_for_them(http: httpx.AsyncClient) -> None:
    answer = await http.get("/models", headers={"anthropic-version": "2023-06-01"})
    assert answer.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/skills", "/v1/complete", "/v1/files/a/b/c"])
async def test_who_names_anthropics_version_is_answered_in_its_shape(
    http: httpx.AsyncClient, path: str
) -> None:
    named = await http.post(path, json={}, headers={"anthropic-version": "2023-06-01"})
    assert named.status_code == 404 and named.json()["error"]["type"] == "not_found_error"
    assert "code" in (await http.post(path, json={})).json()["error"]
    ours = await http.get("/v1/admin/nothing", headers={"anthropic-version": "2023-06-01"})
    assert ours.headers["content-type"] == "application/problem+json"


async def test_ours_speak_problems_that_repeat_nothing(http: httpx.AsyncClient) -> None:
    answer = await http.get("/admin/keys")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "Unknown request URL."


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/v1", "/v2/models", "/" + "x/" * 600])
async def test_what_is_near_nothing_is_unknown(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "Unknown request URL."


def test_only_paths_below_the_prefix_are_suggested() -> None:
    find = path_finder(["/v1/a.b", "/v1/{name:str}/c", "/mcp/x", "/v1/d/{rest:path}"])
    assert find("/a.b") == "/v1/a.b" and find("/axb") is None
    assert find("/n/c") == "/v1/n/c" and find("/n/m/c") is None
    assert find("/d/e/f") == "/v1/d/e/f" and find("/x/mcp/x") is None
