"""Counts by organization what a dashboard shows of tenants: requests by how they ended, tokens and
spend.

Each organization is one more series of each count, so MAX_TENANTS have a label of their own on a
host, whoever came first, and the others share one. The workers number them in a mapped file that
all of them write to, and each adds up in a file of its own. Both begin with how much is in use.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from operator import add
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from billing.events import UsageEvent
from billing.money import PICO_PER_USD
from billing.pricing.rating import rate
from gateway.telemetry.histograms import map_file
from gateway.telemetry.metric_group import MetricDescription, MetricGroup

MAX_TENANTS = 1000
OTHERS = "-"
"""The label of the organizations beyond the bound; their number is 0."""
LIMITED = frozenset((402, 429))
CLIENT_LEFT = 499
OUTCOMES = ("answered", "limited", "refused", "failed")
TOKEN_KINDS = ("uncached", "cache_read", "cache_write", "output")
COLUMNS = (
    *(("requests", "outcome", each) for each in OUTCOMES),
    *(("tokens", "kind", each) for each in TOKEN_KINDS),
    ("spend_usd", "", ""),
)
"""The counts: of each its metric, its label beside `org`, and the value of that label."""
FIRST_TOKENS, SPEND = len(OUTCOMES), len(COLUMNS) - 1
USED = struct.Struct("<Q")
MAX_ID_BYTES = 64
NAMES_FILE, PREFIX, SUFFIX = "tenants.names", "tenants_", ".shm"
NAMES_BYTES = USED.size + MAX_ID_BYTES * MAX_TENANTS
COUNTS_BYTES = USED.size + 8 * len(COLUMNS) * (MAX_TENANTS + 1)


class TenantNumbers:
    """Numbers organizations from 1 on, the same in all processes of one folder. `folder`: None for
    one process alone. From any thread. Raises: OSError."""

    def __init__(self, folder: Path | None) -> None:
        self._fd: int | None = None
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        if folder is None:
            self._map = mmap.mmap(-1, NAMES_BYTES)
            return
        self._fd = os.open(folder / NAMES_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, NAMES_BYTES)
        self._map = mmap.mmap(self._fd, NAMES_BYTES)

    def of(self, org: str) -> int:
        """Return the number of an organization; 0: it has none of its own."""
        number = self._numbers.get(org)
        if number is None:
            number = 0 if len(self._numbers) >= MAX_TENANTS else self._admit(org)
        return number

    def names(self) -> list[str]:
        """Return the organizations in the order of their numbers."""
        with self._lock:
            self._catch_up()
            return list(self._numbers)

    def _admit(self, org: str) -> int:
        name = org.encode()
        if not 0 < len(name) <= MAX_ID_BYTES:
            return 0
        with self._lock:
            if self._fd is not None:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._catch_up()
                if org not in self._numbers and (count := len(self._numbers)) < MAX_TENANTS:
                    start = USED.size + MAX_ID_BYTES * count
                    self._map[start : start + len(name)] = name
                    USED.pack_into(self._map, 0, count + 1)
                    self._catch_up()
            finally:
                if self._fd is not None:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            return self._numbers.get(org, 0)

    def _catch_up(self) -> None:
        """Take up those that other processes have numbered since the last time."""
        for number in range(len(self._numbers), USED.unpack_from(self._map)[0]):
            start = USED.size + MAX_ID_BYTES * number
            name = self._map[start : start + MAX_ID_BYTES].rstrip(b"\0").decode()
            self._numbers[name] = number + 1


class TenantCounts(Collector):
    """Counts in one process, and adds up at a scrape what all processes of the folder have. One
    thread counts requests, and one at a time usage: no two write to one number."""

    def __init__(self, folder: Path | None, listed: Iterable[MetricDescription]) -> None:
        self._folder, self._listed = folder, listed
        self._numbers = TenantNumbers(folder)
        if folder is None:
            self._map = mmap.mmap(-1, COUNTS_BYTES)
        else:
            self._map = map_file(folder / f"{PREFIX}{os.getpid()}{SUFFIX}", COUNTS_BYTES)
        self._values = memoryview(self._map).cast("d")
        self._booking = threading.Lock()

    def answered(self, org: str, status: int) -> None:
        """Count a request. Of 499 its client wanted no more, which is no failure."""
        if status in LIMITED:
            outcome = "limited"
        elif status < 400 or status == CLIENT_LEFT:
            outcome = "answered"
        else:
            outcome = "refused" if status < 500 else "failed"
        self._add(org, OUTCOMES.index(outcome), 1)

    def booked(self, events: Iterable[UsageEvent]) -> None:
        """Count what was booked for customers. From any thread."""
        with self._booking:
            for event in events:
                if event.kind == "usage":
                    self._add_usage(event)

    def _add_usage(self, event: UsageEvent) -> None:
        used, org = event.quantities, event.attempt.org
        counts = (
            used.uncached_input + used.embedding_input,
            used.cache_read,
            used.cache_write_5m + used.cache_write_1h,
            used.output_total,
        )
        for at, count in enumerate(counts, FIRST_TOKENS):
            self._add(org, at, count)
        amount = rate(used, event.attempt.prices).amount_pico
        self._add(org, SPEND, amount / PICO_PER_USD)

    def _add(self, org: str, column: int, amount: float) -> None:
        number = self._numbers.of(org)
        self._values[1 + len(COLUMNS) * number + column] += amount
        used = USED.size + 8 * len(COLUMNS) * (number + 1)
        if used > USED.unpack_from(self._map)[0]:
            USED.pack_into(self._map, 0, used)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        labels = [OTHERS, *self._numbers.names()]
        values = [0.0] * (len(COLUMNS) * len(labels))
        for content in self._contents():
            used = USED.unpack_from(content)[0]
            found = memoryview(content[USED.size : used]).cast("d")
            values[: len(found)] = map(add, found, values)
        for listed in self._listed:
            metric = Metric(listed.name, listed.text, "counter")
            for column, (name, label, value) in enumerate(COLUMNS):
                if listed.name.endswith(name):
                    more = {label: value} if label else {}
                    for number, org in enumerate(labels):
                        amount = values[len(COLUMNS) * number + column]
                        metric.add_sample(listed.shown_name, {"org": org, **more}, amount)
            yield metric

    def _contents(self) -> Iterator[bytes]:
        if self._folder is None:
            yield self._map[:]
            return
        for path in sorted(self._folder.glob(f"{PREFIX}*{SUFFIX}")):
            yield path.read_bytes()


def list_tenant_metrics(group: MetricGroup) -> list[MetricDescription]:
    """Describe the counts to people."""
    return [
        group.describe(
            "tenant_requests",
            "Requests of an organization: answered (also those whose client left), limited (402, "
            "429), refused (another 4xx), failed (5xx). Only with `metrics.tenants`.",
            *("org", "outcome"),
            do="failed of one organization alone: its models or servers; limited: its plan.",
        ),
        group.describe(
            "tenant_tokens",
            "Tokens that an organization was billed for, once booked: uncached, cache_read, "
            "cache_write, output. Only with `metrics.tenants`.",
            *("org", "kind"),
            do="Who uses how much; the console shows it by project, key and model.",
        ),
        group.describe(
            "tenant_spend_usd",
            "Rated usage of an organization that was booked in the ledger, in USD. Only with "
            "`metrics.tenants`.",
            "org",
            do="For trends. Invoices come of the ledger, in exact numbers.",
        ),
    ]
