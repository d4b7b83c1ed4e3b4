"""The load generator against the stub: every answer is read to its end, each event counted once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from bench.tools.load import Target, closed_loop, open_loop, percentiles_ms
from bench.tools.stub_upstream import NUM_CHUNKS, StubProtocol

EVENTS = NUM_CHUNKS + 4
"""The role, the reason to finish, usage and [DONE] beside the content."""


@pytest_asyncio.fixture(params=[None, 0.0, 0.0005], ids=["at once", "each alone", "paced"])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(StubProtocol, request.param), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    server.close()


@pytest.mark.parametrize(("stream", "events"), [(False, 0), (True, EVENTS)])
async def test_both_loops(url: str, stream: bool, events: int) -> None:
    target = Target(url=url, model="m", api_key="k", stream=stream)
    closed = await closed_loop(target, connections=3, duration_s=0.2)
    opened = await open_loop(target, rate_per_s=50, duration_s=0.2)
    assert len(opened.latencies_s) == 10
    for tally in (closed, opened):
        assert tally.num_errors == 0
        assert tally.num_events == events * len(tally.latencies_s) and tally.latencies_s
        assert all(
            first <= whole
            for first, whole in zip(tally.first_bytes_s, tally.latencies_s, strict=True)
        )


async def test_errors_are_counted() -> None:
    nowhere = Target(url="http://127.0.0.1:9/v1", model="m", api_key=None, stream=False)
    tally = await open_loop(nowhere, rate_per_s=50, duration_s=0.1)
    assert (tally.num_errors, tally.latencies_s) == (5, [])


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentiles_ms([i / 1000 for i in range(101)]) == {"p50": 50.0, "p99": 99.0}
    assert percentiles_ms([]) == {}
