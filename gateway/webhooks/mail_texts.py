"""Writes the e-mails that tell people of events: plain text, with amounts and what to do.

Names that people chose are quoted and made harmless: no line break, no hidden character, and
nothing that a mail program would turn into a link.
"""

from __future__ import annotations

import re
import unicodedata
from calendar import monthrange
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple, TypeVar

import msgspec

from gateway.tenancy.members.mail_topics import Topic
from gateway.wire.admin.webhook_events import (
    ApprovalRequested,
    BalanceCrossed,
    BatchEnded,
    EventScope,
    InvoiceEntered,
    Quantity,
    ThresholdReached,
    TopUpEntered,
)

MAX_NAME_LENGTH = 100
WHOLE = 100
CENT = Decimal("0.01")
LINK_DOT = re.compile(r"\.(?=[^\W\d_]{2})")
ONE_DAY = timedelta(days=1)


class MailFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The names of what an event has the ids of."""

    organization: str
    """The name of the organization that it is about."""
    project: str | None = None
    key: str | None = None
    hard: bool | None = None
    """True if the budget refuses what is beyond it; None: it is no budget, or gone."""


class Letter(NamedTuple):
    subject: str
    paragraphs: list[str]
    action: str
    """A sentence on what the reader can do; a link follows."""


class SentEvent(msgspec.Struct, frozen=True):
    """The part of an event's body that is the same for all."""

    type: str
    timestamp: datetime
    data: msgspec.Raw


Data = TypeVar("Data")
Write = Callable[[Any, MailFacts], Letter]


class MailForm(NamedTuple):
    """How an event is told by e-mail."""

    topic: Topic
    data: type[Any]
    write: Write


def clean(name: str | None) -> str:
    """Quote a name that somebody chose."""
    plain = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in name or "")
    plain = " ".join(plain.split())[:MAX_NAME_LENGTH]
    return "“" + LINK_DOT.sub("[.]", plain).replace("://", "[:]//").replace("@", "[at]") + "”"


def amount(quantity: Quantity) -> str:
    """Show a count of tokens; or US dollars with two places, six of what is less than a cent."""
    if quantity.unit != "usd":
        return f"{int(quantity.value):,} tokens"
    exact = Decimal(quantity.value)
    sign, exact = ("-" if exact < 0 else ""), abs(exact)
    if exact and exact < CENT:
        return f"{sign}${exact.quantize(Decimal('0.000001'), ROUND_HALF_UP):f}"
    return f"{sign}${exact.quantize(CENT, ROUND_HALF_UP):,f}"


def day(moment: datetime) -> str:
    at = moment.astimezone(UTC)
    return f"{at.day} {at:%B %Y}"


def instant(moment: datetime) -> str:
    return f"{day(moment)}, {moment.astimezone(UTC):%H:%M} UTC"


def scope_name(scope: EventScope, facts: MailFacts) -> str:
    owner, _, rest = scope.id.partition("/")
    match scope.type:
        case "org":
            return f"the organization {clean(facts.organization)}"
        case "project":
            return f"the project {clean(facts.project or scope.id)}"
        case "key":
            return f"the key {clean(facts.key or scope.id)}"
        case "model" if facts.project:
            return f"the model {clean(rest)} in the project {clean(facts.project)}"
        case "key_model":
            return f"the model {clean(rest)} with the key {clean(facts.key or owner)}"
        case other:
            return f"the {clean(other)[1:-1]} {clean(scope.id)}"


def begin(text: str) -> str:
    return text[:1].upper() + text[1:]


KINDS = {"day": "daily", "month": "monthly", "total": "total"}


def period_of(data: ThresholdReached) -> tuple[str, datetime | None]:
    """Name a budget's period, and say when it ends."""
    start = data.period.start
    if start is None:
        return "all time", None
    start = start.astimezone(UTC)
    if data.period.type == "month":
        return f"{start:%B %Y}", start + timedelta(days=monthrange(start.year, start.month)[1])
    return day(start), start + ONE_DAY


