"""/v1/organization/projects: an org's projects and their members, in OpenAI's shapes."""

from __future__ import annotations

from litestar import Response, delete, get, post
from litestar.params import FromPath

from gateway.permissions import SCOPE_ADMIN_READ
from gateway.request_errors import BadField
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, needs_in_project
from gateway.routes.shared.common_requests import (
    body_of,
    changing_for,
    check_id,
    expect_nothing,
    reading,
    require_unbound,
    to_cursor,
    to_listing,
)
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing
from gateway.tenancy import projects
from gateway.tenancy.members import members, users
from gateway.tenancy.members.members import Member
from gateway.tenancy.projects import Project
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import DeletedObject, ListQuery, read_query, to_unix

PROJECTS = "/v1/organization/projects"
PROJECT = PROJECTS + "/{project_id:str}"
MEMBER = PROJECT + "/users/{user_id:str}"
CHANGE = needs("admin:projects")
CHANGE_MEMBERS = needs_in_project("admin:projects")
READ = needs(SCOPE_ADMIN_READ)


def to_project(project: Project) -> wire.ProjectObject:
    return wire.ProjectObject(
        id=project.id,
        name=project.name,
        created_at=to_unix(project.created_at),
        archived_at=wire.to_unix_or_none(project.archived_at),
        status="active" if project.archived_at is None else "archived",
    )


def to_member(member: Member) -> wire.ProjectUser:
    return wire.ProjectUser(
        id=member.user_id,
        email=member.email,
        name=member.name,
        role=member.role,
        added_at=to_unix(member.added_at),
    )


@get(
    PROJECTS,
    opt=READ,
    tags=["Projects"],
    summary="List the projects",
    operation_class=describes(
        query=wire.OrganizationProjectsQuery, answer=Listing[wire.ProjectObject]
    ),
)
async def list_projects(request: AuthenticatedRequest) -> Response[bytes]:
    query = read_query(request.url.query, wire.OrganizationProjectsQuery)
    async with reading(request) as conn:
        found, more = await projects.page_of_projects(
            conn,
            org_id=request.user.org_id,
            include_archived=query.include_archived,
            cursor=to_cursor(query),
        )
    return answer(request, to_listing([to_project(each) for each in found], more))


@post(
    PROJECTS,
    opt=CHANGE,
    status_code=200,
    tags=["Projects"],
    summary="Create a project",
    operation_class=describes(body=wire.ProjectCreate, answer=wire.ProjectObject, idempotent=True),
)
async def create_project(request: AuthenticatedRequest) -> Response[bytes]:
    body = await body_of(request, wire.ProjectCreate)
    async with reading(request) as conn:
        made = await projects.create_project(
            conn, org_id=request.user.org_id, name=body.name, actor=actor_of(request)
        )
    return answer(request, to_project(made))


