"""Billing turns counted tokens into a ledger. It knows no HTTP and no model."""
