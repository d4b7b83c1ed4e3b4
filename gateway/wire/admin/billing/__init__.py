"""The structs of the admin API about money: credits, top-ups, caps, re-ratings and invoices."""
