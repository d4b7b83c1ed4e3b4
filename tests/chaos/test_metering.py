"""Checks that each answer is in books and invoices once, whatever was killed, and that the harness
would notice otherwise."""

from __future__ import annotations

import pytest

from billing.spool.sync_policy import SyncPolicy
from tests.budget import NIGHT, cycles
from tests.chaos.metered import ACCOUNTS, GATEWAYS, INVOICERS, SHIPPERS
from tests.chaos.metering import POSTGRES, run

pytestmark = pytest.mark.slow

KILLS = cycles(100, daily=20)
KILLS_THAT_TELL = 12


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param(None, id="one-gateway-each"),
        pytest.param("group", marks=NIGHT),
        pytest.param("before_answer", marks=NIGHT),
    ],
)
async def test_kills_lose_nothing_double_nothing_and_invent_nothing(
    sync: SyncPolicy | None,
) -> None:
    verdict = await run(KILLS, seed=6, until_late=True, sync=sync)
    assert (verdict.lost, verdict.phantom, verdict.wrong) == ([], [], [])
    assert sum(verdict.killed.values()) >= KILLS
    assert verdict.killed.keys() == {*GATEWAYS, *SHIPPERS, *INVOICERS, POSTGRES}
    assert verdict.answered > 10 * KILLS and verdict.recovered > 0
    assert verdict.invoices > KILLS // 20 * len(ACCOUNTS) and verdict.late > 0


@pytest.mark.nightly
async def test_an_offset_that_is_saved_before_the_commit_is_caught() -> None:
    verdict = await run(KILLS_THAT_TELL, seed=6, saves_early=True)
    assert verdict.lost and not verdict.sound
