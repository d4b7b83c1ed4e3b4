"""Proposes draft tokens, by n-grams, a grammar or a draft model."""
