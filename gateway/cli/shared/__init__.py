"""Shared by all commands: their options, their errors, and how they reach databases."""
