"""Write invoices, credit notes and payments as a journal for two plain-text accounting tools.

    beancount     2026-10-02 * "TG-000001" "inv_..."        Assets:Receivable:Org-x6fa  12.34 USD
    hledger       2026-10-02 * (TG-000001) inv_...          assets:receivable:org_a     USD 12.34

Amounts are exact USD in any currency of the invoice, as in the ledger: charges by model against the
receivable, and the residual of rounding on its own account, so that each entry balances. Payments
by credits, and what an invoice gives back to them, use the account of advance payments.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import date

import msgspec

from billing.invoices.documents.advances import Advance
from billing.invoices.documents.document import Document
from billing.money import Pico, format_usd

PLAIN = re.compile(r"[A-Za-z0-9]")
UNSAFE = re.compile(r"[^A-Za-z0-9_./@+-]")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the journal. Each tool formats the parts of an account's name in its own way."""

    on: date
    number: str
    note: str
    postings: list[tuple[tuple[str, ...], Pico]]


ADVANCED: dict[str, tuple[tuple[str, ...], int]] = {
    "credit": (("Assets", "Cash"), 1),
    "expired": (("Income", "Breakage"), -1),
    "revoked": (("Assets", "Cash"), -1),
}
"""The other account of an advance, and the sign of its amount there."""


def of_advance(advance: Advance) -> Entry:
    other, sign = ADVANCED[advance.kind]
    amount = sign * advance.amount_pico
    return Entry(
        on=advance.posted_at.date(),
        number=advance.id,
        note=advance.kind,
        postings=[(other, amount), (in_advance(advance.org_id), -amount)],
    )


def in_advance(org_id: str) -> tuple[str, ...]:
    return ("Liabilities", "Credits", org_id)


def of_document(document: Document) -> Iterator[Entry]:
    """Yield the entries of an invoice, its notes and its payments, each balanced."""
    invoice, coin = document.invoice, document.coin_pico
    owed = ("Assets", "Receivable", invoice.org_id)
    charged: dict[tuple[str, ...], Pico] = defaultdict(int)
    for line in document.lines:
        of_terms = line.kind == "adjustment"
        account = ("Income", "Adjustments") if of_terms else ("Income", "Usage", line.model)
        charged[account] -= line.exact_pico
    postings = [(owed, document.amounts.total * coin), *sorted(charged.items())]
    postings.append((("Expenses", "Rounding"), invoice.residual_pico or 0))
    yield Entry(
        on=document.finalized_at.date(), number=document.number, note=invoice.id, postings=postings
    )
    for note in document.notes:
        amount = note.total_coins * coin
        yield Entry(
            on=note.created_at.date(),
            number=note.number,
            note=f"takes back of {document.number}",
            postings=[(("Expenses", "CreditNotes"), amount), (owed, -amount)],
        )
    for payment in document.payments:
        amount = payment.amount_coins * coin
        source = ("Assets", "Cash") if payment.method == "received" else in_advance(invoice.org_id)
        yield Entry(
            on=payment.created_at.date(),
            number=payment.id,
            note=f"{'pays' if amount > 0 else 'gives back'} of {document.number}",
            postings=[(source, amount), (owed, -amount)],
        )


def to_beancount(entries: Iterable[Entry]) -> str:
    found = _by_day(entries)
    accounts = sorted({name for entry in found for name, _ in entry.postings})
    begun = min((entry.on for entry in found), default=date(1970, 1, 1))
    lines = ['option "title" "Tollgate"', 'option "operating_currency" "USD"', ""]
    lines += [f"{begun} open {_beancount(name)} USD" for name in accounts]
    for entry in found:
        lines += ["", f'{entry.on} * "{_safe(entry.number)}" "{_safe(entry.note)}"']
        lines += [
            f"  {_beancount(name)}  {format_usd(amount)} USD" for name, amount in entry.postings
        ]
    return "\n".join(lines) + "\n"


def to_hledger(entries: Iterable[Entry]) -> str:
    lines = ["commodity USD 1.000000000000"]
    for entry in _by_day(entries):
        lines += ["", f"{entry.on} * ({_safe(entry.number)}) {_safe(entry.note)}"]
        lines += [
            f"    {_hledger(name)}  USD {format_usd(amount)}" for name, amount in entry.postings
        ]
    return "\n".join(lines) + "\n"


def _by_day(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.on, entry.number))


def _beancount(name: tuple[str, ...]) -> str:
    """Write an account for beancount, whose parts begin with a capital and have only letters,
    digits and dashes: all other characters are written as their codes, so that names stay
    different."""
    kinds, own = name[:2], name[2:]
    return ":".join([*kinds, *("N-" + "".join(map(_coded, part)) for part in own)])


def _coded(character: str) -> str:
    return character if PLAIN.match(character) else f"-{ord(character):x}-"


def _hledger(name: tuple[str, ...]) -> str:
    """Write an account for hledger, in which a colon separates parts and two spaces end a name."""
    kinds, own = name[:2], name[2:]
    return ":".join([*(kind.lower() for kind in kinds), *map(_escaped, own)])


def _escaped(part: str) -> str:
    return UNSAFE.sub(lambda found: f"%{ord(found[0]):x}%", part)


def _safe(text: str) -> str:
    """Replace the characters of an id that neither tool accepts."""
    return re.sub(r"[^A-Za-z0-9_. -]", "?", text)
