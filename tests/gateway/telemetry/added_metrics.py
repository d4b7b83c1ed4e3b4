"""Prints what /metrics says of one worker, then of two, in a copy of the product to which
`test_adding_a_metric` has added metrics. A process of its own, started in that copy:

    PROMETHEUS_MULTIPROC_DIR=SHARED python -m tests.gateway.telemetry.added_metrics FOLDER SHARED
"""

from __future__ import annotations

import asyncio
import sys
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import httpx

import gateway
from billing.spool.spool import SpoolCounts
from engine.fake.engine import FAKE_CONFIG, FakeCore
from gateway.app.create import create_app
from gateway.fleet.waiting_room import WaitingRoom
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry
from tests.gateway.whole_app import services_with


async def scrape(folder: Path, shared: Path) -> None:
    app = create_app(load({"home": folder}, {}))
    app.state.services = services_with(
        telemetry=Telemetry(models=["m"], shared_folder=shared),
        readiness=SimpleNamespace(
            observe=lambda: None, components=list, free_bytes=None, num_quarantined=0
        ),
        generation=SimpleNamespace(open_calls={}, fleet=SimpleNamespace(routes=())),
        spool=SimpleNamespace(
            backlog=0, unsynced_s=0.0, counts=SpoolCounts(0, 0, 0), lag_s=lambda now: 0.0
        ),
        shipper=SimpleNamespace(alarms=SimpleNamespace(conflicts=0, refused=0)),
        engines={
            "m": {"m": SimpleNamespace(connected=True, status=FakeCore(FAKE_CONFIG).status())}
        },
        rooms={"m": [WaitingRoom(1), WaitingRoom(1)]},
    )
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        print((await client.get("/metrics")).raise_for_status().text)


def main(folder: Path, shared: Path) -> None:
    assert Path(gateway.__file__).is_relative_to(folder), "the copy is tried, not the product"
    first = get_context("fork").Process(target=lambda: asyncio.run(scrape(folder, shared)))
    first.start()
    first.join()
    asyncio.run(scrape(folder, shared))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
