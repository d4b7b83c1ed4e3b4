"""/v1/organization/projects: an org's projects and their members, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

from gateway.request_errors import BadField
from gateway.routes.shared.access import needs, needs_in_project
from gateway.routes.shared.resource import (
    AdminRequest,
    AdminResource,
    check_id,
    expect_nothing,
    require_unbound,
    to_cursor,
)
from gateway.tenancy import projects as verbs
from gateway.tenancy.members import members as member_verbs
from gateway.tenancy.members import users
from gateway.tenancy.members.members import Member
from gateway.tenancy.projects import Project
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import DeletedObject, ListQuery
from gateway.wire.shared.resource import view_of


def to_project(project: Project) -> wire.ProjectObject:
    status = "active" if project.archived_at is None else "archived"
    return view_of(wire.ProjectObject, project, status=status)


projects = AdminResource[Project](
    path="/v1/organization/projects",
    id_name="project_id",
    tag="Projects",
    change=needs("admin:projects"),
    view=wire.ProjectObject,
    show=to_project,
)
members = AdminResource[Member](
    path=projects.one + "/users",
    id_name="user_id",
    tag="Projects",
    change=needs_in_project("admin:projects"),
    view=wire.ProjectUser,
    show=lambda member: view_of(wire.ProjectUser, member, id=member.user_id),
)

list_projects = projects.list_all(
    "List the projects",
    wire.OrganizationProjectsQuery,
    select=lambda org_id, query: verbs.select_projects(org_id, archived=query.include_archived),
    row=Project,
    name="list_projects",
)

retrieve_project = projects.retrieve("One project", verbs.get_project, name="retrieve_project")


@projects.create("Create a project", wire.ProjectCreate, status=200)
async def create_project(request: AdminRequest, wanted: wire.ProjectCreate) -> Project:
    async with request.transaction() as conn:
        return await verbs.create_project(
            conn, org_id=request.org_id, name=wanted.name, actor=request.actor
        )


@projects.update("Rename a project", wire.ProjectUpdate, method="POST")
async def update_project(request: AdminRequest, values: dict[str, Any]) -> Project:
    async with request.transaction() as conn:
        found = await verbs.hold_project(conn, **request.where)
        request.check(found)
        if "name" in values:
            found = await verbs.rename_project(
                conn, **request.where, name=values["name"], actor=request.actor
            )
    return found


@projects.archive("Archive a project: its keys stop working")
async def archive_project(request: AdminRequest) -> Project:
    await expect_nothing(request)
    async with request.announced(request.id) as conn:
        # Archiving again is no error: it announces again.
        seen = await verbs.get_project(conn, **request.where)
        if seen.archived_at is None:
            seen = await verbs.hold_project(conn, **request.where)
        request.check(seen)
        return await verbs.archive(conn, **request.where, actor=request.actor)


# ---- who is in it


@members.page("List a project's users", ListQuery)
async def list_members(request: AdminRequest, query: ListQuery) -> tuple[list[Member], bool]:
    async with request.transaction() as conn:
        await verbs.get_project(conn, **request.where)
        return await member_verbs.list_members(conn, **request.where, cursor=to_cursor(query))


@members.create("Add a user of the org to a project", wire.ProjectUserCreate, status=200)
async def add_member(request: AdminRequest, wanted: wire.ProjectUserCreate) -> Member:
    require_unbound(request.user)
    user_id = await _whom(request, wanted)
    async with request.announced(user_id) as conn:
        return await member_verbs.add_member(
            conn, **request.where, user_id=user_id, role=wanted.role, actor=request.actor
        )


async def _whom(request: AdminRequest, wanted: wire.ProjectUserCreate) -> str:
    """Raises: BadField, NotFound."""
    if wanted.user_id is not None and wanted.email is not None:
        raise BadField("Give either 'user_id' or 'email', not both.", param="email")
    if wanted.user_id is not None:
        return check_id("user_id", wanted.user_id)
    if wanted.email is None:
        raise BadField("Missing required parameter: 'user_id' or 'email'.", param="user_id")
    async with request.transaction() as conn:
        return (await users.find_user(conn, org_id=request.org_id, email=wanted.email)).id


retrieve_member = members.retrieve(
    "One user of a project", member_verbs.get_member, name="retrieve_member"
)


@members.update("Change a user's role in a project", wire.ProjectUserUpdate, method="POST")
async def update_member(request: AdminRequest, values: dict[str, Any]) -> Member:
    async with request.announced(request.id) as conn:
        found = await member_verbs.hold_member(conn, **request.where)
        request.check(found)
        if values["role"] is not None:
            require_unbound(request.user)
            found = await member_verbs.change_member(
                conn, **request.where, role=values["role"], actor=request.actor
            )
    return found


@members.delete("Remove a user from a project", answer=DeletedObject)
async def remove_member(request: AdminRequest) -> DeletedObject:
    async with request.announced(request.id) as conn:
        request.check(await member_verbs.hold_member(conn, **request.where))
        await member_verbs.remove_member(conn, **request.where, actor=request.actor)
    return DeletedObject(id=request.id, object="organization.project.user.deleted")


routes = [
    list_projects,
    create_project,
    retrieve_project,
    update_project,
    archive_project,
    list_members,
    add_member,
    retrieve_member,
    update_member,
    remove_member,
]
