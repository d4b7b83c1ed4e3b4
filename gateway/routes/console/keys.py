"""Shows /console/keys: the API keys of the organization, what each may, and how much of its limits
it has used; makes, rotates and revokes them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from litestar import Response

from gateway.console.tables import Table, TableColumn
from gateway.permissions import SCOPE_MCP_CALL
from gateway.principal import SCOPE_INFERENCE
from gateway.routes.admin.keys import check_given
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy.keys.keys import KeyRow, create_key, retrieve_key, revoke_key, select_keys
from gateway.tenancy.pages import read_page
from gateway.tenancy.projects import select_projects
from gateway.tenancy.tables import api_keys

page = ConsolePage(name="keys", title="Keys and limits", letter="k")


def state_of(key: KeyRow, now: datetime) -> tuple[str, str]:
    if key.revoked_at is not None:
        return "revoked", "err"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired", "wait"
    return "active", "ok"


@page.get()
async def show(request: ConsoleRequest, made: Any = None) -> Response[bytes]:
    project_id = request.value("project")
    async with request.transaction() as conn:
        listed = select_keys(request.org_id, project_id=project_id or None)
        rows, more = await read_page(conn, listed, api_keys.c.id, request.cursor())
        found = await conn.execute(select_projects(request.org_id, archived=True))
        names = {each.id: each.name for each in found}
    keys = [KeyRow(**row._mapping) for row in rows]
    table = Table(
        "API keys",
        keys,
        TableColumn("Name", "name", link=lambda key: f"{page.path}/{key.id}"),
        TableColumn("Key", "hint"),
        TableColumn("Project", lambda key: names.get(key.project_id, "all, for administration")),
        TableColumn("State", lambda key: state_of(key, request.now), kind="tag"),
        TableColumn("Last used", "last_used_at", kind="time"),
        TableColumn("Made", "created_at", kind="time"),
        TableColumn("Id", "id", kind="id"),
    )
    return request.render(
        "keys",
        table=table,
        more=keys[-1].id if more else None,
        projects=sorted(names.items(), key=lambda each: each[1]),
        made=made,
        headers={"cache-control": "no-store"},
    )


@page.post("/create", needs="admin:keys", again=show)
async def create(request: ConsoleRequest) -> Response[bytes]:
    scopes = [name for name in (SCOPE_INFERENCE, SCOPE_MCP_CALL) if name in request.form]
    check_given(request.user, scopes)
    pepper_id, pepper = request.services.authenticator.pepper
    async with request.transaction() as conn:
        made = await create_key(
            conn,
            org_id=request.org_id,
            project_id=request.form.get("project_id") or None,
            name=request.form.get("name", "").strip(),
            scopes=scopes,
            pepper=pepper,
            pepper_id=pepper_id,
            actor=request.actor,
            by=request.user,
        )
    request.form = {}
    return await show(request, made)


@page.get("/{key_id:str}")
async def show_one(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        key = await retrieve_key(conn, request.ids["key_id"], org_id=request.org_id)
    return request.render("key", key=key, fields=msgspec.structs.asdict(key))


@page.post("/{key_id:str}/revoke", needs="admin:keys", again=show)
async def revoke(request: ConsoleRequest) -> Response[bytes]:
    def check(row: KeyRow) -> None:
        check_given(request.user, row.scopes)

    ended = await revoke_key(
        request.db,
        request.redis,
        request.ids["key_id"],
        org_id=request.org_id,
        actor=request.actor,
        check=check,
    )
    return request.done(f"The key {ended.name} is revoked: every worker refuses it.")


routes = page.routes
