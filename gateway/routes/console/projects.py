"""Shows /console/projects: projects with their plans and members; makes, changes and archives them,
and adds and removes who is in them."""

from __future__ import annotations

from litestar import Response

from billing.queries import ask, ask_all
from gateway.console.budgets import budgets_query, with_held
from gateway.console.tables import Table, TableColumn
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy import projects as verbs
from gateway.tenancy.errors import NotFound
from gateway.tenancy.members import members
from gateway.tenancy.members.users import find_user
from gateway.tenancy.project_pages import ProjectLine, list_project_lines, plans_query
from gateway.tenancy.projects import Project

ROLES = (("member", "member"), ("owner", "owner: also adds people, keys and budgets"))
NO_PLAN = ("", "none: only its organization's limits")

page = ConsolePage(name="projects", title="Projects and members", letter="j")


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    archived = request.value("state", ("archived",)) == "archived"
    async with request.transaction() as conn:
        found, more = await list_project_lines(
            conn, org_id=request.org_id, archived=archived, cursor=request.cursor()
        )
        plans = await ask(conn, plans_query())
    table = Table(
        "Projects",
        found,
        TableColumn("Project", "name", link=lambda line: f"{page.path}/{line.id}"),
        TableColumn("Members", "num_members", kind="count"),
        TableColumn(
            "Keys", "num_keys", kind="count", link=lambda line: f"/console/keys?project={line.id}"
        ),
        TableColumn("Plan", "plan"),
        TableColumn("Keeps", keeps),
        TableColumn("Made", "created_at", kind="time"),
        TableColumn("Id", "id", kind="id"),
    )
    return request.render(
        "projects",
        table=table,
        more=found[-1].id if more else None,
        plans=plan_choices(plans),
        archived=archived,
        content_days=request.services.content_log.keep_days,
    )


def keeps(line: ProjectLine) -> str:
    if line.zero_retention:
        return "nothing"
    return "texts of requests" if line.store_content else "as asked"


def plan_choices(names: list[str], present: str | None = None) -> list[tuple[str, str]]:
    """Return the plans for a choice; the present one may be archived, and stays offered."""
    offered = names if present is None or present in names else [present, *names]
    return [NO_PLAN, *((name, name) for name in offered)]


@page.post("/create", needs="admin:projects", again=show)
async def create(request: ConsoleRequest) -> Response[bytes]:
    form = request.form
    async with request.transaction() as conn:
        made = await verbs.create_project(
            conn,
            org_id=request.org_id,
            name=form.get("name", "").strip(),
            plan=form.get("plan") or None,
            zero_retention="zero_retention" in form,
            store_content="store_content" in form,
            actor=request.actor,
        )
    return request.done(f"{made.name} is there. Make a key for it next.", to=address_of(made.id))


def address_of(project_id: str) -> str:
    return f"{page.path}/{project_id}"


@page.get("/{project_id:str}")
async def show_one(request: ConsoleRequest) -> Response[bytes]:
    where = {"org_id": request.org_id, "project_id": request.ids["project_id"]}
    async with request.transaction() as conn:
        project, (found, more), plans, booked = await ask_all(
            conn,
            verbs.project_query(**where),
            members.members_query(**where, cursor=request.cursor("asc")),
            plans_query(),
            budgets_query(**where),
        )
    budgets = await with_held(request.redis, request.org_id, booked, request.now)
    table = Table(
        f"Members of {project.name}",
        found,
        TableColumn(
            "Person",
            "email",
            link=lambda member: f"/console/people/{member.user_id}",
            detail=lambda member: member.name,
        ),
        TableColumn("Role here", "role"),
        TableColumn("Since", "added_at", kind="time"),
    )
    return request.render(
        "project",
        table=table,
        project=project,
        more=found[-1].user_id if more else None,
        plans=plan_choices(plans, project.plan),
        content_days=request.services.content_log.keep_days,
        roles=ROLES,
        budgets=budgets,
        can_here=lambda scope: request.can(scope, project.id) and project.archived_at is None,
    )


@page.post("/{project_id:str}/update", needs="admin:projects", again=show_one)
async def update(request: ConsoleRequest) -> Response[bytes]:
    project_id, form = request.ids["project_id"], request.form
    values = {
        "name": form.get("name", "").strip(),
        "plan": form.get("plan") or None,
        "zero_retention": "zero_retention" in form,
        "store_content": "store_content" in form,
    }
    changed = await verbs.update_project(
        request.db,
        request.redis,
        project_id,
        values,
        org_id=request.org_id,
        actor=request.actor,
    )
    return request.done(f"{changed.name} is changed.", to=address_of(project_id))


@page.post("/{project_id:str}/archive", needs="admin:projects", again=show_one)
async def archive(request: ConsoleRequest) -> Response[bytes]:
    project_id = request.ids["project_id"]
    where = {"org_id": request.org_id, "project_id": project_id}
    async with request.announced(project_id) as conn:
        seen: Project = await verbs.get_project(conn, **where)
        if seen.archived_at is None:
            seen = await verbs.hold_project(conn, **where)
        await verbs.archive(conn, **where, actor=request.actor)
    return request.done(f"{seen.name} is archived: its keys are refused.")


@page.post(
    "/{project_id:str}/members",
    needs="admin:members",
    again=show_one,
    in_project="project_id",
)
async def add_member(request: ConsoleRequest) -> Response[bytes]:
    project_id, email = request.ids["project_id"], request.form.get("email", "").strip()
    async with request.transaction() as conn:
        try:
            user = await find_user(conn, org_id=request.org_id, email=email)
        except NotFound:
            raise NotFound("email", "nobody of the organization has it; invite them") from None
    async with request.announced(user.id) as conn:
        await members.add_member(
            conn,
            org_id=request.org_id,
            project_id=project_id,
            user_id=user.id,
            role=request.form.get("role", "member"),
            actor=request.actor,
        )
    return request.done(f"{user.email} is a member.", to=address_of(project_id))


@page.post(
    "/{project_id:str}/members/{user_id:str}/role",
    needs="admin:members",
    again=show_one,
    in_project="project_id",
)
async def change_member(request: ConsoleRequest) -> Response[bytes]:
    where = member_of(request)
    async with request.announced(where["user_id"]) as conn:
        changed = await members.change_member(
            conn, **where, role=request.form.get("role", ""), actor=request.actor
        )
    text = f"{changed.email} is {changed.role} of the project."
    return request.done(text, to=address_of(where["project_id"]))


@page.post(
    "/{project_id:str}/members/{user_id:str}/remove",
    needs="admin:members",
    again=show_one,
    in_project="project_id",
)
async def remove_member(request: ConsoleRequest) -> Response[bytes]:
    where = member_of(request)
    async with request.announced(where["user_id"]) as conn:
        await members.remove_member(conn, **where, actor=request.actor)
    return request.done(
        "They are no member any more: their keys here are refused.",
        to=address_of(where["project_id"]),
    )


def member_of(request: ConsoleRequest) -> dict[str, str]:
    ids = request.ids
    return {
        "org_id": request.org_id,
        "project_id": ids["project_id"],
        "user_id": ids["user_id"],
    }


routes = page.routes