def budget(data: ThresholdReached, facts: MailFacts) -> Letter:
    scope, kind = scope_name(data.scope, facts), KINDS.get(data.period.type, data.period.type)
    period, ends = period_of(data)
    until = "" if ends is None else f" until {instant(ends)}"
    spent = f"{begin(scope)} has spent {amount(data.used)} of its {kind} budget of"
    paragraphs = [f"{spent} {amount(data.limit)} ({period})."]
    subject = f"{data.threshold_percent}% of the {kind} budget of {scope} is spent"
    if data.reason == "refused":
        subject = f"The {kind} budget of {scope} refuses requests"
        paragraphs.append(
            "A request was refused, because it might have cost more than what is left. Requests"
            f" that may cost less still run; the others are refused{until}."
        )
    elif facts.hard is False:
        paragraphs.append("Nothing is refused: this budget only warns.")
    elif facts.hard and data.threshold_percent >= WHOLE:
        paragraphs.append(f"Its requests are refused{until}, unless the budget is raised.")
    elif facts.hard:
        paragraphs.append(f"When all of it is spent, requests are refused{until}.")
    return Letter(subject, paragraphs, "See what was spent, and raise or remove the budget:")


def unusual(data: ThresholdReached, facts: MailFacts) -> Letter:
    who = clean(facts.organization)
    return Letter(
        f"{who} spends more than usual",
        [
            f"The organization {who} spent {amount(data.used)} in one hour. In past weeks it spent"
            f" less than {amount(data.limit)} at this hour of the week.",
            "Nothing is refused for it.",
        ],
        "See which key and which model it was; a key that leaked can be revoked at once:",
    )


def rate_limit(data: ThresholdReached, facts: MailFacts) -> Letter:
    scope, measure = scope_name(data.scope, facts), data.measure.replace("_", " ")
    return Letter(
        f"{data.threshold_percent}% of the {measure} of {scope} are used",
        [
            f"{begin(scope)} used {int(data.used.value):,} of the {int(data.limit.value):,}"
            f" {measure} that it may use. Requests beyond are refused and can be repeated a little"
            " later.",
        ],
        "See who uses so much, and ask for a plan that allows more if you need it:",
    )


def dispute(data: ThresholdReached, facts: MailFacts) -> Letter:
    return Letter(
        "An upstream claims more than a request can have used",
        [
            f"For a request of the organization {clean(facts.organization)} an upstream claimed"
            f" {amount(data.used)}; {amount(data.limit)} were billed. Nobody pays for the rest.",
        ],
        "See the claims (GET /v1/admin/disputed-usage), and ask the vendor about them:",
    )


def credits_low(data: BalanceCrossed, facts: MailFacts) -> Letter:
    who = clean(facts.organization)
    return Letter(
        f"{amount(data.left)} of credit are left of {who}",
        [
            f"The organization {who} has {amount(data.left)} of credit left, which is not more than"
            f" the {amount(data.threshold)} at which you asked to be told.",
            "When nothing is left, its requests are refused.",
        ],
        "Add credit, or let it be topped up by itself:",
    )


def credits_exhausted(data: BalanceCrossed, facts: MailFacts) -> Letter:
    who = clean(facts.organization)
    why = f"The organization {who} has {amount(data.left)} of credit left."
    if data.reason == "refused":
        why += " A request was refused, because it might have cost more."
    return Letter(
        f"The credit of {who} is used up",
        [why, "Requests are refused until there is credit again."],
        "Add credit:",
    )


def top_up(data: TopUpEntered, facts: MailFacts) -> Letter:
    who, wanted = clean(facts.organization), amount(data.amount)
    match data.state:
        case "requested":
            return Letter(
                f"{who} asks for a top-up of {wanted}",
                [
                    f"The organization {who} wants {wanted} of credit; {amount(data.left)} were"
                    f" left when it asked. Its top-up is {data.top_up_id}, good until"
                    f" {instant(data.expires_at)}.",
                ],
                "Take the payment, then grant the top-up, or say that it failed:",
            )
        case "granted":
            return Letter(
                f"{wanted} of credit were added to {who}",
                [f"The organization {who} has {wanted} more of credit ({data.top_up_id})."],
                "There is nothing to do. The balance stands here:",
            )
        case "failed":
            reason = "" if not data.failure else f" The reason given: {clean(data.failure)}."
            return Letter(
                f"The top-up of {wanted} for {who} failed",
                [f"The payment of the top-up {data.top_up_id} failed.{reason}"],
                "Check how you pay, and add credit before it is used up:",
            )
        case _:
            return Letter(
                f"The top-up of {wanted} for {who} was not paid in time",
                [f"Nobody paid for the top-up {data.top_up_id}, so it has expired."],
                "Add credit before it is used up:",
            )


