"""The document is written once, and Prometheus is told the format of what it reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from litestar import Litestar
from litestar.openapi.plugins import OpenAPIRenderPlugin

from gateway.app.create import create_app
from gateway.settings.load import load
from gateway.telemetry import Telemetry


@pytest.fixture
def app(tmp_path: Path) -> Litestar:
    made = create_app(load({"home": tmp_path}, {}))
    telemetry = Telemetry(models=["penny"])
    made.state.services = SimpleNamespace(telemetry=telemetry, observe=lambda: None)
    return made


async def fetch(app: Litestar, *paths: str) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return [(await client.get(path)).raise_for_status() for path in paths]


async def test_the_document_is_encoded_once(app: Litestar, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = 0
    encode = OpenAPIRenderPlugin.render_json

    def count(*arguments: Any) -> bytes:
        nonlocal encoded
        encoded += 1
        return encode(*arguments)

    monkeypatch.setattr(OpenAPIRenderPlugin, "render_json", staticmethod(count))
    first, second = await fetch(app, "/schema/openapi.json", "/schema/openapi.json")
    assert encoded == 1
    assert first.content == second.content
    assert first.json()["paths"]


async def test_metrics_are_of_prometheus_text_format(app: Litestar) -> None:
    [answer] = await fetch(app, "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
