"""Ingestion ships usage events from the spools to Postgres, each exactly once."""
