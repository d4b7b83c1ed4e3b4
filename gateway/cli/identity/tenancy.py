"""`tollgate orgs` and `tollgate projects`: who is billed, and what plans bind them.

People name both by their names; ids are for scripts and bills.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.cli.shared.command import JSON, connections, with_options, with_settings
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.times import to_day
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from gateway.tenancy.orgs import Org
    from gateway.tenancy.projects import Project

CREATED = Column("CREATED", "created_at", "time", True, lambda row: to_day(row["created_at"]))
ORG_COLUMNS = (
    Column("ID", "id", "id"),
    CREATED,
    Column("PLAN", "plan"),
    Column("NAME", "name"),
)
PROJECT_COLUMNS = (
    Column("ID", "id", "id"),
    CREATED,
    Column("PLAN", "plan"),
    Column("ORG", "org"),
    Column("NAME", "name"),
)
NAME = click.option(
    "--name", required=True, help="A name for people, and for `--org` and `--project`."
)
PLAN = click.option(
    "--plan", help="A [plan.NAME] of the settings, as of the last start. Default: no limits."
)
NEW_PLAN = (
    click.option("--plan", help="A [plan.NAME] of the settings, as of the last start."),
    click.option("--no-plan", is_flag=True, help="Remove its plan: no limits of its own."),
)
OF_ORG = click.option(
    "--org", default="default", show_default=True, help="Name of the organization."
)


@click.group()
def orgs() -> None:
    """Create and list organizations, and set their plans.

    A plan's limits bind all keys below an organization together; the first start makes one that is
    named `default`.
    """


@orgs.command("create")
@with_settings
@with_options(JSON, NAME, PLAN)
@click.option(
    "--project",
    default="default",
    show_default=True,
    help="Name of its first project, which its keys belong to.",
)
async def create_org(
    settings: Settings, name: str, plan: str | None, project: str, as_json: bool
) -> None:
    """Create an organization with a project, so that it can have keys."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy import orgs as org_verbs
    from gateway.tenancy import projects as project_verbs

    async with connections(settings) as (db, _), db.begin() as conn:
        made = await org_verbs.create_org(conn, name=name, plan=plan, actor=COMMAND_LINE)
        await project_verbs.create_project(
            conn, org_id=made.id, name=project, plan=None, actor=COMMAND_LINE
        )
    if as_json:
        click.echo(to_json(made))
        return
    click.echo(f"{made.id} is organization {made.name}, with project {project}.")


@orgs.command("list")
@with_settings
@with_output
async def list_orgs(settings: Settings, output: Output) -> None:
    """List the organizations, oldest first."""
    async with connections(settings) as (db, _), db.connect() as conn:
        rows = [msgspec.structs.asdict(org) async for org in all_orgs(conn)]
    show(rows, ORG_COLUMNS, output)


@orgs.command("set-plan")
@with_settings
@with_options(*NEW_PLAN)
@click.argument("name")
async def set_org_plan(settings: Settings, name: str, plan: str | None, no_plan: bool) -> None:
    """Set or remove the plan of an organization; every worker applies it within a second."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy import orgs as org_verbs

    wanted = chosen(plan, no_plan)
    async with connections(settings) as (db, redis):
        async with db.connect() as conn:
            org = await org_verbs.find_org(conn, name=name)
        await org_verbs.update_org(db, redis, org.id, {"plan": wanted}, actor=COMMAND_LINE)
    click.echo(f"{org.id} has {'no plan' if wanted is None else f'plan {wanted}'}.")


@orgs.command("set-origins")
@with_settings
@click.option(
    "--origin", "origins", multiple=True, help="An origin, such as https://app.example.com."
)
@click.argument("name")
async def set_origins(settings: Settings, name: str, origins: tuple[str, ...]) -> None:
    """Set the web origins from which browsers may call with an organization's keys."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy import orgs as org_verbs
    from gateway.tenancy.keys.restrictions import check_origins

    values = {"cors_origins": check_origins(origins)}
    async with connections(settings) as (db, redis):
        async with db.connect() as conn:
            org = await org_verbs.find_org(conn, name=name)
        changed = await org_verbs.update_org(db, redis, org.id, values, actor=COMMAND_LINE)
    click.echo(f"{org.id} answers pages of {', '.join(changed.cors_origins) or 'nobody'}.")


@click.group()
def projects() -> None:
    """Create and list the projects of organizations, and set their plans.

    A key belongs to a project (`tollgate keys create --org NAME --project NAME`). A plan's limits
    bind all keys of a project together.
    """


