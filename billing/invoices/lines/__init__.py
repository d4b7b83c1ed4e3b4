"""Lines compute what an invoice says: charges by price, corrections, and the terms of an org."""
