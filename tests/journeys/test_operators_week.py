"""An operator's week: upgrade, reload, a model and an MCP server more, a backup and a restore, all
beside customers none of whom sees a failure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from migrations.releases import last_release
from tests.gateway.backup.test_restored import folder, run
from tests.journeys.upstreams import good, live_upstreams
from tests.mcp_bridge.upstream.stdio.servers import SDK_SERVER
from tests.stack import Callers, Stack
from tests.upgrade.release_tree import check_out

__all__ = ["folder"]
CLIENTS = 2
ANSWERS = 6
"""As many come after each change, at the least."""
CONFIG = """
port = PORT
[plan.default]
[mcp.stdio]
isolation = "none"
"""
TEAM = "[plan.team]\nrequests_per_minute = 1000000\n"


class OlderStack(Stack):
    """One whose code is that of a release."""

    def __init__(self, home: Path, tree: Path, **options: Any) -> None:
        env = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        super().__init__(home, env=env, **options)

    def prepare(self) -> None:
        """Nothing: the release makes its own schema."""

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "gateway", *super().command()[1:]]


HELLO: Any = [{"role": "user", "content": "Hello!"}]


def ask_for_stream(client: OpenAI) -> str:
    with client.chat.completions.create(
        model="penny", messages=HELLO, max_tokens=16, stream=True
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    return chunks[0].id


@contextmanager
def customers(client: OpenAI) -> Iterator[Callers]:
    """They are told of every failure: `client` tries nothing again."""
    made = Callers(partial(ask_for_stream, client), CLIENTS)
    try:
        made.wait_for_more(ANSWERS)
        yield made
        made.wait_for_more(ANSWERS)
    finally:
        made.end()


def upgrade(folder: Path) -> tuple[Stack, str]:
    """Monday: the last release has served; today's code takes up its home."""
    old = OlderStack(folder / "home", check_out(last_release(), folder / "tree"), config=CONFIG)
    try:
        old.start()
        key = old.credentials["api_key"]
        ask(old, key, "penny")
        old.stop()
    finally:
        old.clean_up()
    stack = Stack(old.home, config=CONFIG)
    stack.port = old.port
    return stack.start(), key


def ask(stack: Stack, key: str, model: str) -> None:
    answer = stack.client(api_key=key, max_retries=0).chat.completions.create(
        model=model, messages=HELLO, max_tokens=8
    )
    assert answer.choices[0].message.content


def reload(stack: Stack) -> None:
    """Tuesday: a plan more, by an edit of the file."""
    config = stack.home.parent / "tollgate.toml"
    config.write_text(config.read_text() + TEAM)
    assert "plan" in stack.run("reload", "--dry-run")
    assert "All workers have these settings." in stack.run("reload")
    assert "" != stack.run("orgs", "set-plan", "default", "--plan", "team")


def add_server(stack: Stack, key: str) -> None:
    """Thursday: a tool, for the keys that may call tools."""
    script = stack.home.parent / "server.py"
    script.write_text(SDK_SERVER)
    run({}, "mcp", "add", "tools", "--home", str(stack.home), "--", sys.executable, str(script))
    stack.run("mcp", "approve", "tools", "--all")
    made = ("keys", "create", "--name", "tools", "--scope", "mcp:call", "--json")
    caller = json.loads(stack.run(*made))["key"]
    called = stack.run("mcp", "call", "tools", "add", '{"a": 2, "b": 3}', "--key", caller)
    assert json.loads(called)["structuredContent"] == {"result": 5}


@pytest.mark.slow
@pytest.mark.nightly
async def test_an_operators_week_costs_no_customer_an_answer(folder: Path) -> None:
    archive, identity = str(folder / "archive"), str(folder / "backup.key")
    recipient = run({}, "backup", "key", identity).strip()
    stack, key = upgrade(folder)
    restored = Stack(folder / "other")
    try:
        with (
            live_upstreams(1) as [upstream],
            customers(stack.client(api_key=key, max_retries=0)) as callers,
        ):
            reload(stack)
            callers.wait_for_more(ANSWERS)
            upstream.play(good)
            stack.run("models", "add", "far", "--upstream", upstream.base_url)
            ask(stack, key, "far")
            add_server(stack, key)
            callers.wait_for_more(ANSWERS)
            stack.run("backup", "create", "--to", recipient, archive)
        stack.wait_booked()
        assert "The books balance." in stack.run("reconcile")
        stack.run("audit", "verify")
        stack.stop()
        restore = ("backup", "restore", "--identity", identity, "--home", str(restored.home))
        run({}, *restore, archive)
        restored.start()
        ask(restored, key, "penny")
        assert "far" in restored.run("models", "list")
        restored.wait_booked()
        assert "The books balance." in restored.run("reconcile")
        restored.run("audit", "verify")
        restored.stop()
    finally:
        stack.clean_up()
        restored.clean_up()
