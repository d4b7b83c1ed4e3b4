"""Runs the launcher: `python -m gateway ray --folder PATH --plan PATH`.

SIGHUP: the plan is read again. SIGTERM: all that it started on Ray ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from foundation import logs
from gateway.fleet.joining.launch_plan import read_plan
from gateway.fleet.joining.tokens import JoinTokens
from gateway.processes.launching.ray_launcher import RayLauncher, connect

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway ray")
    for name in ("--folder", "--plan"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=("json", "human"), default="human")
    arguments = parser.parse_args(sys.argv[2:])
    logs.configure(arguments.log_level, json_lines=arguments.log_format == "json", process="ray")
    cluster = read_plan(arguments.plan).cluster
    try:
        connect(cluster)
    except (ConnectionError, RuntimeError, ValueError) as error:
        log.error("no Ray cluster at %s: %s", cluster, " ".join(str(error).split()))
        sys.exit(1)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> None:
    """Launch until stopped."""
    running, again = asyncio.current_task(), asyncio.Event()
    assert running is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    loop.add_signal_handler(signal.SIGHUP, again.set)
    plan = read_plan(arguments.plan)
    launcher = RayLauncher(
        JoinTokens(arguments.folder, lambda: [each.name for each in plan.models])
    )
    try:
        while True:
            await launcher.take_up(plan)
            log.info("engines on Ray: %s", {each.pool: each.engines for each in plan.models})
            await again.wait()
            again.clear()
            plan = read_plan(arguments.plan)
    finally:
        await launcher.close()
