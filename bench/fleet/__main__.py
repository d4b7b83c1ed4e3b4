"""`python -m bench.fleet COMMAND`: what a fleet of engines does, held against its goals.

    routers    routers on a trace near saturation, the shipped one beside the formulas of others
    hot        how even replicas work where all prompts have one beginning
    paced      the same with agents that never wait for each other
    roles      where engines that compute prompts for others serve more than engines that do both
    moves      what it brings that requests which wait move, where an engine joins, is slow or hangs
    overload   what is refused, and what is served in time, where more comes than can be computed
    index      what it costs to find who has a prompt cached, and how late that is known
    live       the hit rate of several real engines against that of one with as much cache
    replicas   what a second engine brings on this machine, and what its death takes along
    tiers      the first token of a prompt that was evicted, read from disk and computed
    transfer   the first token of a prompt that is read from another engine, and computed
    choice     what it costs a request to choose among engines
    planner    how many replicas a planner keeps through a spike, beside other scalers
    rollout    how soon a worse version is taken back, and how often one that is not worse

A command says what each of its goals is, and whether it is met; its exit status is 1 if one is not,
and 2 if a trace (`--trace`) cannot be read.
"""

from __future__ import annotations

import importlib
import sys

from bench.fleet.trace import TraceError

COMMANDS = {
    "routers": "bench.fleet.routers",
    "hot": "bench.fleet.spread",
    "paced": "bench.fleet.spread",
    "overload": "bench.fleet.overload",
    "moves": "bench.fleet.moves.moves",
    "roles": "bench.fleet.pools.roles",
    "choice": "bench.fleet.choice",
    "planner": "bench.fleet.planner.planner",
    "rollout": "bench.fleet.versions.rollout",
    "index": "bench.fleet.index",
    "live": "bench.fleet.live",
    "replicas": "bench.fleet.replicas",
    "tiers": "bench.fleet.tiers",
    "transfer": "bench.fleet.transfer",
}
"""The module of each command, whose `main` takes the command and its arguments."""


def main() -> int:
    command, *arguments = sys.argv[1:] or [""]
    if command not in COMMANDS:
        print(
            f"{__doc__}\n{command or 'no command'}: one of {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[command]).main(command, arguments)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
