"""A storm is bounded in any pattern, and steady progress is not."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mcp_bridge.protocol import rpc
from mcp_bridge.routing import guard as bounds
from mcp_bridge.routing.guard import NotificationBudget
from tests.budget import examples


def note(size: int) -> dict[str, Any]:
    return rpc.notification("notifications/message", {"data": "x" * size})


class Budget(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.budget = NotificationBudget(lambda: self.now)
        self.passed = self.passed_bytes = 0

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 1500), size=st.sampled_from([0, 100, 100_000, 5_000_000]))
    def say(self, count: int, size: int) -> None:
        message = note(size)
        each = len(rpc.encode(message))
        for _ in range(min(count, 3 * bounds.MAX_NOTIFICATION_BYTES // each)):
            if self.budget.take(message):
                self.passed += 1
                self.passed_bytes += each

    @invariant()
    def is_bounded(self) -> None:
        assert (
            self.passed <= bounds.MAX_NOTIFICATIONS + bounds.NOTIFICATIONS_PER_S * self.now + 1e-6
        )
        assert (
            self.passed_bytes
            <= bounds.MAX_NOTIFICATION_BYTES + bounds.NOTIFICATION_BYTES_PER_S * self.now + 1
        )


TestBudget = Budget.TestCase
TestBudget.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)


def test_an_hour_of_progress_is_no_storm() -> None:
    now = 0.0
    budget = NotificationBudget(lambda: now)
    for _ in range(10 * 3600):
        now += 0.1
        assert budget.take(note(100))


def test_what_was_counted_as_it_was_read_is_not_encoded() -> None:
    budget, never_encoded = NotificationBudget(lambda: 0.0), {"params": object()}
    assert budget.take(never_encoded, bounds.MAX_NOTIFICATION_BYTES - 10)
    assert not budget.take(never_encoded, 11) and budget.take(never_encoded, 10)


def test_what_is_dropped_costs_nothing() -> None:
    budget = NotificationBudget(lambda: 0.0)
    assert not budget.take(note(bounds.MAX_NOTIFICATION_BYTES))
    assert all(budget.take(note(0)) for _ in range(bounds.MAX_NOTIFICATIONS))
    assert not budget.take(note(0))
