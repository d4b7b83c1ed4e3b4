"""Runs the relay: `python -m gateway join --listen-fd N --folder PATH --config PATH`.

Engines of other machines come to the socket, which the supervisor bound. SIGHUP: the file of
settings is read again. `--state` is a file in which others read who is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path

import uvloop

from foundation import logs
from gateway.fleet.joining.admission import read_config
from gateway.fleet.joining.joined_engines import write_present
from gateway.fleet.joining.relay import Relay

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway join")
    parser.add_argument("--listen-fd", type=int, required=True)
    for name in ("--folder", "--config"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=("json", "human"), default="human")
    arguments = parser.parse_args(sys.argv[2:])
    logs.configure(arguments.log_level, json_lines=arguments.log_format == "json", process="join")
    with contextlib.suppress(asyncio.CancelledError):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> None:
    """Serve until stopped."""
    running, again = asyncio.current_task(), asyncio.Event()
    assert running is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    loop.add_signal_handler(signal.SIGHUP, again.set)
    relay = Relay(arguments.folder, read_config(arguments.config))
    relay.on_change = lambda: write_present(arguments.folder, relay.joined)
    listener = socket.socket(fileno=arguments.listen_fd)
    try:
        await relay.start(listener)
        log.info("engines may join at %s:%d", *listener.getsockname()[:2])
        while True:
            await again.wait()
            again.clear()
            await relay.take_up(read_config(arguments.config))
    finally:
        await relay.close()
