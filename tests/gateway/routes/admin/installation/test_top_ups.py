"""/v1/admin/balance/settings and /v1/admin/top-ups, from a threshold that is crossed to the credit
that answers it: the whole application, a webhook of the operator's on a real socket."""

from __future__ import annotations

import time
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from billing.events import Quantities
from billing.ingestion.ingest import ingest
from tests.billing.samples import an_attempt, an_event, pay_usage
from tests.gateway.routes.admin.changing import ADMIN
from tests.gateway.routes.admin.conftest import World
from tests.gateway.webhooks.conftest import Receiver, receiver
from tests.pace import eventually

__all__ = ["receiver"]

SETTINGS, TOP_UPS, BALANCE = f"{ADMIN}/balance/settings", f"{ADMIN}/top-ups", f"{ADMIN}/balance"
CONFIG = """
egress_to_loopback = true
[[model]]
name = "far"
upstream = "http://127.0.0.1:9/v1"
[plan.default]
requests_per_minute = 6000
"""
EVENTS = ["credits.low", "top_up.requested", "top_up.granted"]
WISH = {
    "low_usd": "0.008",
    "auto_top_up": {"amount_usd": "5", "below_usd": "0.005", "max_per_day": 2},
}


@pytest.fixture
async def config_text() -> str:
    return CONFIG


class Tenant:
    """A prepaid org with a cent; a token of output costs 400 nano."""

    def __init__(self, world: World, org_id: str, key: str) -> None:
        self.world, self.org_id, self.key = world, org_id, key

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.world.call(method, path, body, key=self.key)
        assert answer.is_success, answer.text
        return answer.json()

    async def spend(self, output: int) -> None:
        attempt = an_attempt(org=self.org_id, admitted_at=time.time())
        await ingest(self.world.db, [an_event(attempt, Quantities(output=output))])
        await pay_usage(self.world.db, self.org_id)


@pytest.fixture
async def tenant(world: World) -> Tenant:
    made = (await world.call("POST", f"{ADMIN}/orgs", {"name": "tenant"})).json()
    found = Tenant(world, made["organization"]["id"], made["admin_key"]["value"])
    await world.call("PATCH", f"{ADMIN}/orgs/{found.org_id}", {"prepaid": True})
    await world.call("POST", f"{ADMIN}/credits", {"org_id": found.org_id, "amount_usd": "0.01"})
    return found


async def test_a_balance_that_runs_low_is_topped_up_by_who_takes_its_payment(
    world: World, tenant: Tenant, receiver: Receiver
) -> None:
    hook = {"url": receiver.url, "event_types": EVENTS}
    secret = (await world.call("POST", f"{ADMIN}/webhooks", hook)).json()["secret"]
    await tenant.call("PATCH", SETTINGS, WISH)
    assert await tenant.call("GET", SETTINGS) == {
        "object": "balance_settings",
        "org_id": tenant.org_id,
        **WISH,
    }
    await tenant.spend(15_000)
    (low,) = (await tenant.call("GET", f"{ADMIN}/alerts"))["data"]
    assert (low["type"], low["limit"]["value"], low["used"]["value"]) == (
        "credits.low",
        "0.008",
        "0.004",
    )
    (asked,) = (await tenant.call("GET", TOP_UPS))["data"]
    assert (asked["state"], asked["amount_usd"], asked["left_usd"]) == ("requested", "5", "0.004")

    async def heard(kind: str) -> list[Any]:
        got = [Webhook(secret).verify(each.body, each.headers) for each in receiver.received]
        return [each["data"] for each in got if each["type"] == kind]

    (event,) = await eventually(lambda: heard("top_up.requested"))
    assert (event["top_up_id"], event["organization_id"]) == (asked["id"], tenant.org_id)
    assert event["amount"] == {"value": "5", "unit": "usd"}
    one = f"{TOP_UPS}/{asked['id']}"
    own = await world.call("POST", f"{one}/grant", key=tenant.key)
    assert own.status_code == 403, "nobody says of their own top-up that it is paid"
    for _ in range(3):
        granted = await world.call("POST", f"{one}/grant?org_id={tenant.org_id}")
        assert granted.json()["state"] == "granted", granted.text
    assert (await tenant.call("GET", BALANCE))["left_usd"] == "5.004", "once"
    assert (await tenant.call("GET", one))["credit_id"].startswith("credit_")
    late = await world.call("POST", f"{one}/fail?org_id={tenant.org_id}", {"reason": "no"})
    assert (late.status_code, late.json()["code"]) == (409, "top_up_ended")
    (event,) = await eventually(lambda: heard("top_up.granted"))
    assert event["credit_id"] == granted.json()["credit_id"]
    assert await heard("credits.low") == [], "which is the tenant's own business"


async def test_one_that_fails_credits_nothing_and_amounts_are_checked(
    world: World, tenant: Tenant
) -> None:
    await tenant.call("PATCH", SETTINGS, {"auto_top_up": WISH["auto_top_up"]})
    await tenant.spend(25_000)
    (asked,) = (await tenant.call("GET", TOP_UPS))["data"]
    one = f"{TOP_UPS}/{asked['id']}"
    for _ in range(2):
        failed = await world.call(
            "POST", f"{one}/fail?org_id={tenant.org_id}", {"reason": "card declined"}
        )
        assert (failed.json()["state"], failed.json()["failure"]) == ("failed", "card declined")
    granted = await world.call("POST", f"{one}/grant?org_id={tenant.org_id}")
    assert granted.status_code == 409
    assert (await tenant.call("GET", BALANCE))["left_usd"] == "0"
    for field, wrong in (
        ("low_usd", {"low_usd": "9000001"}),
        (
            "auto_top_up.amount_usd",
            {"auto_top_up": {"amount_usd": "0", "below_usd": "1", "max_per_day": 1}},
        ),
    ):
        refused = await world.call("PATCH", SETTINGS, wrong, key=tenant.key)
        assert (refused.status_code, refused.json()["param"]) == (400, field)
    hidden = await world.call("GET", one)
    assert hidden.status_code == 404, "another org's"


async def test_one_that_leaves_the_balance_below_is_followed_by_the_next(
    world: World, tenant: Tenant
) -> None:
    await tenant.call("PATCH", SETTINGS, {"auto_top_up": WISH["auto_top_up"] | {"amount_usd": "1"}})
    await tenant.spend(5_000_000)  # twice as much as it brings
    (asked,) = (await tenant.call("GET", TOP_UPS))["data"]
    granted = await world.call("POST", f"{TOP_UPS}/{asked['id']}/grant?org_id={tenant.org_id}")
    assert granted.json()["state"] == "granted", granted.text
    states = {each["state"]: each["id"] for each in (await tenant.call("GET", TOP_UPS))["data"]}
    assert states.keys() == {"granted", "requested"} and states["granted"] == asked["id"]