@get(
    PROJECT,
    opt=READ,
    tags=["Projects"],
    summary="One project",
    operation_class=describes(answer=wire.ProjectObject),
)
async def retrieve_project(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    check_id("project_id", project_id)
    async with reading(request) as conn:
        found = await projects.get_project(conn, org_id=request.user.org_id, project_id=project_id)
    return answer(request, to_project(found))


@post(
    PROJECT,
    opt=CHANGE,
    status_code=200,
    tags=["Projects"],
    summary="Rename a project",
    operation_class=describes(
        body=wire.ProjectUpdate,
        answer=wire.ProjectObject,
        idempotent=True,
        conditional=True,
    ),
)
async def update_project(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    check_id("project_id", project_id)
    body, precondition = await body_of(request, wire.ProjectUpdate), if_match(request)
    org_id = request.user.org_id
    async with reading(request) as conn:
        found = await projects.hold_project(conn, org_id=org_id, project_id=project_id)
        precondition.check(to_project(found))
        if isinstance(body.name, str):
            found = await projects.rename_project(
                conn,
                org_id=org_id,
                project_id=project_id,
                name=body.name,
                actor=actor_of(request),
            )
    return answer(request, to_project(found))


@post(
    PROJECT + "/archive",
    opt=CHANGE,
    status_code=200,
    tags=["Projects"],
    summary="Archive a project: its keys stop working",
    operation_class=describes(answer=wire.ProjectObject, idempotent=True, conditional=True),
)
async def archive_project(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    check_id("project_id", project_id)
    await expect_nothing(request)
    precondition, org_id = if_match(request), request.user.org_id
    async with changing_for(request, project_id) as conn:
        # Archiving again is no error: it announces again.
        seen = await projects.get_project(conn, org_id=org_id, project_id=project_id)
        if seen.archived_at is None:
            seen = await projects.hold_project(conn, org_id=org_id, project_id=project_id)
        precondition.check(to_project(seen))
        found = await projects.archive(
            conn, org_id=org_id, project_id=project_id, actor=actor_of(request)
        )
    return answer(request, to_project(found))


# ---- who is in it


@get(
    PROJECT + "/users",
    opt=READ,
    tags=["Projects"],
    summary="List a project's users",
    operation_class=describes(query=ListQuery, answer=Listing[wire.ProjectUser]),
)
async def list_members(request: AuthenticatedRequest, project_id: FromPath[str]) -> Response[bytes]:
    check_id("project_id", project_id)
    query, org_id = read_query(request.url.query, ListQuery), request.user.org_id
    async with reading(request) as conn:
        await projects.get_project(conn, org_id=org_id, project_id=project_id)
        found, more = await members.list_members(
            conn, org_id=org_id, project_id=project_id, cursor=to_cursor(query)
        )
    return answer(request, to_listing([to_member(each) for each in found], more))


@post(
    PROJECT + "/users",
    opt=CHANGE_MEMBERS,
    status_code=200,
    tags=["Projects"],
    summary="Add a user of the org to a project",
    operation_class=describes(
        body=wire.ProjectUserCreate, answer=wire.ProjectUser, idempotent=True
    ),
)
async def add_member(request: AuthenticatedRequest, project_id: FromPath[str]) -> Response[bytes]:
    check_id("project_id", project_id)
    require_unbound(request.user)
    body = await body_of(request, wire.ProjectUserCreate)
    user_id = await _whom(request, body)
    async with changing_for(request, user_id) as conn:
        made = await members.add_member(
            conn,
            org_id=request.user.org_id,
            project_id=project_id,
            user_id=user_id,
            role=body.role,
            actor=actor_of(request),
        )
    return answer(request, to_member(made))


async def _whom(request: AuthenticatedRequest, body: wire.ProjectUserCreate) -> str:
    """Raises: BadField, NotFound."""
    if body.user_id is not None and body.email is not None:
        raise BadField("Give either 'user_id' or 'email', not both.", param="email")
    if body.user_id is not None:
        return check_id("user_id", body.user_id)
    if body.email is None:
        raise BadField("Missing required parameter: 'user_id' or 'email'.", param="user_id")
    async with reading(request) as conn:
        org_id = request.user.org_id
        return (await users.find_user(conn, org_id=org_id, email=body.email)).id


@get(
    MEMBER,
    opt=READ,
    tags=["Projects"],
    summary="One user of a project",
    operation_class=describes(answer=wire.ProjectUser),
)
async def retrieve_member(
    request: AuthenticatedRequest, project_id: FromPath[str], user_id: FromPath[str]
) -> Response[bytes]:
    check_id("project_id", project_id)
    check_id("user_id", user_id)
    async with reading(request) as conn:
        found = await members.get_member(
            conn, org_id=request.user.org_id, project_id=project_id, user_id=user_id
        )
    return answer(request, to_member(found))


@post(
    MEMBER,
    opt=CHANGE_MEMBERS,
    status_code=200,
    tags=["Projects"],
    summary="Change a user's role in a project",
    operation_class=describes(
        body=wire.ProjectUserUpdate,
        answer=wire.ProjectUser,
        idempotent=True,
        conditional=True,
    ),
)
async def update_member(
    request: AuthenticatedRequest, project_id: FromPath[str], user_id: FromPath[str]
) -> Response[bytes]:
    check_id("project_id", project_id)
    check_id("user_id", user_id)
    body, precondition = await body_of(request, wire.ProjectUserUpdate), if_match(request)
    where = {"org_id": request.user.org_id, "project_id": project_id, "user_id": user_id}
    async with changing_for(request, user_id) as conn:
        found = await members.hold_member(conn, **where)
        precondition.check(to_member(found))
        if body.role is not None:
            require_unbound(request.user)
            found = await members.change_member(
                conn, **where, role=body.role, actor=actor_of(request)
            )
    return answer(request, to_member(found))


@delete(
    MEMBER,
    opt=CHANGE_MEMBERS,
    status_code=200,
    tags=["Projects"],
    summary="Remove a user from a project",
    operation_class=describes(answer=DeletedObject, conditional=True),
)
async def remove_member(
    request: AuthenticatedRequest, project_id: FromPath[str], user_id: FromPath[str]
) -> Response[bytes]:
    check_id("project_id", project_id)
    check_id("user_id", user_id)
    precondition = if_match(request)
    where = {"org_id": request.user.org_id, "project_id": project_id, "user_id": user_id}
    async with changing_for(request, user_id) as conn:
        precondition.check(to_member(await members.hold_member(conn, **where)))
        await members.remove_member(conn, **where, actor=actor_of(request))
    return answer(request, DeletedObject(id=user_id, object="organization.project.user.deleted"))


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
