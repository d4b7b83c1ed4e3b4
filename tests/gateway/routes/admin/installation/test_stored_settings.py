"""Settings that operators store beside the file are checked in full, also by dry run."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from gateway.installation.items import items, read_stored, report_home
from tests.gateway.routes.admin.changing import ADMIN, STORED_MODEL
from tests.gateway.routes.admin.conftest import World

MODELS = f"{ADMIN}/settings/models"


async def number_of(world: World) -> int:
    async with world.db.connect() as conn:
        return (await read_stored(conn)).number


async def add(world: World, name: str, content: dict[str, Any] = STORED_MODEL) -> str:
    made = await world.call("POST", MODELS, {"name": name, "content": content})
    assert made.status_code == 201, made.text
    return f"{MODELS}/{name}"


async def test_a_dry_run_says_what_would_change_and_stores_nothing(world: World) -> None:
    before = await number_of(world)
    body = {"name": "tried", "content": STORED_MODEL}
    tried = await world.call("POST", f"{MODELS}?dry_run=true", body)
    assert tried.status_code == 201, tried.text
    assert [line for line in tried.json()["changes"] if line.startswith("+ models.tried")]
    assert await number_of(world) == before
    assert (await world.call("GET", f"{MODELS}/tried")).status_code == 404


async def test_a_dry_run_removes_nothing(world: World) -> None:
    path = await add(world, "kept/for-now")
    assert (await world.call("DELETE", f"{path}?dry_run=true")).status_code == 200
    kept = await world.call("GET", path)
    assert kept.status_code == 200 and kept.json()["id"] == "kept/for-now"


async def test_a_key_is_kept_sealed_for_the_place_it_was_given_for(world: World) -> None:
    body = {"name": "keyed", "content": STORED_MODEL, "api_key": "sk-canary"}
    made = await world.call("POST", MODELS, body)
    assert made.status_code == 201 and made.json()["has_api_key"], made.text
    path = f"{MODELS}/keyed"
    kept = await world.call("PUT", path, {"content": STORED_MODEL | {"context_window": 4096}})
    assert kept.status_code == 200 and kept.json()["has_api_key"], kept.text
    thief = {"upstream": "https://thief.example/v1"}
    refused = await world.call("PUT", path, {"content": thief})
    assert (refused.status_code, refused.json()["param"]) == (400, "api_key")
    moved = await world.call("PUT", path, {"content": thief, "api_key": "sk-other"})
    assert moved.status_code == 200 and moved.json()["has_api_key"]
    gone = await world.call("PUT", path, {"content": thief, "api_key": None})
    assert gone.status_code == 200 and not gone.json()["has_api_key"]
    async with world.db.connect() as conn:
        stored = await conn.execute(sa.text("SELECT i::text FROM installation_items i"))
        logged = await conn.execute(sa.text("SELECT a::text FROM audit_entries a"))
        texts = "\n".join(row[0] for row in (*stored, *logged))
    answers = [each.text for each in (made, kept, refused, moved)]
    assert "(not shown)" in texts
    for text in (texts, *answers):
        assert "sk-canary" not in text and "sk-other" not in text


async def test_a_program_is_removed_and_not_changed_by_api(world: World) -> None:
    program = {"command": "/bin/sh", "args": ["-c", "echo s3cret"]}
    async with world.db.begin() as conn:
        await conn.execute(
            sa.insert(items).values(
                kind="mcp_server", name="shell", content=program, home="host:/elsewhere"
            )
        )
    path = f"{ADMIN}/settings/mcp_servers/shell"
    shown = await world.call("GET", path)
    assert shown.json()["home"] == "host:/elsewhere" and "s3cret" not in shown.text
    changed = await world.call("PUT", path, {"content": {"url": "https://h.example/mcp"}})
    assert (changed.status_code, changed.json()["code"]) == (409, "read_only")
    gone = await world.call("DELETE", path)
    assert gone.status_code == 200 and "s3cret" not in gone.text


async def test_what_does_not_fit_is_refused_by_the_name_of_its_field(world: World) -> None:
    before = await number_of(world)
    body = {"name": "bad", "content": {"path": "models/penny"}}
    refused = await world.call("POST", MODELS, body)
    assert refused.status_code == 400
    assert refused.json()["param"] == "content.path"
    assert "stands in the settings file alone" in refused.json()["detail"].lower()
    assert await number_of(world) == before


async def test_a_name_of_the_file_is_changed_in_the_file(world: World) -> None:
    async with world.db.begin() as conn:
        names = {"model": ["far"], "mcp_server": []}
        await report_home(conn, "host:/home", 0, "", names)  # type: ignore[arg-type]
    refused = await world.call("POST", MODELS, {"name": "far", "content": STORED_MODEL})
    assert refused.status_code == 409
    assert refused.json()["code"] == "read_only"


async def test_a_home_says_what_it_has_in_force_and_why_not(world: World) -> None:
    path = await add(world, "shown")
    number = await number_of(world)
    for problem, is_in_force in (("", True), ("no such variable", False)):
        async with world.db.begin() as conn:
            await report_home(conn, "host:/other", number, problem, {})
        homes = (await world.call("GET", path)).json()["homes"]
        (found,) = [each for each in homes if each["home"] == "host:/other"]
        assert found["in_force"] is is_in_force
        assert found["problem"] == (problem or None)


async def test_what_does_not_fit_any_more_can_be_removed(world: World) -> None:
    """Such as after the settings file was edited: one by one."""
    thief = {"upstream": "https://h.example/v1", "api_key_env": "NOT_SHOWN"}
    async with world.db.begin() as conn:
        for name in ("unfit-1", "unfit-2"):
            await conn.execute(sa.insert(items).values(kind="model", name=name, content=thief))
    refused = await world.call("POST", MODELS, {"name": "fit", "content": STORED_MODEL})
    assert refused.status_code == 400
    for name in ("unfit-1", "unfit-2"):
        gone = await world.call("DELETE", f"{MODELS}/{name}")
        assert gone.status_code == 200, gone.text
    await add(world, "fit")


BOOKS, DEADLINES = f"{ADMIN}/settings/price_books", f"{ADMIN}/settings/deadlines"


def book(name: str, **price: str) -> dict[str, Any]:
    return {"name": name, "content": {"price": [{"valid_from": "2027-06-01", **price}]}}


async def loaded(world: World, model: str) -> list[str]:
    async with world.db.connect() as conn:
        found = await conn.execute(
            sa.text("SELECT price_id FROM prices WHERE price_id LIKE :model ORDER BY 1"),
            {"model": f"{model}:%"},
        )
        return [row[0] for row in found]


async def test_prices_are_loaded_with_their_book_and_never_by_a_dry_run(world: World) -> None:
    wanted = book("2027-06", model="priced", output="0.4")
    tried = await world.call("POST", f"{BOOKS}?dry_run=true", wanted)
    assert tried.status_code == 201, tried.text
    assert tried.json()["changes"] == ["priced default output: none -> 0.4, from 2027-06-01"]
    assert await loaded(world, "priced") == []
    made = await world.call("POST", BOOKS, wanted)
    assert made.status_code == 201, made.text
    assert await loaded(world, "priced") == ["priced:output:2027-06-01T00:00:00Z"]
    assert (await world.call("GET", f"{BOOKS}/2027-06")).json()["content"] == wanted["content"]
    logged = await world.call("GET", "/v1/organization/audit_logs?limit=2")
    assert [each["type"] for each in logged.json()["data"]] == [
        "prices.loaded",
        "price_book.created",
    ]
    for method in ("PUT", "DELETE"):
        assert (await world.call(method, f"{BOOKS}/2027-06", {})).status_code == 405


async def test_prices_that_do_not_fit_are_refused_and_nothing_is_loaded(world: World) -> None:
    before = await number_of(world)
    assert (await world.call("POST", BOOKS, book("a", model="fit", output="1"))).status_code == 201
    same = await world.call("POST", BOOKS, book("b", model="fit", output="2"))
    assert (same.status_code, same.json()["param"]) == (400, "content")
    assert same.json()["detail"] == "It does not fit the prices that there are."
    past = book("c", model="fit", output="2", valid_from="2026-01-01")
    assert (await world.call("POST", BOOKS, past)).status_code == 201, "nobody used another price"
    late = book("d", model="penny", output="2", valid_from="2026-11-02")
    refused = await world.call("POST", BOOKS, late)
    assert refused.json()["detail"] == "Begins in the past; what was admitted is priced."
    assert refused.json()["param"] == "content.valid_from"
    number = await world.call("POST", BOOKS, book("e", model="fit", output="many"))
    assert number.status_code == 400
    assert len(await loaded(world, "fit")) == 2
    assert await number_of(world) == before + 2


async def test_a_discount_is_of_the_future(world: World) -> None:
    terms = {"price_list": "acme", "percent": "10"}
    for valid_from, status in (("2026-01-01", 400), ("2027-06-01", 201)):
        body = {"name": "terms", "content": {"discount": [terms | {"valid_from": valid_from}]}}
        made = await world.call("POST", BOOKS, body)
        assert made.status_code == status, made.text
    assert [line for line in made.json()["changes"] if "acme" in line]


async def test_a_deadline_is_stored_for_a_lane(world: World) -> None:
    refused = await world.call("POST", DEADLINES, {"name": "fast", "content": {"seconds": 1}})
    assert refused.status_code == 400, refused.text
    body = {"name": "agentic", "content": {"seconds": 30}}
    made = await world.call("POST", DEADLINES, body)
    assert made.json()["changes"] == ["+ deadlines.agentic = 30"], made.text
    state = (await world.call("GET", f"{ADMIN}/settings")).json()
    assert state["deadlines"] == {"interactive": 60, "agentic": 300, "batch": None}
    gone = await world.call("DELETE", f"{DEADLINES}/agentic")
    assert gone.status_code == 200
