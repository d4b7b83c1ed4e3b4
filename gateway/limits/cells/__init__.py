"""Divides the limits of tenants between cells: homes that share Postgres and not Redis."""
