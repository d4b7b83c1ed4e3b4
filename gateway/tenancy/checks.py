"""What may keep a row, as it stands under its lock, from being changed: `If-Match`, a credential
that may not.

Above: the verbs of `tenancy`, `auth` and `webhooks` that change a row take a `check` of it, which
raises. Below: nothing.
"""

from __future__ import annotations


def unchecked(_: object) -> None:
    """Whatever it is by now."""
