"""Grants, leases and what they pay for, over virtual time, against the plainest sums."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from billing.credits.balance_leases import (
    EXPIRY_MARGIN,
    LEASE_TTL,
    MAX_LEASE_PICO,
    MIN_LEASE_PICO,
    CreditLine,
    LeaseRequest,
    lease_amount,
    plan,
)
from billing.credits.grants import EXPIRY_GRACE, Burn, Grant, Usage, burn, sort_grants
from billing.ledger.transfers import Transfer
from billing.tables import EPOCH
from tests.budget import examples

CENT = 10**10
MODELS = ("penny", "pound")
amounts = st.integers(1, 400).map(lambda cents: cents * CENT)


class Funded(msgspec.Struct):
    """The grants that Redis was told, and until when they hold."""

    version: int = 0
    general: int = 0
    by_model: dict[str, int] = {}
    until: datetime = EPOCH


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = EPOCH + timedelta(days=1)
        self.line = CreditLine(org_id="org_a", version=0, paid_pico=0, is_prepaid=True)
        self.grants: dict[str, Grant] = {}
        self.credited: dict[str, int] = {}
        self.returned: dict[str, int] = {}
        self.leases: dict[str, Transfer] = {}
        self.told = Funded()
        self.late: list[Funded] = []
        """Answers of the books that Redis has not been told yet."""
        self.running: list[Usage] = []
        self.unpaid: list[Usage] = []
        self.burns: list[Burn] = []
        self.used: dict[str, Usage] = {}

    # ---- what happens

    @rule(
        amount=amounts,
        priority=st.sampled_from([0, 50, 50]),
        lasts=st.sampled_from([None, None, 30, 400, 10_000]),
        model=st.sampled_from([None, None, "penny"]),
    )
    def credit(self, amount: int, priority: int, lasts: int | None, model: str | None) -> None:
        name = f"g{len(self.credited)}"
        self.credited[name] = amount
        self.grants[name] = Grant(
            id=name,
            left_pico=amount,
            priority=priority,
            expires_at=None if lasts is None else self.now + timedelta(seconds=lasts),
            models=None if model is None else (model,),
            created_at=self.now,
        )

    @precondition(lambda self: self.grants)
    @rule(position=st.integers(0, 9))
    def is_taken_back(self, position: int) -> None:
        name = sorted(self.grants)[position % len(self.grants)]
        one = self.grants[name]
        revoked_at = one.revoked_at or self.now
        self.grants[name] = msgspec.structs.replace(one, revoked_at=revoked_at)

    @rule(amount=amounts, model=st.sampled_from(MODELS))
    def asks(self, amount: int, model: str) -> None:
        """As `admit.lua` does it, and the limiter tops up and asks once more."""
        if not self.fits(amount, model):
            self.tops_up(amount)
        if self.fits(amount, model):
            name = f"u{len(self.used)}"
            self.used[name] = Usage(
                transfer_id=name, model=model, admitted_at=self.now, amounts={"output": amount}
            )
            self.running.append(self.used[name])
            assert self.spent() <= sum(self.credited.values()), "no more than was ever paid"
        else:
            assert self.told.version == self.line.told, "it was asked"
            assert all(
                not grant.is_valid(self.now) or self.free(grant) == 0 or grant.is_scoped
                for grant in self.grants.values()
            ) or self.spent() + amount > self.most(model), "what is left would have been leased"

    def most(self, model: str) -> int:
        return self.told.general + self.told.by_model.get(model, 0)

    def fits(self, amount: int, model: str) -> bool:
        return self.now < self.told.until and self.spent() + amount <= self.most(model)

    def spent(self) -> int:
        return sum(usage.amount_pico for usage in self.used.values())

    def free(self, grant: Grant) -> int:
        lease = self.leases.get(grant.id)
        return grant.left_pico - (lease.amount_pico if lease is not None else 0)

    @precondition(lambda self: self.running)
    @rule(position=st.integers(0, 9), share=st.floats(0, 1))
    def is_booked(self, position: int, share: float) -> None:
        one = self.running.pop(position % len(self.running))
        amount = int(one.amount_pico * share)
        self.used[one.transfer_id] = msgspec.structs.replace(one, amounts={"output": amount})
        if amount:
            self.unpaid.append(self.used[one.transfer_id])

    @rule(wanted=st.sampled_from([0, 0, 50 * CENT]))
    def tops_up(self, wanted: int) -> None:
        self.tell(self.answer(wanted))

    @rule(wanted=st.sampled_from([0, 0, 50 * CENT]))
    def tops_up_slowly(self, wanted: int) -> None:
        self.late.append(self.answer(wanted))

    @precondition(lambda self: self.late)
    @rule(position=st.integers(0, 9))
    def is_told_late(self, position: int) -> None:
        self.tell(self.late.pop(position % len(self.late)))

    def answer(self, wanted: int) -> Funded:
        ask = LeaseRequest(spent_pico=self.spent(), wanted_pico=wanted)
        found, must_shrink = self.settle(ask)
        if must_shrink:
            self.tell(Funded(found.version, until=self.now))  # let go
            elsewhere, must_shrink = self.settle(ask)
            assert must_shrink, "another gateway asks, which has let go of nothing"
            assert elsewhere.version > self.told.version
            ask = msgspec.structs.replace(ask, released=self.told.version)
            found, must_shrink = self.settle(ask)
        assert not must_shrink
        return found

    def tell(self, found: Funded) -> None:
        """As `fund.lua` does it."""
        if found.version > self.told.version:
            self.told = found

    @rule()
    def is_swept(self) -> None:
        self.settle(None)

    @rule(by_s=st.sampled_from([1, 29, 61, 71, 3700]))
    def time_passes(self, by_s: int) -> None:
        self.now += timedelta(seconds=by_s)

    # ---- the ledger's side

    def settle(self, ask: LeaseRequest | None) -> tuple[Funded, bool]:
        before = self.line.paid_pico + sum(each.amount_pico for each in self.leases.values())
        made = plan(self.line, list(self.grants.values()), self.leases, self.unpaid, ask, self.now)
        self.post(made.transfers)
        self.line, self.leases = made.line, dict(made.leases)
        self.burns += made.burns
        self.unpaid = [
            msgspec.structs.replace(each, amounts={"output": made.owed[each.transfer_id]})
            for each in self.unpaid
            if each.transfer_id in made.owed
        ]
        general, by_model = made.funded_pico(self.grants)
        for name in made.ended:
            assert self.grants[name].left_pico == 0
        was_alive = self.now < self.told.until
        if was_alive:
            after = self.line.paid_pico + sum(each.amount_pico for each in self.leases.values())
            assert after >= before, "whoever was told may be spending it"
        until = self.line.leased_until or self.now + LEASE_TTL
        return Funded(self.line.version, general, by_model, until), made.must_shrink

    def post(self, made: list[Transfer] | tuple[Transfer, ...] | object) -> None:
        assert isinstance(made, list)
        assert len({each.id for each in made}) == len(made)
        for each in made:
            name = each.debit.removeprefix("grant:")
            if each.phase in ("posted", "post"):
                left = self.grants[name].left_pico - each.amount_pico
                self.grants[name] = msgspec.structs.replace(self.grants[name], left_pico=left)
            if each.resolves is not None:
                assert self.leases[name].id == each.resolves
                assert each.amount_pico <= self.leases[name].amount_pico
            if each.kind == "burn" and name in self.leases:
                ended = [one for one in made if one.resolves == self.leases[name].id]
                assert [one.phase for one in ended] == ["post"], "leases pay first"
                assert ended[0].amount_pico == self.leases[name].amount_pico
            if each.kind in ("expired", "revoked"):
                self.returned[name] = self.returned.get(name, 0) + each.amount_pico
                assert self.grants[name].is_over(self.now)

    # ---- what always holds

    @invariant()
    def leases_are_covered(self) -> None:
        for name, grant in self.grants.items():
            assert self.free(grant) >= 0, "leased + posted <= credited"
            burned = sum(one.amount_pico for one in self.burns if one.grant_id == name)
            assert self.credited[name] == grant.left_pico + burned + self.returned.get(name, 0)

    @invariant()
    def what_was_told_is_leased_while_it_holds(self) -> None:
        for told in (self.told, *self.late):
            if self.now < told.until and told.version >= self.told.version:
                held = {name: each.amount_pico for name, each in self.leases.items()}
                general = sum(held[name] for name in held if not self.grants[name].is_scoped)
                assert told.general <= self.line.paid_pico + general
                assert told.general + told.by_model.get("penny", 0) <= (
                    self.line.paid_pico + sum(held.values())
                )

    @invariant()
    def each_usage_is_paid_once(self) -> None:
        owed = {each.transfer_id: each.amount_pico for each in self.unpaid}
        running = {each.transfer_id for each in self.running}
        for name, usage in self.used.items():
            paid = sum(one.amount_pico for one in self.burns if one.transfer_id == name)
            assert paid + owed.get(name, 0) == (0 if name in running else usage.amount_pico)
        assert self.line.paid_pico == sum(one.amount_pico for one in self.burns)

    @invariant()
    def nobody_pays_for_what_is_not_theirs(self) -> None:
        for one in self.burns:
            grant, usage = self.grants[one.grant_id], self.used[one.transfer_id]
            assert grant.models is None or usage.model in grant.models
            assert grant.expires_at is None or usage.admitted_at < grant.expires_at

    @invariant()
    def leases_end(self) -> None:
        for lease in self.leases.values():
            assert lease.expires_at is not None
            assert lease.expires_at <= self.now + LEASE_TTL + EXPIRY_MARGIN


TestGrants = Machine.TestCase
TestGrants.settings = settings(
    max_examples=examples(150), stateful_step_count=30, deadline=None, database=None
)


def test_grants_burn_by_priority_then_expiry_then_age_within_their_scope() -> None:
    def grant(name: str, **fields: object) -> Grant:
        terms = {"left_pico": 10, "created_at": EPOCH, **fields}
        return Grant(id=name, **terms)  # type: ignore[arg-type]

    later, sooner = EPOCH + timedelta(days=9), EPOCH + timedelta(days=5)
    grants = [
        grant("old"),
        grant("young", created_at=EPOCH + timedelta(days=1)),
        grant("sooner", expires_at=sooner),
        grant("later", expires_at=later),
        grant("first", priority=0),
        grant("gone", priority=0, expires_at=EPOCH),
        grant("other model", priority=0, models=("pound",)),
        grant("output", priority=1, components=("output",), left_pico=3),
    ]
    usage = Usage(
        transfer_id="u",
        model="penny",
        admitted_at=EPOCH,
        amounts={"uncached_input": 8, "output": 40},
    )
    paid = [(one.grant_id, one.amount_pico) for one in burn(grants, [usage])]
    rest = [("sooner", 10), ("later", 10), ("old", 10), ("young", 5)]
    assert paid == [("first", 10), ("output", 3), *rest]
    assert sort_grants(grants)[0].priority == 0


def test_a_lease_is_what_half_a_minute_takes_within_its_bounds() -> None:
    assert lease_amount(0, 10) == MIN_LEASE_PICO
    assert lease_amount(CENT * 100, 30) == CENT * 100
    assert lease_amount(CENT * 100, 0.001) == 30 * CENT * 100, "a moment is no rate"
    assert lease_amount(10**20, 1) == MAX_LEASE_PICO


def test_what_expired_goes_to_the_house_once_late_usage_had_its_time() -> None:
    at = EPOCH + timedelta(days=1)
    line = CreditLine(org_id="org_a", version=1, paid_pico=0, is_prepaid=True)
    grant = Grant(id="g", left_pico=9, expires_at=at, created_at=EPOCH)
    late = Usage(
        transfer_id="u", model="m", admitted_at=at - timedelta(seconds=1), amounts={"output": 4}
    )
    paid = plan(line, [grant], {}, [late], None, at + EXPIRY_GRACE)
    made = [(each.kind, each.amount_pico) for each in paid.transfers]
    assert made == [("burn", 4), ("expired", 5)]
    assert paid.ended == ["g"]
