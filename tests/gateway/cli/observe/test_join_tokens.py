"""`tollgate fleet token` prints a token alone, so that it can go into a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

TOKENS = "/v1/admin/join_tokens"
ID = "join_0123456789abcdef"


def token(**fields: Any) -> dict[str, Any]:
    return {
        "object": "join_token",
        "id": ID,
        "model": "penny",
        "cell": "",
        "state": "open",
        "uses": 2,
        "created_at": 1_790_000_000,
        "expires_at": 1_790_003_600,
        "revoked_at": None,
        "engines": [
            {
                "host": "gpu-box",
                "replica": "penny/1000",
                "joined_at": 1_790_000_100,
                "seen_at": None,
            }
        ],
        **fields,
    }


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        yield found


def test_a_token_is_printed_alone(gateway: FakeGateway) -> None:
    gateway.on("POST", TOKENS, token(token="tgjoin_x"))
    done = gateway.run("fleet", "token", "create", "--model", "penny", "--uses", "2")
    assert done.stdout == "tgjoin_x\n"
    assert done.stderr == f"{ID}: lets 2 engines join penny until 2026-09-21 15:13 UTC.\n"
    assert gateway.asked[0][3] == {"model": "penny", "uses": 2, "expires_in_s": 3600}


def test_a_token_of_a_cell_is_for_all_that_it_lends(gateway: FakeGateway) -> None:
    gateway.on("POST", TOKENS, token(token="tgjoin_x", model="", cell="us-1"))
    done = gateway.run("fleet", "token", "create", "--cell", "us-1", "--uses", "2")
    assert done.stdout == "tgjoin_x\n"
    assert f"{ID}: lets 2 engines of cell us-1 be lent to this one until" in done.stderr
    assert gateway.asked[0][3] == {"cell": "us-1", "uses": 2, "expires_in_s": 3600}
    gateway.on("GET", TOKENS, {"data": [token(model="", cell="us-1")], "has_more": False})
    assert "those of cell us-1" in gateway.run("fleet", "token", "list", "--wide").output


@pytest.mark.parametrize("who", [(), ("--model", "penny", "--cell", "us-1")])
def test_a_token_is_for_a_model_or_a_cell(gateway: FakeGateway, who: tuple[str, ...]) -> None:
    done = gateway.run("fleet", "token", "create", *who)
    assert done.exit_code == 2 and "give either --model NAME or --cell NAME" in done.output
    assert gateway.asked == []


def test_tokens_are_listed_with_who_joined(gateway: FakeGateway) -> None:
    gateway.on("GET", TOKENS, {"data": [token()], "has_more": False})
    head, row = gateway.run("fleet", "token", "list", "--wide").output.splitlines()
    assert head.split() == ["ID", "MODEL", "STATE", "JOINED", "EXPIRES", "ENGINES"]
    assert row.split()[:6] == [ID, "penny", "open", "1", "of", "2"]
    assert row.endswith("penny/1000 on gpu-box")


def test_a_revoked_token_turns_out_who_joined(gateway: FakeGateway) -> None:
    gateway.on("POST", f"{TOKENS}/{ID}/revoke", token(state="revoked"))
    said = gateway.run("fleet", "token", "revoke", ID).output
    assert said == f"{ID} is revoked; 1 had joined by it.\n"
