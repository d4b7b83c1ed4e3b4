"""/v1/admin/cache-leases: what is kept for an org, and what became of it."""

from __future__ import annotations

from billing.corrections.cache_leases import Lease, end, grant, sweep
from billing.events import Price, Quantities
from billing.ingestion.ingest import ingest
from tests.billing.samples import NOON, an_attempt, an_event
from tests.gateway.routes.admin.conftest import World
from tests.shared_application import on_one_loop

LEASES = "/v1/admin/cache-leases"
EVENT = "019aa0c5-0000-7000-8000-000000000001"


@on_one_loop()
async def org_id(world: World) -> str:
    found: str = (await world.call("GET", "/v1/admin/organization")).json()["id"]
    return found


async def test_leases_are_listed_with_what_became_of_them(world: World, org_id: str) -> None:
    lease = Lease(
        id=f"{EVENT}:0",
        org_id=org_id,
        event_id=EVENT,
        model="penny",
        engine="here",
        engine_id="one",
        ttl="5m",
        num_tokens=1024,
        end_tokens=1600,
        prefix=b"secret",
        granted_at=NOON,
        asked_at=NOON,
    )
    await grant(world.db, lease)

    async def listed(status: str) -> list[dict[str, object]]:
        answer = await world.call("GET", f"{LEASES}?status={status}")
        found: list[dict[str, object]] = answer.json()["data"]
        return found

    [found] = await listed("open")
    assert found == {
        "object": "cache_lease",
        "id": f"{EVENT}:0",
        "event_id": EVENT,
        "model": "penny",
        "ttl": "5m",
        "num_tokens": 1024,
        "end_tokens": 1600,
        "granted_at": int(NOON),
        "kept_until": int(NOON) + 300,
        "ended_at": None,
        "outcome": None,
        "refunded_usd": None,
    }
    prices = {"uncached_input": Price("in", 100_000), "cache_write_5m": Price("write", 125_000)}
    attempt = an_attempt(EVENT, org=org_id, prices=prices)  # type: ignore[arg-type]
    await ingest(world.db, [an_event(attempt, Quantities(cache_write_5m=1024))])
    await end(world.db, lease.id, EVENT, is_broken=True)
    await sweep(world.db, [])
    assert await listed("open") == []
    [ended] = await listed("ended")
    assert (ended["outcome"], ended["refunded_usd"]) == ("evicted", "0.0000256")
    refused = await world.call("GET", f"{LEASES}?status=lost")
    assert refused.status_code == 400 and refused.json()["param"] == "status"
