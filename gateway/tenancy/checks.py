"""What may keep a row, as it stands under its lock, from being changed: `If-Match`, a credential
that may not.
"""

from __future__ import annotations


def unchecked(_: object) -> None:
    """Whatever it is by now."""
