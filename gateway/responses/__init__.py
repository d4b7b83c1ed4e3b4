"""Responses and conversations that outlive their requests: kept sealed in Postgres, for a time.

Knows no HTTP.
"""
