"""Two-phase transfers and reversals against a plain model, at once, and what the schema refuses."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import rule
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.ingest import ingest
from billing.ledger.transfers import Transfer, TransferStatus, transfer
from billing.reconciliation.checks import check_ledger
from billing.tables import EPOCH
from tests.billing.samples import an_attempt, an_event
from tests.databases import Databases
from tests.machines import DatabaseMachine, run_over_database

S = TransferStatus
PAST, FUTURE = EPOCH + timedelta(days=1), EPOCH + timedelta(days=365_000)
CASH, GRANT, OWED = "house:cash", "grant:one", "receivable:org_a"
ACCOUNTS = (CASH, GRANT, OWED)
amounts = st.sampled_from([0, 1, 7, 100, 10**25])


def a_transfer(name: str, amount: int = 100, **fields: Any) -> Transfer:
    fields = {"debit": CASH, "credit": GRANT, "kind": "credit", **fields}
    return Transfer(id=name, amount_pico=amount, **fields)


def a_lease(name: str, amount: int, expires_at: Any = FUTURE, debit: str = GRANT) -> Transfer:
    return Transfer(
        id=name,
        debit=debit,
        credit=OWED,
        amount_pico=amount,
        kind="lease",
        phase="pending",
        expires_at=expires_at,
    )


async def book(db: AsyncEngine, *wanted: Transfer) -> list[TransferStatus]:
    async with db.begin() as conn:
        return await transfer(conn, wanted)


class Model:
    """Transfers by id, and every sum made anew."""

    def __init__(self) -> None:
        self.there: dict[str, Transfer] = {}

    def resolution(self, name: str | None) -> Transfer | None:
        return next((each for each in self.there.values() if each.resolves == name), None)

    def sums(self, account: str) -> tuple[int, int, int, int]:
        moved, held = [0, 0], [0, 0]
        for each in self.there.values():
            for side, name in enumerate((each.debit, each.credit)):
                if name == account and each.phase in ("posted", "post"):
                    moved[side] += each.amount_pico
                open_ = each.phase == "pending" and self.resolution(each.id) is None
                if name == account and open_:
                    held[side] += each.amount_pico
        return (*moved, *held)

    def overdraws(self, wanted: list[Transfer]) -> bool:
        trial = Model()
        trial.there = self.there | {each.id: each for each in wanted}
        debits, credits, pending, _ = trial.sums(GRANT)
        return debits + pending > credits

    def expect(self, one: Transfer) -> TransferStatus:
        there = self.there.get(one.id)
        if there is not None:
            return S.EXISTS if there == one else S.EXISTS_WITH_OTHER_CONTENT
        if one.resolves is not None:
            held = self.there.get(one.resolves)
            if held is None or held.phase != "pending":
                return S.NOT_FOUND if held is None else S.NOT_PENDING
            if self.resolution(one.resolves) is not None:
                return S.ALREADY_RESOLVED
            if one.amount_pico > held.amount_pico:
                return S.OTHER_AMOUNT
            if one.phase == "expire" and held.expires_at == FUTURE:
                return S.NOT_EXPIRED
        elif one.corrects is not None:
            if any(each.corrects == one.corrects for each in self.there.values()):
                return S.ALREADY_CORRECTED
        return S.EXCEEDS_CREDITS if self.overdraws([one]) else S.CREATED


class Machine(DatabaseMachine):
    def __init__(self, *lent: Any) -> None:
        super().__init__(*lent)
        self.model = Model()
        self.count = 0
        self.run(self.empty)

    async def empty(self) -> None:
        """Delete all that was booked, with the triggers turned off: nobody can otherwise."""
        async with self.db.begin() as conn:
            await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
            for table in ("transfers", "balances", "accounts"):
                await conn.execute(sa.text(f"DELETE FROM {table}"))

    def name(self) -> str:
        self.count += 1
        return f"t{self.count:03}"

    def do(self, one: Transfer) -> None:
        expected = self.model.expect(one)
        event(expected.value)
        assert self.run(book, self.db, one) == [expected], one
        if expected is S.CREATED:
            self.model.there[one.id] = one

    def some(self, position: int, phases: tuple[str, ...]) -> Transfer | None:
        found = [each for each in self.model.there.values() if each.phase in phases]
        return found[position % len(found)] if found else None

    @rule(amount=amounts, taken=st.booleans())
    def posts(self, amount: int, taken: bool) -> None:
        sides = {"debit": GRANT, "credit": OWED, "kind": "burn"} if taken else {}
        self.do(a_transfer(self.name(), amount, **sides))

    @rule(amount=amounts, gone=st.booleans(), from_grant=st.booleans())
    def holds(self, amount: int, gone: bool, from_grant: bool) -> None:
        debit = GRANT if from_grant else CASH
        self.do(a_lease(self.name(), amount, PAST if gone else FUTURE, debit))

    @rule(position=st.integers(0, 9), how=st.sampled_from(["post", "void", "expire"]), part=amounts)
    def resolves(self, position: int, how: str, part: int) -> None:
        held = self.some(position, ("pending", "pending", "post"))
        if held is None:
            return
        made = held.post(self.name(), min(part, held.amount_pico + 1))
        self.do(made if how == "post" else getattr(held, how)(made.id))

    @rule(position=st.integers(0, 9))
    def reverses(self, position: int) -> None:
        original = self.some(position, ("posted", "post"))
        if original is not None:
            self.do(original.reverse(self.name()))

    @rule(position=st.integers(0, 9), other=st.booleans())
    def replays(self, position: int, other: bool) -> None:
        known = self.some(position, ("posted", "pending", "post", "void", "expire"))
        if known is not None:
            more = known.amount_pico + int(other)
            self.do(msgspec.structs.replace(known, amount_pico=more))

    @rule(position=st.integers(0, 9), amount=amounts)
    def two_at_once(self, position: int, amount: int) -> None:
        """Both, or neither."""
        held = self.some(position, ("pending",))
        first = a_transfer(self.name(), amount)
        second = held.void(self.name()) if held else a_lease(self.name(), amount)
        alone = [self.model.expect(each) for each in (first, second)]
        found = self.run(book, self.db, first, second)
        if alone[1] is S.ALREADY_RESOLVED:
            assert found == [S.NOT_BOOKED, S.ALREADY_RESOLVED]
            return
        assert found == [S.CREATED, S.CREATED], "what the first gives, the second may take"
        self.model.there |= {first.id: first, second.id: second}

    def teardown(self) -> None:
        self.run(self.agree)

    async def agree(self) -> None:
        async with self.db.connect() as conn:
            rows = await conn.execute(sa.text(
                "SELECT account, debits_pico, credits_pico, pending_debits_pico,"
                " pending_credits_pico FROM balances"
            ))  # fmt: skip
            found = {name: tuple(map(int, sums)) for name, *sums in rows}
        for account in ACCOUNTS:
            assert found.get(account, (0, 0, 0, 0)) == self.model.sums(account), account
        assert await check_ledger(self.db) == []


def test_transfers_agree_with_a_plain_model(databases: Databases) -> None:
    run_over_database(Machine, databases, examples=30, steps=20)


async def test_opposite_transfers_at_once_wait_for_nobody_in_a_circle(db: AsyncEngine) -> None:
    """Beside usage of the same accounts, which is ingested in batches."""

    async def back_and_forth(number: int) -> None:
        one, other = ("receivable:org_a", "receivable:org_b")[:: 1 if number % 2 else -1]
        for turn in range(10):
            there = a_transfer(f"{number}-{turn}", 5, debit=one, credit=other)
            assert await book(db, there, a_transfer(f"{number}-{turn}-cash", 5)) == [S.CREATED] * 2

    async def usage() -> None:
        for _ in range(5):
            await ingest(db, [an_event(an_attempt(org=org)) for org in ("org_b", "org_a") * 5])

    async with asyncio.timeout(30):
        await asyncio.gather(*(back_and_forth(number) for number in range(6)), usage(), usage())
    assert await check_ledger(db) == []


async def test_of_many_who_book_one_id_or_resolve_one_lease_one_does(db: AsyncEngine) -> None:
    await book(db, a_transfer("grant"), a_lease("lease", 100, debit=CASH))
    held = a_lease("lease", 100, debit=CASH)
    same = await asyncio.gather(*(book(db, a_transfer("same")) for _ in range(6)))
    assert sorted(status.value for (status,) in same) == ["created", *["exists"] * 5]
    sides = [{"debit": f"receivable:{n}", "credit": f"revenue:{n}"} for n in range(6)]
    each = await asyncio.gather(*(book(db, a_transfer("one", **side)) for side in sides))
    assert sorted({status.value for (status,) in each}) == ["created", "exists_with_other_content"]
    ended = await asyncio.gather(*(book(db, held.post(f"post-{n}", n)) for n in range(6)))
    assert [status for (status,) in ended].count(S.CREATED) == 1
    assert [status for (status,) in ended].count(S.ALREADY_RESOLVED) == 5
    assert await check_ledger(db) == []


@pytest.mark.parametrize(
    "row",
    [
        "'x', 'house:cash', 'grant:one', 1, 'credit', 'pending', NULL, NULL, now()",
        "'x', 'grant:one', 'receivable:org_a', 1, 'lease', 'posted', NULL, NULL, NULL",
        "'x', 'grant:one', 'receivable:org_a', 41, 'lease', 'post', 'held', NULL, NULL",
        "'x', 'grant:one', 'receivable:org_a', 39, 'lease', 'void', 'held', NULL, NULL",
        "'x', 'receivable:org_a', 'grant:one', 40, 'lease', 'post', 'held', NULL, NULL",
        "'x', 'house:cash', 'grant:one', 1, 'lease', 'post', 'credit', NULL, NULL",
        "'x', 'grant:one', 'receivable:org_a', 10, 'lease', 'void', 'done', NULL, NULL",
        "'x', 'grant:one', 'house:cash', 99, 'reversed', 'posted', NULL, 'credit', NULL",
        "'x', 'grant:one', 'house:cash', 100, 'reversed', 'posted', NULL, NULL, NULL",
        "'x', 'receivable:org_a', 'grant:one', 40, 'reversed', 'posted', NULL, 'held', NULL",
    ],
)
async def test_the_schema_refuses_what_the_verbs_would(db: AsyncEngine, row: str) -> None:
    done = a_lease("done", 10)
    await book(db, a_transfer("credit"))
    await book(db, a_lease("held", 40), done)
    await book(db, done.void("end"))
    columns = "id, debit, credit, amount_pico, kind, phase, resolves, corrects, expires_at"
    with pytest.raises(DBAPIError) as refused:
        async with db.begin() as conn:
            await conn.execute(sa.text(
                f"INSERT INTO transfers ({columns}, admitted_at) SELECT {row}, now()"
            ))  # fmt: skip
    assert getattr(refused.value.orig, "sqlstate", "")[:2] == "23"


async def test_no_grant_is_overdrawn_even_by_hand(db: AsyncEngine) -> None:
    await book(db, a_transfer("credit"), a_lease("held", 60, debit=CASH))
    with pytest.raises(DBAPIError, match="balances_no_grant_overdrawn"):
        async with db.begin() as conn:
            await conn.execute(sa.text(
                "UPDATE balances SET pending_debits_pico = 101 WHERE account = 'grant:one'"
            ))  # fmt: skip
