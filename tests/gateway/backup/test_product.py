"""The whole product: a backup beside `tollgate up` under load, and what is restored serves."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from openai import OpenAI

from tests.gateway.backup.test_restored import folder, run
from tests.stack import Callers, Stack

__all__ = ["folder"]
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CLIENTS = 4
ANSWERS = 20
"""As many come before the backup begins, and as many again until the load ends."""


def ask(client: OpenAI) -> str:
    answer = client.chat.completions.create(
        model="penny", messages=[{"role": "user", "content": "Hello!"}], max_tokens=8
    )
    assert answer._request_id is not None
    return answer._request_id


async def test_a_restored_home_serves_its_customers_and_balances(folder: Path) -> None:
    stack, restored = Stack(folder / "home"), Stack(folder / "other")
    archive, identity = str(folder / "archive"), str(folder / "backup.key")
    try:
        stack.start()
        recipient = run({}, "backup", "key", identity).strip()
        load = Callers(partial(ask, stack.client()), CLIENTS)
        try:
            load.wait_for_more(ANSWERS)
            before = list(load.answered)
            stack.run("backup", "create", "--to", recipient, archive)
            load.wait_for_more(ANSWERS)
        finally:
            load.end()
        key = stack.credentials["api_key"]
        stack.stop()
        restore = ("backup", "restore", "--identity", identity, "--home", str(restored.home))
        run({}, *restore, archive)
        restored.start()
        known = ask(restored.client(api_key=key))
        restored.wait_booked()
        rows = await restored.sql("SELECT request_id FROM usage_events WHERE kind = 'usage'")
        booked = [row[0] for row in rows]
        assert {*before, known} <= {*booked} and len(booked) == len({*booked})
        assert "balance" in restored.run("reconcile")
        assert "BROKEN" not in restored.run("audit", "verify")
        restored.stop()
    finally:
        stack.clean_up()
        restored.clean_up()
