"""Reconciliation proves that engines, spools, ledger and invoices agree."""
