"""Periodic work goes on whatever one round meets, can be woken, and ends when it is told to."""

from __future__ import annotations

import asyncio
import logging

import pytest

from foundation.periodic import Periodic

log = logging.getLogger(__name__)
NEVER_S = 3600.0


class Rounds:
    """Work that counts its rounds, and fails in the first ones with the errors it is given."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0
        self.happened = asyncio.Event()

    async def __call__(self) -> None:
        self.count += 1
        self.happened.set()
        if self.errors:
            raise self.errors.pop(0)

    async def next(self) -> None:
        await self.happened.wait()
        self.happened.clear()


def periodic(rounds: Rounds, interval_s: float = 0.0, at_once: bool = True) -> Periodic:
    return Periodic(
        "rounds",
        interval_s,
        rounds,
        log=log,
        failure="no round",
        expected=(OSError,),
        at_once=at_once,
    )


async def test_a_round_that_fails_is_logged_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = Rounds(OSError("away"), ValueError("a bug"))
    work = periodic(rounds)
    work.start()
    while rounds.count < 3:
        await rounds.next()
    await work.close()
    expected, unforeseen = caplog.records
    assert (expected.levelname, expected.message) == ("WARNING", "no round (OSError)")
    assert unforeseen.levelname == "ERROR" and unforeseen.exc_info is not None


async def test_a_wake_begins_the_next_round_before_the_interval_is_over() -> None:
    rounds = Rounds()
    work = periodic(rounds, NEVER_S)
    work.start()
    await rounds.next()
    work.wake()
    await rounds.next()
    assert rounds.count == 2
    await work.close()
    assert not work.is_running


async def test_the_first_round_may_wait_for_the_interval() -> None:
    rounds = Rounds()
    work = periodic(rounds, NEVER_S, at_once=False)
    work.start()
    await asyncio.sleep(0)
    assert rounds.count == 0
    work.wake()
    await rounds.next()
    await work.close()


async def test_a_round_that_hangs_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    cut = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(NEVER_S)
        finally:
            cut.set()

    work = Periodic("hang", NEVER_S, hang, log=log, failure="no round", timeout_s=0.001)
    work.start()
    await cut.wait()
    await asyncio.sleep(0)
    assert work.is_running
    await work.close()


async def test_the_interval_may_be_drawn_anew_each_time() -> None:
    drawn = iter([0.0, 0.0, NEVER_S])
    rounds = Rounds()
    work = Periodic("rounds", lambda: next(drawn), rounds, log=log, failure="no round")
    work.start()
    while rounds.count < 3:
        await rounds.next()
    await work.close()
