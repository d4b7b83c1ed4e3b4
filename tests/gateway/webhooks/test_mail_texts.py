"""Every event is told in plain words; no name that somebody chose becomes a header or a link."""

from __future__ import annotations

from datetime import UTC, datetime
from email.parser import BytesParser
from email.policy import default
from typing import Any, get_args

import msgspec
import pytest
from aiosmtplib.email import flatten_message
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.net.mail import MailMessage, to_email
from gateway.tenancy.members.mail_topics import TOPICS, Topic
from gateway.webhooks.mail_texts import (
    MAILED,
    Letter,
    MailFacts,
    amount,
    clean,
    read_event,
    write_text,
)
from gateway.wire.admin.tenant import MailChoices
from gateway.wire.admin.webhook_events import (
    ApprovalRequested,
    BalanceCrossed,
    BatchEnded,
    EventPeriod,
    EventScope,
    EventType,
    InvoiceEntered,
    Quantity,
    ThresholdReached,
    TopUpEntered,
    WebhookEvent,
)
from tests.budget import examples

AT = datetime(2026, 11, 19, 12, 30, tzinfo=UTC)
UNTOLD = {"invoice.draft"}
FACTS = MailFacts(organization="acme", project="search", key="ci", hard=True)


def usd(value: str) -> Quantity:
    return Quantity(value=value, unit="usd")


def threshold(**changes: Any) -> ThresholdReached:
    found = ThresholdReached(
        alert_id="alert_1",
        organization_id="org_1",
        scope=EventScope(type="project", id="proj_1"),
        measure="spend",
        cap_id="cap_1",
        period=EventPeriod(type="month", start=datetime(2026, 11, 1, tzinfo=UTC)),
        threshold_percent=80,
        limit=usd("1250"),
        used=usd("1000.005"),
        reason="spent",
    )
    return msgspec.structs.replace(found, **changes)


def sample(type_: str) -> Any:
    state = type_.partition(".")[2]
    kind = MAILED[type_].data
    if kind is BalanceCrossed:
        return BalanceCrossed(
            alert_id="alert_1",
            organization_id="org_1",
            threshold=usd("20"),
            left=usd("-0.000123") if state == "exhausted" else usd("18.2"),
            reason="spent",
        )
    if kind is ApprovalRequested:
        return ApprovalRequested(
            organization_id="org_1",
            project_id="proj_1",
            approval_id="apr_1",
            server="files",
            tool="delete_file",
            client_id="key_1",
            decider="administrator",
            arguments_digest="sha256:1",
            expires_at=AT,
        )
    if kind is BatchEnded:
        return BatchEnded(id="batch_1", organization_id="org_1", project_id="proj_1")
    if kind is TopUpEntered:
        return TopUpEntered(
            organization_id="org_1",
            top_up_id="topup_1",
            state=state,  # type: ignore[arg-type]
            amount=usd("100"),
            left=usd("3"),
            requested_at=AT,
            expires_at=AT,
            credit_id=None,
            failure="card declined" if state == "failed" else None,
        )
    if kind is InvoiceEntered:
        return InvoiceEntered(
            organization_id="org_1",
            invoice_id="inv_1",
            number="INV-7",
            state=state,
            currency="EUR",
            total="12.00",
            due_at=AT,
        )
    tokens = {"limit": Quantity(value="1000", unit="tokens"), "reason": None, "cap_id": None}
    if type_ == "rate_limit.threshold_reached":
        used = Quantity(value="850", unit="tokens")
        scope = EventScope(type="key", id="key_1")
        return threshold(measure="tokens_per_minute", used=used, scope=scope, **tokens)
    if type_ == "usage.disputed":
        return threshold(used=Quantity(value="5000", unit="tokens"), **tokens)
    return threshold()


def compose(type_: str, facts: MailFacts = FACTS, data: Any = None) -> Letter:
    event = WebhookEvent(type=type_, timestamp=AT, data=sample(type_) if data is None else data)
    mailed, read = read_event(msgspec.json.encode(event).decode())
    assert read == event.data
    letter: Letter = mailed.write(read, facts)
    return letter


def test_every_event_is_told_or_is_named_as_one_that_is_not() -> None:
    assert {*MAILED} == {*get_args(EventType)} - UNTOLD
    assert {each.topic for each in MAILED.values()} == {*TOPICS} == {*get_args(Topic)}
    assert {*MailChoices.__struct_fields__} == {*TOPICS}


SUBJECTS = {
    "budget.threshold_reached": "80% of the monthly budget of the project “search” is spent",
    "spend.unusual": "“acme” spends more than usual",
    "rate_limit.threshold_reached": "80% of the tokens per minute of the key “ci” are used",
    "usage.disputed": "An upstream claims more than a request can have used",
    "credits.low": "$18.20 of credit are left of “acme”",
    "credits.exhausted": "The credit of “acme” is used up",
    "mcp.approval_requested": "A call of the tool “delete_file” waits for an approval",
    "batch.completed": "The batch batch_1 is complete",
    "batch.failed": "The batch batch_1 has failed",
    "batch.expired": "The batch batch_1 was not done in time",
    "batch.cancelled": "The batch batch_1 was cancelled",
    "top_up.requested": "“acme” asks for a top-up of $100.00",
    "top_up.granted": "$100.00 of credit were added to “acme”",
    "top_up.failed": "The top-up of $100.00 for “acme” failed",
    "top_up.expired": "The top-up of $100.00 for “acme” was not paid in time",
    "invoice.finalized": "Invoice INV-7 is ready",
    "invoice.past_due": "Invoice INV-7 is past due",
    "invoice.reminder_1": "Reminder: invoice INV-7 is past due",
    "invoice.reminder_2": "Second reminder: invoice INV-7 is past due",
    "invoice.reminder_3": "Last reminder: invoice INV-7 is past due",
    "invoice.suspended": "“acme” is suspended: invoice INV-7 is not paid",
    "invoice.uncollectible": "Invoice INV-7 was written off",
    "invoice.paid": "Invoice INV-7 is paid",
    "invoice.voided": "Invoice INV-7 is void",
}


