"""Trust in issuers that others run: their keys, their tokens, and logins through them."""
