"""`tollgate fleet` shows replicas one by one, and says of which models some do not serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.cli.observe.fleet import incomplete
from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

FLEET = "/v1/admin/fleet"


def replica(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "object": "fleet_replica",
        "id": name,
        "model": name.rpartition("/")[0] or name,
        "kind": "engine",
        "state": "serving",
        "since": 1_790_000_000,
        "engine_id": f"process-of-{name}",
        "num_running": 3,
        "num_waiting": 0,
        "kv_used": 0.25,
        "hit_rate": 0.815,
        "prefill_tokens_per_s": 1830.4,
        "max_model_len": 2048,
        "host": None,
        **fields,
    }


AWAY = replica(
    "penny/1",
    state="unreachable",
    engine_id=None,
    num_running=0,
    kv_used=None,
    hit_rate=None,
    prefill_tokens_per_s=None,
)


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        rows = [replica("far/0", kind="upstream", hit_rate=None), replica("penny/0"), AWAY]
        found.on("GET", FLEET, {"data": rows, "has_more": False})
        yield found


def test_each_replica_has_a_row_and_a_model_that_lacks_one_a_line(gateway: FakeGateway) -> None:
    done = gateway.run("fleet", "status")
    assert done.exit_code == 0, done.output
    head, far, penny, away, line = done.output.splitlines()
    assert head.split()[:8] == "REPLICA STATE RUNNING WAITING KV USED HIT RATE".split()
    assert penny.split()[:7] == ["penny/0", "serving", "3", "0", "25%", "82%", "1830"]
    assert far.split()[:6] == ["far/0", "serving", "3", "0", "25%", "-"]
    assert away.split()[:7] == ["penny/1", "unreachable", "0", "0", "-", "-", "-"]
    assert line == "penny: 1 of 2 replicas serve"


def test_places_where_nobody_joined_are_no_loss() -> None:
    vacant = [replica(f"penny/{number}", state="vacant") for number in (1000, 1001)]
    assert incomplete([replica("penny/0"), *vacant]) == []
    assert incomplete([replica("penny/0"), AWAY, *vacant]) == ["penny: 1 of 2 replicas serve"]
    assert incomplete(vacant) == ["penny: 0 of 2 replicas serve"]


def test_a_replica_is_drained_and_sent_to_again(gateway: FakeGateway) -> None:
    path = f"{FLEET}/penny/0"
    gateway.on("PATCH", path, replica("penny/0", state="draining"), replica("penny/0"))
    said = [gateway.run("fleet", verb, "penny/0").output for verb in ("drain", "undrain")]
    assert said == [
        "penny/0 is draining, 3 requests run there.\n",
        "penny/0 is serving, 3 requests run there.\n",
    ]
    assert [each[3] for each in gateway.asked] == [{"drained": True}, {"drained": False}]


def test_json_has_all_that_the_api_says(gateway: FakeGateway) -> None:
    done = gateway.run("fleet", "status", "--json")
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert rows[1] == replica("penny/0") and rows[2] == AWAY
