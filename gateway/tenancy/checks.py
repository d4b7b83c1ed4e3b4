"""The default of `check`, which may keep a row, as it is under its lock, from being changed:
`If-Match`, or a credential that may not."""

from __future__ import annotations


def unchecked(_: object) -> None:
    """Allow any change."""
