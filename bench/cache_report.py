"""Measure what the cache report adds to a request: why its prompt was not cached, and counting it.

    python -m bench.cache_report [--rounds N] [--dry]

No engine, no Postgres: what is timed is what runs on the event loop for each request. Beside an
empty call (what the measuring itself costs): the cause and the prefix of a prompt of 2,048 tokens,
with the last event of an attempt; making a note of a broken one; counting a note of a prompt that
was cached, of one that broke where others had, of one with a prefix of its own, and of one beyond
the prefixes that a key may have. Each has a bound of 10 microseconds; a run that is recorded ends
with 1 where it is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from sqlalchemy.ext.asyncio import create_async_engine

from bench.tools.record import record
from billing.events import Attempt
from engine.protocol import SeenPrefix
from gateway.cache_report.report import CacheReport
from gateway.fleet.engine.cache_outcome import Circumstances, outcome_of, prefix_digest
from gateway.fleet.engine.prefix_memory import EarlierPrompt
from gateway.fleet.replica import PreparedRequest
from gateway.generate_request import ChatPrompt, GenerateRequest
from gateway.generation_events import CacheCause, CacheOutcome, MeteredUsage
from gateway.inference.cache_notes import CacheNote, note_of
from gateway.lanes import Priority

BATCH = 5_000
"""Calls of one turn, after which what was counted is dropped, as a flush does."""
BOUND_US = 10.0
FLOOR = "empty call"
PROMPT = [*range(2048)]
SALT = "5f" * 16
USAGE = MeteredUsage(uncached_input=48, cache_read=2000, output=100)
HERE = Circumstances(
    contract="native",
    block_size=16,
    engine_id="e",
    before=EarlierPrompt(1920, "e"),
    is_marked=False,
)
SEEN = SeenPrefix(2000, "broken")
NOWHERE = "postgresql+asyncpg://nobody@127.0.0.1:1/nothing"
ATTEMPT = Attempt(
    id="1",
    request_id="req_1",
    org="org_a",
    project="proj_a",
    key="key_a",
    model="penny",
    lane="interactive",
    prices={},
    admitted_at=1_795_370_400.0,
)


def a_note(cause: CacheCause, prefix: str) -> CacheNote:
    outcome = CacheOutcome(cause=cause, position=2000, prefix=prefix)
    return CacheNote(attempt=ATTEMPT, usage=USAGE, outcome=outcome, replica="penny")


def tell() -> None:
    cause, position = outcome_of(HERE, len(PROMPT), SEEN, 2000)
    CacheOutcome(cause=cause, position=position, prefix=prefix_digest(SALT, PROMPT))


class Nowhere:
    """As much of a replica as a note asks for."""

    name = "penny"


def making() -> Callable[[], object]:
    prompt = ChatPrompt(messages=[])
    request = GenerateRequest(model="penny", stream=False, include_usage=False, prompt=prompt)
    prepared = PreparedRequest(
        request=request,
        input_tokens=len(PROMPT),
        max_output_tokens=100,
        max_tokens_given=True,
        payload=None,
    )
    outcome, replica = CacheOutcome(cause="changed", position=2000, prefix="aa"), Nowhere()
    priority = Priority()
    return lambda: note_of(ATTEMPT, USAGE, outcome, replica, prepared, priority, salt=SALT)  # type: ignore[arg-type]


def sides() -> Mapping[str, Callable[[CacheReport], Callable[[], object]]]:
    """Each with a report of its own."""
    cached, broken = a_note("intact", "aa"), a_note("changed", "aa")
    numbers = count()

    def alone(report: CacheReport) -> Callable[[], object]:
        """One prefix for each key: none is beyond the bound."""
        notes = [a_note("first", f"{next(numbers):016x}") for _ in range(60)]
        turns = count()
        return lambda: report.note(notes[next(turns) % 60])

    def too_many(report: CacheReport) -> Callable[[], object]:
        notes = [a_note("first", f"{next(numbers):016x}") for _ in range(BATCH)]
        turns = count()
        return lambda: report.note(notes[next(turns) % BATCH])

    return {
        FLOOR: lambda _: lambda: None,
        "cause and prefix": lambda _: tell,
        "a note, made": lambda _: making(),
        "cached": lambda report: lambda: report.note(cached),
        "broken": lambda report: lambda: report.note(broken),
        "of 60 prefixes": alone,
        "beyond the prefixes": too_many,
    }


def timed(work: Callable[[], object]) -> float:
    """Microseconds a call."""
    begun = time.perf_counter()
    for _ in range(BATCH):
        work()
    return (time.perf_counter() - begun) / BATCH * 1e6


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Turn by turn, so that a noisy moment is everybody's."""
    db = create_async_engine(NOWHERE)
    found: dict[str, list[float]] = {name: [] for name in sides()}
    for _ in range(rounds + 1):
        for name, work in sides().items():
            found[name].append(timed(work(CacheReport(db))))
    return {
        name: {
            "median_us": round(statistics.median(times[1:]), 2),
            "best_us": round(min(times[1:]), 2),
            "worst_us": round(max(times[1:]), 2),
        }
        for name, times in found.items()
    }


def show(result: Mapping[str, Mapping[str, float]]) -> bool:
    """False where the bound is broken."""
    print(f"{'':<22}{'median us':>10}{'best':>8}{'bound':>8}")
    for name, row in result.items():
        bound = "" if name == FLOOR else f"{BOUND_US:.0f}"
        print(f"{name:<22}{row['median_us']:>10.2f}{row['best_us']:>8.2f}{bound:>8}")
    return all(row["median_us"] <= BOUND_US for row in result.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    load_average = round(os.getloadavg()[0], 2)
    found = measure(options.rounds)
    good = show(found)
    result: dict[str, Any] = {
        "load_average_before": load_average,
        "calls_each": BATCH * options.rounds,
    }
    print(json.dumps(result | found))
    if not options.dry:
        print(record("cache-report", result | found))
        sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
