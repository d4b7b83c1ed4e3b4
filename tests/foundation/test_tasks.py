"""Tasks end with their application; loops go on after a failure, and log it now and then."""

from __future__ import annotations

import asyncio
import logging

import pytest

from foundation import tasks as ending
from foundation.request_context import LOG_CONTEXT, LogContext
from foundation.tasks import LOG_AGAIN_S, LogAndContinue, SharedTasks, TaskSet

log = logging.getLogger(__name__)


async def test_tasks_of_an_application_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of Redis whose timeout runs out in that very moment raises that instead."""
    monkeypatch.setattr(ending, "CANCEL_AGAIN_S", 0.01)
    asked = asyncio.Event()
    lost = 0

    async def survive_outages() -> None:
        nonlocal lost
        while True:
            asked.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise

    tasks = TaskSet()
    tasks.spawn(survive_outages())
    await asked.wait()
    async with asyncio.timeout(30):
        await tasks.close()
    assert lost == 2


def test_a_loop_that_always_fails_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log_and_continue = LogAndContinue(log, "not done", clock=lambda: now)
    for _ in range(5):
        with log_and_continue:
            raise ValueError
    now += LOG_AGAIN_S
    with log_and_continue:
        raise ValueError
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "not done: ValueError()"
    assert second == "not done (4 more since the last): ValueError()"


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_what_ends_a_task_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), LogAndContinue(log, "not done"):
        raise error


async def test_who_asks_for_the_same_key_shares_one_task() -> None:
    finish = asyncio.Event()
    num_started = 0

    async def work() -> int:
        nonlocal num_started
        num_started += 1
        await finish.wait()
        return num_started

    tasks: SharedTasks[str, int] = SharedTasks("work")
    first = asyncio.create_task(tasks.run("a", work))
    leaving = asyncio.create_task(tasks.run("a", work))
    await asyncio.sleep(0)
    assert "a" in tasks and len(tasks) == 1
    leaving.cancel()
    await asyncio.wait([leaving])
    finish.set()
    assert await first == 1
    assert await tasks.run("a", work) == 2


async def test_what_many_wait_for_logs_for_none_of_their_requests() -> None:
    seen: list[LogContext | None] = []

    async def work() -> None:
        seen.append(LOG_CONTEXT.get())

    LOG_CONTEXT.set(LogContext("req_" + "1" * 32))
    await SharedTasks[str, None]("work").run("a", work)
    assert seen == [None]


async def test_shared_tasks_that_run_are_cancelled_at_the_end() -> None:
    tasks: SharedTasks[str, None] = SharedTasks("work")
    waiting = asyncio.create_task(tasks.run("a", lambda: asyncio.sleep(60)))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await tasks.close()
    assert len(tasks) == 0
    with pytest.raises(asyncio.CancelledError):
        await waiting
