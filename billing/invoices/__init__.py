"""Invoices turn the ledger's charges into what a customer is asked for, and follow its payment."""
