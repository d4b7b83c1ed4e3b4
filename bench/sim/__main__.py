"""`python -m bench.sim [scenario ...]`: each by virtual token counters, first come first served and
strict priority, in one run. `--fit` times the real engine and writes the constants of its steps;
`--check` holds the simulator against the engine on another case; `--speed` says how many requests
the simulator gets through in a minute. Both end with 1 where that is not what is wanted. `--loops`
says what the engine's choices by the clock are worth: how many threads run recorded kernels, and
how large chunks of prompts are.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bench.sim import paces, thread_team
from bench.sim.cost import FOLDER, Cost, floor, load, save
from bench.sim.orderings import FAIR, ORDERINGS
from bench.sim.report import Report, moved, report
from bench.sim.scenarios import SCENARIOS, Scenario, short
from bench.sim.world import Session, World
from bench.tools.record import record

COST = FOLDER / "cost_penny-cpu.json"
SIZE = 3000
SPEED_SIZE = 200_000
SPEED_GOAL = 1_000_000
"""Requests a minute, on one core, with admission."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.sim", description="The scheduler, simulated.")
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; all if none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=SIZE, help="sessions, about, but of long")
    parser.add_argument(
        "--cost", type=Path, help="constants, as --fit writes them; long has a GPU's if none"
    )
    parser.add_argument("--fit", action="store_true", help="time the real engine; write --cost")
    parser.add_argument("--check", action="store_true", help="against the real engine")
    parser.add_argument("--speed", action="store_true", help="of the simulator itself")
    parser.add_argument("--loops", action="store_true", help="threads and chunks by the clock")
    parser.add_argument("--record", action="store_true", help="keep the figures; on quiet cores")
    arguments = parser.parse_args()
    if unknown := set(arguments.scenarios) - SCENARIOS.keys():
        parser.error(f"scenarios: {', '.join(sorted(unknown))}: not of {', '.join(SCENARIOS)}")
    if arguments.size < 1:
        parser.error(f"--size {arguments.size}: at least 1")
    if arguments.fit:
        _fit(arguments.cost or COST)
        return
    gc.disable()  # nothing here that comes and goes refers to itself, and what is kept is large
    try:
        _run(arguments)
    finally:
        gc.enable()


def _run(arguments: argparse.Namespace) -> None:
    """Run what is asked for, print it, and exit with a message if it misses its goal."""
    cost = load(arguments.cost or COST)
    if arguments.check:
        result, name = _check(cost), "sim_check"
    elif arguments.loops:
        result, name = _compare_loops(), "sim_loops"
    elif arguments.speed:
        result, name = _speed(cost, arguments.seed), "sim_speed"
    else:
        names = arguments.scenarios or list(SCENARIOS)
        # A prompt of a million tokens would take a CPU the better part of a day.
        costs = dict.fromkeys(names, cost)
        if arguments.cost is None:
            costs |= {name: floor() for name in names if name.startswith("long")}
        result, name = _compare(costs, arguments.seed, arguments.size), "sim"
    if arguments.record:
        print(f"recorded in {record(name, result)}")
    if result.get("within") is False:
        sys.exit("the simulator is further from the engine than allowed")
    if result.get("met") is False:
        sys.exit("the simulator is slower than its goal")


def _fit(path: Path) -> None:
    from bench.sim.fit import fit  # not for those who only simulate: torch is slow to load

    cost = fit()
    save(cost, path)
    print(path.read_text())


def _check(cost: Cost) -> dict[str, Any]:
    from bench.sim.fit import ALLOWED, check

    result = check(cost) | {"fitted_on": cost.fitted.get("machine")}
    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    for name, deviation in result["deviations"].items():
        said = "within" if abs(deviation) <= ALLOWED else "beyond"
        print(f"{name}: {deviation:+.1%} of the engine's, {said} {ALLOWED:.0%}")
    return result


