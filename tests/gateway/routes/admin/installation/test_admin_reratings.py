"""/v1/admin/reratings: shown, applied as it was shown, and known to who counts what is spent."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from billing.corrections import rerating
from gateway.limits.counters import index_key
from gateway.routes.admin.billing import reratings as admin_reratings
from tests.billing.invoices.billed import at, book, tokens
from tests.gateway.routes.admin.changing import ADMIN
from tests.gateway.routes.admin.conftest import CONFIG, World

RERATINGS = f"{ADMIN}/reratings"
SPAN = {"starts_at": int(at(2026, 9, 1).timestamp()), "ends_at": int(at(2026, 10, 1).timestamp())}
HAS_NUL = "This has a NUL character in it."
QUERY = "&".join(f"{name}={value}" for name, value in SPAN.items())


@pytest.fixture
async def config_text(tmp_path: Path) -> str:
    prices = tmp_path / "book.toml"
    prices.write_text('[[price]]\nmodel = "penny"\nvalid_from = "2026-01-01"\noutput = "0.5"\n')
    return f'price_books = ["{prices}"]\n{CONFIG}'


async def test_a_period_is_priced_anew_as_it_was_shown(
    world: World, org_id: str, redis: Redis
) -> None:
    event = tokens(at(2026, 9, 10), 1000, 2_000_000, org=org_id)
    await book(world.db, event, tokens(at(2026, 9, 11), 10, 1, org=org_id, model="unknown"))
    shown = (await world.call("GET", f"{RERATINGS}/preview?{QUERY}")).json()
    assert (shown["num_events"], shown["num_unpriced"]) == (1, 1)
    [line] = shown["lines"]
    assert (line["invoice"], line["component"], line["quantity"]) == (None, "output", 1000)
    amounts = (line["before_usd"], line["after_usd"], line["difference_usd"])
    assert amounts == ("0.002", "0.0005", "-0.0015")
    assert line["price_id_after"] == "penny:output:2026-01-01T00:00:00Z"
    stranger = await world.call("POST", RERATINGS, {**SPAN, "digest": "0" * 64})
    assert stranger.status_code == 409 and "preview has changed" in stranger.text
    counter = f"tollgate:{{{org_id}}}:spent:org:{org_id}:total"
    await redis.hset(counter, "n", "2000000")  # type: ignore[misc]
    await redis.sadd(index_key(org_id), counter)  # type: ignore[misc]
    for _ in range(2):
        done = await world.call("POST", RERATINGS, {**SPAN, "digest": shown["digest"]})
        assert done.status_code == 200, done.text
        assert (done.json()["num_applied"], done.json()["difference_usd"]) == (1, "-0.0015")
        assert done.json()["applied_at"] is not None and done.json()["lines"] == [line]
    assert not await redis.exists(counter), "it is built from the books again"
    assert (await world.call("GET", RERATINGS)).json()["data"] == [done.json()]
    again = (await world.call("GET", f"{RERATINGS}/preview?{QUERY}")).json()
    assert (again["num_events"], again["lines"]) == (0, [])


async def test_counters_know_of_a_part_of_it(
    world: World, org_id: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerating, "MAX_BATCH", 1)
    monkeypatch.setattr(admin_reratings, "MAX_BATCHES", 1)
    await book(world.db, *(tokens(at(2026, 9, day), 1000, 2_000_000, org=org_id) for day in (1, 2)))
    shown = (await world.call("GET", f"{RERATINGS}/preview?{QUERY}")).json()
    await redis.sadd(index_key(org_id), "counter")  # type: ignore[misc]
    await redis.set("counter", 1)
    part = (await world.call("POST", RERATINGS, {**SPAN, "digest": shown["digest"]})).json()
    assert (part["num_applied"], part["applied_at"]) == (1, None)
    assert not await redis.exists("counter")


async def test_what_cannot_be_is_refused_by_name(world: World) -> None:
    for query, field in {
        "starts_at=1": "ends_at",
        "starts_at=2&ends_at=2": "ends_at",
        "starts_at=1&ends_at=2&price_list=nobodys": "price_list",
        "starts_at=-1&ends_at=2": "starts_at",
    }.items():
        refused = await world.call("GET", f"{RERATINGS}/preview?{query}")
        assert refused.status_code == 400 and field in refused.text, refused.text
    for field in ("model", "price_list"):
        body = {**SPAN, "digest": "0" * 64, field: "a\0b"}
        refused = await world.call("POST", RERATINGS, body)
        told = refused.json()
        assert (told["status"], told["param"], told["detail"]) == (400, field, HAS_NUL)
