"""The handlers of the admin API for invoices, credits, spend caps and prices."""
