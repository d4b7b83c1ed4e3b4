"""Cost rows of FOCUS 1.2 (FinOps Open Cost and Usage Specification), one for each line.

Above: the gateway's exports. Below: `document`. All 57 columns of version 1.2, in the order of
their names; what this house does not have, such as regions, is null. `BilledCost` is what was
rounded, so its sum is the invoice; list, contracted and effective cost are exact, in USD to the
pico, in other currencies to 18 places. Prices are in USD (`PricingCurrency`).
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal

from billing.currency import USD, exponent_of
from billing.events import CALLS
from billing.invoices.documents.document import Document, moment
from billing.invoices.documents.tables import inert, to_csv
from billing.invoices.invoice import Line
from billing.money import Pico, format_usd

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
PROVIDER = "Tollgate"
PLACES = Decimal("1e-18")
EXACT = Context(prec=80, rounding=ROUND_HALF_EVEN)


def focus_rows(document: Document) -> list[dict[str, str | None]]:
    """Every column of COLUMNS; None: null."""
    return [_row(document, line) for line in document.lines]


def focus_as_csv(document: Document) -> str:
    rows = [
        [inert(value) if text else value for value, text in _cells(row)]
        for row in focus_rows(document)
    ]
    return to_csv(COLUMNS, rows)


def _cells(row: dict[str, str | None]) -> list[tuple[str, bool]]:
    """With whether it is a text that somebody made up."""
    made_up = ("Sku", "SubAccount", "Resource", "ChargeDescription")
    return [(row[name] or "", name.startswith(made_up)) for name in COLUMNS]


def _row(document: Document, line: Line) -> dict[str, str | None]:
    row: dict[str, str | None] = dict.fromkeys(COLUMNS)
    invoice = document.invoice
    cost = _billed(document, line.exact_pico)
    row |= {
        "BilledCost": document.money(line.amount_coins),
        "BillingAccountId": invoice.org_id,
        "BillingAccountName": invoice.org_id,
        "BillingAccountType": "Organization",
        "BillingCurrency": invoice.currency,
        "BillingPeriodStart": moment(invoice.period_start),
        "BillingPeriodEnd": moment(invoice.period_end),
        "ChargePeriodStart": moment(line.usage_start),
        "ChargePeriodEnd": moment(line.usage_end),
        "ListCost": cost,
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "InvoiceId": document.number,
        "InvoiceIssuerName": invoice.issuer,
        "PricingCurrency": USD,
        "PricingCurrencyEffectiveCost": format_usd(line.exact_pico),
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceSubcategory": "Generative AI",
        "ServiceName": "Inference",
        "ChargeDescription": f"{line.kind}: {line.model}, {line.tier}, {line.component}",
        "SubAccountId": line.project or None,
        "SubAccountName": line.project or None,
        "SubAccountType": "Project" if line.project else None,
    }
    return row | _charge(line) | (_metered(document, line) if line.quantity else {})


def _charge(line: Line) -> dict[str, str | None]:
    if line.kind == "adjustment":
        return {"ChargeCategory": "Adjustment", "ChargeFrequency": "One-Time"}
    of_usage: dict[str, str | None] = {
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ResourceId": line.model,
        "ResourceName": line.model,
        "ResourceType": "Model",
    }
    if line.kind == "correction":
        return of_usage | {"ChargeClass": "Correction"}
    return of_usage | {"PricingCategory": "Standard"}


def _metered(document: Document, line: Line) -> dict[str, str | None]:
    unit = "Calls" if line.component in CALLS else "Tokens"
    found: dict[str, str | None] = {
        "ConsumedQuantity": str(line.quantity),
        "ConsumedUnit": unit,
        "PricingQuantity": str(line.quantity),
        "PricingUnit": unit,
        "SkuId": f"{line.model}/{line.tier}/{line.component}",
        "SkuMeter": line.component,
        "SkuPriceId": line.price_id or None,
    }
    if line.pico_per_token is not None:
        price, in_usd = _billed(document, line.pico_per_token), format_usd(line.pico_per_token)
        found |= {
            "ListUnitPrice": price,
            "ContractedUnitPrice": price,
            "PricingCurrencyListUnitPrice": in_usd,
            "PricingCurrencyContractedUnitPrice": in_usd,
        }
    return found


def _billed(document: Document, amount: Pico) -> str:
    """In the invoice's currency, not rounded to its coins."""
    currency = document.invoice.currency
    if currency == USD:
        return format_usd(amount)
    coins = EXACT.divide(Decimal(amount), Decimal(document.coin_pico))
    units = EXACT.scaleb(coins, -exponent_of(currency))
    return format(EXACT.quantize(units, PLACES), "f")
