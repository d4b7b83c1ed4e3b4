"""Servers to start: one on the official SDK, and whatever a test writes on one page."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil

from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.stdio.process import ProcessOwner

SDK_SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("fixture")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

@server.tool()
def environment() -> dict[str, str]:
    return dict(os.environ)

@server.tool()
def whereabouts() -> dict[str, str]:
    here = os.getcwd()
    return {"uid": str(os.getuid()), "cwd": here, "holds": str(os.listdir(here))}

@server.tool()
def complain(size: int) -> str:
    sys.stderr.write("z" * size)
    sys.stderr.flush()
    return "said"

server.run("stdio")
"""
UIDS_OF_A_RUN = 64
FIRST_UID = 1_000_000_000 + os.getpid() * UIDS_OF_A_RUN
"""The first uid of this test process. Everything under a uid is ended as a whole, so tests that run
at the same time must share none."""
OWNER = ProcessOwner(tenant="org_a", credential_set="none")


def sdk_spec(**fields: Any) -> LaunchSpec:
    return python_spec(SDK_SERVER, name="fixture", **fields)


def python_spec(script: str, *, name: str = "script", **fields: Any) -> LaunchSpec:
    args = ("-c", script)
    return LaunchSpec(name=name, command=sys.executable, args=args, **fields)


def living(marker: str) -> list[str]:
    """Processes that have it on their command line; a zombie has none."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if marker in line:
            found.append(line)
    return found


def children() -> set[int]:
    """Return the children of this process, zombies too."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
