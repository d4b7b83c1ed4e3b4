"""/v1/admin/invoices: from an invoice down to the request, as the job makes them; who is told."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from beancount import loader

from billing.credits.grants_admin import grant_credit, revoke_credit
from billing.events import Quantities
from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.invoicer import Invoicer
from gateway.cli.money.invoices import write_document
from gateway.cli.shared.target import Gateway, GatewayError, GatewayTarget
from tests.billing.invoices.billed import ACCOUNT_MADE, OCTOBER, at, book, tokens, used
from tests.billing.samples import an_attempt, an_event, pay_usage
from tests.gateway.routes.admin.changing import ADMIN, Maker
from tests.gateway.routes.admin.conftest import World
from tests.pace import eventually

INVOICES = f"{ADMIN}/invoices"


async def found(world: World, path: str) -> Any:
    answer = await world.call("GET", path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def bill(world: World, org_id: str) -> str:
    """The path of September's invoice, made by the job when its grace period was over."""
    async with world.db.begin() as conn:
        await set_account(conn, org_id=org_id, terms=BillingTerms(), now=ACCOUNT_MADE)
    endpoint = {"url": "https://hooks.example/x", "event_types": ["invoice.finalized"]}
    assert (await world.call("POST", f"{ADMIN}/webhooks", endpoint)).is_success
    for hour in (1, 1, 5):
        await book(world.db, used(at(2026, 9, 10, hour), org=org_id))
    now = OCTOBER

    invoicer = Invoicer(world.db, wall_clock=lambda: now.timestamp())
    await invoicer.look()
    now = OCTOBER + timedelta(hours=23, minutes=59)
    await invoicer.look()
    [draft] = (await found(world, INVOICES))["data"]
    assert (draft["state"], draft["number"], draft["due"]) == ("draft", None, None)
    now = OCTOBER + timedelta(hours=24)
    await invoicer.look()
    return f"{INVOICES}/{draft['id']}"


async def test_the_command_line_writes_an_invoice_to_a_file(
    world: World, org_id: str, tmp_path: Path
) -> None:
    """As `tollgate invoices get` does, which asks over a socket."""
    await bill(world, org_id)
    gateway = Gateway(world.http, GatewayTarget("http://test", "the test", world.admin_key))
    for form, begin in (("pdf", b"%PDF-"), ("csv", b"invoice")):
        path = tmp_path / form
        _, size = await write_document(gateway, "TG-000001", None, form, path)
        content = path.read_bytes()
        assert len(content) == size > 100 and content.startswith(begin)
    with pytest.raises(GatewayError, match=r"^invoice 'TG-000002': there is none"):
        await write_document(gateway, "TG-000002", None, "pdf", tmp_path / "none")


async def test_the_job_makes_an_invoice_that_leads_down_to_its_requests(
    world: World, org_id: str
) -> None:
    path = await bill(world, org_id)
    invoice = await found(world, path)
    assert invoice["number"] == "TG-000001"
    assert (invoice["exact_usd"], invoice["total"]) == ("0.000054", "0.00")
    lines = (await found(world, f"{path}/lines"))["data"]
    told = [(it["component"], it["quantity"], it["unit_usd"], it["exact_usd"]) for it in lines]
    assert told == [
        ("output", 60, "0.0000004", "0.000024"),
        ("uncached_input", 300, "0.0000001", "0.00003"),
    ]
    line = f"{path}/lines/{lines[0]['id']}"
    hours = (await found(world, f"{line}/hours"))["data"]
    assert [(it["id"], it["num_requests"], it["exact_usd"]) for it in hours] == [
        ("2026-09-10T01Z", 2, "0.000016"), ("2026-09-10T05Z", 1, "0.000008"),
    ]  # fmt: skip
    requests = (await found(world, f"{line}/requests?hour=2026-09-10T01Z"))["data"]
    assert [(it["request_id"], it["quantity"]) for it in requests] == [("req_1", 20)] * 2
    assert len((await found(world, f"{line}/requests"))["data"]) == 3
    [untagged] = (await found(world, f"{line}/tags"))["data"]
    assert (untagged["tags"], untagged["quantity"], untagged["exact_usd"]) == ({}, 60, "0.000024")
    for bad in ("hour=2026-02-30T01Z", "hour=yesterday", "limit=0"):
        assert (await world.call("GET", f"{line}/requests?{bad}")).status_code == 400
    for gone in (f"{INVOICES}/inv_x", f"{path}/lines/x/hours", f"{INVOICES}/inv_x/lines"):
        assert (await world.call("GET", gone)).status_code == 404


