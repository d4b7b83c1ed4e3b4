"""From counted tokens to a ledger. Knows no HTTP and no model."""
