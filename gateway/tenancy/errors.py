"""What can go wrong when tenants are administered. Every one names the field it is about.

TenancyError
├── InvalidField         a value that breaks a rule
├── NotFound             no such live row
├── NameTaken            a live sibling has this name
└── ChangeNotAnnounced   committed, but the workers could not be told; repeating the call tells them
"""

from __future__ import annotations


class TenancyError(Exception):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class InvalidField(TenancyError):
    pass


class NotFound(TenancyError):
    pass


class NameTaken(TenancyError):
    pass


class ChangeNotAnnounced(TenancyError):
    pass