@projects.command("create")
@with_settings
@with_options(JSON, NAME, OF_ORG, PLAN)
async def create_project(
    settings: Settings, name: str, org: str, plan: str | None, as_json: bool
) -> None:
    """Create a project of an organization."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy import orgs as org_verbs
    from gateway.tenancy import projects as project_verbs

    async with connections(settings) as (db, _), db.begin() as conn:
        owner = await org_verbs.find_org(conn, name=org)
        made = await project_verbs.create_project(
            conn, org_id=owner.id, name=name, plan=plan, actor=COMMAND_LINE
        )
    click.echo(to_json(made) if as_json else f"{made.id} is project {made.name} of {org}.")


@projects.command("list")
@with_settings
@with_output
@click.option("--org", help="List those of this organization. Default: of all.")
async def list_projects(settings: Settings, org: str | None, output: Output) -> None:
    """List the projects, oldest first, by organization."""
    from gateway.tenancy.orgs import find_org
    from gateway.tenancy.pages import read_all
    from gateway.tenancy.projects import Project, select_projects
    from gateway.tenancy.tables import projects as table

    rows: list[dict[str, Any]] = []
    async with connections(settings) as (db, _), db.connect() as conn:
        if org is not None:
            await find_org(conn, name=org)
        async for owner in all_orgs(conn):
            if org in (None, owner.name):
                listed = select_projects(owner.id)
                rows += [
                    msgspec.structs.asdict(project) | {"org": owner.name}
                    async for project in read_all(conn, listed, table.c.id, Project)
                ]
    show(rows, PROJECT_COLUMNS, output)


@projects.command("set-plan")
@with_settings
@with_options(OF_ORG, *NEW_PLAN)
@click.argument("name")
async def set_project_plan(
    settings: Settings, name: str, org: str, plan: str | None, no_plan: bool
) -> None:
    """Set or remove the plan of a project; every worker applies it within a second."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy.projects import update_project

    wanted = chosen(plan, no_plan)
    async with connections(settings) as (db, redis):
        project = await project_named(db, org, name)
        await update_project(
            db, redis, project.id, {"plan": wanted}, org_id=project.org_id, actor=COMMAND_LINE
        )
    click.echo(f"{project.id} has {'no plan' if wanted is None else f'plan {wanted}'}.")


@projects.command("set-models")
@with_settings
@with_options(OF_ORG)
@click.option("--allow", multiple=True, help="Allow this model, and no others than these.")
@click.option("--deny", multiple=True, help="Deny this model. With neither: all are allowed.")
@click.argument("name")
async def set_models(
    settings: Settings, name: str, org: str, allow: tuple[str, ...], deny: tuple[str, ...]
) -> None:
    """Set the models that a project may use; every worker applies it within a second."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy.keys.model_permissions import update_model_permissions

    if allow and deny:
        raise click.UsageError("give either --allow or --deny")
    async with connections(settings) as (db, redis):
        project = await project_named(db, org, name)
        permitted = await update_model_permissions(
            db,
            redis,
            project.id,
            org_id=project.org_id,
            mode="allow_list" if allow else "deny_list" if deny else None,
            models=allow or deny,
            actor=COMMAND_LINE,
        )
    models = f"{permitted.mode} {', '.join(permitted.models)}" if permitted.mode else "all models"
    click.echo(f"{project.id} has {models}.")


@projects.command("set-content")
@with_settings
@with_options(OF_ORG)
@click.argument("state", type=click.Choice(["on", "off"]))
@click.argument("name")
async def set_content(settings: Settings, name: str, state: str, org: str) -> None:
    """Store the texts of a project's requests and answers, or stop and erase them.

    Off by default. Texts are sealed in Postgres for `[requests] content_days`, for who has the
    scope admin:content, and spans of the project's traces have them. Every worker goes by it within
    a second; what is stored is found no more at once, and deleted within minutes.
    """
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy.projects import update_project

    values = {"store_content": state == "on"}
    async with connections(settings) as (db, redis):
        project = await project_named(db, org, name)
        await update_project(
            db, redis, project.id, values, org_id=project.org_id, actor=COMMAND_LINE
        )
    days = settings.requests.days_of_content
    if state == "off":
        click.echo(f"{project.id} stores no texts of its requests; those that it had are erased.")
    elif days:
        click.echo(f"{project.id} stores the texts of its requests for {days} days.")
    else:
        click.echo(f"{project.id} may store texts, but [requests] content_days is 0: none are.")


async def project_named(db: AsyncEngine, org: str, name: str) -> Project:
    """Return a live project by its organization's name and its own. Raises: NotFound."""
    from gateway.tenancy.orgs import find_org
    from gateway.tenancy.projects import find_project

    async with db.connect() as conn:
        owner = await find_org(conn, name=org)
        return await find_project(conn, org_id=owner.id, name=name)


def all_orgs(conn: AsyncConnection, *, archived: bool = False) -> AsyncIterator[Org]:
    """Yield the organizations, oldest first: the live ones, or with `archived` all."""
    from gateway.tenancy.orgs import Org, select_orgs
    from gateway.tenancy.pages import read_all
    from gateway.tenancy.tables import orgs as table

    return read_all(conn, select_orgs(archived=archived), table.c.id, Org)


def chosen(plan: str | None, no_plan: bool) -> str | None:
    """Return the one of the two that was given. Raises: click.UsageError unless exactly one was."""
    if (plan is None) != no_plan:
        raise click.UsageError("give either --plan NAME or --no-plan")
    return plan


def to_json(made: Org | Project) -> str:
    return msgspec.json.encode(made).decode()
