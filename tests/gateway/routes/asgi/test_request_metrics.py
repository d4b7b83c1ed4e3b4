"""Every answer is in the request counter, also where no handler gave it, under bounded labels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from litestar import Litestar

from foundation.logs import JsonFormatter
from gateway.app.create import create_app
from gateway.fleet.router import Fleet
from gateway.lanes import LaneDeadlines
from gateway.principal import Principal
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry

CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
BEARER = {"authorization": "Bearer sk-tg-x"}


class Everybody:
    """Lets in whoever shows anything."""

    async def authenticate(self, bearer: str) -> Principal:
        return Principal(
            org_id="org_1",
            project_id="proj_1",
            key_id="key_1",
            key_hint="",
            scopes=frozenset({"inference"}),
        )


@pytest.fixture
def app(tmp_path: Path) -> Litestar:
    (tmp_path / "tollgate.toml").write_text("max_body_bytes = 1024\n")
    made = create_app(load({"home": tmp_path, "config": tmp_path / "tollgate.toml"}, {}))
    made.state.services = SimpleNamespace(
        telemetry=Telemetry(models=["penny"]),
        authenticator=Everybody(),
        generation=SimpleNamespace(fleet=Fleet([]), deadlines=LaneDeadlines()),
    )
    return made


@pytest.mark.parametrize(
    ("method", "path", "options", "labels"),
    [
        ("GET", "/health/live", {}, ("/health/live", "-", "200")),
        ("GET", "/nowhere/at/all", {}, ("-", "-", "404")),
        ("DELETE", CHAT, {"headers": BEARER}, ("-", "-", "405")),
        ("POST", CHAT, {"json": {}}, (CHAT, "-", "401")),
        (
            "GET",
            "/v1/organization/costs",
            {"headers": BEARER},
            ("/v1/organization/costs", "-", "403"),
        ),
        ("POST", CHAT, {"headers": BEARER, "content": b"{"}, (CHAT, "-", "400")),
        ("POST", CHAT, {"headers": BEARER, "content": b"x" * 2000}, (CHAT, "-", "413")),
        ("POST", CHAT, {"headers": BEARER, "json": {"model": "penny"}}, (CHAT, "penny", "404")),
        ("POST", CHAT, {"headers": BEARER, "json": {"model": "a guess"}}, (CHAT, "-", "404")),
    ],
)
async def test_what_is_refused_is_counted_too(
    app: Litestar, method: str, path: str, options: dict[str, Any], labels: tuple[str, str, str]
) -> None:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.request(method, path, **options)
    assert str(answer.status_code) == labels[2]
    registry = app.state.services.telemetry.registry
    [counted] = [
        (tuple(sample.labels[name] for name in ("route", "model", "status")), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "tollgate_requests_total"
    ]
    assert counted == (labels, 1)


async def test_a_traceback_is_found_by_the_id_of_its_answer(
    app: Litestar, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_down(bearer: str) -> Principal:
        raise RuntimeError("provoked")

    app.state.services.authenticator = SimpleNamespace(authenticate=break_down)
    caplog.handler.setFormatter(JsonFormatter("worker-0"))
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post(CHAT, headers=BEARER | {"traceparent": TRACEPARENT}, json={})
    assert answer.status_code == 500
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    named = [each for each in lines if each.get("request") == answer.headers["x-request-id"]]
    [found] = [each for each in named if "exception" in each]
    assert found["exception"].endswith("RuntimeError: provoked")
    assert found["trace"] == TRACE
    assert BEARER["authorization"] not in caplog.text
