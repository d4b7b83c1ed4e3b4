"""Runs the official SDK's own everything-server, which `make mcp-conformance` unpacks, on a port:
`python -m tests.conformance.sdk_server FOLDER --era both`.

It says `listening on PORT` once it does. With `--era 2025-11-25` or `2026-07-28` it refuses the
other era as a server does that has never heard of it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from tests.mcp_bridge.fixture_parts import MODERN, of_one_era

SERVER = Path("examples/servers/everything-server")
RETRY_MS = 100


def application(folder: Path, era: str) -> Any:
    sys.path.insert(0, str(folder / SERVER))
    server = importlib.import_module("mcp_everything_server.server")
    app = server.mcp.streamable_http_app(event_store=server.event_store, retry_interval=RETRY_MS)
    return of_one_era(app, era)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--era", choices=["both", "2025-11-25", MODERN], default="both")
    given = parser.parse_args()
    with socket.socket() as bound:
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        print(f"listening on {bound.getsockname()[1]}", flush=True)
        app = application(given.folder, given.era)
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        asyncio.run(uvicorn.Server(config).serve([bound]))


if __name__ == "__main__":
    main()
