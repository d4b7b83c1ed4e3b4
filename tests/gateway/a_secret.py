"""Secrets of installations, by the names of their keys."""

from __future__ import annotations

import base64

from gateway.secret import Secret, SecretKey


def a_secret(*ids: str) -> Secret:
    """The first of `ids` is the current one."""
    keys = [
        SecretKey(id=each, secret=base64.b64encode(each.encode() * 32).decode()) for each in ids
    ]
    return Secret(version=1, keys=tuple(keys))
