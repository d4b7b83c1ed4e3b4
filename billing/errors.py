"""Billing's error tree.

    BillingError                code
    ├── MoneyError              money_error         not a whole number of pico-USD
    ├── PriceBookError          price_book_error    an invalid price book; names file and key
    │   └── PriceChanged        price_changed       a loaded price was edited
    ├── SpoolError              spool_error
    │   ├── SpoolFull           spool_full          no room; queued records are kept and retried
    │   ├── SpoolBroken         spool_broken        the disk failed; this process must restart
    │   └── SpoolLocked         spool_locked        another process holds the directory
    ├── ReportQueryError        report_query_error  an invalid query of a report; names `param`
    └── InvoicingError          invoicing_error     names the field
        ├── BadInvoicing        bad_invoicing       an invalid value
        ├── NoInvoice           no_invoice          the org has no such invoice or line
        └── InvoicingConflict   invoicing_conflict  the state of the invoice forbids it

Messages are written for the log.
"""

from __future__ import annotations

from typing import ClassVar

from foundation.errors import CodedError, LocatedError


class BillingError(CodedError):
    """The root of the errors that billing raises by contract."""

    code: ClassVar[str] = "billing_error"


class MoneyError(BillingError):
    code = "money_error"


class PriceBookError(BillingError):
    code = "price_book_error"


class PriceChanged(PriceBookError):
    code = "price_changed"


class SpoolError(BillingError):
    code = "spool_error"


class SpoolFull(SpoolError):
    code = "spool_full"


class SpoolBroken(SpoolError):
    code = "spool_broken"


class SpoolLocked(SpoolError):
    code = "spool_locked"


class ReportQueryError(BillingError):
    code = "report_query_error"
    param: str

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param)


class InvoicingError(BillingError, LocatedError):
    code = "invoicing_error"


class BadInvoicing(InvoicingError):
    code = "bad_invoicing"


class NoInvoice(InvoicingError):
    code = "no_invoice"


class InvoicingConflict(InvoicingError):
    code = "invoicing_conflict"
