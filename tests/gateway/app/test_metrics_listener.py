"""Metrics and health have a listener of their own where the settings name one."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from litestar import Litestar

from gateway.app.create import create_app
from gateway.net.listener import AddressError, bind, bind_metrics
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry

MAIN, OWN = "http://127.0.0.1:8000", "http://127.0.0.1:9464"


def make_app(folder: Path, config: str) -> Litestar:
    file = folder / "tollgate.toml"
    file.write_text(config)
    app = create_app(load({"home": folder, "config": file}, {}))
    telemetry = Telemetry(models=["penny"])
    app.state.services = SimpleNamespace(telemetry=telemetry, observe=lambda: None)
    return app


async def status_of(app: Litestar, url: str) -> int:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport) as client:
        return (await client.get(url)).status_code


@pytest.mark.parametrize(
    ("url", "status"),
    [
        (f"{OWN}/metrics", 200),
        (f"{OWN}/health/live", 200),
        (f"{OWN}/", 404),
        (f"{OWN}/docs", 404),
        (f"{OWN}/v1/models", 404),
        (f"{OWN}/metrics/", 404),
        (f"{MAIN}/metrics", 404),
        (f"{MAIN}/metrics/", 404),
        (f"{MAIN}/health/live", 200),
        (f"{MAIN}/docs", 200),
        (f"{MAIN}/llm/metrics", 404),
    ],
)
async def test_a_listener_for_metrics_serves_them_and_health_alone(
    tmp_path: Path, url: str, status: int
) -> None:
    app = make_app(tmp_path, 'root_path = "/llm"\n[metrics]\nport = 9464\n')
    assert await status_of(app, url) == status


async def test_without_one_metrics_are_where_everything_else_is(tmp_path: Path) -> None:
    app = make_app(tmp_path, "")
    assert await status_of(app, f"{MAIN}/metrics") == 200
    assert await status_of(app, f"{OWN}/docs") == 200


def test_it_has_a_port_of_its_own() -> None:
    with bind("127.0.0.1", 0) as listener, socket.socket() as taken:
        port = listener.getsockname()[1]
        with pytest.raises(AddressError, match=r"^metrics.host, metrics.port: .*everything else"):
            bind_metrics("127.0.0.1", port, listener)
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(AddressError, match=r"in use; metrics.port chooses another$"):
            bind_metrics("127.0.0.1", taken.getsockname()[1], listener)
        assert bind_metrics("127.0.0.1", None, listener) is None
