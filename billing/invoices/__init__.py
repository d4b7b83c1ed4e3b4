"""Invoices: from the ledger's charges to what a customer is asked for, and whether it was paid."""
