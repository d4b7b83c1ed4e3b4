"""The gateway's loops go on after what nobody foresaw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from foundation.periodic import Flusher
from gateway.auth.bearer.revocations import Denylist
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.limits import funding, limiter
from gateway.limits.limiter import Limiter
from gateway.tenancy import changes as tenancy_changes
from gateway.tenancy import idempotency_keys
from gateway.tenancy.changes import ChangeListener
from gateway.tenancy.idempotency_keys import IdempotencyKeys

Work = Callable[..., Awaitable[Any]]
Patch = pytest.MonkeyPatch
NOTHING: Any = object()


class Notes(Flusher):
    def __init__(self, work: Work) -> None:
        self.flush = work  # type: ignore[method-assign]
        super().__init__("notes", 0.001)

    async def flush(self) -> None:
        raise AssertionError("replaced")


def flusher(work: Work, patch: Patch) -> Awaitable[None]:
    return Notes(work)._periodic.run()


def nowhere() -> redis.asyncio.Redis:
    return redis.asyncio.from_url("redis://127.0.0.1:1")


def bare_limiter(patch: Patch) -> Limiter:
    for module, name in ((funding, "RENEW_INTERVAL_S"), (limiter, "RENEW_INTERVAL_S")):
        patch.setattr(module, name, 0.001)
    for name in ("RETRY_S", "WATCH_S"):
        patch.setattr(limiter, name, 0.001)
    return Limiter(nowhere())


def leases(work: Work, patch: Patch) -> Awaitable[None]:
    made = bare_limiter(patch)
    patch.setattr(made, "count_gateways", work)
    return made._renew_forever()


def lost_counters(work: Work, patch: Patch) -> Awaitable[None]:
    made = bare_limiter(patch)
    patch.setattr(made.counters, "has_changed", work)
    return made._watch_forever()


def balances(work: Work, patch: Patch) -> Awaitable[None]:
    made = bare_limiter(patch)
    patch.setattr(made.funds, "_renew", work)
    return made.funds.renew_forever(lambda: [("org_a", "counter")])


def swept_keys(work: Work, patch: Patch) -> Awaitable[None]:
    patch.setattr(idempotency_keys, "SWEEP_INTERVAL_S", 0.001)
    keys = object.__new__(IdempotencyKeys)
    patch.setattr(keys, "sweep", work)
    return keys.sweep_forever()


def changes(work: Work, patch: Patch) -> Awaitable[None]:
    patch.setattr(tenancy_changes, "HEARTBEAT_S", 0.001)
    listener = ChangeListener(nowhere(), lambda subject: None)
    patch.setattr(listener, "_listen", work)
    return listener._run()


def revocations(work: Work, patch: Patch) -> Awaitable[None]:
    denylist = Denylist(NOTHING, nowhere(), lambda revocation: None)
    patch.setattr(denylist, "_poll", work)
    return denylist._run()


def rotation(work: Work, patch: Patch) -> Awaitable[None]:
    patch.setattr(signing_keys, "RETRY_S", 0.001)
    keys = KeyRing(NOTHING, NOTHING)
    patch.setattr(keys, "_rotate_when_due", work)
    return keys._run()


LIMITS = [leases, lost_counters, balances]
OTHERS = [flusher, swept_keys, changes, revocations, rotation]


@pytest.mark.parametrize("kind", LIMITS + OTHERS)
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
