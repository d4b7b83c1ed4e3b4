"""The pages below /console/billing: invoices, credits, prices, re-ratings."""