@pytest.mark.parametrize("type_", sorted(MAILED))
def test_each_is_told_in_words(type_: str) -> None:
    letter = compose(type_)
    assert letter.subject == SUBJECTS[type_]
    text = write_text(
        letter, reader="Ann", role="owner", organization="acme", base="https://g", choices_url="u"
    )
    assert "None" not in text and "_reached" not in text and all(letter.paragraphs)
    assert all(line.endswith((".", ":")) for line in (*letter.paragraphs, letter.action))


BUDGETS = [
    (True, {}, "When all of it is spent, requests are refused until 1 December 2026, 00:00 UTC."),
    (False, {}, "Nothing is refused: this budget only warns."),
    (
        True,
        {"threshold_percent": 100},
        "Its requests are refused until 1 December 2026, 00:00 UTC, unless the budget is raised.",
    ),
    (
        True,
        {"threshold_percent": 100, "reason": "refused"},
        "A request was refused, because it might have cost more than what is left. Requests that"
        " may cost less still run; the others are refused until 1 December 2026, 00:00 UTC.",
    ),
    (
        True,
        {"period": EventPeriod(type="total", start=None)},
        "When all of it is spent, requests are refused.",
    ),
    (
        True,
        {"period": EventPeriod(type="day", start=datetime(2026, 12, 31, tzinfo=UTC))},
        "When all of it is spent, requests are refused until 1 January 2027, 00:00 UTC.",
    ),
]


@pytest.mark.parametrize(("hard", "changes", "said"), BUDGETS)
def test_a_budget_says_what_it_refuses_and_until_when(
    hard: bool, changes: dict[str, Any], said: str
) -> None:
    facts = msgspec.structs.replace(FACTS, hard=hard)
    letter = compose("budget.threshold_reached", facts, threshold(**changes))
    assert letter.paragraphs[1:] == [said]
    assert letter.paragraphs[0].startswith("The project “search” has spent $1,000.01 of its ")


SCOPES = [
    ("org", "org_1", "the organization “acme”"),
    ("model", "proj_1/org/gpt", "the model “org/gpt” in the project “search”"),
    ("key_model", "key_1/gpt", "the model “gpt” with the key “ci”"),
    ("client", "client_1", "the client “client_1”"),
    ("tag", "team=search", "the tag “team=search”"),
]


@pytest.mark.parametrize(("type_", "id_", "name"), SCOPES)
def test_a_scope_is_named(type_: str, id_: str, name: str) -> None:
    data = threshold(scope=EventScope(type=type_, id=id_))
    assert compose("budget.threshold_reached", FACTS, data).subject.endswith(f"of {name} is spent")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0", "$0.00"),
        ("1234567.895", "$1,234,567.90"),
        ("0.0099", "$0.009900"),
        ("-0.5", "-$0.50"),
        ("0.00000000025", "$0.000000"),
    ],
)
def test_amounts_are_readable(value: str, shown: str) -> None:
    assert amount(usd(value)) == shown


HOSTILE = st.one_of(
    st.text(max_size=100),
    st.sampled_from(
        [
            "acme\r\nBcc: eve@example.com",
            "acme\u2028Bcc: eve@example.com",
            "pay at https://evil.example/now",
            "www.evil.example",
            "=?utf-8?q?=0ABcc=3A?= eve@example.com",
            "\u202eemca",
            "\x00\x0b\x85",
        ]
    ),
)


@settings(max_examples=examples(200), deadline=None)
@given(name=HOSTILE, type_=st.sampled_from(sorted(MAILED)))
def test_no_name_becomes_a_header_or_a_link(name: str, type_: str) -> None:
    facts = MailFacts(organization=name, project=name, key=name, hard=True)
    letter = compose(type_, facts)
    text = write_text(
        letter, reader=name, role="owner", organization=name, base="https://g", choices_url="u"
    )
    message = MailMessage(to="ann@example.com", subject=letter.subject, text=text, id="mail_1")
    sent = flatten_message(to_email(message, "Tollgate <g@example.com>"))
    read = BytesParser(policy=default).parsebytes(sent)
    assert [each.lower() for each in read.keys()] == [
        "from", "subject", "to", "date", "message-id", "auto-submitted", "content-type",
        "content-transfer-encoding", "mime-version",
    ]  # fmt: skip
    assert read["to"] == "ann@example.com"
    plain = text.replace("https://g/console", "").replace("https://g", "")
    assert "://" not in plain and "evil.example" not in plain and "@" not in plain


def test_a_plain_name_is_left_as_it_is() -> None:
    assert clean("llama-3.1 (prod)") == "“llama-3.1 (prod)”"
    assert clean("evil.example") == "“evil[.]example”"
