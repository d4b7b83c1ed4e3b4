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
"""Each prints this; `costs` comes late, since it counts what the others did."""


def python(name: str) -> list[str]:
    """Return the command that runs an example as its README says."""
    return ["bash", "-c", f". examples/env.sh && exec {sys.executable} examples/{name}.py"]


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


@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name: str, stack: Stack) -> None:
    if name == "costs":
        chat = subprocess.run(python("chat"), cwd=ROOT, env=env_of(stack), timeout=TIMEOUT_S)
        assert chat.returncode == 0
        stack.wait_booked()
    done = subprocess.run(
        python(name),
        cwd=ROOT,
        env=env_of(stack),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SAID[name], done.stdout), done.stdout


def env_of(stack: Stack) -> dict[str, str]:
    return {**os.environ, "TOLLGATE_HOME": str(stack.home)}
