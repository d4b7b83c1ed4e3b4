"""Cost rows of FOCUS 1.2 (FinOps Open Cost and Usage Specification), one for each line, and one for
each part of a line that a credit note takes back.

The rows have all 57 columns of version 1.2, in alphabetical order; what does not exist here, such
as regions, is null. `BilledCost` is rounded, so its sum is the invoice less its credit notes; list,
contracted and effective cost are exact, in USD to the pico, in other currencies to 18 places.
Prices are in USD (`PricingCurrency`): list prices are those of the default list, contracted ones
those that were booked. Late and rerated usage of an invoiced period is a correction; the terms of a
whole period are adjustments. The issuer of the invoice is the provider: with another one, FOCUS
would have the row paid elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import IO

import msgspec

from billing.currency import USD, exponent_of
from billing.events import CALLS
from billing.invoices.documents.document import Bill, LineReversal, Page, moment
from billing.invoices.documents.tables import inert, write_csv
from billing.invoices.invoice import InvoiceLine
from billing.money import Pico, to_decimal
from billing.tables import EPOCH

VERSION = "1.2"
COLUMNS = (
    *("AvailabilityZone", "BilledCost", "BillingAccountId", "BillingAccountName"),
    *("BillingAccountType", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart"),
    *("CapacityReservationId", "CapacityReservationStatus", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart"),
    *("CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName"),
    *("CommitmentDiscountQuantity", "CommitmentDiscountStatus", "CommitmentDiscountType"),
    *("CommitmentDiscountUnit", "ConsumedQuantity", "ConsumedUnit", "ContractedCost"),
    *("ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost"),
    *("ListUnitPrice", "PricingCategory", "PricingCurrency"),
    *("PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost"),
    *("PricingCurrencyListUnitPrice", "PricingQuantity", "PricingUnit", "ProviderName"),
    *("PublisherName", "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType"),
    *("ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter"),
    *("SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags"),
)
NUMBERS = frozenset(it for it in COLUMNS if it.endswith(("Cost", "UnitPrice", "Quantity")))
MOMENTS = frozenset(it for it in COLUMNS if it.endswith(("PeriodStart", "PeriodEnd")))
"""Columns with moments; all others have text."""
MADE_UP = ("Sku", "SubAccount", "Resource", "ChargeDescription", "BillingAccount")
"""Columns with these prefixes have names that tenants choose."""
NUM_PLACES = 18
PLACES = Decimal(1).scaleb(-NUM_PLACES)
EXACT = Context(prec=80, rounding=ROUND_HALF_EVEN)
Value = str | Decimal | datetime | None


def focus_rows(bill: Bill, page: Page) -> Iterator[dict[str, Value]]:
    """Yield rows with every column of COLUMNS."""
    for line in page.lines:
        yield _charged(bill, line, page.list_pico.get(line.price_id))
    for part in page.taken_back:
        yield _taken_back(bill, part)


def write_focus(bill: Bill, pages: Iterable[Page], file: IO[bytes]) -> None:
    """Write the rows as CSV."""
    rows = (row for page in pages for row in focus_rows(bill, page))
    write_csv(COLUMNS, map(_cells, rows), file)


def _cells(row: dict[str, Value]) -> list[str]:
    return [_cell(name, to_text(row[name]) or "") for name in COLUMNS]


def _cell(name: str, text: str) -> str:
    return inert(text) if name.startswith(MADE_UP) else text


def to_text(value: Value) -> str | None:
    match value:
        case datetime():
            return moment(value)
        case Decimal():
            return format(value, "f")
    return value


def _row(bill: Bill, line: InvoiceLine) -> dict[str, Value]:
    """Return the columns that charges and reversals of a line have in common."""
    row: dict[str, Value] = dict.fromkeys(COLUMNS)
    invoice = bill.invoice
    return row | {
        "BillingAccountId": invoice.org_id,
        "BillingAccountName": bill.org_name,
        "BillingAccountType": "Organization",
        "BillingCurrency": invoice.currency,
        "BillingPeriodStart": invoice.period_start,
        "BillingPeriodEnd": invoice.period_end,
        "ChargePeriodStart": line.usage_start,
        "ChargePeriodEnd": line.usage_end,
        "InvoiceId": bill.number,
        "InvoiceIssuerName": invoice.issuer,
        "PricingCurrency": USD,
        "ProviderName": invoice.issuer,
        "PublisherName": invoice.issuer,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceSubcategory": "Generative AI",
        "ServiceName": "Inference",
        "SubAccountId": line.project or None,
        "SubAccountName": bill.project_names.get(line.project),
        "SubAccountType": "Project" if line.project else None,
    }


def _charged(bill: Bill, line: InvoiceLine, list_pico: Pico | None) -> dict[str, Value]:
    cost = _cost(bill, line, line.pico_per_token)
    row = _row(bill, line) | {
        "BilledCost": Decimal(bill.money(line.amount_coins)),
        "ListCost": cost if list_pico is None else _cost(bill, line, list_pico),
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "PricingCurrencyEffectiveCost": to_decimal(line.exact_pico),
        "ChargeDescription": f"{line.kind}: {line.model}, {line.tier}, {line.component}",
    }
    if line.kind == "adjustment":
        return row | {"ChargeCategory": "Adjustment", "ChargeFrequency": "One-Time"}
    row |= {
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ResourceId": line.model,
        "ResourceName": line.model,
        "ResourceType": "Model",
    }
    if _corrects(line):
        row["ChargeClass"] = "Correction"
    return row | _metered(bill, line, list_pico)


def _taken_back(bill: Bill, part: LineReversal) -> dict[str, Value]:
    """Return a row of money alone: a credit note does not change the usage."""
    cost = -Decimal(bill.money(part.amount_coins))
    return _row(bill, part.line) | {
        **dict.fromkeys(("BilledCost", "ListCost", "ContractedCost", "EffectiveCost"), cost),
        "PricingCurrencyEffectiveCost": to_decimal(-part.amount_coins * bill.coin_pico),
        "ChargeCategory": "Credit",
        "ChargeClass": "Correction",
        "ChargeFrequency": "One-Time",
        "ChargeDescription": f"credit note {part.note}: {part.reason}",
    }


def _corrects(line: InvoiceLine) -> bool:
    """True if the line corrects an earlier invoice; usage before the first one does not."""
    return line.kind == "correction" or (line.kind == "late" and line.usage_start > EPOCH)


def _metered(bill: Bill, line: InvoiceLine, list_pico: Pico | None) -> dict[str, Value]:
    unit, quantity = "Calls" if line.component in CALLS else "Tokens", Decimal(line.quantity)
    sku = f"{line.model}/{line.tier}/{line.component}"
    details = {"Model": line.model, "ServiceTier": line.tier, "Meter": line.component}
    paid = line.pico_per_token or 0  # usage without a price costs nothing
    listed = paid if list_pico is None else list_pico
    return {
        "ConsumedQuantity": quantity,
        "ConsumedUnit": unit,
        "PricingCategory": "Standard",
        "PricingQuantity": quantity,
        "PricingUnit": unit,
        "SkuId": sku,
        "SkuMeter": line.component,
        "SkuPriceId": line.price_id or f"{sku}/unpriced",
        "SkuPriceDetails": msgspec.json.encode(details).decode(),
        "ListUnitPrice": _billed(bill, listed),
        "ContractedUnitPrice": _billed(bill, paid),
        "PricingCurrencyListUnitPrice": to_decimal(listed),
        "PricingCurrencyContractedUnitPrice": to_decimal(paid),
    }


def _cost(bill: Bill, line: InvoiceLine, pico_per_token: Pico | None) -> Decimal:
    """Return the price times the quantity, both as they are written, or the exact amount of a line
    without a price."""
    if pico_per_token is None:
        return _billed(bill, line.exact_pico)
    return EXACT.multiply(_billed(bill, pico_per_token), line.quantity)


def _billed(bill: Bill, amount: Pico) -> Decimal:
    """Convert an amount to the invoice's currency, without rounding it to coins."""
    currency = bill.invoice.currency
    if currency == USD:
        return to_decimal(amount)
    coins = EXACT.divide(Decimal(amount), Decimal(bill.coin_pico))
    return EXACT.quantize(EXACT.scaleb(coins, -exponent_of(currency)), PLACES)