def _speed(cost: Cost, seed: int) -> dict[str, Any]:
    """Measure the speed of the scheduler alone, and with all tenants' limits and early refusals
    before it."""
    scenario, found = short(cost, seed, SPEED_SIZE), dict[str, Any]()
    bare = replace(scenario.setup, rules=None)
    for name, setup in (("scheduler", bare), ("with admission", scenario.setup)):
        world = World(cost, FAIR, setup)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        outcome = world.run(scenario.sessions, scenario.horizon_s)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        requests, steps = len(outcome.fates), outcome.num_steps
        found[name] = {
            "requests": requests,
            "steps": steps,
            "requests_per_minute": requests / wall_s * 60,
            "requests_per_minute_of_processor": requests / cpu_s * 60,
        }
        print(
            f"{name}: {requests} requests in {steps} steps, {wall_s:.1f} s, {cpu_s:.1f} s of the"
            f" processor ({1e6 * cpu_s / requests:.1f} us a request):"
            f" {requests / wall_s * 60:,.0f} requests a minute"
        )
    reached = found["with admission"]["requests_per_minute"]
    found["met"] = reached >= SPEED_GOAL
    said = "met" if found["met"] else "not met"
    print(f"goal, {SPEED_GOAL:,} a minute with admission: {said}, {reached:,.0f}")
    return found


def _compare_loops() -> dict[str, Any]:
    """Hold what the engine chooses by the clock against what could be fixed."""
    threads, chunks = thread_team.compare(), paces.compare()
    for wanted, seconds in threads.items():
        said = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        print(f"{wanted}: seconds by {said}")
    for speed, bursts in chunks.items():
        print(f"a burst on a machine {speed:g} times as fast:")
        for name, found in bursts.items():
            print(f"  {name:<12} ITL p99 {found.itl_p99_s:.3f} s, {found.seconds:.1f} s in all")
    return {
        "threads": threads,
        "chunks": {str(speed): msgspec.to_builtins(bursts) for speed, bursts in chunks.items()},
    }


def _compare(costs: Mapping[str, Cost], seed: int, size: int) -> dict[str, Any]:
    """costs: by the scenarios."""
    result: dict[str, Any] = {"seed": seed, "size": size}
    for name, cost in costs.items():
        scenario = SCENARIOS[name](cost, seed, size)
        print(f"\n{name}: {scenario.what}; {scenario.horizon_s:.0f} s")
        found: dict[str, Any] = {"cost": msgspec.to_builtins(cost)}
        for ordering in ORDERINGS:
            began_s = time.process_time()
            world = World(cost, ordering, scenario.setup)
            outcome = report(world.run(scenario.sessions, scenario.horizon_s))
            took_s = time.process_time() - began_s
            found[ordering.name] = msgspec.to_builtins(outcome)
            print("\n".join(table(ordering.name, outcome)) + f"   ({took_s:.1f} s to simulate)")
            if scenario.without is not None and ordering is FAIR:
                found["moved"] = _hold_against(scenario, scenario.without, cost, outcome)
        result[name] = found
    return result


def _hold_against(
    scenario: Scenario, without: list[Session], cost: Cost, beside: Report
) -> dict[str, float]:
    alone = report(World(cost, FAIR, scenario.setup).run(without, scenario.horizon_s))
    found = moved("interactive", beside, alone)
    said = ", ".join(f"{name.removesuffix('_s')} {times:.2f}" for name, times in found.items())
    print(f"    interactive, times what it is without: {said}")
    print(f"    ({scenario.note})")
    return found


def table(name: str, outcome: Report) -> list[str]:
    head = "requests refused    done  TTFT p50      p99  TPOT p50      p99  ITL p99  good/s    good"
    lines = [f"  {name:<12} {head}"]
    for lane, row in outcome.lanes.items():
        ttft = f"{row.ttft_p50_s:9.3f} {row.ttft_p99_s:8.3f}"
        tpot = f"{row.tpot_p50_s:9.4f} {row.tpot_p99_s:8.4f} {row.itl_p99_s:8.4f}"
        good = f"{row.goodput_per_s:7.2f} {row.goodput:7.1%}"
        counts = f"{row.requests:7d} {row.refused:7d} {row.done:7d}"
        lines.append(f"    {lane:<11} {counts} {ttft} {tpot} {good}")
    lines.append(
        f"    Jain {outcome.jain:.3f}   busy {outcome.utilisation:.1%}"
        f"   {outcome.steps} steps, {outcome.preemptions} preemptions"
    )
    return lines


if __name__ == "__main__":
    main()
