"""Reads the organization's reports with the official SDK's admin client, and the events they are
made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI

from tests.stack import Stack

PICO = 10**12


def costs_pico(client: OpenAI) -> int:
    """The organization's costs of today (and yesterday, around midnight)."""
    page = client.admin.organization.usage.costs(start_time=int(time.time()) - 86_400)
    amounts = [row.amount.value for bucket in page.data for row in bucket.results if row.amount]  # type: ignore[union-attr]
    return round(sum(amount or 0 for amount in amounts) * PICO)


def costs_of(client: OpenAI, model: str) -> list[float]:
    """Return the costs of as many days, in US dollars, by what of the model was used."""
    start = int(time.time()) - 86_400
    page = client.admin.organization.usage.costs(start_time=start, group_by=["line_item"])
    rows: list[Any] = [row for bucket in page.data for row in bucket.results]
    return [row.amount.value for row in rows if (row.line_item or "").startswith(f"{model},")]


def usage_of_today(client: OpenAI, **filters: Any) -> dict[str, int]:
    """Return the usage of the last hour. `filters`: `models`, `api_key_ids` and the like."""
    page = client.admin.organization.usage.completions(
        start_time=int(time.time()) - 3_600, bucket_width="1m", limit=120, **filters
    )
    total: dict[str, int] = {}
    fields = ("input_tokens", "output_tokens", "input_cached_tokens", "num_model_requests")
    for bucket in page.data:
        for row in bucket.results:
            for field in fields:
                total[field] = total.get(field, 0) + (getattr(row, field) or 0)
    return total


def eventually(read: Callable[[], Any], expected: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while (seen := read()) != expected:
        assert time.monotonic() < deadline, f"{seen} instead of {expected}"
        time.sleep(0.1)


def events(stack: Stack, model: str) -> list[Any]:
    """Return what was billed of this model, oldest first, once Postgres has all there is.

    What was made for nobody (`waste`) comes when it comes.
    """
    stack.wait_booked()
    query = f"SELECT * FROM usage_events WHERE model = '{model}' AND kind = 'usage' ORDER BY id"
    return asyncio.run(stack.sql(query))


def next_event(stack: Stack, model: str, before: int) -> Any:
    """The one event of the request that was made since there were `before`."""
    stack.wait("the event is there", lambda: len(events(stack, model)) > before)
    found = events(stack, model)[before:]
    assert len(found) == 1
    return found[0]
