"""The errors of administering tenants. Each names the field it is about (`param`), and has a
`detail`, which unlike `message` never holds a value of the caller's. `status` and `code` are those
of the answer.

TenancyError
├── InvalidField         a value that breaks a rule
├── NotFound             no such live row
├── Conflict             what is there forbids it
│   ├── NameTaken        a live sibling has this name
│   ├── ArchivedError    an archived project cannot be used or changed
│   ├── LastOwner        an organization keeps an owner
│   ├── InviteClosed     it was accepted already
│   ├── ReadOnly         it is kept elsewhere, or for good
│   └── ApprovalPending  of `gateway.tools.approvals`: a call that nobody has answered
├── NotAllowed           a good credential that may not do this to this row
└── ChangeNotAnnounced   committed, but the workers could not be told; repeating the call tells them
"""

from __future__ import annotations

from typing import ClassVar

from foundation.errors import LocatedError


class TenancyError(LocatedError):
    status: ClassVar[int] = 400
    constant: ClassVar[str | None] = None
    """The detail of errors whose message may name a value."""

    def __init__(self, field: str, message: str, *, detail: str | None = None) -> None:
        super().__init__(field, message)
        self.detail = detail or self.constant or message


class InvalidField(TenancyError):
    pass


class NotFound(TenancyError):
    status = 404
    code = "not_found"
    constant = "there is no such thing here, or it was archived"


class Conflict(TenancyError):
    status = 409
    code = "conflict"


class NameTaken(Conflict):
    code = "name_taken"
    constant = "another one has this already"


class ArchivedError(Conflict):
    code = "archived"
    constant = "it is archived"


class LastOwner(Conflict):
    code = "last_owner"


class InviteClosed(Conflict):
    code = "invite_accepted"


class ReadOnly(Conflict):
    code = "read_only"


class NotAllowed(TenancyError):
    status = 403
    code = "insufficient_permissions"


class ChangeNotAnnounced(TenancyError):
    pass
