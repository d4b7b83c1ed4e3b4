"""An invoice skips and hurries no stage, and stays settled where it is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from billing.invoices.states import (
    DUNNING,
    OPEN,
    STAGES,
    Amounts,
    InvoiceStatus,
    State,
    advance,
    next_stage,
    settled_state,
)

DUE = datetime(2026, 11, 1, tzinfo=UTC)
shares = st.integers(0, 120)


class Life(RuleBasedStateMachine):
    """The life of a final invoice, with whoever pays, gives back and looks at it at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = DUE - timedelta(days=30)
        self.amounts = Amounts(total=100)
        self.standing = InvoiceStatus(state="finalized", since=self.now, due_at=DUE)
        self.seen: list[tuple[State, datetime]] = [("finalized", self.now)]

    def enter(self, state: State) -> None:
        if state != self.standing.state:
            self.standing = InvoiceStatus(state=state, since=self.now, due_at=DUE)
            self.seen.append((state, self.now))

    @rule(hours=st.integers(0, 24 * 40))
    def wait(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @rule()
    def look(self) -> None:
        stage = advance(self.standing, self.now)
        if stage is not None:
            self.enter(stage)

    @precondition(lambda self: self.amounts.due > 0)
    @rule(part=shares)
    def pay(self, part: int) -> None:
        paid = min(part, self.amounts.due)
        self.amounts = msgspec.structs.replace(self.amounts, settled=self.amounts.settled + paid)
        self.enter(settled_state(self.standing.state, self.amounts))

    @rule(part=shares)
    def take_back(self, part: int) -> None:
        """Take a part back: what was paid of it is given back."""
        credited = min(self.amounts.total, self.amounts.credited + part)
        settled = min(self.amounts.settled, self.amounts.total - credited)
        self.amounts = Amounts(total=100, credited=credited, settled=settled)
        self.enter(settled_state(self.standing.state, self.amounts))

    @invariant()
    def it_is_open_while_something_is_due(self) -> None:
        assert (self.standing.state in OPEN) == (self.amounts.due > 0)
        assert (self.standing.state == "voided") == (self.amounts.credited == 100)

    @invariant()
    def no_stage_is_left_out_or_comes_too_early(self) -> None:
        stages = [(state, since) for state, since in self.seen if state in OPEN]
        assert [state for state, _ in stages] == list(STAGES[: len(stages)])
        for (state, since), (_, following) in zip(stages, stages[1:], strict=False):
            begun = DUE if state == "finalized" else since
            assert following >= begun + timedelta(days=dict(DUNNING)[state])

    @invariant()
    def nothing_follows_what_is_settled(self) -> None:
        if self.standing.state not in OPEN or self.standing.state == "uncollectible":
            assert next_stage(self.standing) is None


TestLife = Life.TestCase


def test_an_invoice_that_nobody_pays_is_given_up_after_three_reminders() -> None:
    standing, reached = InvoiceStatus(state="finalized", since=DUE, due_at=DUE), []
    while (found := next_stage(standing)) is not None:
        assert advance(standing, found[1] - timedelta.resolution) is None
        assert advance(standing, found[1]) == found[0]
        standing = InvoiceStatus(state=found[0], since=found[1], due_at=DUE)
        reached.append((found[0], (found[1] - DUE).days))
    assert reached == [
        ("past_due", 0), ("reminder_1", 3), ("reminder_2", 10), ("reminder_3", 20),
        ("suspended", 30), ("uncollectible", 90),
    ]  # fmt: skip
