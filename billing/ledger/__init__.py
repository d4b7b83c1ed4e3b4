"""The ledger keeps double entry: accounts, transfers between them, and the totals made of them."""
