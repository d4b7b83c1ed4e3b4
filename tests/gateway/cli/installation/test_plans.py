"""`tollgate plans` and `webhooks` ask the API for what is there, and change it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

PLANS, WEBHOOKS = "/v1/admin/plans", "/v1/admin/webhooks"
TEAM = {
    "object": "plan",
    "name": "team",
    "requests_per_minute": 60,
    "lane": None,
    "read_only": False,
    "created_at": 1,
    "archived_at": None,
}


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        found.on("GET", PLANS, {"data": [TEAM], "has_more": False})
        found.on("GET", f"{PLANS}/team", TEAM)
        found.on("PATCH", f"{PLANS}/team", TEAM)
        found.on("POST", PLANS, TEAM, status=201)
        found.on("POST", f"{PLANS}/team/archive", TEAM)
        found.on("POST", WEBHOOKS, {"id": "whep_1", "secret": "whsec_1"}, status=201)
        found.on("POST", f"{WEBHOOKS}/whep_1/archive", {"id": "whep_1"})
        yield found


def sent(gateway: FakeGateway) -> list[tuple[str, str, Any]]:
    return [(method, path, body) for method, path, _, body in gateway.asked if method != "GET"]


def test_a_plan_is_made_or_changed(gateway: FakeGateway) -> None:
    made = gateway.run("plans", "set", "gold", "requests_per_minute=600", "lane=batch")
    assert made.exit_code == 0 and made.output == "The plan gold is made.\n", made.output
    changed = gateway.run("plans", "set", "team", "requests_per_minute=", "weight=2.5")
    assert changed.output == "The plan team is changed.\n"
    assert gateway.run("plans", "archive", "team").exit_code == 0
    assert sent(gateway) == [
        ("POST", PLANS, {"name": "gold", "requests_per_minute": 600, "lane": "batch"}),
        ("PATCH", f"{PLANS}/team", {"requests_per_minute": None, "weight": 2.5}),
        ("POST", f"{PLANS}/team/archive", None),
    ]


def test_plans_are_listed_with_their_limits(gateway: FakeGateway) -> None:
    listed = gateway.run("plans", "list")
    assert listed.exit_code == 0
    assert listed.output.splitlines()[1].split() == ["team", "database", "requests_per_minute=60"]
    (row,) = map(json.loads, gateway.run("plans", "list", "--json").output.splitlines())
    assert row["name"] == "team"


def test_an_endpoint_is_told_of_events_until_it_is_removed(gateway: FakeGateway) -> None:
    added = gateway.run("webhooks", "add", "https://h.example/in", "--event", "credits.low")
    assert "whep_1 is told" in added.output and "whsec_1" in added.output, added.output
    assert gateway.run("webhooks", "remove", "whep_1").output == "whep_1 is told no more.\n"
    body = {"url": "https://h.example/in", "event_types": ["credits.low"]}
    assert sent(gateway) == [
        ("POST", WEBHOOKS, body),
        ("POST", f"{WEBHOOKS}/whep_1/archive", None),
    ]
    gateway.on("GET", WEBHOOKS, {"data": [], "has_more": False})
    assert gateway.run("webhooks", "list").output == "Events are sent nowhere.\n"
