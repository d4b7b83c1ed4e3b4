"""/v1/admin/webhooks and /v1/admin/alerts in the whole application; what every route of
administration keeps to is tried by its walks."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from billing.alerts.alerts import CeilingUse, note_ceilings
from gateway.webhooks import endpoints
from tests.gateway.routes.admin.conftest import World

WEBHOOKS = "/v1/admin/webhooks"
BODY = {"url": "https://hooks.example/in?x=1", "event_types": ["budget.threshold_reached"]}


async def test_an_endpoint_is_made_changed_and_archived(world: World) -> None:
    made = await world.call("POST", WEBHOOKS, {**BODY, "description": "ours"})
    assert made.status_code == 201, made.text
    assert made.headers["cache-control"] == "no-store"
    shown = made.json()
    assert shown.pop("secret").startswith("whsec_")
    path = f"{WEBHOOKS}/{shown['id']}"
    again = await world.call("GET", path)
    assert again.json() == shown and again.headers["etag"] == made.headers["etag"]
    assert shown == {
        "object": "webhook_endpoint",
        "id": shown["id"],
        **BODY,
        "description": "ours",
        "in_settings": False,
        "enabled": True,
        "older_secret_expires_at": None,
        "created_at": shown["created_at"],
        "disabled_at": None,
        "archived_at": None,
    }
    both = ["rate_limit.threshold_reached", "budget.threshold_reached"] * 2
    patch = {"event_types": both, "description": None, "enabled": False}
    changed = (await world.call("PATCH", path, patch)).json()
    assert changed["event_types"] == sorted(set(both)) and changed["description"] is None
    assert not changed["enabled"] and changed["disabled_at"]
    off = await world.call("POST", f"{path}/ping")
    assert off.status_code == 409 and off.json()["code"] == "read_only"
    same = await world.call("PATCH", path, patch)
    assert same.json() == changed
    on = (await world.call("PATCH", path, {"enabled": True, "url": "https://b.example"})).json()
    assert on["enabled"] and on["disabled_at"] is None and on["url"] == "https://b.example"
    rotated = (await world.call("POST", f"{path}/rotate-secret", {"grace_s": 60})).json()
    assert rotated["secret"] != made.json()["secret"]
    assert rotated["older_secret_expires_at"] - rotated["created_at"] >= 60
    for _ in range(2):
        archived = await world.call("POST", f"{path}/archive")
        assert archived.status_code == 200 and archived.json()["archived_at"]
    for late in ("/ping", "/rotate-secret"):
        assert (await world.call("POST", path + late)).status_code == 409
    assert (await world.call("PATCH", path, {"enabled": False})).status_code == 409
    assert (await world.call("GET", WEBHOOKS)).json()["data"] == []
    listed = await world.call("GET", f"{WEBHOOKS}?include_archived=true")
    assert [each["id"] for each in listed.json()["data"]] == [shown["id"]]


async def test_a_delivery_is_shown_and_sent_again(world: World) -> None:
    path = f"{WEBHOOKS}/{(await world.call('POST', WEBHOOKS, BODY)).json()['id']}"
    sent = await world.call("POST", f"{path}/ping")
    assert sent.status_code == 201, sent.text
    made = sent.json()
    assert (made["state"], made["event_type"]) == ("pending", "webhook.ping")
    assert made["expires_at"] - made["created_at"] == 24 * 3600
    one = f"{path}/deliveries/{made['id']}"
    for _ in range(2):
        again = await world.call("POST", f"{one}/redeliver")
        assert again.status_code == 200 and again.json()["event_id"] == made["event_id"]
    [listed] = (await world.call("GET", f"{path}/deliveries")).json()["data"]
    assert listed["id"] == made["id"] == (await world.call("GET", one)).json()["id"]
    other = f"{WEBHOOKS}/{(await world.call('POST', WEBHOOKS, BODY)).json()['id']}"
    for missing in (f"{other}/deliveries/{made['id']}", f"{WEBHOOKS}/none/deliveries"):
        assert (await world.call("GET", missing)).status_code == 404
    missed = await world.call("POST", f"{other}/deliveries/{made['id']}/redeliver")
    assert missed.status_code == 404
    await world.call("POST", f"{path}/archive")
    ended = (await world.call("GET", one)).json()
    assert (ended["state"], ended["next_attempt_at"]) == ("dead", None)
    for state, num in (("dead", 1), ("pending", 0)):
        listed = await world.call("GET", f"{path}/deliveries?state={state}")
        assert len(listed.json()["data"]) == num


async def test_what_cannot_be_is_refused_at_the_door(world: World) -> None:
    path = f"{WEBHOOKS}/{(await world.call('POST', WEBHOOKS, BODY)).json()['id']}"
    wrong: list[tuple[str, object]] = [
        ("url", "http://hooks.example/in"),
        ("url", "https://127.0.0.1/in"),
        ("url", "https://169.254.169.254/latest/meta-data"),
        ("url", "https://ann:secret@hooks.example"),
        ("url", "https://hooks.example/#here"),
        ("description", "a\nb"),
        ("event_types", []),
        ("event_types", ["webhook.ping"]),
        ("secret", "whsec_mine"),
    ]
    for field, value in wrong:
        for method, at, body in (("POST", WEBHOOKS, BODY), ("PATCH", path, {})):
            refused = await world.call(method, at, {**body, field: value})
            assert refused.status_code == 400, refused.text
            assert (refused.json()["param"] or "").startswith(field), refused.text


async def test_an_org_has_so_many_endpoints(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_ENDPOINTS_PER_ORG", 1)
    first = await world.call("POST", WEBHOOKS, BODY)
    assert (await world.call("POST", WEBHOOKS, BODY)).status_code == 400
    await world.call("POST", f"{WEBHOOKS}/{first.json()['id']}/archive")
    assert (await world.call("POST", WEBHOOKS, BODY)).status_code == 201


async def test_alerts_are_listed(world: World, org_id: str) -> None:
    use = CeilingUse(
        org_id=org_id,
        scope="model",
        scope_id="proj_1/far",
        measure="output_tokens_per_minute",
        minute=1_795_089_660,
        tokens=60,
        limit=100,
    )
    await note_ceilings(world.db, [use])
    [found] = (await world.call("GET", "/v1/admin/alerts")).json()["data"]
    assert isinstance(found.pop("occurred_at"), int) and found.pop("id").startswith("alert_")
    assert found == {
        "object": "alert",
        "type": "rate_limit.threshold_reached",
        "scope": {"type": "model", "id": "proj_1/far"},
        "measure": "output_tokens_per_minute",
        "cap_id": None,
        "period": "hour",
        "period_start": 1_795_089_600,
        "threshold_percent": 50,
        "limit": {"value": "100", "unit": "tokens"},
        "used": {"value": "60", "unit": "tokens"},
        "reason": None,
    }


async def test_e_mails_are_listed_with_what_became_of_them(world: World, org_id: str) -> None:
    row = sa.text("""
        WITH person AS (
            INSERT INTO users (id, org_id, email, name, role)
            VALUES ('user_mailed', :org, 'ann@x.example', 'Ann', 'owner') RETURNING id
        )
        INSERT INTO mail_deliveries (id, org_id, user_id, event_id, event_type, body, state,
            attempts, expires_at, status, failure, ended_at)
        SELECT 'mail_1', :org, id, 'alert_1', 'credits.low', '{}', 'dead', 1, now(), 550,
            'SMTPRecipientsRefused', now() FROM person
    """)
    async with world.db.begin() as conn:
        await conn.execute(row, {"org": org_id})
    [found] = (await world.call("GET", "/v1/admin/mail-deliveries?state=dead")).json()["data"]
    assert all(found.pop(name) for name in ("expires_at", "created_at", "ended_at"))
    assert found == {
        "object": "mail_delivery",
        "id": "mail_1",
        "user_id": "user_mailed",
        "event_id": "alert_1",
        "event_type": "credits.low",
        "state": "dead",
        "attempts": 1,
        "next_attempt_at": None,
        "last_status": 550,
        "last_failure": "SMTPRecipientsRefused",
    }
    waiting = await world.call("GET", "/v1/admin/mail-deliveries?state=pending")
    assert waiting.json()["data"] == []
