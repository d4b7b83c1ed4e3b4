"""The person and the application that the bridge acts for, as the gateway found out. Pure data."""

from __future__ import annotations

import msgspec


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A caller.

    `subject`: the person or key; `client`: the application that it uses. What one of them keeps
    here (a session, a call that waits) is no other's.
    """

    org_id: str
    project_id: str
    subject: str
    client: str
    user_id: str | None = None
    """Where `subject` is a person. Of a principal that was written down it is not known: a server
    is asked as the endpoint says that was opened for the person."""
    part_of: str | None = None
    """The id of the request in which a model calls; None: the caller calls itself."""
    keeps_nothing: bool = False
    """Of what it asks and is answered nothing stays: a stream that it loses is lost."""

    @property
    def principal(self) -> str:
        return "\n".join((self.org_id, self.project_id, self.subject, self.client))

    @classmethod
    def of(cls, principal: str) -> Caller:
        org_id, project_id, subject, client = principal.split("\n")
        return cls(org_id=org_id, project_id=project_id, subject=subject, client=client)
