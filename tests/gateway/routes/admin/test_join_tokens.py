"""/v1/admin/join_tokens makes tokens, shows each once, and revokes them."""

from __future__ import annotations

import pytest

from engine.transport.join_messages import JoinToken
from gateway.fleet.joining.joined_engines import RECORDS, JoinRecord, JoinRecords
from gateway.routes.admin.installation.join_tokens import state_of
from tests.gateway.routes.admin.conftest import World

PATH = "/v1/admin/join_tokens"


@pytest.fixture
def joinable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.services.join_tokens, "joinable", lambda: ("far",))


async def test_a_token_is_shown_once_and_its_life_is_audited(world: World, joinable: None) -> None:
    made = (await world.call("POST", PATH, {"model": "far", "uses": 2})).json()
    token = JoinToken.of_text(made["token"])
    kept = world.services.join_tokens.get(made["id"])
    assert kept is not None and kept.is_of(token.secret) and token.expires_at == made["expires_at"]
    record = JoinRecord(
        serials=["1"], token_id=made["id"], model="far", host="box", joined_at=1, expires_at=2
    )
    records = JoinRecords(world.services.join_tokens.folder / RECORDS)
    records._records.append(record)
    records.write()
    shown = (await world.call("GET", f"{PATH}/{made['id']}")).json()
    assert "token" not in shown and (shown["state"], shown["uses"]) == ("open", 2)
    assert [(each["host"], each["replica"]) for each in shown["engines"]] == [("box", None)]
    done = await world.call("POST", f"{PATH}/{made['id']}/revoke")
    assert (done.status_code, done.json()["state"]) == (200, "revoked")
    again = await world.call("POST", f"{PATH}/{made['id']}/revoke")
    assert again.json()["revoked_at"] == done.json()["revoked_at"]
    audit = (await world.call("GET", "/v1/organization/audit_logs?limit=2")).json()["data"]
    assert [each["type"] for each in audit] == ["join_token.revoked", "join_token.created"]
    assert made["token"] not in str(audit) and token.secret not in str(audit)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "none"}, "model"),
        ({"cell": "us-1"}, "cell"),
        ({"model": "far", "cell": "us-1"}, "model"),
        ({}, "model"),
        ({"model": "far", "uses": 0}, "uses"),
        ({"model": "far", "expires_in_s": 59}, "expires_in_s"),
    ],
)
async def test_a_token_that_cannot_be(
    world: World, joinable: None, body: dict[str, object], param: str
) -> None:
    before = world.services.join_tokens.all()
    answer = await world.call("POST", PATH, body)
    assert (answer.status_code, answer.json()["param"]) == (400, param)
    assert world.services.join_tokens.all() == before


async def test_where_no_model_may_be_joined(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.services.join_tokens, "joinable", frozenset)
    answer = await world.call("POST", PATH, {"model": "far"})
    assert answer.status_code == 400
    assert "no model" in answer.json()["detail"]


async def test_a_token_of_a_cell_is_for_every_model(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.services.join_tokens, "cells", lambda: ("us-1",))
    made = (await world.call("POST", PATH, {"cell": "us-1", "uses": 8})).json()
    assert (made["model"], made["cell"], made["state"]) == ("", "us-1", "open")
    assert JoinToken.of_text(made["token"]).model == ""
    refused = (await world.call("POST", PATH, {"cell": "asia"})).json()["detail"]
    assert "[[cell.peer]] has to say `borrow`; us-1 does" in refused


async def test_its_state_is_whether_it_lets_another_in(world: World, joinable: None) -> None:
    token, _ = world.services.join_tokens.draw("far", uses=1, expires_in_s=60)
    now = float(token.created_at)
    assert [state_of(token, number, now) for number in (0, 1)] == ["open", "used"]
    assert state_of(token, 0, now + 60) == "expired"
