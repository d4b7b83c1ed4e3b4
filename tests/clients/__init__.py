"""Programs of others, as their users run them, before a live Tollgate: `make clients`."""
