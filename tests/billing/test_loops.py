"""Loops go on after what nobody foresaw, and say it once in a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from billing.ingestion import shipper as worker
from billing.ingestion.shipper import Shipper
from billing.invoices.invoicer import Invoicer
from billing.reconciliation import daily
from billing.reconciliation.daily import DailyAgreement
from foundation.tasks import LOG_AGAIN_S, LogAndContinue

log = logging.getLogger(__name__)
NO_DB: Any = object()


class Rounds:
    """The work of a loop, whose first round fails."""

    def __init__(self) -> None:
        self.count = 0
        self.went_on = asyncio.Event()

    async def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count == 1:
            raise LookupError("unforeseen")
        self.went_on.set()


def invoicer(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    loop = Invoicer(NO_DB, interval_s=0.001)
    monkeypatch.setattr(loop, "look", rounds)
    return loop, loop.close


def agreement(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(daily, "LOOK_INTERVAL_S", 0.001)
    loop = DailyAgreement(NO_DB, Path(), list, host="here")
    monkeypatch.setattr(loop, "look", rounds)
    return loop, loop.stop


def adopter(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    class Spool:
        backlog = 0

        async def wait_readable(self) -> None:
            await asyncio.Event().wait()

    spool: Any = Spool()
    monkeypatch.setattr(worker, "ADOPT_INTERVAL_S", 0.001)
    loop = Shipper(spool, NO_DB, adopt_from=Path())
    monkeypatch.setattr(loop, "_adopt_all", rounds)
    return loop, loop.stop


@pytest.mark.parametrize("kind", [invoicer, agreement, adopter])
async def test_a_loop_goes_on(
    kind: Callable[[Rounds, pytest.MonkeyPatch], tuple[Any, Callable[[], Awaitable[None]]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = Rounds()
    loop, close = kind(rounds, monkeypatch)
    loop.start()
    async with asyncio.timeout(30):
        await rounds.went_on.wait()
        await close()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "Traceback" in caplog.text and "unforeseen" in caplog.text


def test_a_loop_that_always_fails_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    unforeseen = LogAndContinue(log, "not done", clock=lambda: now)
    for _ in range(5):
        with unforeseen:
            raise ValueError
    now += LOG_AGAIN_S
    with unforeseen:
        raise ValueError
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "not done: ValueError()"
    assert second == "not done (4 more since the last): ValueError()"


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_what_ends_a_task_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), LogAndContinue(log, "not done"):
        raise error
