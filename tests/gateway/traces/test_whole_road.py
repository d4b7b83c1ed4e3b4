"""A trace that a client began goes through the whole application to an upstream, and each stage of
the request is in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from litestar import Litestar
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import note_work
from gateway.routes.asgi.request_metrics import ACCESS_LOG
from tests.gateway.auth.browsing import live_app, new_browser
from tests.gateway.auth.conftest import make_tenant
from tests.gateway.fleet.upstream.scripted_upstream import (
    Exchange,
    Upstream,
    completion,
    good_stream,
)
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


def configure(home: Path, upstream: Upstream, collector: Taken, more: str) -> Path:
    config = home / "traces.toml"
    config.write_text(
        "".join(
            f'[[model]]\nname = "{name}"\nupstream = "{upstream.base_url}"\n'
            for name in ("told", "untold")
        )
        + f'[traces]\nendpoint = "{collector.url}"\nsend_context_to = ["told"]\n{more}\n'
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
        trusts = 'ratio = 0\ntrust = "clients"'
        config = str(configure(tmp_path, upstream, collector, trusts))
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
        config = str(configure(tmp_path, upstream, collector, "ratio = 1"))
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


async def answers(exchange: Exchange) -> None:
    """Stream, or answer whole: as a line of a batch is asked."""
    if exchange.body.get("stream"):
        await good_stream(exchange)
        return
    await exchange.answer(completion())


def the(spans: Sequence[Span], name: str) -> Span:
    [found] = [span for span in spans if span.name == name]
    return found


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_what_goes_on_without_its_request_is_a_trace_of_its_own_that_links_to_it(
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    db: AsyncEngine,
    upstream: Upstream,
    patient: None,
) -> None:
    """A response in the background, and a line of a batch."""
    upstream.script = answers
    with http_collector() as collector:
        config = str(configure(tmp_path, upstream, collector, "ratio = 1"))
        async with live_app(tmp_path, postgres_url, redis_url, None, config=config) as app:
            async with AsyncExitStack() as stack:
                services = app.state.services
                opened = app.state.open_access_log(stack, services.telemetry, services.request_log)
                app.state[ACCESS_LOG] = opened
                note_work(services, opened)
                tenant = await make_tenant(db, "acme")
                key = await make_key(db, tenant, tmp_path, name="k", scopes=["inference"])
                signed = {"authorization": f"Bearer {key}"}
                async with new_browser(app) as http:
                    http.headers.update(signed)
                    body = {"model": "untold", "input": "a-secret", "background": True}
                    made = await http.post("/v1/responses", json=body, headers=SENT)
                    assert made.status_code == 200, made.text
                    response = f"/v1/responses/{made.json()['id']}"

                    async def has_ended() -> bool:
                        return (await http.get(response)).json()["status"] == "completed"

                    await until(has_ended)
                    batch = await make_batch(http)

                    async def is_done() -> bool:
                        return (await http.get(batch)).json()["status"] == "completed"

                    await until(is_done)
                await services.request_log.flush()
                async with services.system_db.connect() as conn:
                    query = sa.text("SELECT id, trace, route, batch, output_tokens, status"
                                    " FROM request_log ORDER BY id")  # fmt: skip
                    rows = (await conn.execute(query)).all()
    spans = collector.spans
    asked, work = the(spans, "POST /v1/responses"), the(spans, "background /v1/responses")
    [client] = asked.links
    assert (client.trace_id.hex(), client.span_id.hex()) == (TRACE, PARENT)
    creating, line = the(spans, "POST /v1/batches"), the(spans, "batch /v1/chat/completions")
    for made_by, found in ((asked, work), (creating, line)):
        [link] = found.links
        assert (link.trace_id, link.span_id) == (made_by.trace_id, made_by.span_id)
        assert found.trace_id != made_by.trace_id and not found.parent_span_id
        assert found.kind == Span.SPAN_KIND_INTERNAL and "http.route" not in said(found)
        stages = [span for span in spans if span.parent_span_id == found.span_id]
        assert {"admit", "chat untold", "settle"} <= {span.name for span in stages}
        assert {span.trace_id for span in stages} == {found.trace_id}
        assert "tollgate.unfinished" not in str([said(span) for span in stages])
        assert said(found)["tollgate.cost_pico_usd"] == 0  # without a price
    assert (said(work)["tollgate.work"], said(line)["tollgate.work"]) == ("background", "batch")
    below = [span.name for span in spans if span.parent_span_id == asked.span_id]
    assert set(below) == {"authenticate", "read"}
    assert "a-secret" not in str(spans)
    found = {(row.route, row.batch, row.status): row for row in rows}
    assert len(rows) == len(found) == 2, "each once"
    noted = found["/v1/responses", None, 200]
    assert noted.output_tokens > 0 and noted.trace.bytes == work.trace_id
    row = found["/v1/chat/completions", batch.rpartition("/")[2], 200]
    assert row.output_tokens == 5 and row.trace.bytes == line.trace_id


async def make_batch(http: Any) -> str:
    """Make a batch of one line, and return its address."""
    asked = {"model": "untold", "messages": [{"role": "user", "content": "a-secret"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = (await http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    wanted = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
    made = await http.post("/v1/batches", json=wanted)
    assert made.status_code == 200, made.text
    return f"/v1/batches/{made.json()['id']}"
