"""Checks what a customer pays to have kept: it is read as long as it is there, and paid back where
it was not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.journeys.reports import PICO, costs_pico, eventually
from tests.stack import Stack, running

pytestmark = pytest.mark.slow

BOOK = """
[[price]]
model = "penny"
valid_from = "2026-11-02"
uncached_input = "0.10"
cache_read = "0.01"
cache_write = "0.125"
cache_write_1h = "0.20"
output = "0.40"
"""
"""Behind the price that ships, of which writing costs nothing."""
CONFIG = """
price_books = ["{book}"]

[[model]]
name = "penny"
path = "models/penny"
cache_contract = "explicit"
[model.engine_options]
num_blocks = 300
cache_lease_share = 0.4
"""
"""A cache of 4,800 tokens, and room for one whole context beside a few more."""
PREMIUM = 25_000
"""Pico-USD per token, of five minutes."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    book: Path = tmp_path_factory.mktemp("prices") / "book.toml"
    book.write_text(BOOK)
    with running(config=CONFIG.format(book=book), workers=2) as started:
        yield started


def text(subject: str, num_lines: int) -> str:
    lines = (f"Line {number}: the {subject} counts to {number * 7}." for number in range(num_lines))
    return " ".join(lines)


class Customer:
    def __init__(self, stack: Stack) -> None:
        self.stack, self.client = stack, stack.client(max_retries=5)
        self.paid_pico = 0

    def ask(self, system: str, *, keep: bool) -> Any:
        """Usage. Adds up what the answers say that they cost."""
        part: dict[str, Any] = {"type": "text", "text": system}
        if keep:
            part["cache_control"] = {"type": "ephemeral"}
        answer = self.client.chat.completions.with_raw_response.create(
            model="penny",
            messages=[
                {"role": "system", "content": [part]},  # type: ignore[list-item]
                {"role": "user", "content": "Who counts?"},
            ],
            max_tokens=4,
            temperature=0,
            extra_headers={"x-tollgate-cost": "true"},
        )
        self.paid_pico += int(Decimal(answer.headers["x-tollgate-cost"].split()[0]) * PICO)
        usage = answer.parse().usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details

    def leases(self) -> list[tuple[str | None, int | None]]:
        query = "SELECT outcome, refunded_pico FROM cache_leases ORDER BY id"
        rows = asyncio.run(self.stack.sql(query))
        return [(row.outcome, row.refunded_pico) for row in rows]

    def expect(self, *leases: tuple[str | None, int | None]) -> None:
        """And the bill that comes of it."""
        self.stack.wait(f"{leases}", lambda: self.leases() == [*leases], timeout_s=60)
        refunded = sum(pico or 0 for _, pico in leases)
        eventually(lambda: costs_pico(self.client), self.paid_pico - refunded)


def told_causes(stack: Stack) -> dict[str, int]:
    """By the cache report, which workers write every ten seconds."""
    page = httpx.get(
        f"{stack.base_url}/v1/organization/cache_report",
        params={"start_time": int(time.time()) - 86_400},
        headers={"authorization": f"Bearer {stack.credentials['admin_key']}"},
    ).json()
    found: Counter[str] = Counter()
    for bucket in page["data"]:
        for result in bucket["results"]:
            found.update(result["causes"])
    begun_anew = found.pop("first", 0) + found.pop("restarted", 0)
    return {name: number for name, number in found.items() if number} | {"begun anew": begun_anew}


@pytest.mark.nightly
def test_what_is_paid_to_be_kept_is_read_or_paid_back(stack: Stack) -> None:
    customer, kept = Customer(stack), text("quick brown fox", 80)
    wrote = customer.ask(kept, keep=True)
    assert wrote.cache_write_tokens >= 1024 and wrote.cached_tokens == 0
    read = customer.ask(kept, keep=True)
    assert (read.cached_tokens, read.cache_write_tokens) == (wrote.cache_write_tokens, 0)

    for number in range(5):
        customer.ask(text(f"dog of {number}", 60), keep=False)
    assert customer.ask(kept, keep=True) == read, "more than the cache holds came by"
    customer.expect((None, None))

    customer.ask(text("elephant", 190), keep=False)
    premium = wrote.cache_write_tokens * PREMIUM
    customer.expect(("evicted", premium))
    again = customer.ask(kept, keep=True)
    assert (again.cached_tokens, again.cache_write_tokens) == (0, wrote.cache_write_tokens)
    customer.expect(("evicted", premium), (None, None))

    [engine] = stack.pids("-m engine --")
    os.kill(engine, signal.SIGKILL)
    customer.expect(("evicted", premium), ("engine_lost", premium))
    assert customer.ask(kept, keep=True) == again
    customer.expect(("evicted", premium), ("engine_lost", premium), (None, None))
    expected = {"begun anew": 2, "intact": 2, "evicted": 1, "unmarked": 6}
    eventually(lambda: told_causes(stack), expected, timeout_s=30)
    stack.wait_booked()
    assert "The books balance" in stack.run("reconcile")
    metric = "tollgate_cache_leases_total"
    for outcome, number in (("granted", 3), ("evicted", 1), ("engine_lost", 1)):
        stack.wait_metric(metric, number, outcome=outcome)
