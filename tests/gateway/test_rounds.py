"""The gateway's loops go on after what nobody foresaw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from gateway.auth.bearer.revocations import Denylist
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.limits import funding
from gateway.limits.limiter import Limiter
from gateway.tenancy import changes as tenancy_changes
from gateway.tenancy.changes import Subscription

Work = Callable[..., Awaitable[Any]]
Patch = pytest.MonkeyPatch
NOTHING: Any = object()


def nowhere() -> redis.asyncio.Redis:
    return redis.asyncio.from_url("redis://127.0.0.1:1")


def balances(work: Work, patch: Patch) -> Awaitable[None]:
    patch.setattr(funding, "RENEW_INTERVAL_S", 0.001)
    funds = Limiter(nowhere()).funds
    patch.setattr(funds, "_renew", work)
    return funds.periodic_renewal(lambda: [("org_a", "counter")]).run()


def changes(work: Work, patch: Patch) -> Awaitable[None]:
    patch.setattr(tenancy_changes, "HEARTBEAT_S", 0.001)
    subscription = Subscription(nowhere())
    patch.setattr(subscription, "_listen", work)
    return subscription.run()


def revocations(work: Work, patch: Patch) -> Awaitable[None]:
    denylist = Denylist(NOTHING, nowhere(), lambda revocation: None)
    patch.setattr(denylist, "_poll", work)
    return denylist._rounds.run()


def rotation(work: Work, patch: Patch) -> Awaitable[None]:
    for interval in ("RELOAD_S", "RETRY_S"):
        patch.setattr(signing_keys, interval, 0.001)
    keys = KeyRing(NOTHING, NOTHING)
    patch.setattr(keys, "_rotate_when_due", work)
    return keys._reloads.run()


LOOPS = [balances, changes, revocations, rotation]


@pytest.mark.parametrize("kind", LOOPS)
async def test_a_loop_goes_on(
    kind: Callable[[Work, Patch], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds, went_on = 0, asyncio.Event()

    async def work(*_: object) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise LookupError("unforeseen")
        went_on.set()

    running = asyncio.ensure_future(kind(work, monkeypatch))
    async with asyncio.timeout(30):
        await went_on.wait()
    running.cancel()
    await asyncio.wait((running,))
    assert running.cancelled(), "cancellation passes"
    tracebacks = [record for record in caplog.records if record.exc_info is not None]
    assert "unforeseen" in tracebacks[0].getMessage()
