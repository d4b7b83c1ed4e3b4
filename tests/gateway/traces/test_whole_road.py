"""A trace that a client began goes through the whole application to an upstream, and each stage of
the request is in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.routes.asgi.request_metrics import ACCESS_LOG
from tests.gateway.auth.browsing import live_app, new_browser
from tests.gateway.auth.conftest import make_tenant
from tests.gateway.fleet.upstream.scripted_upstream import Upstream, good_stream
from tests.gateway.inference.test_hot_path import make_key
from tests.gateway.traces.collectors import Taken, http_collector, said

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = {
    "traceparent": f"00-{TRACE}-{PARENT}-01",
    "tracestate": "vendor=1",
    "baggage": "user=alice",
}


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    upstream.script = good_stream
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    upstream.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    yield upstream
    server.close()
    for writer in list(upstream.writers):
        writer.transport.abort()
    await server.wait_closed()


def configure(home: Path, upstream: Upstream, collector: Taken) -> Path:
    config = home / "traces.toml"
    config.write_text(
        "".join(
            f'[[model]]\nname = "{name}"\nupstream = "{upstream.base_url}"\n'
            for name in ("told", "untold")
        )
        + f'[traces]\nendpoint = "{collector.url}"\nratio = 0\ntrust = "clients"\n'
        + 'send_context_to = ["told"]\n'
    )
    return config


async def ask(app: Litestar, key: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "a-secret"}], "stream": True}
    async with new_browser(app) as http:
        answer = await http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}", **SENT}
        )
    assert answer.status_code == 200, answer.text


async def test_a_clients_trace_reaches_the_upstream_with_each_stage_in_it(
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    db: AsyncEngine,
    upstream: Upstream,
    patient: None,
) -> None:
    with http_collector() as collector:
        config = str(configure(tmp_path, upstream, collector))
        async with live_app(tmp_path, postgres_url, redis_url, None, config=config) as app:
            async with AsyncExitStack() as stack:
                services = app.state.services
                opened = app.state.open_access_log(stack, services.telemetry, services.request_log)
                app.state[ACCESS_LOG] = opened
                tenant = await make_tenant(db, "acme")
                key = await make_key(db, tenant, tmp_path, name="k", scopes=["inference"])
                for model in ("told", "untold"):
                    await ask(app, key, model)
    told, untold = (exchange.headers for exchange in upstream.exchanges)
    assert {"traceparent", "tracestate", "baggage"}.isdisjoint(untold)
    assert "baggage" not in told and told["tracestate"] == "vendor=1"
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    spans = {
        span.name: span for span in collector.spans if span.name != "POST /v1/chat/completions"
    }
    assert set(spans) == {
        *("authenticate", "read", "prepare", "admit", "chat told", "chat untold"),
        *("prefill", "decode", "settle"),
    }
    assert told["traceparent"] == f"00-{TRACE}-{spans['chat told'].span_id.hex()}-01"
    requests = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
    assert len(requests) == 2 and said(requests[0])["tollgate.kept_for"] == "sampled"
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in collector.spans)
    assert "tollgate.unfinished" not in said(spans["settle"])
    assert "a-secret" not in str(collector.spans)


async def test_texts_are_in_the_spans_of_a_project_that_stores_them_alone(
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    db: AsyncEngine,
    upstream: Upstream,
    patient: None,
) -> None:
    with http_collector() as collector:
        config = str(configure(tmp_path, upstream, collector))
        async with live_app(tmp_path, postgres_url, redis_url, None, config=config) as app:
            async with AsyncExitStack() as stack:
                found = app.state.services
                opened = app.state.open_access_log(
                    stack, found.telemetry, found.request_log, found.content_log
                )
                app.state[ACCESS_LOG] = opened
                plain, stores = await make_tenant(db, "acme"), await make_tenant(db, "globex")
                async with db.begin() as conn:
                    named = {"org": stores.org_id}
                    on = "UPDATE projects SET store_content = true WHERE org_id = :org"
                    await conn.execute(sa.text(on), named)
                for tenant in (plain, stores):
                    key = await make_key(db, tenant, tmp_path, name="k", scopes=["inference"])
                    await ask(app, key, "told")
            async with db.connect() as conn:
                await found.content_log.flush()
                stored = sa.text("SELECT org FROM request_content")
                assert (await conn.scalars(stored)).all() == [stores.org_id]
    attempts = [said(span) for span in collector.spans if span.name == "chat told"]
    assert [each.get("gen_ai.input.messages", "") for each in attempts] == [
        "",
        '[{"role":"user","parts":[{"type":"text","content":"a-secret"}]}]',
    ]
    assert '"content":"Hello"' in str(attempts[1]["gen_ai.output.messages"])
