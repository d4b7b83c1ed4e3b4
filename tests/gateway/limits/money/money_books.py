"""Books of a test's own, with a clock that ticks once for each thing that happens in them."""

from __future__ import annotations

from collections.abc import Sequence

from billing.events import Price, PriceSet, UsageEvent
from gateway.limits.counters import BookedRequest
from gateway.limits.spending import Counter
from gateway.principal import Principal, SpendCap
from tests.billing.samples import an_attempt, an_event

ORG, PROJECT = "org_a", "proj_a"
PRICES: PriceSet = {
    "uncached_input": Price("m:uncached_input", 2_000),
    "cache_read": Price("m:cache_read", 3_000),
    "output": Price("m:output", 10_500),
}
"""Pico-USD: the dearest input is the cached one; a token of output is no whole number of nano."""


def who(*caps: SpendCap, key_id: str = "key_a") -> Principal:
    return Principal(
        org_id=ORG,
        project_id=PROJECT,
        key_id=key_id,
        key_hint="",
        scopes=frozenset(),
        spend_caps=caps,
    )


class BooksOfATest:
    def __init__(self) -> None:
        self.rows: dict[str, BookedRequest] = {}
        self.now = 1.0
        self.asked = 0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def ingest(self, request_id: str, key_id: str, nano: int, moment: float) -> UsageEvent:
        """Into the books, once; the event's id is the request's."""
        if request_id not in self.rows:
            self.rows[request_id] = BookedRequest(
                request_id=request_id,
                org=ORG,
                project=PROJECT,
                key=key_id,
                admitted_at=moment,
                occurred_at=moment,
                ingested_at=self.tick(),
                amount_pico=nano * 1000,
            )
        attempt = an_attempt(request_id, org=ORG, project=PROJECT, key=key_id, admitted_at=moment)
        return an_event(attempt)

    async def spent(self, org_id: str, counters: Sequence[Counter]) -> tuple[float, list[int]]:
        self.asked += 1
        return self.tick(), [
            sum(row.amount_pico for row in self.rows.values() if self.is_of(row, counter))
            for counter in counters
        ]

    def is_of(self, row: BookedRequest, counter: Counter) -> bool:
        begun = counter.start is None or counter.start.timestamp() <= row.admitted_at
        over = counter.end is not None and counter.end.timestamp() <= row.admitted_at
        owner = {"key": row.key, "project": row.project, "org": row.org}[counter.scope]
        return begun and not over and owner == counter.owner_id

    async def booked(self, event_ids: Sequence[str]) -> Sequence[BookedRequest]:
        return [self.rows[each] for each in event_ids if each in self.rows]