async def test_a_final_invoice_is_exported_in_every_form(world: World, org_id: str) -> None:
    path = await bill(world, org_id)
    begins = {
        "json": b'{"object":"invoice.document"',
        "csv": b"invoice,line,kind",
        "tags": b"invoice,line,kind",
        "pdf": b"%PDF-1.7",
        "focus": b"AvailabilityZone,BilledCost",
        "parquet": b"PAR1",
        "beancount": b'option "title"',
        "hledger": b"commodity USD",
    }
    for form, begun in begins.items():
        answer = await world.call("GET", f"{path}/export?format={form}")
        assert answer.status_code == 200 and answer.content.startswith(begun), answer.text
        assert b"TG-000001" in answer.content
    assert (await world.call("GET", f"{path}/export?format=docx")).status_code == 400


async def test_the_journal_of_an_org_has_its_credits_beside_its_invoices(
    world: World, org_id: str
) -> None:
    async with world.db.begin() as conn:
        for credit_id in ("cr_1", "cr_2"):
            await grant_credit(conn, credit_id=credit_id, org=org_id, amount_pico=10**12)
        await revoke_credit(conn, org_id, "cr_2")
    await bill(world, org_id)
    await pay_usage(world.db, org_id)
    answer = await world.call("GET", f"{ADMIN}/journal")
    assert answer.status_code == 200 and "text/x-beancount" in answer.headers["content-type"]
    loaded, errors, _ = loader.load_string(answer.text)
    assert errors == [] and "TG-000001" in answer.text
    noted = [entry.narration for entry in loaded if hasattr(entry, "postings")]
    assert noted.count("credit") == 2 and "revoked" in noted
    as_hledger = await world.call("GET", f"{ADMIN}/journal?format=hledger")
    assert as_hledger.text.startswith("commodity USD") and "(cr_2) credit" in as_hledger.text
    assert (await world.call("GET", f"{ADMIN}/journal?format=pdf")).status_code == 400


async def test_late_and_corrected_lines_lead_to_their_requests_too(
    world: World, org_id: str
) -> None:
    path = await bill(world, org_id)
    unpriced = an_attempt(org=org_id, prices={}, admitted_at=at(2026, 9, 11).timestamp())
    await book(
        world.db,
        tokens(at(2026, 9, 12), 2, 7, org=org_id),
        tokens(at(2026, 10, 12), 2, 7, org=org_id),
        an_event(unpriced, Quantities(output=3)),
    )
    now = at(2026, 11, 3)
    await Invoicer(world.db, wall_clock=lambda: now.timestamp()).look()
    october = (await found(world, f"{INVOICES}?order=desc&limit=1"))["data"][0]["id"]
    lines = (await found(world, f"{INVOICES}/{october}/lines"))["data"]
    assert [(it["kind"], it["price_id"]) for it in lines] == [
        ("late", None), ("late", "p:7"), ("usage", "p:7"),
    ]  # fmt: skip
    for line in lines:
        below = await found(world, f"{INVOICES}/{october}/lines/{line['id']}/requests")
        assert len(below["data"]) == 1
    assert len((await found(world, f"{path}/lines"))["data"]) == 2, "it stays as it was"


async def test_who_asked_is_told_that_an_invoice_is_final(world: World, org_id: str) -> None:
    await bill(world, org_id)

    async def deliveries() -> Sequence[sa.Row[Any]]:
        async with world.db.connect() as conn:
            query = sa.text("SELECT event_type, body::jsonb AS body FROM webhook_deliveries")
            return (await conn.execute(query)).all()

    [row] = await eventually(deliveries)
    assert row.event_type == "invoice.finalized"
    assert '"number": "TG-000001"' in str(row.body).replace("'", '"')


async def test_an_operator_bills_records_and_takes_back(world: World, org_id: str) -> None:
    account = f"{ADMIN}/billing-account"
    assert (await world.call("GET", account)).status_code == 404
    terms = {"timezone": "Asia/Tokyo", "billing_day": 5, "issuer": "ACME"}
    made = await world.call("POST", account, terms)
    assert (made.status_code, made.json()["version"]) == (201, 1)
    for field, value in {"timezone": "Mars/Olympus", "currency": "XAU", "billing_day": 0}.items():
        refused = await world.call("POST", account, {field: value})
        assert refused.status_code == 400 and field in refused.text
    assert (await found(world, account))["timezone"] == "Asia/Tokyo"
    path = await Maker(world, org_id, "proj_a").invoice()
    paid = await world.call("POST", f"{path}/payments", {"amount": "60", "reference": "wire 7"})
    assert (paid.status_code, paid.json()["amount"]) == (201, "60.00")
    for amount in ("40.01", "0", "0.001", "-1"):
        body = {"amount": amount, "reference": "wire 8"}
        assert (await world.call("POST", f"{path}/payments", body)).status_code == 400
    [line] = (await found(world, f"{path}/lines"))["data"]
    body = {"reason": "it was slow", "lines": {line["id"]: "40"}}
    note = await world.call("POST", f"{path}/credit-notes", body)
    assert (note.status_code, note.json()["number"]) == (201, "TG-CN-000001")
    invoice = await found(world, path)
    assert (invoice["state"], invoice["due"], invoice["credited"]) == ("paid", "0.00", "40.00")


