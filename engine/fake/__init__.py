"""Imitates the engine for tests: the same protocol, deterministic, without a model."""
