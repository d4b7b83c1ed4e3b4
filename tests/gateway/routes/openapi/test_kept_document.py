"""The document is written once and shown by files of ours; metrics say their format."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from litestar import Litestar

from gateway.app.create import create_app
from gateway.routes.shared import openapi
from gateway.routes.shared.conditional import accepts_gzip
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry


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


def browse(app: Litestar) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://x")


@pytest.mark.parametrize("name", ["openapi.json", "openapi.yaml"])
async def test_the_document_is_written_once_and_not_sent_again(
    app: Litestar, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written = 0
    write = openapi.write_json

    def count(app: Litestar) -> bytes:
        nonlocal written
        written += 1
        return write(app)

    path = f"/schema/{name}"
    monkeypatch.setattr(openapi, "write_json", count)
    if name == "openapi.json":
        monkeypatch.setitem(openapi.WRITERS, path, (count, openapi.WRITERS[path][1]))
    async with browse(app) as client:
        first, second = await asyncio.gather(client.get(path), client.get(path))
        assert written == 1
        assert first.content == second.content
        assert yaml.load(first.content, yaml.CSafeLoader)["paths"]
        assert first.headers["content-encoding"] == "gzip"
        assert int(first.headers["content-length"]) < 64 * 1024
        plain = await client.get(path, headers={"accept-encoding": "identity"})
        assert plain.content == first.content and "content-encoding" not in plain.headers
        assert plain.headers["etag"] != first.headers["etag"]
        assert plain.headers["vary"] == first.headers["vary"] == "accept-encoding"
        for tag in (first.headers["etag"], f"W/{plain.headers['etag']}", '"x", *', "*"):
            known = await client.get(path, headers={"if-none-match": tag})
            expected = 200 if tag.startswith('"x"') else 304
            assert (known.status_code, bool(known.content)) == (expected, expected == 200), tag
    assert written == 1


@pytest.mark.parametrize(
    ("accepted", "zips"),
    [
        ("", False),
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, br", False),
        ("gzip;q=1.0", True),
        ("xgzip", False),
    ],
)
def test_what_a_client_accepts_is_read(accepted: str, zips: bool) -> None:
    assert accepts_gzip(accepted) is zips


async def test_refusals_stand_in_the_document_once(app: Litestar) -> None:
    async with browse(app) as client:
        document = (await client.get("/schema/openapi.json")).json()
    used = {
        tag for each in document["paths"].values() for said in each.values() for tag in said["tags"]
    }
    assert used >= set(openapi.FIRST_TAGS), "no empty heading"
    refused = document["paths"]["/v1/admin/plans"]["post"]["responses"]["403"]
    assert refused == {"$ref": "#/components/responses/Problem403"}
    shared = document["components"]["responses"]["Problem403"]
    assert shared["description"] == "Forbidden" and "application/problem+json" in shared["content"]


async def test_the_reference_asks_this_gateway_alone(app: Litestar) -> None:
    async with browse(app) as client:
        page = await client.get("/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert not [each for each in named if "//" in each]
        for each in named:
            if not each.startswith("data:"):
                got = await client.get(f"/{each}")
                assert got.status_code == 200 and got.content, each
        assert (await client.get("/docs/assets/nothing.js")).status_code == 404
        beside = await client.get("/docs/")
        assert (beside.status_code, beside.headers["location"]) == (308, "../docs")


def test_the_files_of_the_reference_are_those_of_its_release() -> None:
    assert runpy.run_path("requirements/swagger_ui.py")["changed_files"]() == []


async def test_metrics_are_of_prometheus_text_format(app: Litestar) -> None:
    [answer] = await fetch(app, "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
