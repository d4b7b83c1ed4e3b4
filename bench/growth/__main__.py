"""Measure what a request costs in an installation that has grown, beside an empty one.

    python -m bench.growth [--seconds S] [--rounds N] [--keys N] [--orgs N] [--models N]
        [--ledger ROWS] [--kit FOLDER] [--dry]

Two installations run side by side (`tollgate up`, one worker each, everything on, in front of an
upstream that costs nothing). One is new: one organization, one key, one model. The other has
--keys API keys of --orgs organizations, --models models and --ledger transfers in its ledger, made
by SQL. All its keys are used, each connection at random, so that all its organizations are active
at once. The same load goes to both in turns, after each key was used once and what that has noted
is written; the figure is what the worker's and the stores' processor times of a request are of the
new one's, in the median of the rounds. A recorded run ends with 1 where the worker's is above
BOUND.

The new one's single organization is busy, so its requests pass from slices of its limits; with none
of 5,000 busy, each request of the grown one takes the exact path, two scripts of Redis. That is
the dearest mix there is, and on purpose: a tenant that asks now and then has to cost what a request
costs. The stores' share of it is what two scripts are, and a row of a balance, an hour and a cache
report for each request where the new one's requests add to the same rows. Both get the same rate,
SHARE of what the slower one manages: what has more to do at once does more of it with one wake-up,
and the stores, on their one core, would let the worker of the grown one wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from bench.gateway import CONNECTIONS, Bench, Meter, checked, open_bench
from bench.tools.load import Connection, Tally, Target
from bench.tools.record import record
from gateway.auth.bearer.last_used import FLUSH_INTERVAL_S
from gateway.home import Home
from gateway.processes.embedded_databases import postgres_url
from gateway.secret import Secret
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, PREFIX, hash_key, new_secret

BOUND = 1.05
SEED = 20
ROWS_AT_ONCE = 500_000
WRITTEN_S = FLUSH_INTERVAL_S + 2.0
"""A worker has written by then whatever it noted in memory."""
SHARE = 0.7
REVENUE = "revenue:each"
SIDES = ("new", "grown")
KINDS = ("serving", "stores")


@dataclass(frozen=True)
class Side:
    """One installation under load. `requests`: those of its keys, ready to be sent."""

    target: Target
    requests: Sequence[bytes]
    meter: Meter
    drawn: random.Random = field(default_factory=lambda: random.Random(SEED))

    def use_each(self) -> None:
        """Use every key once, so that each is known to the worker as one in use is."""
        uvloop.run(self._send((None, each) for each in self.requests))

    def measure(self, seconds: float, rate_per_s: float | None = None) -> dict[str, float]:
        """Return the processor time of a request in microseconds, and how many there were a
        second. `rate_per_s`: how many are sent; None: as many as are answered."""
        before = self.meter.cpu_s()
        tally = uvloop.run(self._send(self._at_random(seconds, rate_per_s)))
        after = self.meter.cpu_s()
        found = checked(tally.summary())
        num = found["requests"]
        cpu_us = {kind: round(1e6 * (after[kind] - before[kind]) / num, 1) for kind in KINDS}
        return {**cpu_us, "requests_per_s": found["requests_per_s"]}

    def _at_random(
        self, seconds: float, rate_per_s: float | None
    ) -> Iterator[tuple[float | None, bytes]]:
        """Yield requests, and how many seconds from now each is to be sent; None: at once."""
        if rate_per_s is not None:
            for number in range(round(seconds * rate_per_s)):
                yield number / rate_per_s, self.drawn.choice(self.requests)
            return
        ends_at = time.perf_counter() + seconds
        while time.perf_counter() < ends_at:
            yield None, self.drawn.choice(self.requests)

    async def _send(self, requests: Iterable[tuple[float | None, bytes]]) -> Tally:
        """Send each request, as soon as a connection is free for it or at its moment."""
        tally, begun_at = Tally(), time.perf_counter()
        waiting = iter(requests)

        async def work() -> None:
            connection = await Connection.open(self.target)
            try:
                for moment, request in waiting:
                    if moment is not None:
                        await asyncio.sleep(begun_at + moment - time.perf_counter())
                    asked_at = time.perf_counter()
                    tally.add(await connection.ask(request), asked_at)
            finally:
                connection.close()

        await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
        tally.elapsed_s = time.perf_counter() - begun_at
        return tally


async def grow(home: Home, *, keys: int, orgs: int, ledger: int) -> list[str]:
    """Fill the database of an installation. Returns the secrets of its keys."""
    conn = await asyncpg.connect(postgres_url(home).replace("+asyncpg", ""))
    try:
        secrets = await _add_keys(conn, Secret.load(home.secret), keys, orgs)
        await _add_transfers(conn, ledger, orgs)
        await conn.execute("VACUUM ANALYZE")
    finally:
        await conn.close()
    return secrets


async def _add_keys(
    conn: asyncpg.Connection[Any], secret: Secret, keys: int, orgs: int
) -> list[str]:
    """Add organizations with a project each, which share the keys out evenly."""
    await conn.execute(
        "INSERT INTO orgs (id, name) SELECT 'org_grown' || n, 'org ' || n"
        " FROM generate_series(0, $1::int - 1) AS n",
        orgs,
    )
    await conn.execute(
        "INSERT INTO projects (id, org_id, name)"
        " SELECT 'proj_grown' || n, 'org_grown' || n, 'project'"
        " FROM generate_series(0, $1::int - 1) AS n",
        orgs,
    )
    made, current = [new_secret(PREFIX) for _ in range(keys)], secret.current
    pepper = current.derive(PEPPER_PURPOSE)
    await conn.copy_records_to_table(
        "api_keys",
        columns=[
            *("id", "org_id", "project_id", "name", "key_hash", "pepper_id"),
            *("prefix", "last_four", "scopes", "plan"),
        ],
        records=[
            (
                *(f"key_grown{n}", f"org_grown{n % orgs}", f"proj_grown{n % orgs}", f"key {n}"),
                *(hash_key(pepper, each), current.id, PREFIX, each[-4:]),
                *(["inference"], "default"),
            )
            for n, each in enumerate(made)
        ],
    )
    return made


async def _add_transfers(conn: asyncpg.Connection[Any], rows: int, orgs: int) -> None:
    """Add what so many requests of the last month have booked, each from the receivables of its
    organization to the revenue."""
    await conn.execute(
        "INSERT INTO accounts (id) SELECT 'receivable:org_grown' || n"
        " FROM generate_series(0, $1::int - 1) AS n UNION ALL SELECT $2 ON CONFLICT DO NOTHING",
        orgs,
        REVENUE,
    )
    for first in range(0, rows, ROWS_AT_ONCE):
        await conn.execute(
            """
            INSERT INTO transfers (
                id, event_id, debit, credit, amount_pico, kind, phase, admitted_at, posted_at
            )
            SELECT id, id, 'receivable:org_grown' || n % $3::int, $4::text, 1250000, 'usage',
                'posted', at, at
            FROM generate_series($1::int, $2::int - 1) AS n,
                LATERAL (SELECT 'grown' || lpad(n::text, 12, '0') AS id) AS named,
                LATERAL (SELECT now() - interval '30 days'
                    + n * interval '30 days' / $5::float8 AS at) AS moment
            """,
            first,
            min(rows, first + ROWS_AT_ONCE),
            orgs,
            REVENUE,
            float(rows),
        )


def run(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, bench.loaded)
    with ExitStack() as stack:
        url = bench.upstreams(stack)["each"]
        few = {"each": url}
        many = few | {f"each-{n}": url for n in range(1, options.models)}
        sides: dict[str, Side] = {}
        for name, models in zip(SIDES, (few, many), strict=True):
            base, key, meter = stack.enter_context(
                bench.serving(models, 1, bench.served, name=name)
            )
            keys, home = [key], Home(bench.folder / f"home{name}")
            if name == "grown":
                made = grow(home, keys=options.keys, orgs=options.orgs, ledger=options.ledger)
                keys = asyncio.run(made)
            targets = [
                Target(base, list(models)[n % len(models)], each, stream=False)
                for n, each in enumerate(keys)
            ]
            sides[name] = Side(targets[0], [each.request() for each in targets], meter)
        for side in sides.values():
            side.use_each()
        time.sleep(WRITTEN_S)
        fastest = [side.measure(min(1.0, bench.seconds)) for side in sides.values()]
        rate_per_s = SHARE * min(each["requests_per_s"] for each in fastest)
        rounds = [
            {name: side.measure(bench.seconds, rate_per_s) for name, side in sides.items()}
            for _ in range(options.rounds)
        ]
        memory = {name: side.meter.memory_mb() for name, side in sides.items()}
    times = {
        kind: round(
            statistics.median(each["grown"][kind] / each["new"][kind] for each in rounds), 3
        )
        for kind in KINDS
    }
    sizes = {name: getattr(options, name) for name in ("keys", "orgs", "models", "ledger")}
    return {"sizes": sizes, "times": times, "rounds": rounds, "memory_mb": memory}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'median of the rounds':32}{'new':>12}{'grown':>12}{'times':>9}"]
    for kind, title in zip(KINDS, ("CPU us/request", "stores' CPU us/request"), strict=True):
        cells = [statistics.median(each[side][kind] for each in result["rounds"]) for side in SIDES]
        lines.append(f"{title:32}{cells[0]:12.1f}{cells[1]:12.1f}{result['times'][kind]:8.2f}x")
    resident = [result["memory_mb"][side]["resident"] for side in SIDES]
    lines.append(f"{'memory MB, resident':32}{resident[0]:12.1f}{resident[1]:12.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--orgs", type=int, default=5_000)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--ledger", type=int, default=10_000_000, help="transfers")
    parser.add_argument("--kit", type=Path, help="folder with stub.c: the upstream")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    with open_bench(options.seconds, options.kit) as bench:
        result = run(bench, options)
    print(table(result))
    print(json.dumps(result))
    if not options.dry:
        print(record("growth", result))
        sys.exit(int(result["times"]["serving"] > BOUND))


if __name__ == "__main__":
    main()
