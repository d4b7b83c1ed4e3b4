"""Resolves the bearer credential of a request to a principal: keys, tokens, revocation."""
