"""Whom a server is there for: everybody, or these organizations and projects. Pure data.

For all others it is as one that does not exist.
"""

from __future__ import annotations

import msgspec


class Audience(msgspec.Struct, frozen=True):
    """The organizations and projects that a server is there for, by their ids; a project's with its
    organization's. Both None: everybody. An empty set is nobody, so that who takes the last one
    away does not let all others in."""

    orgs: frozenset[str] | None = None
    projects: frozenset[tuple[str, str]] | None = None

    def has(self, org_id: str, project_id: str | None) -> bool:
        """True if the server is there for this caller.

        `project_id` None: for who sees to a whole organization, any of its projects.
        """
        if self.orgs is None and self.projects is None:
            return True
        if org_id in (self.orgs or ()):
            return True
        projects = self.projects or frozenset()
        if project_id is None:
            return any(org == org_id for org, _ in projects)
        return (org_id, project_id) in projects


EVERYBODY = Audience()
