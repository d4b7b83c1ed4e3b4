"""`tollgate fleet` shows replicas one by one, and says of which models some do not serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.cli.observe.fleet import incomplete
from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

FLEET, PLANNER = "/v1/admin/fleet", "/v1/admin/planner"
PLANNED = {
    "model": "penny",
    "least": 1,
    "most": 4,
    "running": 1,
    "starting": 0,
    "wanted": 2,
    "reasons": [
        {"cause": "arrivals", "replicas": 2, "text": "3.00 requests/s are forecast"},
        {"cause": "least", "replicas": 1, "text": "the settings want 1 at least"},
    ],
    "rate": 2.5,
    "expected_rate": 3.0,
    "work": 1.25,
    "start_s": 4.2,
    "problem": "",
}
CHANGE = {"at": 1_790_000_000, "model": "penny", "before": 2, "after": 1, "why": "all is quiet"}
NO_PLAN: dict[str, Any] = {"mode": "on", "at": None, "models": [], "changes": []}


def replica(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "object": "fleet_replica",
        "id": name,
        "model": name.rpartition("/")[0] or name,
        "kind": "engine",
        "role": "both",
        "state": "serving",
        "since": 1_790_000_000,
        "engine_id": f"process-of-{name}",
        "num_running": 3,
        "num_waiting": 0,
        "kv_used": 0.25,
        "hit_rate": 0.815,
        "prefill_tokens_per_s": 1830.4,
        "lanes": {
            lane: {"num_running": 1, "num_waiting": number, "waiting_tokens": 100 * number}
            for number, lane in enumerate(("interactive", "agentic", "batch"))
        },
        "prompt_tokens": {"pool": 60, "host": 10, "disk": 0, "fetched": 10, "computed": 20},
        "generated_tokens": 500,
        "costs": {"step_s": 0.002, "decode_s": 0.001, "prompt_token_s": 0.0003},
        "predicted_ttft_s": 0.31,
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
    lanes=None,
    prompt_tokens=None,
    generated_tokens=None,
    costs=None,
    predicted_ttft_s=None,
)


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        rows = [
            replica("far/0", kind="upstream", role=None, hit_rate=None),
            replica("penny/0"),
            AWAY,
        ]
        found.on("GET", FLEET, {"data": rows, "has_more": False})
        found.on("GET", PLANNER, NO_PLAN)
        yield found


def test_each_replica_has_a_row_and_a_model_that_lacks_one_a_line(gateway: FakeGateway) -> None:
    done = gateway.run("fleet", "status")
    assert done.exit_code == 0, done.output
    head, far, penny, away, line = done.output.splitlines()
    assert head.split()[:8] == "REPLICA STATE RUNNING WAITING KV USED HIT RATE".split()
    assert penny.split()[:7] == ["penny/0", "serving", "3", "0", "25%", "82%", "1830"]
    assert far.split()[:6] == ["far/0", "serving", "3", "0", "25%", "-"]
    assert away.split()[:8] == ["penny/1", "unreachable", "0", "0", "-", "-", "-", "-"]
    assert not {"HOST", "ROLE"} & {*head.split()} and "310 ms" in penny
    assert line == "penny: 1 of 2 replicas serve"


NO_ROUTE = {"title": "Not Found", "status": 404, "code": "unknown_url"}


def test_of_an_older_gateway_it_shows_what_there_is(gateway: FakeGateway) -> None:
    """It knows no planner, and says less of a replica."""
    old = replica("penny/0")
    for name in ("role", "host", "lanes", "predicted_ttft_s", "prompt_tokens", "generated_tokens"):
        del old[name]
    gateway.on("GET", FLEET, {"data": [old], "has_more": False})
    gateway.on("GET", PLANNER, NO_ROUTE, status=404)
    done = gateway.run("fleet", "status")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[1].split()[:2] == ["penny/0", "serving"]
    done = gateway.run("fleet", "top", "--once", "--interval", "0.2")
    assert done.exit_code == 0 and "penny/0" in done.output, done.output


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (("fleet", "plan"), PLANNER),
        (("fleet", "top", "--once"), FLEET),
        (("models", "rollout", "status"), "/v1/admin/models/rollouts"),
        (("models", "rollout", "abort", "penny"), "/v1/admin/models/rollouts"),
        (("models", "evaluations", "penny"), "/v1/admin/models/evaluations"),
        (("fleet", "token", "list"), "/v1/admin/join_tokens"),
    ],
)
@pytest.mark.parametrize("status", [404, 405])
def test_a_gateway_that_lacks_what_a_command_needs(
    gateway: FakeGateway, command: tuple[str, ...], path: str, status: int
) -> None:
    gateway.on("GET", path, NO_ROUTE | {"status": status}, status=status)
    done = gateway.run(*command)
    needs = f"has no GET {path}, which this command needs: it runs another version of Tollgate"
    assert done.exit_code == 2 and done.output.strip().endswith(needs)
    assert len(done.output.splitlines()) == 1


def test_roles_and_machines_are_shown_where_there_are_any(gateway: FakeGateway) -> None:
    rows = [replica("penny/0", role="prefill"), replica("penny/1000", role="decode", host="box")]
    gateway.on("GET", FLEET, {"data": rows, "has_more": False})
    head, here, far = gateway.run("fleet", "status").output.splitlines()
    assert {"HOST", "ROLE"} <= {*head.split()}
    assert "prefill" in here and "decode" in far and "box" in far


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


def test_whom_nobody_knows_is_told_who_is_there(gateway: FakeGateway) -> None:
    gateway.on("PATCH", f"{FLEET}/penny/7", {"title": "None."}, status=404)
    done = gateway.run("fleet", "drain", "penny/7")
    line = "tollgate: penny/7: no such replica; there are far/0, penny/0, penny/1\n"
    assert (done.exit_code, done.output) == (2, line)


def test_json_has_all_that_the_api_says(gateway: FakeGateway) -> None:
    done = gateway.run("fleet", "status", "--json")
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert rows[1] == replica("penny/0") and rows[2] == AWAY


def test_a_plan_says_what_is_wanted_and_why(gateway: FakeGateway) -> None:
    changes = [{**CHANGE, "is_done": True}, {**CHANGE, "is_done": False}]
    gateway.on("GET", PLANNER, {**NO_PLAN, "models": [PLANNED], "changes": changes})
    done = gateway.run("fleet", "plan")
    assert done.exit_code == 0, done.output
    head, row, arrivals, least, change, undone = done.output.splitlines()
    assert head.split() == "MODEL RANGE RUNNING STARTING WANTED REQ/S FORECAST WORK START".split()
    assert row.split() == ["penny", "1..4", "1", "0", "2", "2.50", "3.00", "1.25", "4.2", "s"]
    assert arrivals == "penny: 2 by arrivals: 3.00 requests/s are forecast"
    assert least == "penny: 1 by least: the settings want 1 at least"
    assert change.endswith("penny 2 -> 1: all is quiet")
    assert undone.endswith("penny 2 -> 1 (not done): all is quiet")
    status = gateway.run("fleet", "status").output.splitlines()
    assert status[-1] == "penny: 1 of 1..4 run, 2 are wanted: 3.00 requests/s are forecast"


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_plan_shows_the_device_of_each_engine(gateway: FakeGateway, mode: str) -> None:
    reason = "it takes 4.00 GiB of 16.00 GiB that were free"
    engine = {"engine": "penny/0", "device": "cuda:1", "bytes": 2**32, "reason": reason}
    gateway.on("GET", PLANNER, {**NO_PLAN, "mode": mode, "engines": [engine]})
    *_, head, row = gateway.run("fleet", "plan").output.splitlines()
    assert head.split() == ["ENGINE", "DEVICE", "GIB", "REASON"]
    assert row.split(maxsplit=3) == ["penny/0", "cuda:1", "4.00", reason]


def test_no_plan_is_said_to_be_none(gateway: FakeGateway) -> None:
    assert 'such as `replicas = "1..4"`' in gateway.run("fleet", "plan").output
    gateway.on("GET", PLANNER, {**NO_PLAN, "mode": "off"})
    assert "The planner is off" in gateway.run("fleet", "plan").output
