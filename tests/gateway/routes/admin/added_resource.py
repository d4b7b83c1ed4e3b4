"""Uses the resource that `test_adding_a_resource` adds to a copy of the product, in the whole
application, by what is tried of every other. A process of its own, started in that copy:

    python -m tests.gateway.routes.admin.added_resource FOLDER DATABASE_URL REDIS_URL
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import sqlalchemy as sa

import gateway
from gateway.db import ROLE_TENANT, create_engine, tenant
from migrations.runner import migrate
from tests.gateway.routes.admin.changing import ADMIN, RECIPES, Maker, at, new
from tests.gateway.routes.admin.conftest import CONFIG, World, open_world
from tests.gateway.routes.admin.installation.test_every_change import changes_once, keeps_to_it
from tests.gateway.routes.admin.installation.test_every_list import walk

NOTES, NOTE = f"{ADMIN}/notes", f"{ADMIN}/notes/{{note_id}}"
ACTIONS = ["note.created", "note.updated", "note.archived"]


async def make(maker: Maker) -> str:
    return f"{NOTES}/{(await maker.post(NOTES, {'body': maker.name()}))['id']}"


CHANGES = {
    ("POST", NOTES): new(NOTES, lambda maker: {"body": maker.name()}),
    ("PATCH", NOTE): at(make, body={"body": "other"}),
    ("POST", f"{NOTE}/archive"): at(make, "/archive"),
}


async def check_changes(world: World, maker: Maker) -> None:
    """Check that each is recorded, done once by its Idempotency-Key, and goes by If-Match."""
    RECIPES.update(CHANGES)
    for (method, path), recipe in CHANGES.items():
        await keeps_to_it(world, maker, method, path)
        if "{" in path:
            await changes_once(world, method, await recipe(maker))


async def check_one(world: World, maker: Maker) -> str:
    """Check one from its beginning to its end, and what the audit log says of it; return its
    path."""
    path = await make(maker)
    changed = (await world.call("PATCH", path, {"body": "new"})).json()
    assert (changed["object"], changed["body"], changed["archived_at"]) == ("note", "new", None)
    assert (await world.call("GET", path)).json() == changed
    archived = (await world.call("POST", f"{path}/archive")).json()
    assert archived["archived_at"] >= archived["created_at"] > 0
    assert (await world.call("PATCH", path, {"body": "newer"})).status_code == 409
    assert (await world.call("PATCH", path, {"body": 1})).status_code == 400
    query = f"resource_ids[]={changed['id']}"
    entries = (await world.call("GET", f"/v1/organization/audit_logs?{query}")).json()["data"]
    assert [each["type"] for each in reversed(entries)] == ACTIONS, entries
    return path


async def check_pages(world: World, maker: Maker) -> None:
    ids = [(await make(maker)).rpartition("/")[2] for _ in range(10)]
    assert (await walk(world, NOTES))[-len(ids) :] == ids
    live, listed = [
        (await world.call("GET", f"{NOTES}?limit=100{more}")).json()["data"]
        for more in ("", "&include_archived=true")
    ]
    assert len(ids) <= len(live) < len(listed)


async def check_walls(world: World, path: str, database_url: str) -> None:
    """Check that no other tenant finds it, over HTTP or without a WHERE."""
    assert (await world.call("GET", path, key=world.api_key)).status_code == 403
    made = (await world.call("POST", f"{ADMIN}/orgs", {"name": "mallory"})).json()
    mallory, theirs = made["admin_key"]["value"], made["organization"]["id"]
    for method, place, body in (
        ("GET", path, None),
        ("PATCH", path, {"body": "taken over"}),
        ("POST", f"{path}/archive", None),
    ):
        assert (await world.call(method, place, body, key=mallory)).status_code == 404, method
    assert (await world.call("GET", NOTES, key=mallory)).json()["data"] == []
    pool = create_engine(database_url, role=ROLE_TENANT)
    async with tenant(pool, theirs) as conn:
        assert (await conn.execute(sa.text("SELECT id FROM notes"))).all() == []
    await pool.dispose()


async def check_the_document(world: World) -> None:
    document = (await world.http.get("/schema/openapi.json")).json()
    described = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith(NOTES)
    }
    assert described == {*CHANGES, ("GET", NOTES), ("GET", NOTE)}
    assert {"NewNote", "NotePatch", "Note"} <= document["components"]["schemas"].keys()


async def main(folder: Path, database_url: str, redis_url: str) -> None:
    assert Path(gateway.__file__).is_relative_to(folder), "the copy is tried, not the product"
    await migrate(database_url)
    db = create_engine(database_url)
    async with open_world(folder, CONFIG, db, database_url, redis_url) as world:
        owner = await world.services.authenticator.authenticate(world.admin_key)
        maker = Maker(world, owner.org_id, "")
        await check_changes(world, maker)
        path = await check_one(world, maker)
        await check_pages(world, maker)
        await check_walls(world, path, database_url)
        await check_the_document(world)
    await db.dispose()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
