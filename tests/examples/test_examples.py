"""Each program of examples/ does what it says, at one Tollgate with the documented settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from bench.tools.ports import free_port
from tests.stack import ROOT, Stack, running

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 120.0
SAID = {
    "chat": r'"completion_tokens":\d+.*"cost":',
    "stream": r"\n\d+ tokens in, \d+ out\n$",
    "structured": r": (a|no) capital\n$",
    "tools": r"get_weather\(\{'city': '.*'\}\)\n.",
    "responses": r".\n.",
    "messages": r"\n\d+ tokens in, \d+ out\n$",
    "batch": r"completed .*completed=10, failed=0.*\n(sum-\d+ .*\n){10}$",
    "limits": r"\d+ answers, then: Rate limit reached .*\nanswered again .*\nrevoked\n$",
    "costs": r"penny: [1-9]\d* requests, [1-9]\d* tokens\n(.*\n)*examples: 0\.\d+ usd\n",
    "mcp_client": r"library__find_book: .*\n(.*\n)*3 of Dune\n$",
}
"""Each prints this."""


ALL = """
import runpy, sys, traceback
for name in sys.argv[1:]:
    print("@@", name, flush=True)
    try:
        runpy.run_path(f"examples/{name}.py", run_name="__main__")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
"""
"""Runs examples one after the other: to import an SDK takes longer than what most of them do."""


def run(stack: Stack, *names: str) -> dict[str, str]:
    """Run examples as their README says, and return what each prints."""
    done = subprocess.run(
        ["bash", "-c", '. examples/env.sh && exec "$@"', "bash", sys.executable, "-c", ALL, *names],
        cwd=ROOT,
        env={**os.environ, "TOLLGATE_HOME": str(stack.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    parts = [part.partition("\n") for part in ("\n" + done.stdout).split("\n@@ ")[1:]]
    return {name: f"{said}\n" for name, _, said in parts}


@contextmanager
def library(port: int) -> Iterator[None]:
    """Run the example of an MCP server."""
    server = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "mcp_server.py")],
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        server.kill()
        server.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Run the settings that stand at the top of that server, with a port that is free."""
    port = free_port()
    text = (EXAMPLES / "mcp_server.py").read_text().split('"""')[1]
    config = text[text.index("[[") :].replace("9000", str(port))
    with library(port), running(config=config) as started:
        started.wait("the server of tools answers", lambda: is_there(port))
        settings = str(started.home.parent / "tollgate.toml")
        started.run("mcp", "approve", "library", "--all", "--config", settings)
        yield started


def is_there(port: int) -> bool:
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/mcp", timeout=30).status_code)
    except httpx.TransportError:
        return False


def test_every_program_is_tried_and_named() -> None:
    programs = {file.stem for file in EXAMPLES.glob("*.py")}
    assert programs == {*SAID, "mcp_server"}
    named = set(re.findall(r"\[(\w+)\.py\]", (EXAMPLES / "README.md").read_text()))
    assert named == programs


@pytest.fixture(scope="module")
def said(stack: Stack) -> dict[str, str]:
    """Return what each prints; `costs` comes last, since it counts what the others did."""
    found = run(stack, *(name for name in SAID if name != "costs"))
    stack.wait_booked()
    return found | run(stack, "costs")


@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name: str, said: dict[str, str]) -> None:
    assert re.search(SAID[name], said[name]), said[name]
