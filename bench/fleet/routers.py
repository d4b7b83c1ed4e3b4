"""`bench.fleet routers`: routers on a trace near saturation."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from bench.fleet.anchors import ANCHORS
from bench.fleet.goals import FleetGoal, tell
from bench.fleet.ours import PredictedTime
from bench.fleet.report import FleetReport, fixed_limit, report
from bench.fleet.trace import (
    CONVERSATION,
    DOCUMENTS,
    TracedRequest,
    TraceError,
    TraceShape,
    make_trace,
    read_trace,
    statistics_of,
)
from bench.fleet.world import FleetSetup, FleetWorld, Router
from bench.sim.cost import Cost, floor
from gateway.lanes import Slo

SHARE_OF_FLOOR = 0.7
"""The share of a device's speed that steps reach."""
SLO = Slo(ttft_s=2.0, tpot_s=0.05)
OURS = "Tollgate"

MakeRouter = Callable[[FleetWorld, random.Random], Router]


def gpu_cost() -> Cost:
    """Return the costs of Llama-3.1-8B on one H200 at SHARE_OF_FLOOR of what it could do."""
    least = floor()
    slower = {
        name: getattr(least, name) / SHARE_OF_FLOOR
        for name in least.__struct_fields__
        if name != "fitted"
    }
    return msgspec.structs.replace(least, **slower)


def faster(requests: Iterable[TracedRequest], times: float) -> list[TracedRequest]:
    return [msgspec.structs.replace(r, arrival_s=r.arrival_s / times) for r in requests]


def run(
    requests: Sequence[TracedRequest], setup: FleetSetup, make: MakeRouter, seed: int
) -> FleetReport:
    world = FleetWorld(setup)
    fates = world.run(requests, make(world, random.Random(seed)))
    return report(world, fates, fixed_limit(SLO), SLO.tpot_s)


def mean_of(reports: Sequence[FleetReport]) -> FleetReport:
    fields: dict[str, Any] = {
        name: fmean(getattr(each, name) for each in reports)
        for name in FleetReport.__struct_fields__
        if getattr(reports[0], name) is not None
    }
    return FleetReport(**{"error_p90": None} | fields)


HEAD = "hits  TTFT p50     p99  TPOT p99  goodput  refused  spread  error p90"


def line_of(found: FleetReport) -> str:
    error = "" if found.error_p90 is None else f"{found.error_p90:9.1%}"
    return (
        f"{found.hits:5.1%} {found.ttft_p50_s:8.3f} {found.ttft_p99_s:8.2f}"
        f" {1000 * found.tpot_p99_s:6.1f} ms {found.goodput:8.3f} {found.refused:8.1%}"
        f" {found.spread:7.2f} {error}"
    )


def parser_of(command: str, text: str, *, takes_trace: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}", description=text)
    if takes_trace:
        parser.add_argument("--trace", type=Path, help="Mooncake's JSONL; made traces if none")
        parser.add_argument("--speed", type=_speed, default=3.0, help="times the trace's")
    parser.add_argument("--seeds", type=_count, default=3, help="made traces of each shape")
    parser.add_argument("--requests", type=_count, help="of each trace only so many")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: not a number from 1 on")
    return int(text)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: not a number above 0")
    return speed


def traces_of(arguments: argparse.Namespace, shape: TraceShape) -> list[list[TracedRequest]]:
    """Return the traces that a command was asked for, each at its speed. Raises: TraceError where a
    request of one is longer than what a replica can hold."""
    if arguments.trace is not None:
        found = [read_trace(arguments.trace)]
        most = FleetSetup(cost=gpu_cost()).kv_tokens
        longest = max(each.input_length + each.output_length for each in found[0])
        if longest > most:
            raise TraceError(
                f"{arguments.trace}: a request has {longest} tokens; a replica can hold {most}"
            )
    else:
        found = [make_trace(shape, seed) for seed in range(1, arguments.seeds + 1)]
    return [faster(each, arguments.speed)[: arguments.requests] for each in found]


def main(command: str, arguments: list[str]) -> int:
    parser = parser_of(command, __doc__ or "")
    makers: dict[str, MakeRouter] = {**ANCHORS, OURS: PredictedTime}
    parser.add_argument("--routers", nargs="*", choices=makers, help="only these")
    asked = parser.parse_args(arguments)
    setup = FleetSetup(cost=gpu_cost())
    if asked.routers:
        makers = {name: make for name, make in makers.items() if name in asked.routers}
    shapes = [CONVERSATION] if asked.trace is not None else [CONVERSATION, DOCUMENTS]
    goods: dict[str, float] = {}
    for shape in shapes:
        traces = traces_of(asked, shape)
        print(f"{shape.name if asked.trace is None else asked.trace}, x{asked.speed:g}:")
        print(f"  {msgspec.json.encode(statistics_of(traces[0])).decode()}")
        print(f"  {'':<18} {HEAD}")
        for name, make in makers.items():
            began_s = time.process_time()
            found = mean_of([run(each, setup, make, at) for at, each in enumerate(traces)])
            took_s = (time.process_time() - began_s) / len(traces)
            print(f"  {name:<18} {line_of(found)}   ({took_s:.1f} s)", flush=True)
            goods[f"{shape.name} {name}"] = found.goodput
        if OURS in makers:
            stale = msgspec.structs.replace(setup, status_interval_s=1.0)
            found = mean_of([run(each, stale, PredictedTime, at) for at, each in enumerate(traces)])
            goods[f"{shape.name} stale"] = found.goodput
            print(f"  {'Tollgate, 1 s old':<18} {line_of(found)}")
    goals = [
        FleetGoal(name=name, text=text, reached=goods[run_name], wanted=wanted)
        for name, text, run_name, wanted in (
            ("G1", "goodput on the conversation trace", f"{CONVERSATION.name} {OURS}", 0.93),
            ("G1", "the same with statuses 1 s old", f"{CONVERSATION.name} stale", 0.88),
            ("G2", "goodput on the synthetic trace", f"{DOCUMENTS.name} {OURS}", 0.92),
        )
        if run_name in goods
    ]
    return tell(goals)
