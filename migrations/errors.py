"""Errors of bringing a database to the newest schema.

MigrationError    the schema is not one that this version knows, or a migration cannot run
"""

from __future__ import annotations


class MigrationError(Exception):
    """Its text is one line for the operator."""
