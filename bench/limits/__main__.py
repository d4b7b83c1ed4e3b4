"""Count what passes when several gateways share limits, against the bound.

    python -m bench.limits [--seconds S] [--dry]

Four limiter processes, one of them killed, at 64 and at 512 requests at once; then `tollgate up`
with four workers, at the same; then what a request costs Redis, asked for each and with slices, and
whom slices refuse at nine tenths of a limit. The result goes to `bench/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.limits import gateways, processes, trips
from bench.limits.processes import Scenario
from bench.tools.record import record
from gateway.home import Home
from gateway.processes import embedded_databases as embedded

STOP_TIMEOUT_S = 10.0
CONCURRENCIES = (64, 512)
LEASE_TTL_S = 6.0
MAX_TRIPS_S = 10.0
"""The longest that each way of serving is watched; more shows nothing else."""
TIMES, GOAL_PER_S = 10, 30_000


def of_processes(folder: Path, seconds: float) -> dict[str, Any]:
    home = Home(folder / "redis")
    home.create()
    server = asyncio.run(embedded.start_redis(home, durable=False))
    found = {}
    try:
        for concurrency in CONCURRENCIES:
            scenario = Scenario(
                concurrency=concurrency,
                scale=max(64, concurrency // 4),
                seconds=seconds,
                lease_ttl_s=LEASE_TTL_S,
                killed_after_s=seconds / 6,
                await_expiry=True,
            )
            outcome = processes.run(embedded.redis_url(home), folder, scenario)
            found[str(concurrency)] = msgspec.to_builtins(outcome)
    finally:
        asyncio.run(server.stop(STOP_TIMEOUT_S))
    return found


def of_gateways(folder: Path, seconds: float) -> dict[str, Any]:
    with gateways.running(folder / "gateways") as stack:
        return {
            str(concurrency): msgspec.to_builtins(gateways.run(stack, concurrency, seconds))
            for concurrency in CONCURRENCIES
        }


def of_trips(folder: Path, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    home = Home(folder / "trips")
    home.create()
    server = asyncio.run(embedded.start_redis(home, durable=False))
    url = embedded.redis_url(home)
    try:
        costs = trips.run(url, min(seconds, MAX_TRIPS_S))
        near = asyncio.run(trips.near_limit(url, seconds))
    finally:
        asyncio.run(server.stop(STOP_TIMEOUT_S))
    return msgspec.to_builtins(costs), {"0.9": msgspec.to_builtins(near)}


def show(title: str, found: dict[str, Any], columns: tuple[str, ...]) -> None:
    print(f"{title:<22}" + "".join(f"{name:>22}" for name in columns))
    for concurrency, outcome in found.items():
        cells = (outcome[name] for name in columns)
        texts = (f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells)
        print(f"{concurrency:<22}" + "".join(f"{text:>22}" for text in texts))


def show_goals(costs: dict[str, Any]) -> None:
    """Print which goals of what a request costs Redis are met."""
    for name, asked_each in costs.items():
        way, _, load = name.partition(", ")
        if way == "exact":
            with_slices = costs[f"slices, {load}"]["redis_us_per_request"]
            times = asked_each["redis_us_per_request"] / with_slices
            said = f"{load}: {times:.1f} times cheaper with slices, of {TIMES}"
            print(f"{said}: {met(times >= TIMES)}")
        elif way == "one org":
            cores = asked_each["redis_us_per_request"] * GOAL_PER_S / 1e6
            said = f"{GOAL_PER_S:,} requests/s of one organization, {load}: {cores:.1%} of a core"
            print(f"{said} of Redis: {met(cores <= 1)}")


def met(is_met: bool) -> str:
    return "met" if is_met else "not met"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tgl-", dir="/tmp"))
    try:
        limiters = of_processes(folder, options.seconds)
        show(
            "processes",
            limiters,
            ("admitted_ratio", "with_steps_ratio", "double_settles", "miscounted_us"),
        )
        whole = of_gateways(folder, options.seconds)
        show("gateways", whole, ("admitted_ratio", "with_steps_ratio", "admitted", "refused"))
        costs, near = of_trips(folder, options.seconds)
        show("trips", costs, trips.Trips.__struct_fields__)
        show_goals(costs)
        show("share of the limit", near, trips.NearLimit.__struct_fields__)
    finally:
        shutil.rmtree(folder)
    if not options.dry:
        print(
            record(
                "limits", {"processes": limiters, "gateways": whole, "trips": costs, "near": near}
            )
        )


if __name__ == "__main__":
    main()