INVOICE_SUBJECTS = {
    "finalized": "{which} is ready",
    "past_due": "{which} is past due",
    "reminder_1": "Reminder: {which} is past due",
    "reminder_2": "Second reminder: {which} is past due",
    "reminder_3": "Last reminder: {which} is past due",
    "suspended": "{who} is suspended: {which} is not paid",
    "uncollectible": "{which} was written off",
    "paid": "{which} is paid",
    "voided": "{which} is void",
}
INVOICE_ENDS = {
    "reminder_3": "If it is not paid, requests of the organization are refused soon.",
    "suspended": "Requests of the organization are refused until it is paid.",
    "uncollectible": "Its payment is expected no more; the organization stays as it is.",
    "paid": "Thank you.",
    "voided": "Nothing is to be paid for it.",
}
SETTLED = ("paid", "voided", "uncollectible")


def invoice(data: InvoiceEntered, facts: MailFacts) -> Letter:
    number = clean(data.number or data.invoice_id)[1:-1]
    which, who = f"invoice {number}", clean(facts.organization)
    total = "" if data.total is None else f" of {data.total} {data.currency}"
    due = f", due on {day(data.due_at)}" if data.due_at and data.state not in SETTLED else ""
    paragraphs = [f"This is about {which}{total} for the organization {who}{due}."]
    if end := INVOICE_ENDS.get(data.state):
        paragraphs.append(end)
    see = "See the invoice:" if data.state in SETTLED else "See the invoice and how to pay it:"
    return Letter(begin(INVOICE_SUBJECTS[data.state].format(which=which, who=who)), paragraphs, see)


def approval(data: ApprovalRequested, facts: MailFacts) -> Letter:
    tool, server = clean(data.tool), clean(data.server)
    return Letter(
        f"A call of the tool {tool} waits for an approval",
        [
            f"Somebody wants to call the tool {tool} of the server {server} in the project"
            f" {clean(facts.project or data.project_id)}; who asks is {clean(data.client_id)}.",
            f"The request is {data.approval_id}. It can be answered until"
            f" {instant(data.expires_at)}; without an answer the call is not made.",
        ],
        "Look at its arguments, then approve or deny it:",
    )


def batch(data: BatchEnded, facts: MailFacts, became: str) -> Letter:
    return Letter(
        f"The batch {data.id} {became}",
        [
            f"The batch {data.id} of the project {clean(facts.project or data.project_id)}"
            f" {became}.",
        ],
        "Its results, and what failed, are fetched over the API (GET /v1/batches). See what it"
        " cost:",
    )


def _batch(became: str) -> MailForm:
    return MailForm("batches", BatchEnded, lambda data, facts: batch(data, facts, became))


MAILED: Mapping[str, MailForm] = {
    "budget.threshold_reached": MailForm("budgets", ThresholdReached, budget),
    "spend.unusual": MailForm("budgets", ThresholdReached, unusual),
    "rate_limit.threshold_reached": MailForm("rate_limits", ThresholdReached, rate_limit),
    "usage.disputed": MailForm("disputes", ThresholdReached, dispute),
    "credits.low": MailForm("credits", BalanceCrossed, credits_low),
    "credits.exhausted": MailForm("credits", BalanceCrossed, credits_exhausted),
    "mcp.approval_requested": MailForm("approvals", ApprovalRequested, approval),
    "batch.completed": _batch("is complete"),
    "batch.failed": _batch("has failed"),
    "batch.expired": _batch("was not done in time"),
    "batch.cancelled": _batch("was cancelled"),
    "top_up.requested": MailForm("payments", TopUpEntered, top_up),
    "top_up.granted": MailForm("credits", TopUpEntered, top_up),
    "top_up.failed": MailForm("credits", TopUpEntered, top_up),
    "top_up.expired": MailForm("credits", TopUpEntered, top_up),
    **{
        f"invoice.{state}": MailForm("invoices", InvoiceEntered, invoice)
        for state in INVOICE_SUBJECTS
    },
}
"""Each event that people are told of. A draft of an invoice is the operator's to look at: nobody is
sent it."""


def read_event(body: str) -> tuple[MailForm, Any]:
    """Read the body of a delivery: how its event is told, and its data."""
    sent = msgspec.json.decode(body, type=SentEvent)
    mailed = MAILED[sent.type]
    return mailed, msgspec.json.decode(sent.data, type=mailed.data)


def write_text(
    letter: Letter, *, reader: str, role: str, organization: str, base: str, choices_url: str
) -> str:
    """Return the text of a letter. `base`: the address of this installation."""
    return "\n\n".join(
        (
            f"Hello {clean(reader)[1:-1]},",
            *letter.paragraphs,
            f"{letter.action}\n{base}/console",
            "-- \n"
            f"You are sent this as {role} of {clean(organization)} at {base}.\n"
            f"Choose what you are sent: {choices_url}\n",
        )
    )
