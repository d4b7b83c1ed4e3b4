"""Measure what the metrics cost: `python -m bench.metrics [--rounds N] [--dry]`.

A scrape: eight workers have written their files, with 200 models, each of which was asked on three
routes and answered with three statuses, and 1,000 organizations; one process adds the files up and
writes the page in each format, with and without the counts by organization. A request: what a
stream of 64 steps through one worker counts and times, and what its organization adds. Times are of
the processor, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.tools.record import record
from billing.events import Attempt, Quantities, UsageEvent
from engine.fairness import LANE_WEIGHTS
from engine.fake.engine import FAKE_CONFIG, FakeCore
from foundation.request_context import LOG_CONTEXT, LogContext
from gateway.generation_events import MeteredUsage, ReplicaEvent, TextDelta
from gateway.lanes import SLO_OUTCOMES, Slo
from gateway.telemetry.exposition import OPENMETRICS, PROTOBUF, TEXT
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter

WORKERS, TENANTS = 8, 1000
MODELS = [f"model-{number}" for number in range(200)]
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
STATUSES = ("200", "429", "503")
STEPS = 64
REQUESTS = 500
"""In a round."""
FORMATS = {"text": TEXT, "openmetrics": OPENMETRICS, "protobuf": PROTOBUF}


def fill(folder: Path, *, counts_tenants: bool) -> None:
    """Write what one worker counts in a while."""
    telemetry = Telemetry(models=MODELS, shared_folder=folder, counts_tenants=counts_tenants)
    drawn = random.Random(os.getpid())
    status = FakeCore(FAKE_CONFIG).status()
    for model in MODELS:
        for route in ROUTES:
            for code in STATUSES:
                telemetry.answered(route=route, model=model, status=code)
        telemetry.count_tokens(model, uncached=9, cache_read=9, cache_write=9, output=9)
        for histogram_of in (
            *(telemetry.ttft_of, telemetry.itl_of, telemetry.tpot_of, telemetry.queue_time_of),
        ):
            for _ in range(50):
                histogram_of(model).observe(drawn.lognormvariate(-3, 2))
            histogram_of(model).exemplify(0.05, trace="ab" * 16, at=time.time())
        for lane in LANE_WEIGHTS:
            for outcome in SLO_OUTCOMES:
                telemetry.slo_requests_of(model, lane, outcome).inc()
        for gauge in telemetry.engine_gauges.gauges.values():
            gauge.labels(model, model).set(status.num_blocks)
    if telemetry.tenants is not None:
        for number in range(TENANTS):
            org = f"org_{number:032x}"
            for code in STATUSES:
                telemetry.tenants.answered(org, int(code))
            telemetry.tenants.booked([event_of(org)])


def event_of(org: str) -> UsageEvent:
    attempt = Attempt(
        id="a", request_id="r", org=org, project="p", key="k", model=MODELS[0], prices={},
        admitted_at=0.0,
    )  # fmt: skip
    quantities = Quantities(uncached_input=100, cache_read=900, output=STEPS)
    return UsageEvent(attempt=attempt, quantities=quantities, occurred_at=0.0)


def scrape(folder: Path, rounds: int, *, counts_tenants: bool) -> dict[str, Any]:
    """Measure the page of each format: milliseconds, kilobytes and lines."""
    telemetry = Telemetry(models=MODELS, shared_folder=folder, counts_tenants=counts_tenants)
    found: dict[str, Any] = {}
    for name, accept in FORMATS.items():
        page = telemetry.render(accept).content  # reads each key, once
        took = [cpu_s(partial(telemetry.render, accept)) for _ in range(rounds)]
        found[name] = {
            "ms": round(statistics.median(took) * 1e3, 1),
            "first_kb": round(len(page) / 1e3),
            "series": page.count(b"\n"),
        }
    found["protobuf"].pop("series")
    found["files_kb"] = round(sum(each.stat().st_blocks for each in folder.iterdir()) / 2)
    return found


def cpu_s(work: Callable[[], object]) -> float:
    begun_at = time.process_time()
    work()
    return time.process_time() - begun_at


def request_us(folder: Path, rounds: int) -> dict[str, float]:
    """Measure what one streamed request counts, in microseconds, and its organization beside."""
    telemetry = Telemetry(models=MODELS, shared_folder=folder, counts_tenants=True)
    assert telemetry.tenants is not None
    tenants, model, slo = telemetry.tenants, MODELS[0], Slo(ttft_s=1.0, tpot_s=1.0)
    steps = [
        ReplicaEvent(
            items=(TextDelta(index=0, text="x"),),
            usage=MeteredUsage(uncached_input=100, cache_read=900, output=output + 1),
            finished=output == STEPS - 1,
        )
        for output in range(STEPS)
    ]
    event = event_of("org_0")

    def request() -> None:
        LOG_CONTEXT.set(LogContext("req_" + "1" * 32))
        meter = RequestMeter(telemetry, model)
        meter.promise("interactive", slo)
        meter.begin_attempt("m/0", "id")
        for each in steps:
            meter.received(each, streams=True)
        meter.wrote_first()
        meter.used(event)
        telemetry.answered(route=ROUTES[0], model=model, status="200")
        meter.judge(200)
        meter.exemplify("ab" * 16, 1.0)

    def by_tenant() -> None:
        tenants.answered("org_0", 200)
        tenants.booked([event])

    def us(work: Callable[[], None]) -> float:
        def many() -> None:
            for _ in range(REQUESTS):
                work()

        took = [cpu_s(many) for _ in range(rounds)]
        return round(statistics.median(took) / REQUESTS * 1e6, 2)

    request()
    return {"stream_of_64_steps": us(request), "its_organization": us(by_tenant)}


def part(name: str, folder: Path, rounds: int, *, counts_tenants: bool) -> Any:
    """Run a part in a process of its own, as prometheus-client reads its folder when imported."""
    command = [sys.executable, "-m", "bench.metrics", "--part", name, "--folder", str(folder)]
    command += ["--rounds", str(rounds), *(["--tenants"] if counts_tenants else [])]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    return json.loads(done.stdout or b"null")


def run(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"load_average_before": round(os.getloadavg()[0], 2)}
    for name, counts_tenants in (("without_tenants", False), ("with_tenants", True)):
        with tempfile.TemporaryDirectory(prefix="tg-bench-", dir="/tmp") as folder:
            for _ in range(WORKERS):
                part("fill", Path(folder), rounds, counts_tenants=counts_tenants)
            found[name] = part("scrape", Path(folder), rounds, counts_tenants=counts_tenants)
            if counts_tenants:
                found["request_us"] = part("request", Path(folder), rounds, counts_tenants=True)
    return found


def table(found: dict[str, Any]) -> str:
    lines = [f"{'a scrape, 8 workers, 200 models':36}{'ms':>8}{'KB':>8}"]
    for side, title in (("without_tenants", ""), ("with_tenants", ", 1,000 organizations")):
        for name in FORMATS:
            one = found[side][name]
            lines.append(f"{name + title:36}{one['ms']:8.1f}{one['first_kb']:8,}")
    lines.append(f"{'a request':36}{'us':>8}")
    for name, us in found["request_us"].items():
        lines.append(f"{name.replace('_', ' '):36}{us:8.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    parser.add_argument("--part", choices=("fill", "scrape", "request"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tenants", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "fill":
        fill(options.folder, counts_tenants=options.tenants)
    elif options.part == "scrape":
        print(json.dumps(scrape(options.folder, options.rounds, counts_tenants=options.tenants)))
    elif options.part == "request":
        print(json.dumps(request_us(options.folder, options.rounds)))
    else:
        found = run(options.rounds)
        print(table(found))
        if not options.dry:
            print(record("metrics", found))


if __name__ == "__main__":
    main()
