"""The whole product: a backup beside `tollgate up` under load, and what is restored serves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from tests.gateway.backup.test_restored import folder, run
from tests.stack import Stack

__all__ = ["folder"]
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CLIENTS = 4
ANSWERS = 20
"""As many come before the backup begins, and as many again until the load ends."""


class Load:
    """Clients who ask until told to stop; `answered` has the ids of the requests, in order."""

    def __init__(self, client: OpenAI) -> None:
        self.answered: list[str] = []
        self._client, self._stop = client, threading.Event()
        self._more = threading.Condition()
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._done = [self._threads.submit(self._ask) for _ in range(CLIENTS)]

    def _ask(self) -> None:
        while not self._stop.is_set():
            self.answered.append(ask(self._client))
            with self._more:
                self._more.notify_all()

    def wait(self, number: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.answered) >= number, timeout=120)

    def end(self) -> None:
        self._stop.set()
        for each in self._done:
            each.result()
        self._threads.shutdown()


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
        load = Load(stack.client())
        try:
            load.wait(ANSWERS)
            before = list(load.answered)
            stack.run("backup", "create", "--to", recipient, archive)
            load.wait(len(before) + ANSWERS)
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
