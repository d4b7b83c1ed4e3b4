"""Makes a day and a half of requests for the organizations of `server`, and bills them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from billing.events import COMPONENTS
from billing.tables import AMOUNTS
from gateway.db import tenant
from gateway.generate_request import ChatPrompt, GenerateRequest, Tool, ToolUse
from gateway.generation_events import TextDelta
from gateway.request_log.histograms import pack
from gateway.request_log.rows import RequestRow, StageRow
from gateway.request_log.writer import RequestLog
from gateway.telemetry.captured_content import CapturedContent
from gateway.telemetry.latency_counts import TokenGaps
from gateway.tenancy.tables import api_keys, projects
from tests.gateway.console.server import ConsoleServer, Organization

HOSTILE = "srv/<script>alert(3)</script>"
HOSTILE_TEXT = "<img src=x onerror=alert(4)><b>bold</b>"
HOSTILE_TAG = "<b>x</b>"
MANY = 1000
FAILURES: dict[int, tuple[int, str]] = {
    5: (503, "overloaded"),
    9: (429, "rate_limit_exceeded"),
    11: (400, "context_length_exceeded"),
}


async def make_requests(server: ConsoleServer) -> None:
    log = RequestLog(server.services.system_db, keep_days=30, on_dropped=lambda number: None)
    for org, number in ((server.little, 12), (server.much, MANY)):
        async with tenant(server.services.db, org.id) as conn:
            keys_ = (await conn.scalars(sa.select(api_keys.c.id).limit(40))).all()
        sums: Counter[tuple[str, str, str, int]] = Counter()
        rows = [request_of(org, keys_, at) for at in range(number)]
        for row in rows:
            log.put(row)
            sums[row.project, row.key, row.model, row.at_ms // 3_600_000] += row.output_tokens
        await log.flush()
        await bill(server, org, sums)
    await store_contents(server, server.much, rows)


async def store_contents(
    server: ConsoleServer, org: Organization, rows: Sequence[RequestRow]
) -> None:
    """Store what some requests asked, hostile words among them: each another time of day."""
    async with server.services.system_db.begin() as conn:
        stores = sa.update(projects).where(projects.c.id == org.project_id)
        await conn.execute(stores.values(store_content=True))
    shown = {"type": "function", "function": {"name": "look", "description": HOSTILE_TEXT}}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for row in rows:
        messages = [
            {"role": "system", "content": f"You are kind.\u202e It is {row.at_ms}. Be brief."},
            {"role": "user", "content": f"What is this?\n\n{HOSTILE_TEXT}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": HOSTILE_TEXT, "tool_call_id": "call_1"},
        ]
        use = ToolUse(tools=(Tool(name="look", shown=shown),))
        prompt = ChatPrompt(messages=messages, tools=use)
        captured = CapturedContent()
        captured.begin(
            GenerateRequest(model=row.model, stream=False, include_usage=False, prompt=prompt)
        )
        said = TextDelta(index=0, text=f"It says {HOSTILE_TEXT}", reasoning="Hm.")
        captured.add((said, TextDelta(index=0, text="", finish_reason="stop")))
        server.services.content_log.put(row, captured)
    await server.services.content_log.flush()


def request_of(org: Organization, keys_: Sequence[str], number: int) -> RequestRow:
    at_ms = int(time.time() * 1000) - (number * 7919) % 130_000 * 1000
    slow = number % 17 == 3
    failed, error_code = FAILURES.get(number % 37, (0, None))
    ttft = 90_000 * (1 + number % 5) * (8 if slow else 1)
    stages = [
        StageRow("authenticate", 0, 400),
        StageRow("prepare", 900, 2_000, "penny/0"),
        StageRow("queue", 3_000, 31_000, "penny/0"),
        StageRow("prefill", 34_000, ttft - 34_000),
        StageRow("decode", ttft, 900_000),
        StageRow("tool_call", ttft + 900_000, 300_000, HOSTILE, "ToolFailed" if slow else ""),
        StageRow("settle", ttft + 1_200_000, 800),
    ]
    id_ = f"{at_ms:012x}7{number:019x}"
    gaps = TokenGaps()
    gaps.add(0.021 * 95, 95)
    gaps.add(0.09 if slow else 0.03, 1)
    assert gaps.counts is not None
    used: dict[str, Any] = {} if failed else {"uncached_tokens": 300 + number, "cached_tokens": 900}
    used |= {} if failed else {"output_tokens": 80 + number % 200, "cost_pico": 10**9 * number}
    return RequestRow(
        id=id_,
        at_ms=at_ms,
        org=org.id,
        project=org.project_id,
        key=keys_[number % len(keys_)],
        model=("penny", "llama-8b", "qwen-32b")[number % 3],
        lane=("interactive", "agentic")[number % 5 == 0],
        route="/v1/chat/completions",
        status=failed or 200,
        error_code=error_code,
        is_good=None if failed in (400, 429) else not (slow or failed),
        duration_us=ttft + 1_300_000,
        ttft_us=None if failed else ttft,
        tpot_us=None if failed else 21_000 + number,
        queue_us=31_000,
        trace=id_,
        stages=stages,
        cache_cause="changed",
        cache_position=900,
        batch="batch_seeded" if number % 13 == 4 else None,
        tags={"team": ("search", "chat")[number % 2], "feature": HOSTILE_TAG},
        itl_p50_us=None if failed else 21_000,
        itl_p99_us=None if failed else 90_000 if slow else 30_000,
        itl=None if failed else pack(gaps.counts),
        **used,
    )


async def bill(
    server: ConsoleServer, org: Organization, sums: Counter[tuple[str, str, str, int]]
) -> None:
    names = ", ".join((*COMPONENTS, *AMOUNTS))
    async with server.services.system_db.begin() as conn:
        for table, unit in (("usage_hourly", "hour"), ("usage_daily", "day")):
            known = ", ".join(f"{name} = t.{name} + excluded.{name}" for name in SUMMED)
            for (project, key, model, hour), tokens in sums.items():
                used = {"uncached_input": 4 * tokens, "cache_read": 9 * tokens, "output": tokens}
                used["cache_write_5m"] = tokens // 2
                used |= {f"{name}_pico": count * 10**7 for name, count in used.items()}
                values = ", ".join(str(used.get(name, 0)) for name in (*COMPONENTS, *AMOUNTS))
                await conn.execute(
                    sa.text(f"""
                        INSERT INTO {table} AS t (org, {unit}, project, key, model, tier, batch,
                            {names}, num_requests)
                        VALUES (:org, date_trunc('{unit}', to_timestamp(:at), 'UTC'), :project,
                            :key, :model, 'default', false, {values}, 1)
                        ON CONFLICT (org, {unit}, project, key, model, tier, batch)
                        DO UPDATE SET {known}
                    """),
                    {
                        "org": org.id,
                        "at": hour * 3600,
                        "project": project,
                        "key": key,
                        "model": model,
                    },
                )


SUMMED = (
    *("uncached_input", "cache_read", "cache_write_5m", "output"),
    *("uncached_input_pico", "cache_read_pico", "cache_write_5m_pico", "output_pico"),
)


def addresses_of_requests(server: ConsoleServer, org: Organization) -> list[str]:
    """A request, requests that failed, and usage narrowed down."""

    async def newest() -> str:
        async with tenant(server.services.db, org.id) as conn:
            query = "SELECT id FROM request_log WHERE status = 200 ORDER BY at DESC LIMIT 1"
            return str((await conn.scalar(sa.text(query))).hex)

    address = f"/console/requests/req_{server.call(newest)}"
    return [
        address,
        *([f"{address}/content"] if org is server.much else ()),
        "/console/requests?outcome=failed&range=7d",
        "/console/requests?error_code=overloaded&range=7d",
        "/console/requests?cost=1000000",
        "/console/usage?by=key",
        f"/console/usage?by=model&project={org.project_id}&range=30d",
        "/console/usage?by=tag",
        "/console/overview?model=nothing",
    ]
