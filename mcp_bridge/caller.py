"""The person and the application that the bridge acts for. The gateway authenticates them."""

from __future__ import annotations

import msgspec


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A caller: `subject` is the person or key, `client` the application that it uses.

    A session or a waiting call belongs to one caller and is invisible to all others.
    """

    org_id: str
    project_id: str
    subject: str
    client: str
    user_id: str | None = None
    """Set if `subject` is a person. `of` leaves it out: a stored principal does not hold it."""
    part_of: str | None = None
    """The id of the request whose model makes the call; None: the caller makes it directly."""
    keeps_nothing: bool = False
    """Store no content of its requests and answers, so a stream that it loses cannot be resumed."""

    @property
    def principal(self) -> str:
        """Return the key under which state of this caller is stored; `of` reads it back."""
        return "\n".join((self.org_id, self.project_id, self.subject, self.client))

    @classmethod
    def of(cls, principal: str) -> Caller:
        org_id, project_id, subject, client = principal.split("\n")
        return cls(org_id=org_id, project_id=project_id, subject=subject, client=client)
