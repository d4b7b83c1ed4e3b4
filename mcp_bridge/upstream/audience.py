"""The audience of a server: everybody, or some organizations and projects. Pure data.

For all others the server does not exist.
"""

from __future__ import annotations

import msgspec


class Audience(msgspec.Struct, frozen=True):
    """The ids of organizations, and of projects with their organizations. Both None: everybody.

    An empty set is nobody, so that removing the last id does not admit everybody.
    """

    orgs: frozenset[str] | None = None
    projects: frozenset[tuple[str, str]] | None = None

    def has(self, org_id: str, project_id: str | None) -> bool:
        """True if the server exists for this caller. `project_id` None: an admin of the whole
        organization, who sees the servers of any of its projects."""
        if self.orgs is None and self.projects is None:
            return True
        if org_id in (self.orgs or ()):
            return True
        projects = self.projects or frozenset()
        if project_id is None:
            return any(org == org_id for org, _ in projects)
        return (org_id, project_id) in projects


EVERYBODY = Audience()
