"""/v1/admin/projects: projects with what OpenAI's have not, a plan. Our own routes; who is in a
project, and what it may use, is below `/v1/organization/projects`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get, patch, post
from litestar.params import FromPath

from foundation.structs import given
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery
from gateway.tenancy import projects as verbs
from gateway.tenancy.pages import Cursor
from gateway.tenancy.projects import Check, Project
from gateway.wire.admin.plans import to_seconds
from gateway.wire.admin.tenant import NewProject, ProjectPatch, ProjectView
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept

PROJECTS = "/v1/admin/projects"
PROJECT = PROJECTS + "/{project_id:str}"
CHANGE = needs("admin:projects")
READ = needs(SCOPE_ADMIN_READ)
TAGS = ["Projects"]
_new_decoder = msgspec.json.Decoder(NewProject)
_patch_decoder = msgspec.json.Decoder(ProjectPatch)


class AdminProjectsQuery(PageQuery):
    include_archived: bool = False


def to_view(project: Project) -> ProjectView:
    fields: dict[str, Any] = msgspec.structs.asdict(project)
    del fields["org_id"]
    return ProjectView(
        **fields | {name: to_seconds(fields[name]) for name in ("created_at", "archived_at")}
    )


def unless_changed(precondition: Precondition) -> Check:
    return lambda project: precondition.check(to_view(project))


@get(
    PROJECTS,
    opt=READ,
    tags=TAGS,
    summary="List the projects, with their plans",
    operation_class=describes(query=AdminProjectsQuery, answer=Listing[ProjectView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, AdminProjectsQuery)
    async with tenant(services(request).db, request.user.org_id) as conn:
        found, more = await verbs.page_of_projects(
            conn,
            org_id=request.user.org_id,
            include_archived=query.include_archived,
            cursor=Cursor(after=query.after, limit=query.limit, order=query.order),
        )
    data = [to_view(each) for each in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    listing = Listing(data=data, first_id=first, last_id=last, has_more=more)
    return answer(request, listing)


@post(
    PROJECTS,
    opt=CHANGE,
    tags=TAGS,
    summary="Create a project, on a plan",
    operation_class=describes(body=NewProject, answer=ProjectView, status=201, idempotent=True),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    wanted = decode_kept(_new_decoder, await plain_body(request))
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        made = await verbs.create_project(
            conn,
            org_id=org_id,
            name=wanted.name,
            plan=wanted.plan,
            zero_retention=wanted.zero_retention,
            actor=actor_of(request),
        )
    return answer(request, to_view(made), status=201)


@get(
    PROJECT,
    opt=READ,
    tags=TAGS,
    summary="One project, with its plan",
    operation_class=describes(answer=ProjectView),
)
async def retrieve(request: AuthenticatedRequest, project_id: FromPath[str]) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        found = await verbs.get_project(conn, org_id=org_id, project_id=project_id)
    return answer(request, to_view(found))


@patch(
    PROJECT,
    opt=CHANGE,
    tags=TAGS,
    summary="Rename a project, or give it another plan; every worker goes by it within a second",
    operation_class=describes(body=ProjectPatch, answer=ProjectView, conditional=True),
)
async def update(request: AuthenticatedRequest, project_id: FromPath[str]) -> Response[bytes]:
    check = unless_changed(if_match(request))
    values = given(decode_kept(_patch_decoder, await plain_body(request)))
    found = services(request)
    made = await verbs.update_project(
        found.db,
        found.redis,
        project_id,
        values,
        org_id=request.user.org_id,
        actor=actor_of(request),
        check=check,
    )
    return answer(request, to_view(made))


routes = [list_, create, retrieve, update]
