"""/v1/admin/projects: projects with what OpenAI's have not, a plan. Our own routes; who is in a
project, and what it may use, is below `/v1/organization/projects`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy import projects as verbs
from gateway.tenancy.projects import Project
from gateway.wire.admin.tenant import NewProject, ProjectPatch, ProjectView
from gateway.wire.shared.page_query import ArchivedOrgPageQuery
from gateway.wire.shared.resource import view_of

projects = AdminResource[Project](
    path="/v1/admin/projects",
    id_name="project_id",
    tag="Projects",
    change=needs("admin:projects"),
    view=ProjectView,
    show=lambda project: view_of(ProjectView, project),
    checks_ids=False,
)

list_ = projects.list_all(
    "List the projects, with their plans",
    ArchivedOrgPageQuery,
    select=lambda org_id, query: verbs.select_projects(org_id, archived=query.include_archived),
    row=Project,
)

retrieve = projects.retrieve("One project, with its plan", verbs.get_project)


@projects.create("Create a project, on a plan", NewProject)
async def create(request: AdminRequest, wanted: NewProject) -> Project:
    async with request.transaction() as conn:
        return await verbs.create_project(
            conn, org_id=request.org_id, actor=request.actor, **asdict(wanted)
        )


@projects.update(
    "Rename a project, or give it another plan; every worker goes by it within a second",
    ProjectPatch,
)
async def update(request: AdminRequest, values: dict[str, Any]) -> Project:
    return await verbs.update_project(
        request.db, request.redis, request.id, values, **request.change
    )


routes = [list_, create, retrieve, update]
