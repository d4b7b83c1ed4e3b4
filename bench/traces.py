"""Measure what traces cost a request: `python -m bench.traces [--seconds S] [--rounds N] [--dry]`.

Starts a `tollgate up` for each side: no traces; traces of which none is recorded, one request in
ten, or all; and one in ten while the collector hangs. Whole answers of an upstream that costs
nothing go through them in turns, each side between two turns of no traces, which it is compared
with: what the machine does meanwhile falls upon both. The processor time of a request is that of
the worker that served it, with the threads that make and send spans. Beside it stands what the
stages of a request take, which have their times whether or not anybody records them.

Figures are medians over the rounds, with the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bench.gateway import CONNECTIONS, WARM_UP_S, Bench, Meter, checked, open_bench
from bench.tools.load import Target
from bench.tools.record import record
from foundation.request_context import LOG_CONTEXT, LogContext, current_stages
from foundation.stages import Stage
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter

TRACES = """
[traces]
endpoint = "{url}"
ratio = {ratio}
"""
MODEL = "each"
MANY = 20_000


class Receiver(BaseHTTPRequestHandler):
    """Takes whatever comes and answers as a collector does; one that hangs answers nothing."""

    server: Collector

    def do_POST(self) -> None:
        self.server.num_bytes += len(self.rfile.read(int(self.headers["content-length"])))
        if self.server.hangs:
            self.server.ended.wait()
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Collector(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, *, hangs: bool) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.hangs, self.ended, self.num_bytes = hangs, threading.Event(), 0

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yield its URL."""
        with self:
            threading.Thread(target=self.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{self.server_port}"
            self.ended.set()
            self.shutdown()


def stages_us() -> float:
    """Measure what the stages of a plain generation take, in microseconds."""
    telemetry = Telemetry(models=[MODEL])

    def request(*, staged: bool) -> None:
        LOG_CONTEXT.set(LogContext("req_" + "1" * 32))
        meter = RequestMeter(telemetry, MODEL)
        if not staged:
            return
        with current_stages().begin("authenticate"):
            pass
        meter.stages.add(Stage("read", time.perf_counter(), time.perf_counter()))
        for name in ("prepare", "admit", "settle"):
            with meter.stages.begin(name):
                pass
        with meter.begin_attempt("m/0", "id"):
            meter._add_queue(0.001)
            meter._add_prefill(time.perf_counter())

    def took_us(*, staged: bool) -> float:
        begun_at = time.process_time()
        for _ in range(MANY):
            request(staged=staged)
        return (time.process_time() - begun_at) / MANY * 1e6

    took_us(staged=True)
    return statistics.median(took_us(staged=True) - took_us(staged=False) for _ in range(5))


def run(bench: Bench, rounds: int) -> dict[str, Any]:
    load_average = round(os.getloadavg()[0], 2)
    with ExitStack() as stack:
        well, hanging = Collector(hangs=False), Collector(hangs=True)
        url, hanging_url = (stack.enter_context(each.running()) for each in (well, hanging))
        settings = {
            "off": "",
            "none": TRACES.format(url=url, ratio=0.0),
            "tenth": TRACES.format(url=url, ratio=0.1),
            "hanging": TRACES.format(url=hanging_url, ratio=0.1),
            "all": TRACES.format(url=url, ratio=1.0),
        }
        os.sched_setaffinity(0, bench.loaded)
        upstreams = {MODEL: bench.upstreams(stack)[MODEL]}
        sides = {
            name: Side(bench, *stack.enter_context(
                bench.serving(upstreams, 1, bench.served, name=name, settings=written)
            ))
            for name, written in settings.items()
        }  # fmt: skip
        for side in sides.values():
            bench.load.closed(side.target, CONNECTIONS, WARM_UP_S)
        off = sides.pop("off")
        off_us = [off.measure_us()]
        us: dict[str, list[float]] = {name: [] for name in sides}
        more: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            turns = list(sides.items())
            for name, side in turns if number % 2 else reversed(turns):
                us[name].append(side.measure_us())
                off_us.append(off.measure_us())
                more[name].append(2 * us[name][-1] / sum(off_us[-2:]) - 1)
    return {
        "seconds_each": bench.seconds,
        "rounds": rounds,
        "load_average_before": load_average,
        "stages_us": round(stages_us(), 2),
        "more": {name: spread(found, 4) for name, found in more.items()},
        "us": {name: spread(found, 1) for name, found in {"off": off_us, **us}.items()},
        "collector_bytes": well.num_bytes,
    }


class Side:
    """One `tollgate up`, and what its requests cost."""

    def __init__(self, bench: Bench, base: str, key: str, meter: Meter) -> None:
        self._bench, self._meter = bench, meter
        self.target = Target(base, MODEL, key, stream=False)

    def measure_us(self) -> float:
        """Measure the processor time of a request for a while, in microseconds."""
        before = self._meter.cpu_s()["serving"]
        closed = checked(self._bench.load.closed(self.target, CONNECTIONS, self._bench.seconds))
        return 1e6 * (self._meter.cpu_s()["serving"] - before) / float(closed["requests"])


def spread(found: list[float], digits: int) -> dict[str, float]:
    """Return the median of some figures, and between which ones half of them are."""
    low, median, high = (round(each, digits) for each in statistics.quantiles(found, n=4))
    return {"median": median, "low": low, "high": high}


def table(result: dict[str, Any]) -> str:
    us, stages = result["us"], result["stages_us"]
    off = us["off"]["median"]
    lines = [f"{'CPU of a request':34}{'us':>8}{'more':>8}  half of all rounds  goal"]
    lines.append(f"{'no traces':34}{off:8.1f}")
    lines.append(f"{'of that the stages':34}{stages:8.1f}{stages / off:8.1%}{'':20}  <= 1 %")
    for name, title, goal in (
        ("none", "none recorded", "<= 1 %"),
        ("tenth", "one in ten recorded", "<= 5 %"),
        ("hanging", "one in ten, the collector hangs", "<= 5 %"),
        ("all", "all recorded", ""),
    ):
        more = result["more"][name]
        half = f"{more['low']:.1%} to {more['high']:.1%}"
        lines.append(
            f"{title:34}{us[name]['median']:8.1f}{more['median']:8.1%}  {half:18}  {goal}".rstrip()
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each turn")
    parser.add_argument("--rounds", type=int, default=30, help="of all sides")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    with open_bench(options.seconds, None) as bench:
        result = run(bench, options.rounds)
    print(table(result))
    print(json.dumps(result))
    if not options.dry:
        print(record("traces", result))


if __name__ == "__main__":
    main()