async def test_a_draft_is_made_final_by_hand_and_credits_and_payments_are_listed(
    world: World, org_id: str
) -> None:
    credit = await world.call("POST", f"{ADMIN}/credits", {"org_id": org_id, "amount_usd": "30"})
    maker = Maker(world, org_id, "proj_a")
    await book(world.db, tokens(ACCOUNT_MADE, 10_000, 10**10, org=org_id))
    await pay_usage(world.db, org_id)
    path = await maker.draft()
    for _ in range(2):
        final = await world.call("POST", f"{path}/finalize")
        assert (final.status_code, final.json()["number"]) == (200, "TG-000001")
    assert (final.json()["total"], final.json()["due"]) == ("100.00", "70.00")
    [paid] = (await found(world, f"{path}/credits"))["data"]
    assert (paid["id"], paid["paid_usd"]) == (credit.json()["id"], "30")
    body = {"amount": "1", "reference": "wire 7"}
    assert (await world.call("POST", f"{path}/payments", body)).is_success
    note = await world.call("POST", f"{path}/credit-notes", {"reason": "it was slow"})
    assert note.json()["total"] == "100.00"
    payments = (await found(world, f"{ADMIN}/payments"))["data"]
    assert sorted((it["method"], it["amount"]) for it in payments) == [
        ("balance", "-31.00"), ("balance", "30.00"), ("received", "1.00"),
    ]  # fmt: skip
    assert (await found(world, f"{ADMIN}/credit-notes"))["data"] == [note.json()]
    invoice_id = path.rpartition("/")[2]
    for kind, expected in (("payments", payments), ("credit-notes", [note.json()])):
        assert (await found(world, f"{ADMIN}/{kind}?invoice_id={invoice_id}"))["data"] == expected
        assert (await found(world, f"{ADMIN}/{kind}?invoice_id=inv_x"))["data"] == []


async def test_a_currency_has_a_rate_and_a_slip_is_asked_about(world: World) -> None:
    path, bank = f"{ADMIN}/fx-rates", {"source": "bank"}
    for currency in ("ZZZ", "XAU", "USD"):
        refused = await world.call(
            "POST", path, {"currency": currency, "usd_per_unit": "1", "valid_from": 0, **bank}
        )
        assert (refused.status_code, refused.json()["param"]) == (400, "currency"), refused.text

    async def say(currency: str, usd: str, valid_from: int, *, confirm: bool = False) -> int:
        body = {"currency": currency, "usd_per_unit": usd, "valid_from": valid_from, **bank}
        answer = await world.call("POST", path, {**body, "confirm": confirm})
        assert answer.is_success or answer.json()["param"] == "usd_per_unit", answer.text
        return answer.status_code

    assert await say("JPY", "0.000000000001", 1) == 400
    assert await say("JPY", "0.0066", 1) == 201
    assert [await say("JPY", usd, 2) for usd in ("0.066", "0.0032", "0.0133")] == [400] * 3
    assert await say("JPY", "0.0132", 2) == 201
    assert await say("JPY", "0.0066", 3) == 201
    assert await say("JPY", "0.66", 4, confirm=True) == 201
    assert await say("EUR", "1.1", 1) == 201
    assert await say("EUR", "1.2", 4_000_000_000) == 201

    async def listed(query: str) -> list[tuple[str, str]]:
        return [(it["id"], it["coin_usd"]) for it in (await found(world, f"{path}{query}"))["data"]]

    assert await listed("") == [("EUR.1", "0.011"), ("JPY.4", "0.66")]
    assert await listed("?at=3&limit=1&after=EUR.1") == [("JPY.3", "0.0066")]
    assert await listed("?at=4000000000&order=desc") == [
        ("JPY.4", "0.66"), ("EUR.4000000000", "0.012"),
    ]  # fmt: skip


async def test_nobody_says_of_their_own_invoice_that_it_was_paid(world: World, org_id: str) -> None:
    made = await world.call("POST", f"{ADMIN}/orgs", {"name": "mallory"})
    mallory = made.json()["admin_key"]["value"]
    path = await Maker(world, org_id, "proj_a").invoice()
    for change, body in {
        f"{path}/finalize": None,
        f"{ADMIN}/reratings": {"starts_at": 0, "ends_at": 1, "digest": "0" * 64},
        f"{path}/payments": {"amount": "1", "reference": "x"},
        f"{path}/credit-notes": {"reason": "x"},
        f"{ADMIN}/billing-account": {"net_days": 365},
        f"{ADMIN}/fx-rates": {
            "currency": "EUR", "usd_per_unit": "1", "valid_from": 0, "source": "me",
        },
    }.items():  # fmt: skip
        assert (await world.call("POST", change, body, key=mallory)).status_code == 403
    assert (await world.call("GET", path, key=mallory)).status_code == 404
