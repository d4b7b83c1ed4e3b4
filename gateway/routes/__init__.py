"""Thin HTTP handlers, one file per resource."""
