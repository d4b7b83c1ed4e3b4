"""Replicas that point at a scripted upstream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest
from gateway.wire.openai.from_chat import from_openai
from tests.gateway.fleet.upstream.scripted_upstream import API_KEY, UPSTREAM_MODEL, Upstream


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream.base_url = f"http://127.0.0.1:{port}/v1"
    yield upstream
    server.close()
    for exchange in upstream.exchanges:
        exchange.left.set()
        exchange.writer.close()
    await server.wait_closed()


MakeReplica = Callable[..., UpstreamReplica]


@pytest_asyncio.fixture
async def make_replica(upstream: Upstream, threads: PrepareThreads) -> AsyncIterator[MakeReplica]:
    made: list[UpstreamReplica] = []

    def make(**options: Any) -> UpstreamReplica:
        defaults: dict[str, Any] = {
            "name": "big@0",
            "base_url": upstream.base_url,
            "upstream_model": UPSTREAM_MODEL,
            "api_key": API_KEY,
            "threads": threads,
        }
        replica = UpstreamReplica(**(defaults | options))
        made.append(replica)
        return replica

    yield make
    for replica in made:
        await replica.close()


@pytest.fixture
def chat() -> Callable[..., GenerateRequest]:
    def make(**fields: Any) -> GenerateRequest:
        body = {"model": "big", "messages": [{"role": "user", "content": "hello"}], **fields}
        return from_openai(json.dumps(body).encode(), "upstream")

    return make
