"""The errors of the audit log.

SecretInAudit        somebody tried to record a secret: a mistake in our code; names its key
└── CredentialInAudit  a client wrote a credential where none belongs (names `field`)
UnknownAuditEntry    a cursor that names no entry of this org (names `param`)
"""

from __future__ import annotations


class SecretInAudit(ValueError):
    """Its text never holds the value."""


class CredentialInAudit(SecretInAudit):
    def __init__(self, field: str) -> None:
        super().__init__(f"{field} holds a credential")
        self.field = field


class UnknownAuditEntry(Exception):
    def __init__(self, param: str) -> None:
        super().__init__(f"{param}: no such entry")
        self.param = param
