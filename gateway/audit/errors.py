"""What can go wrong with the audit log.

SecretInAudit        somebody tried to record a secret: a mistake in our code; names its key
UnknownAuditEntry    a cursor that names no entry of this org (names `param`)
"""

from __future__ import annotations


class SecretInAudit(ValueError):
    """Its text never holds the value."""


class UnknownAuditEntry(Exception):
    def __init__(self, param: str) -> None:
        super().__init__(f"{param}: no such entry")
        self.param = param
