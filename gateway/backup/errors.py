"""Errors of backups."""

from __future__ import annotations


class BackupError(Exception):
    """A backup cannot be made, read or restored; one line that says why."""
