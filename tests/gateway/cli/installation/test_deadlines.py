"""`tollgate deadlines` shows what is in force, and changes what is stored for a lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import tollgate
from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

STORED = "/v1/admin/settings/deadlines"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        homes = [{"home": "host:/home", "in_force": True, "problem": None}]
        in_force = {"interactive": 60, "agentic": 30, "batch": None}
        found.on("GET", "/v1/admin/settings", {"homes": homes, "deadlines": in_force})
        one = {"id": "agentic", "hidden": False, "changes": ["~ x"]}
        found.on("GET", STORED, {"data": [one], "has_more": False})
        found.on("POST", STORED, one, status=201)
        for method in ("GET", "PUT", "DELETE"):
            found.on(method, f"{STORED}/agentic", one)
        yield found


def run(gateway: FakeGateway, *arguments: str) -> Result:
    target = ("--url", gateway.url, "--key", "sk-test")
    return CliRunner().invoke(tollgate, ["deadlines", *arguments, *target])


def test_the_deadlines_in_force_are_listed_with_where_they_come_from(gateway: FakeGateway) -> None:
    rows = [line.split() for line in run(gateway, "list").output.splitlines()]
    assert rows == [
        ["LANE", "SECONDS", "FROM"],
        ["interactive", "60", "settings"],
        ["agentic", "30", "stored"],
        ["batch", "none", "settings"],
    ]


def test_a_lane_is_set_whether_or_not_it_was_before(gateway: FakeGateway) -> None:
    done = run(gateway, "set", "agentic", "12.5")
    assert (done.exit_code, done.output) == (0, "~ x\nagentic: 12.5 s.\n")
    assert gateway.asked[-2][0::3] == ("PUT", {"content": {"seconds": 12.5}})
    done = run(gateway, "set", "batch", "none", "--dry-run")
    assert done.output == "~ x\nNothing is stored.\n"
    method, _, query, body = gateway.asked[-1]
    assert (method, query) == ("POST", {"dry_run": ["true"]})
    assert body == {"name": "batch", "content": {"seconds": None}}
    assert run(gateway, "remove", "agentic").output.endswith("the deadline of the settings.\n")


def test_what_is_no_lane_and_no_time_is_said(gateway: FakeGateway) -> None:
    for arguments in (("set", "fast", "1"), ("set", "batch", "soon")):
        assert run(gateway, *arguments).exit_code == 2
    assert gateway.asked == []
